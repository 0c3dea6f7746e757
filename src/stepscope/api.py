"""What programs call, and what the command line calls: plan, run, measure, record, read, explain, compare, report.

Every function takes runs as the command line does (a folder, the beginning of an id, `latest`) or as the objects that
the other functions return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.core.errors import StepscopeError, UsageError, unknown_name
from stepscope.core.files import write_output
from stepscope.core.units import escape_controls, escape_line, parse_range
from stepscope.records import REQUESTS, UntilDecided
from stepscope.store import StoredRun, read_each, resolve_store
from stepscope.store import find_run as find_stored_run
from stepscope.store.reader import UNSHOWABLE

if TYPE_CHECKING:
    from stepscope.analyze.answers.compose import Answer
    from stepscope.analyze.job import JobReport, Timelines
    from stepscope.analyze.ranks.ranks_report import ClockChoice
    from stepscope.compare.verdict import Comparison
    from stepscope.compare.views import ImplementationTable
    from stepscope.measure import Measurement, MeasureSettings
    from stepscope.measure.progress import BarProgress, LineProgress, SilentProgress
    from stepscope.records import Case, System
    from stepscope.records.request import Check
    from stepscope.report.view import Report
    from stepscope.run.plan import Job
    from stepscope.store import MeasuredCase
    from stepscope.traces import TraceSet

    AnyProgress = LineProgress | BarProgress | SilentProgress

RunLike = StoredRun | str | Path
"""A run, its folder, or its name in the store."""
Tell = Callable[[str], object]
"""Gets messages for people while something is done."""


def _say_nothing(text: str) -> None:
    return


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
    try:
        made = REQUESTS[verb](**asked)
        msgspec.convert(msgspec.to_builtins(made), REQUESTS[verb])  # constructors do not look at types
    except (TypeError, ValueError) as error:
        raise UsageError(f"the options of {verb} cannot be used: {error}", hint="compare their types") from error
    return Job(verb, name or cases[0].benchmark.model, list(cases), made, launcher, ranks)


def start(
    job: Job,
    *,
    store: str | Path | None = None,
    resume: bool | str = False,
    command: Sequence[str] | None = None,
    tell: Tell = _say_nothing,
) -> StoredRun:
    """The run that a job is measured into: on disk, and nothing is measured yet.

    `job`: from `plan`. `store`: where it is kept. `resume`: True to continue the newest interrupted run of the same
    job, if there is one; a name to continue that run. `command`: what a person would type to get the run, by default
    this program. `tell`: gets messages on the way.

    >>> job = stepscope.plan("ops", stepscope.find_run("latest").plan.cases, settings=stepscope.measure.QUICK)
    >>> stored = stepscope.start(job, command=["example"])
    >>> stored.status, stepscope.execute(stored).status
    ('running', 'complete')
    """
    from stepscope.run import plan as planning

    place = resolve_store(store)
    if resume and resume is not True:
        return planning.find_resumed(resume, place, verb=job.verb, job=job)
    if resume:
        found = planning.find_interrupted(job, place)
        tell(f"continuing {found.id}" if found else "no interrupted run with these cases: starting a new one")
        if found:
            return found
    find_baseline(place, job.request.until_decided)  # a wrong name is reported before anything is measured
    return planning.create(job, place, command or sys.argv)


def run(
    job: Job,
    *,
    store: str | Path | None = None,
    resume: bool | str = False,
    progress: AnyProgress | None = None,
) -> StoredRun:
    """The finished run of a job: `start`, then `execute`.

    `job`: from `plan`. `store`, `resume`: as for `start`. `progress`: what shows progress.

    >>> job = stepscope.plan("ops", stepscope.find_run("latest").plan.cases, settings=stepscope.measure.QUICK)
    >>> stepscope.run(job).status
    'complete'
    """
    return execute(start(job, store=store, resume=resume), progress=progress)


def execute(stored: StoredRun, *, progress: AnyProgress | None = None, tell: Tell = _say_nothing) -> StoredRun:
    """The run once everything is measured that its plan still lacks.

    `stored`: a run, new or interrupted. `progress`: what shows progress. `tell`: gets messages on the way.

    >>> job = stepscope.plan("ops", stepscope.find_run("latest").plan.cases, settings=stepscope.measure.QUICK)
    >>> stepscope.execute(stepscope.start(job)).status
    'complete'
    """
    from stepscope.run.execute import execute as execute_plan

    return execute_plan(
        stored, progress=progress, count_wanted=lambda cases, system: _count_wanted(stored, cases, system, tell)
    )


class Interleaved(NamedTuple):
    """Two sides that were measured in turn."""

    a: StoredRun
    b: StoredRun
    comparison: Comparison


def ab(
    a: Job,
    b: Job,
    *,
    pairs: int = 8,
    level: float = 0.01,
    resolution: float = 0.05,
    store: str | Path | None = None,
    resume: bool | str = False,
    command: Sequence[str] | None = None,
    progress: AnyProgress | None = None,
    tell: Tell = _say_nothing,
) -> Interleaved:
    """Both runs and their comparison, measured in fresh processes that take turns.

    `a`, `b`: from `plan`; `plan(…, environment={…})` sets variables for one side alone. `pairs`: fresh processes of
    each side. `level`, `resolution`: as for `compare`. `store`, `resume`, `command`, `progress`, `tell`: as for `start`
    and `execute`; each process is on disk when it is done.

    >>> cases = stepscope.find_run("latest").plan.cases
    >>> side = stepscope.plan("ops", cases, settings=stepscope.measure.QUICK)
    >>> found = stepscope.ab(side, side, pairs=2)
    >>> [row.verdict for row in found.comparison.rows]
    ['not enough data']
    """
    from stepscope.compare.views import compare_interleaved
    from stepscope.measure.progress import SilentProgress
    from stepscope.run import plan as planning
    from stepscope.run.processes import RunSide, measure_in_processes

    _require_level(level)
    place = resolve_store(store)
    request = {"processes": pairs, "until_decided": None}
    jobs = [job._replace(request=msgspec.structs.replace(job.request, **request)) for job in (a, b)]
    runs = planning.find_interrupted_sides(jobs, place, None if resume is True else resume) if resume else None
    if resume:
        tell(
            f"continuing {runs[0].id} and {runs[1].id}"
            if runs
            else "no interrupted comparison of these sides: starting a new one"
        )
    runs = runs or planning.create_sides(jobs, place, command or sys.argv)
    sides = [RunSide(one, one.plan.request.environment) for one in runs]
    measure_in_processes(sides, pairs, progress=progress or SilentProgress())
    done_a, done_b = (StoredRun(one.folder) for one in runs)
    return Interleaved(done_a, done_b, compare_interleaved(done_a, done_b, level=level, resolution=resolution))


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


def _count_wanted(stored: StoredRun, cases: list[MeasuredCase], system: System | None, tell: Tell) -> int:
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
    compiled: bool = False,
    check: bool = True,
    kernels: bool = False,
    graph: bool = False,
    tag: str | None = None,
    settings: MeasureSettings | None = None,
    processes: int = 1,
    store: str | Path | None = None,
) -> StoredRun:
    """A finished run of one operator over its shapes, dtypes and passes, by default on `cuda` where it works.

    `name`: as `stepscope bench ops --list` shows. `shape`, `dtype`, `direction`, `cache`: one or several; every
    combination is a case. `compiled`: with torch.compile. `check`: compare results with float64. `kernels`: profile
    each case. `graph`: also time replays of CUDA graphs. `tag`: a word for people. `settings`, `processes`, `store`: as
    for `plan` and `run`.

    >>> run = stepscope.bench_op("gemm", shape="m=16,n=16,k=16", settings=stepscope.measure.QUICK)
    >>> [case.result.status for case in run.cases()]
    ['ok']
    """
    from stepscope.bench.ops import make_cases
    from stepscope.measure import best_device

    device = device or best_device()
    cases = make_cases(
        names=[name], shapes=_as_list(shape), dtypes=_as_list(dtype), directions=_as_list(direction), device=device,
        caches=_as_list(cache), compiled=compiled,
    )  # fmt: skip
    job = plan(
        "ops", cases, settings=settings, device=device, processes=processes, check=check, kernels=kernels, graph=graph,
        tag=tag,
    )  # fmt: skip
    return run(job, store=store)


def bench_collective(
    name: str,
    *,
    sizes: str | Sequence[int] = "1K:1M:x4",
    ranks: int = 2,
    backend: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    reduction: str = "sum",
    root: int = 0,
    placement: str | None = None,
    check: Check = "sample",
    tag: str | None = None,
    settings: MeasureSettings | None = None,
    processes: int = 1,
    store: str | Path | None = None,
) -> StoredRun:
    """A finished run of one collective over message sizes, on ranks that are started here.

    `name`: as `stepscope bench comms --list` shows. `sizes`: a list of bytes, or a range such as `1K:1M:x4`. `ranks`,
    `backend`: how many ranks, and what they communicate with; by default `nccl` where each rank has a GPU of its own,
    else `gloo` (`fake` moves no data). `reduction`, `root`, `placement`: what is measured, as on the command line.
    `check`: which iterations' results are compared. `tag`: a word for people.

    >>> run = stepscope.bench_collective("all_reduce", sizes="1K:4K:x4", ranks=2, backend="fake",
    ...                                  settings=stepscope.measure.QUICK)
    >>> [int(case.result.size_bytes) for case in run.cases()]
    [1024, 4096]
    """
    from stepscope.bench.comms import make_cases
    from stepscope.launch.join import choose_backend, device_of_backend, require_backend
    from stepscope.measure import MeasureSettings

    points = parse_range(sizes) if isinstance(sizes, str) else list(sizes)
    backend = backend or choose_backend(ranks, device)
    if backend not in {"fake", "mpi"}:
        require_backend(backend)  # here, and not by every rank after it was started
    device = device or device_of_backend(backend)
    cases = make_cases(
        collective=name, sizes=points, dtype=dtype, backend=backend, world_size=ranks, device=device,
        reduction=reduction, root=root, placement=placement,
    )  # fmt: skip
    # One iteration per sample: what a rank waits for must not be averaged away.
    single = msgspec.structs.replace(settings or MeasureSettings(), iterations=1)
    job = plan(
        "comms", cases, settings=single, device=device, ranks=ranks, backend=backend, processes=processes, check=check,
        tag=tag,
    )  # fmt: skip
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

    _require_level(level)
    return compare_runs(find_run(a, store=store), find_run(b, store=store), level=level, resolution=resolution)


def compare_implementations(
    runs: RunLike | Sequence[RunLike], *, level: float = 0.01, resolution: float = 0.05, store: str | Path | None = None
) -> ImplementationTable:
    """How much faster the optimized implementations of whole models are than those out of the box, with the means.

    `runs`: where both were measured, together or apart. `level`, `resolution`, `store`: as for `compare`.

    >>> stepscope.compare_implementations("latest").comparison.rows
    []
    """
    from stepscope.compare.views import compare_implementations as compare_measured

    _require_level(level)
    measured = [case for run in _find_runs(runs, store) for case in run.cases()]
    return compare_measured(measured, level=level, resolution=resolution)


class Explanation(NamedTuple):
    """Why a step takes as long as it does."""

    answer: Answer
    """The sentence, the evidence behind it, and what to try next."""
    job: JobReport
    """Every analysis, with the section that shows it."""
    timelines: Timelines
    """The timelines that were read."""

    @property
    def sentence(self) -> str:
        return self.answer.sentence

    def write_page(self, output: str | Path) -> int:
        """Write one HTML page that needs no network; its size in bytes."""
        from stepscope.report.trace_page import write_page

        return write_page(self.job, self.answer, self.timelines, Path(output))


def explain(
    traces: TraceSet | str | Path,
    *,
    step: int | None = None,
    clocks: ClockChoice = "auto",
    engine: str | None = None,
    workers: int | None = None,
    on_rank: Callable[[int, int], None] = lambda done, of: None,
) -> Explanation:
    """Why a step takes as long as it does: the sentence, the evidence behind it, and what to try next.

    `traces`: what `read_traces` returned, or the path of a trace or of a folder with one per rank. `step`: by default
    the median one. `clocks`: how times of different ranks are compared. `engine`, `workers`: how the ranks of a large
    job are read. `on_rank`: called with the number of ranks that were read, and of all.

    >>> with stepscope.record(out="recording", steps=2, overwrite=True) as recorder:
    ...     for _ in range(40):
    ...         total = sum(torch.ones(64, 64) @ torch.ones(64, 64) for _ in range(50))
    ...         recorder.step()
    >>> explanation = stepscope.explain("recording/kineto")
    >>> "step" in explanation.sentence
    True
    >>> explanation.write_page("step.html") > 10_000
    True
    """
    from stepscope.analyze.answers.compose import answer
    from stepscope.analyze.job import Timelines, explain_job
    from stepscope.traces import read_traces

    timelines = Timelines(read_traces(traces) if isinstance(traces, str | Path) else traces)
    job = explain_job(
        timelines.traces, step=step, clocks=clocks, engine=engine, workers=workers, on_done=on_rank, timelines=timelines
    )
    return Explanation(answer(job, limits=job.limits), job, timelines)


REPORT_KINDS = ("text", "markdown", "csv", "json", "html", "nccl")
_ENDINGS = {".html": "html", ".htm": "html", ".md": "markdown", ".csv": "csv", ".json": "json"}


def report(
    runs: RunLike | Sequence[RunLike],
    *,
    output: str | Path | None = None,
    kind: str | None = None,
    width: int | None = None,
    store: str | Path | None = None,
    tell: Tell = _say_nothing,
) -> str:
    """The text of a report on runs; also written to `output` where that is given.

    `runs`: one or several runs, folders or names. `kind`: `text`, `markdown`, `csv`, `json`, `html`, or `nccl` for
    collectives as nccl-tests prints them; by default by the ending of `output`, else text. `width`: tables of text are
    no wider. `store`: where names are looked up. `tell`: gets the names of runs that cannot be shown.

    >>> page = stepscope.report("latest", output="report.html")
    >>> stepscope.report("latest", kind="csv").splitlines()[0].startswith("run_id,")
    True
    """
    from stepscope.report.render import render_report

    found = _find_runs(runs, store)
    chosen = kind or report_kind(output)
    if chosen == "nccl":
        text = _collective_table(found, width, tell)
    else:
        text = render_report(_build_report(found, tell), chosen, width=width)
    if output is not None:
        write_output(Path(output), text.encode(), make_folders=True)
    return text


def report_kind(output: str | Path | None) -> str:
    """What a file of that name holds: `html`, `markdown`, `csv` or `json` by its ending, else text.

    `output`: the name of the file.

    >>> stepscope.api.report_kind("report.md")
    'markdown'
    """
    return _ENDINGS.get(Path(output).suffix, "text") if output else "text"


def _build_report(runs: Sequence[StoredRun], tell: Tell) -> Report:
    """What one run's values keep from being shown is left out and named, as long as others are left."""
    from stepscope.report.render import read_report_runs
    from stepscope.report.view import build_report

    def build(run: StoredRun) -> StoredRun:
        build_report(read_report_runs([run]))
        return run

    try:
        return build_report(read_report_runs(runs))
    except UNSHOWABLE:
        good, damaged = read_each([run.folder for run in runs], build)
        if not damaged:
            raise
        if not good:
            raise damaged[0] from None
        tell_left_out(damaged, tell)
        return build_report(read_report_runs(good))


