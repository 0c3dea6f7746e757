"""What a process does for one rank, and where it does: in this process, in several here, or on a Ray or Dask cluster.

Whatever the engine, the same function runs on the same tasks and the answers come back in the order of the tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from stepscope.analyze.ranks.digest import RankDigest, digest, list_numbers
from stepscope.analyze.step.breakdown import Shares, break_down
from stepscope.analyze.step.report import StepReport, explain_step
from stepscope.analyze.step.view import view
from stepscope.core.errors import MissingDependencyError, StepscopeError, UsageError

if TYPE_CHECKING:
    from stepscope.formats.timeline import Timeline

Answer = TypeVar("Answer")
Answers: TypeAlias = Generator[tuple[int, Answer], None, None]
Progress = Callable[[int, int], None]

ALONE_UP_TO_BYTES = 64 << 20
"""Traces of together less than this are read in this process: starting others takes longer."""
MEMORY_OF_A_BYTE = 12
"""Peak memory of analysing a trace, for each byte of its packed file; as measured, see docs/benchmarks.md."""
LEAST_MEMORY = 400 << 20
RANKS_A_PROCESS = 64
"""A process is replaced after so many ranks, so that what libraries keep does not add up."""


def run_tasks(
    function: Callable[[RankTask], Answer],
    tasks: Sequence[RankTask],
    *,
    here: Callable[[RankTask], Answer] | None = None,
    engine: str | None = None,
    workers: int | None = None,
    on_done: Progress = lambda _done, _of: None,
) -> list[Answer]:
    """`engine`: None for this machine, `ray://HOST:PORT` (or `ray://` for a local one), `dask://HOST:PORT` or `tcp://…`.

    `here` gives the same answers, and is called instead where no other process is worth its start.
    """
    if not tasks:
        return []
    found: dict[int, Answer] = {}
    with closing(_answers(function, tasks, here or function, engine=engine, workers=workers)) as answers:
        for place, answer in answers:
            found[place] = answer
            on_done(len(found), len(tasks))
    return [found[place] for place in range(len(tasks))]


def _answers(
    function: Callable[[RankTask], Answer],
    tasks: Sequence[RankTask],
    here: Callable[[RankTask], Answer],
    *,
    engine: str | None,
    workers: int | None,
) -> Answers[Answer]:
    """Places of tasks and their answers, as they come."""
    if engine is None:
        count = choose_workers(tasks, workers)
        yield from _in_pools(function, tasks, count) if count > 1 else enumerate(map(here, tasks))
        return
    scheme, _, address = engine.partition("://")
    if scheme == "ray":
        yield from _on_ray(function, tasks, engine if address else None)
    elif scheme in ("dask", "tcp", "tls"):
        yield from _on_dask(function, tasks, f"tcp://{address}" if scheme == "dask" else engine)
    else:
        hint = "ray://HOST:PORT, dask://HOST:PORT, or none for this machine"
        raise UsageError(f"there is no engine {engine!r}", hint=hint)


def choose_workers(tasks: Sequence[RankTask], asked: int | None) -> int:
    """As many processes as there are cores and as their memory allows."""
    import psutil

    sizes = [os.path.getsize(task.path) for task in tasks if os.path.exists(task.path)]
    if asked is not None:
        return max(1, min(asked, len(tasks)))
    if sum(sizes) < ALONE_UP_TO_BYTES or len(tasks) == 1:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(LEAST_MEMORY, max(sizes) * MEMORY_OF_A_BYTE)
    return max(1, min(cores, len(tasks), int(psutil.virtual_memory().available * 0.8 / each)))


def _in_pools(function: Callable[[RankTask], Answer], tasks: Sequence[RankTask], workers: int) -> Answers[Answer]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Fresh processes: forking one with threads (polars has some) may hang.
    context = multiprocessing.get_context("spawn")
    done = 0
    # A pool's own way to replace its processes (max_tasks_per_child) can hang for ever: a new pool after each batch.
    for first in range(0, len(tasks), workers * RANKS_A_PROCESS):
        places = range(len(tasks))[first : first + workers * RANKS_A_PROCESS]
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = {pool.submit(function, tasks[place]): place for place in places}
            try:
                for future in as_completed(futures):
                    answer = future.result()
                    done += 1
                    yield futures[future], answer
            except BrokenProcessPool as error:
                raise StepscopeError(
                    f"a process that analysed traces died ({done} of {len(tasks)} ranks were done)",
                    hint="most likely memory ran out: try --workers 1, or fewer",
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _load(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        hint = "pip install 'stepscope[cluster]'"
        raise MissingDependencyError(f"this engine needs the package {package}", hint=hint) from None


def _on_ray(function: Callable[[RankTask], Answer], tasks: Sequence[RankTask], address: str | None) -> Answers[Answer]:
    ray = _load("ray")
    mine = not ray.is_initialized()
    if mine:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        remote = ray.remote(function)
        waiting = {remote.remote(task): place for place, task in enumerate(tasks)}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            try:
                answer = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                # Errors come wrapped with the text of a remote traceback; ours are told as they are.
                cause = getattr(error, "cause", None)
                raise cause if isinstance(cause, StepscopeError) else error from None
            yield waiting.pop(ready), answer
    finally:
        if mine:
            ray.shutdown()


def _on_dask(function: Callable[[RankTask], Answer], tasks: Sequence[RankTask], address: str) -> Answers[Answer]:
    dask = _load("distributed")
    try:
        client = dask.Client(address, timeout=10)
    except (OSError, TimeoutError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {address}",
            hint="start one with `dask scheduler`, and workers with `dask worker`",
        ) from error
    with client:
        futures = {client.submit(function, task, pure=False): place for place, task in enumerate(tasks)}
        for future in dask.as_completed(list(futures)):
            yield futures[future], future.result()


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    place: int = 0
    """Which of the ranks in that file."""
    rank: int
    step: int | None
    or_another: bool = False
    """Whether a rank without that step explains its own median step; else that is an error."""
    step_marker: str | None = None
    cache: bool = True
    in_full: bool = True
    """Whether the full report of the step comes back, or only its summary."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step in short. Times are profiled ones."""

    rank: int
    source: str
    step: int
    step_s: float
    breakdown_s: Shares
    device_busy_s: float
    kernels: int
    copies: int
    device: str
    hidden_comm_share: float | None
    """Share of communication that ran beside compute; None without communication."""
    repairs: dict[str, int]
    """What was repaired while reading the trace."""


