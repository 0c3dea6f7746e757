"""`stepscope demo`: the whole loop on this machine."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from stepscope import api
from stepscope.cli.execute import measure_stored, open_job
from stepscope.cli.options import FILE, json_option, store_option
from stepscope.cli.output import emit, narrate, suggest_for_file, terminal_width, wants_json
from stepscope.core.errors import ExitCode, StepscopeError
from stepscope.measure import MeasureSettings
from stepscope.records import Case
from stepscope.run.plan import Job
from stepscope.store import StoredRun

SETTINGS = MeasureSettings(max_time_s=2.0, warmup_max_time_s=1.0)
SIZES = "1K:1M:x4"
RANKS = 2
HANG_TIMEOUT_S = 60.0
WORKLOAD = "dlrm/ootb/train/small.1dev-embed32-fp32"
MOST_STEPS = 100


@click.command("demo")
@click.option("--output", "-o", type=FILE, help="The page to write [default: in the store].")
@store_option
@json_option
def command(*, output: Path | None, store: Path) -> int:
    """Measure operators, a collective and a small model, then record and explain a training step.

    The last lines name two pages: a report of the runs, and one about the step.
    """
    runs: list[StoredRun] = []
    steps = [
        ("operators: gemm, linear, embedding_bag", operator_job()),
        (f"all_reduce between {RANKS} gloo ranks", collective_job()),
        ("training a small DLRM", workload_job()),
    ]
    for title, job in steps:
        narrate(f"== {title}")
        runs.append(measure_stored(open_job(job, store=store, resume=None, verb=job.verb)))
    narrate("== three steps of it, recorded and explained")
    explained = explain_training(store)
    page = output or store / "demo.html"
    api.report(runs, output=page, kind="html", tell=narrate)
    failed = [result.case.label for run in runs for result in run.results if result.status == "failed"]
    place = str(page.resolve())
    data = {
        "report": place,
        "runs": [str(run.folder) for run in runs],
        "failed": failed,
        "trace": explained,
    }
    lines = [
        api.report(runs, width=terminal_width()),
        explained["sentence"],
        f"report: {place}",
        f"the step: {explained['page']}",
    ]
    emit(data, "\n".join(lines))
    suggest_for_file(page.resolve())
    if failed and not wants_json():
        raise StepscopeError(f"failed: {', '.join(failed)}", hint=f"stepscope runs show {runs[0].id}")
    return ExitCode.FAILED if failed else ExitCode.DONE


def explain_training(store: Path) -> dict[str, str]:
    """Record steps of the model and explain one of them: what it says, and the page about it."""
    import stepscope
    from stepscope.bench.workloads.producer import open_step

    step = open_step(_training_case())
    folder = store / "demo-trace"
    with stepscope.record(out=folder, overwrite=True) as recorder:
        for _ in range(MOST_STEPS):
            step()
            recorder.step()
            if recorder.is_done:
                break
    explanation = stepscope.explain(folder / "kineto")
    page = (store / "demo-step.html").resolve()
    explanation.write_page(page)
    return {"sentence": explanation.sentence, "page": str(page), "recording": str(folder)}


def operator_job() -> Job:
    from stepscope.bench.ops import make_cases, make_peak_cases

    def cases(name: str, shape: str, directions: tuple[str, ...]) -> list[Case]:
        return make_cases(names=[name], shapes=[shape], dtypes=["float32"], directions=directions, device="cpu")

    both = ("forward", "backward")
    chosen = [
        *make_peak_cases(["float32"], "cpu"),
        *cases("gemm", "m=512,n=512,k=512", ("forward",)),
        *cases("linear", "batch=256,in=512,out=512", both),
        *cases("embedding_bag", "rows=100000,dim=64,pooling=20,batch=256", ("forward",)),
    ]
    return api.plan("ops", chosen, name="demo-ops", settings=SETTINGS)


def collective_job() -> Job:
    from stepscope.bench.comms import make_cases
    from stepscope.core.units import parse_range

    cases = make_cases(
        collective="all_reduce", sizes=parse_range(SIZES), dtype="float32", backend="gloo", world_size=RANKS,
        device="cpu",
    )  # fmt: skip
    settings = msgspec.structs.replace(SETTINGS, iterations=1)
    return api.plan(
        "comms", cases, name="demo-all_reduce", settings=settings, ranks=RANKS, hang_timeout_s=HANG_TIMEOUT_S
    )


def workload_job() -> Job:
    return api.plan("workload", [_training_case()], name="demo-dlrm", settings=SETTINGS, loader_workers=None)


def _training_case() -> Case:
    from stepscope.bench.workloads import find_workload

    return find_workload(WORKLOAD).make_case(device="cpu")