def describe_damage(error: StepscopeError) -> str:
    """One line of a run that cannot be used."""
    return escape_line(f"{error.message} ({error.where})")


def tell_left_out(damaged: Sequence[StepscopeError], tell: Tell) -> None:
    for error in damaged:
        tell(f"left out: {describe_damage(error)}")


def _collective_table(runs: Sequence[StoredRun], width: int | None, tell: Tell) -> str:
    """Runs without communication are left out and named."""
    from stepscope.report.communication import format_collective_table, has_collectives
    from stepscope.report.render import read_report_runs

    read = read_report_runs(runs)
    found = [run for run in read if has_collectives(run)]
    if not found:
        raise UsageError(
            f"{'the run has' if len(read) == 1 else 'these runs have'} no communication cases",
            hint="--format text shows every kind of case",
            where="--format nccl",
        )
    for run in read:
        if run not in found:
            tell(f"left out: {run.id} has no communication cases")
    return escape_controls(format_collective_table(found, width=width))


def _find_runs(runs: RunLike | Sequence[RunLike], store: str | Path | None) -> list[StoredRun]:
    listed = [runs] if isinstance(runs, StoredRun | str | Path) else list(runs)
    return [find_run(one, store=store) for one in listed]


def _require_level(level: float) -> None:
    if not 0 < level < 1:
        raise UsageError("the level must be between 0 and 100 %", hint="write for example 1%, or 0.01", where="level")


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
