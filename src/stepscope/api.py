"""What programs call, and what the command line calls: plan, run, measure, record, read, explain, compare, report.

Every function takes runs as the command line does (a folder, the beginning of an id, `latest`) or as the objects that
the other functions return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.core.errors import UsageError, unknown_name
from stepscope.core.files import write_output
from stepscope.core.units import parse_range
from stepscope.records import REQUESTS, UntilDecided
from stepscope.store import StoredRun, resolve_store
from stepscope.store import find_run as find_stored_run

if TYPE_CHECKING:
    from stepscope.analyze.answers.compose import Answer
    from stepscope.compare.verdict import Comparison
    from stepscope.measure import Measurement, MeasureSettings
    from stepscope.measure.progress import BarProgress, LineProgress
    from stepscope.records import Case, System
    from stepscope.run.plan import Job
    from stepscope.store import MeasuredCase
    from stepscope.traces import TraceSet

RunLike = StoredRun | str | Path
"""A run, its folder, or its name in the store."""


def find_run(name: RunLike, *, store: str | Path | None = None) -> StoredRun:
    """The stored run of that name.

    `name`: a folder, the beginning of an id, `latest`, or `latest~1` for the run before it. `store`: the folder of
    stored runs; by default $STEPSCOPE_STORE, else ./stepscope-runs.

    >>> stepscope.find_run("latest").status
    'complete'
    """
    return name if isinstance(name, StoredRun) else find_stored_run(resolve_store(store), str(name))


def plan(
    verb: str,
    cases: Sequence[Case],
    *,
    name: str | None = None,
    settings: MeasureSettings | None = None,
    device: str | None = None,
    ranks: int = 1,
    backend: str | None = None,
    processes: int = 1,
    hang_timeout_s: float = 300.0,
    **request: Any,
) -> Job:
    """What a run would measure; nothing is measured yet.

    `verb`: what measures, `ops`, `comms` or `workload`. `cases`: what is measured. `name`: part of the run's id.
    `device`: by default the one that the cases name. `settings`: when a case has been sampled long enough. `ranks`,
    `backend`: how many ranks are started, and what they communicate with. `processes`: how many fresh processes measure
    each case. `hang_timeout_s`: how long a rank may send no heartbeat. `request`: further options of the verb, for
    example `check`, `kernels` and `graph` of `ops`.

    >>> from stepscope.bench.ops import make_cases
    >>> shape = dict(shapes=["m=16,n=16,k=16"], dtypes=["float32"], directions=["forward"], device="cpu")
    >>> job = stepscope.plan("ops", make_cases(names=["gemm"], **shape), settings=stepscope.measure.QUICK)
    >>> [case.label for case in job.cases]
    ['gemm/micro/forward/custom[m=16,n=16,k=16,layout=nn,dtype=float32,device=cpu,cache=warm]']
    """
    from stepscope.measure import MeasureSettings
    from stepscope.run.plan import Job
    from stepscope.run.producer import PRODUCERS

    if verb not in PRODUCERS:
        raise UsageError(f"there is nothing that measures {verb!r}", hint=f"one of: {', '.join(PRODUCERS)}")
    if not cases:
        raise UsageError("there are no cases to measure", hint="make some with bench_op or bench_collective")
    asked = {
        "device": device or cases[0].spec.device or "cpu",
        "settings": settings or MeasureSettings(),
        "processes": processes,
        **request,
    }
    launcher = "inline"
    if verb == "comms" or ranks > 1:
        launcher = "inline" if backend == "fake" else "self"
        asked |= {"backend": backend or "gloo", "hang_timeout_s": hang_timeout_s}
    known = REQUESTS[verb].__struct_fields__
    if unknown := sorted(asked.keys() - set(known)):
        raise unknown_name("option", unknown[0], known)
    return Job(verb, name or cases[0].benchmark.model, list(cases), REQUESTS[verb](**asked), launcher, ranks)


def run(
    job: Job,
    *,
    store: str | Path | None = None,
    resume: bool = False,
    progress: LineProgress | BarProgress | None = None,
) -> StoredRun:
    """The finished run of a job.

    `job`: from `plan`. `store`: where it is kept. `resume`: continue the newest interrupted run of the same job, if
    there is one. `progress`: what shows progress.

    >>> job = stepscope.plan("ops", stepscope.find_run("latest").plan.cases, settings=stepscope.measure.QUICK)
    >>> stepscope.run(job).status
    'complete'
    """
    from stepscope.run import plan as planning

    place = resolve_store(store)
    found = planning.find_interrupted(job, place) if resume else None
    return execute(found or planning.create(job, place, sys.argv), progress=progress)


def execute(
    stored: StoredRun,
    *,
    progress: LineProgress | BarProgress | None = None,
    tell: Callable[[str], object] = lambda text: None,
) -> StoredRun:
    """The run once everything is measured that its plan still lacks.

    `stored`: a run, new or interrupted. `progress`: what shows progress. `tell`: gets messages on the way.

    >>> job = stepscope.plan("ops", stepscope.find_run("latest").plan.cases, settings=stepscope.measure.QUICK)
    >>> stored = stepscope.run.plan.create(job, Path("stepscope-runs"), ["example"])
    >>> stepscope.execute(stored).status
    'complete'
    """
    from stepscope.run.execute import execute as execute_plan

    return execute_plan(
        stored, progress=progress, count_wanted=lambda cases, system: _count_wanted(stored, cases, system, tell)
    )


def find_baseline(store: Path, until: UntilDecided | None) -> StoredRun | None:
    """The run that `--until-decided` names."""
    if until is None:
        return None
    name = until.baseline
    found = find_stored_run(store, name)
    if name.startswith("latest") and found.id != name:
        # The run that is measured will be the latest one itself, and after an interruption another.
        raise UsageError(
            f"{name} will mean another run once this one is measured", hint=f"--until-decided {found.id}",
            where="--until-decided",
        )  # fmt: skip
    return found


def _count_wanted(
    stored: StoredRun, cases: list[MeasuredCase], system: System | None, tell: Callable[[str], object]
) -> int:
    """How many processes `--until-decided` wants altogether, by what those so far have shown of the noise."""
    until = stored.plan.request.until_decided
    baseline = find_baseline(stored.folder.parent, until)
    if until is None or baseline is None:
        return 0
    from stepscope.compare.gate import plan_candidate

    same_system = system is not None and baseline.system is not None and system.place == baseline.system.place
    planned = plan_candidate(baseline.cases(), cases, resolution=until.resolution, same_system=same_system)
    for label, count in planned.items():
        if count is None:
            tell(f"{label}: no number of processes decides; {baseline.id} itself needs more (--processes)")
    return min(max((count for count in planned.values() if count), default=0), until.max_processes)


def measure(
    body: Callable[[], object],
    *,
    settings: MeasureSettings | None = None,
    device: str | None = None,
    before_sample: Callable[[], object] | None = None,
) -> Measurement:
    """The samples of a callable; one call is one iteration, and each sample has as many as the clock needs.

    `body`: what is timed; on a GPU it may only launch, since the loop synchronises around each sample. `settings`:
    when it has been sampled long enough. `device`: by default `cuda` where it works, else `cpu`.
    `before_sample`: called before each sample, not timed.

    >>> samples = stepscope.measure(lambda: sum(range(1000)), settings=stepscope.measure.QUICK)
    >>> 0 < samples.summary().median_s < 1
    True
    """
    from stepscope.measure import MeasureSettings, WallClock, best_device, open_device
    from stepscope.measure import measure as run_loop

    return run_loop(
        body,
        settings=settings or MeasureSettings(),
        clock=WallClock(),
        device=open_device(device or best_device()),
        before_sample=before_sample,
    )


def bench_op(
    name: str,
    *,
    shape: str | Sequence[str] = (),
    dtype: str | Sequence[str] = "float32",
    direction: str | Sequence[str] = "forward",
    device: str | None = None,
    cache: str | Sequence[str] = "warm",
    settings: MeasureSettings | None = None,
    processes: int = 1,
    store: str | Path | None = None,
    **request: Any,
) -> StoredRun:
    """A finished run of one operator over its shapes, dtypes and passes, by default on `cuda` where it works.

    `name`: as `stepscope bench ops --list` shows. `shape`, `dtype`, `direction`, `cache`: one or several; every
    combination is a case. `settings`, `processes`, `store`: as for `plan` and `run`. `request`: further options.

    >>> run = stepscope.bench_op("gemm", shape="m=16,n=16,k=16", settings=stepscope.measure.QUICK)
    >>> [case.result.status for case in run.cases()]
    ['ok']
    """
    from stepscope.bench.ops import make_cases
    from stepscope.measure import best_device

    device = device or best_device()
    cases = make_cases(
        names=[name], shapes=_as_list(shape), dtypes=_as_list(dtype), directions=_as_list(direction), device=device,
        caches=_as_list(cache),
    )  # fmt: skip
    job = plan("ops", cases, settings=settings, device=device, processes=processes, **request)
    return run(job, store=store)


def bench_collective(
    name: str,
    *,
    sizes: str | Sequence[int] = "1K:1M:x4",
    ranks: int = 2,
    backend: str = "gloo",
    dtype: str = "float32",
    device: str = "cpu",
    settings: MeasureSettings | None = None,
    processes: int = 1,
    store: str | Path | None = None,
    **options: Any,
) -> StoredRun:
    """A finished run of one collective over message sizes, on ranks that are started here.

    `name`: as `stepscope bench comms --list` shows. `sizes`: a list of bytes, or a range such as `1K:1M:x4`. `ranks`,
    `backend`: how many ranks, and what they communicate with (`fake` moves no data). `options`: further parameters of
    the cases, for example `reduction`, `root` and `placement`.

    >>> run = stepscope.bench_collective("all_reduce", sizes="1K:4K:x4", ranks=2, backend="fake",
    ...                                  settings=stepscope.measure.QUICK)
    >>> [int(case.result.size_bytes) for case in run.cases()]
    [1024, 4096]
    """
    from stepscope.bench.comms import make_cases
    from stepscope.measure import MeasureSettings

    points = parse_range(sizes) if isinstance(sizes, str) else list(sizes)
    cases = make_cases(
        collective=name, sizes=points, dtype=dtype, backend=backend, world_size=ranks, device=device, **options
    )
    # One iteration per sample: what a rank waits for must not be averaged away.
    single = msgspec.structs.replace(settings or MeasureSettings(), iterations=1)
    job = plan("comms", cases, settings=single, device=device, ranks=ranks, backend=backend, processes=processes)
    return run(job, store=store)


def compare(
    a: RunLike,
    b: RunLike,
    *,
    level: float = 0.01,
    resolution: float = 0.05,
    store: str | Path | None = None,
) -> Comparison:
    """Verdicts for every case that both runs have: better, worse, no difference found, or not enough data.

    `a`, `b`: runs, folders or names; B is compared with A. `level`: the chance of even one false alarm. `resolution`: a
    change by this fraction must be visible, or the verdict is "not enough data". `store`: where names are looked up.

    >>> [row.verdict for row in stepscope.compare("latest", "latest").rows]
    ['not enough data']
    """
    from stepscope.compare.views import compare_runs

    return compare_runs(find_run(a, store=store), find_run(b, store=store), level=level, resolution=resolution)


def explain(traces: TraceSet | str | Path) -> Answer:
    """Why a step takes as long as it does: the sentence, the evidence behind it, and what to try next.

    `traces`: what `read_traces` returned, or the path of a trace or of a folder with one per rank.

    >>> with stepscope.record(out="recording", steps=2) as recorder:
    ...     for _ in range(40):
    ...         total = sum(torch.ones(64, 64) @ torch.ones(64, 64) for _ in range(50))
    ...         recorder.step()
    >>> answer = stepscope.explain("recording/kineto")
    >>> "step" in answer.sentence
    True
    """
    from stepscope.analyze.answers.compose import answer
    from stepscope.analyze.job import explain_job
    from stepscope.traces import read_traces

    read = read_traces(traces) if isinstance(traces, str | Path) else traces
    job = explain_job(read)
    return answer(job, limits=job.limits)


def report(
    runs: RunLike | Sequence[RunLike],
    *,
    output: str | Path | None = None,
    kind: str | None = None,
    store: str | Path | None = None,
) -> str:
    """The text of a report on runs; also written to `output` where that is given.

    `runs`: one or several runs, folders or names. `kind`: `text`, `markdown`, `csv`, `json` or `html`; by default by
    the ending of `output`, else text. `store`: where names are looked up.

    >>> page = stepscope.report("latest", output="report.html")
    >>> stepscope.report("latest", kind="csv").splitlines()[0].startswith("run_id,")
    True
    """
    from stepscope.report import build_report, read_report_runs, render_report

    listed = [runs] if isinstance(runs, StoredRun | str | Path) else list(runs)
    endings = {".html": "html", ".htm": "html", ".md": "markdown", ".csv": "csv", ".json": "json"}
    chosen = kind or (endings.get(Path(output).suffix, "text") if output else "text")
    found = [find_run(one, store=store) for one in listed]
    text = render_report(build_report(read_report_runs(found)), chosen)
    if output is not None:
        write_output(Path(output), text.encode(), make_folders=True)
    return text


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