_FROM_BREAKDOWN = ("step_s", "breakdown_s", "device_busy_s", "kernels", "copies", "device")


class RankAnswer(RankSummary, frozen=True, kw_only=True):
    """The summary, and what else the whole job needs of a rank."""

    format: str
    devices: list[str]
    digest: RankDigest
    report: StepReport | None


def explain_rank(task: RankTask, timeline: Timeline | None = None) -> RankAnswer:
    """The same answer wherever it runs: nothing here depends on the process, the machine or other ranks.

    `timeline`: that of the task, where it has been read already.
    """
    from stepscope.traces.read import load_timeline

    if timeline is None:
        if not task.in_full and find_spec("numba") is not None:
            import numba  # noqa: F401 - one of many ranks: loading the compiled scanner once pays for all of them
        timeline = load_timeline(Path(task.path), place=task.place, step_marker=task.step_marker, cache=task.cache)
    if timeline.rank != task.rank:
        timeline = replace(timeline, rank=task.rank)
    step = _own_step(timeline, task.step, or_another=task.or_another)
    report = explain_step(timeline, step) if task.in_full else None
    breakdown = report.breakdown if report is not None else break_down(timeline, step)
    devices: Any = timeline.metadata.get("devices") or []
    names = (device.get("name") for device in devices if isinstance(device, dict))
    return RankAnswer(
        rank=task.rank,
        source=task.path,
        format=str(timeline.metadata.get("format", "")),
        devices=list(dict.fromkeys(str(name) for name in names if name)),
        step=breakdown.step if breakdown.step is not None else 0,
        **{name: getattr(breakdown, name) for name in _FROM_BREAKDOWN},
        hidden_comm_share=breakdown.overlap.hidden_share,
        repairs=dict(timeline.repairs),
        digest=digest(timeline),
        report=report,
    )


def _own_step(timeline: Timeline, step: int | None, *, or_another: bool) -> int | None:
    numbers = [span.number for span in timeline.steps]
    if step is None or step in numbers:
        return step
    if or_another:
        return view(timeline).median_step()
    raise UsageError(f"rank {timeline.rank} has no step {step}", hint=f"its steps: {list_numbers(numbers)}")
