"""Recording from inside a program: with stepscope.record(out=…) as recorder: … recorder.step()."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.traces.recording.evidence import (
    RankRecording,
    Recording,
    StepMarker,
    make_settings,
    write_rank,
    write_recording,
)
from stepscope.traces.recording.recorder import Recorder, describe_lack, require_new

if TYPE_CHECKING:
    import torch


Ended = Callable[[], None]


class Marks:
    """Passes on the ends of steps from whatever the recording listens to."""

    def __init__(self, wanted: StepMarker, ended: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._ended = ended
        self._has_explicit = False

    def end(self, marker: Literal["mark", "optimizer", "forward"]) -> None:
        """A step ended by this. From the program's own marks on, its optimizers say nothing: it would count twice."""
        self._has_explicit |= marker == "mark"
        is_silent = marker == "forward" or (marker == "optimizer" and self._has_explicit)
        if self._wanted == marker or (self._wanted == "auto" and not is_silent):
            self._ended(marker)


class OptimizerCycle:
    """The last of several optimizers in one step ends it."""

    def __init__(self) -> None:
        self._order: list[int] = []

    def ends_step(self, optimizer: object) -> bool:
        """Whether this one is the last of its step, as far as is known: a new one belongs to the step before it."""
        key = id(optimizer)
        if key not in self._order:
            self._order.append(key)
            return len(self._order) == 1
        return key == self._order[-1]


def watch_optimizers(ended: Ended) -> None:
    """Call `ended` after every step that is an optimizer's last. For optimizers that are made from now on.

    torch's own hook would run inside the span that torch draws around the optimizer, and a step that ends there would
    cut that span in two.
    """
    import torch

    original = torch.optim.Optimizer.profile_hook_step
    cycle, depth = OptimizerCycle(), [0]

    def profile_hook_step(function: Callable[..., Any]) -> Callable[..., Any]:
        inner: Callable[..., Any] = original(function)

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            # A compiler that reads this must find nothing new in it.
            if torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            depth[0] += 1
            try:
                result = inner(*args, **kwargs)
            finally:
                depth[0] -= 1
            # An optimizer may be built from others: the outermost counts.
            if not depth[0] and cycle.ends_step(args[0]):
                ended()
            return result

        return step

    torch.optim.Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[assignment, method-assign]


def watch_outermost_module(ended: Ended) -> None:
    """Call `ended` after every call of the outermost module.

    All modules are watched only until the first call is over: a hook on each of them would slow the program down.
    """
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    stack: list[torch.nn.Module] = []
    handles: list[Any] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        stack.append(module)

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        # An exception that the program has caught may have left modules behind.
        while stack and stack.pop() is not module:
            pass
        if not stack:
            for handle in handles:
                handle.remove()
            module.register_forward_hook(lambda *_: ended())
            ended()

    handles += [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]


_marks: list[Marks] = []


def install(wanted: StepMarker, ended: Callable[[str], None]) -> None:
    """For the life of the process."""
    marks = Marks(wanted, ended)
    _marks[:] = [marks]
    if wanted in ("auto", "optimizer"):
        watch_optimizers(functools.partial(marks.end, "optimizer"))
    if wanted == "forward":
        watch_outermost_module(functools.partial(marks.end, "forward"))


def mark_explicitly(recorder: Recorder) -> None:
    """`stepscope.step()`: through the marks where a program is watched, else straight to the recorder."""
    if _marks:
        _marks[0].end("mark")
    else:
        recorder.step()


_current: list[Recorder] = []
"""The recorder of this process, at most one: torch's profiler cannot run twice."""


class Record:
    """What `record` hands out. After the block, `recording` is what was written."""

    def __init__(self, recorder: Recorder, end_step: Callable[[], None]) -> None:
        self._recorder = recorder
        self._end_step = end_step
        self.recording: Recording | None = None

    @property
    def is_done(self) -> bool:
        """Everything is recorded and timed: the loop may end."""
        return self._recorder.is_done

    def step(self) -> None:
        """A step has ended."""
        self._end_step()


def current_recorder() -> Recorder | None:
    return _current[-1] if _current else None


def set_current(recorder: Recorder | None) -> None:
    _current[:] = [] if recorder is None else [recorder]


def step() -> None:
    """The end of a step of this program. Does nothing where nobody records, so that it may stay in the program.

    >>> stepscope.step()
    """
    recorder = current_recorder()
    if recorder is not None:
        mark_explicitly(recorder)


@contextmanager
def ignoring_marks() -> Iterator[None]:
    """For whoever counts the steps of another one's code: marks in that code would count each a second time."""
    recorder = current_recorder()
    set_current(None)
    try:
        yield
    finally:
        set_current(recorder)


@contextmanager
def record(
    *,
    out: str | Path,
    steps: int = 3,
    warmup: int = 2,
    unprofiled: int = 5,
    profiler_warmup: int = 1,
    settle: int = 1,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
    et: bool = True,
    ranges: bool = False,
    lean: bool = False,
    overheads: bool = False,
    link: bool = True,
    overwrite: bool = False,
) -> Iterator[Record]:
    """A context in which steps of the loop in it are recorded into the folder `out`, one pair of traces per rank.

    `steps` steps are recorded. Before them pass `warmup` steps that are left alone, `unprofiled` steps that are timed
    without the profiler and `profiler_warmup` steps that it throws away; after them `settle` and `unprofiled` steps
    again, where the loop goes on. `shapes`, `stacks`, `memory`, `ranges`: what else the timeline holds; `et`: the
    execution trace beside it; `link`: join the two; `lean`: also record as many later steps with the timeline alone;
    `overheads`: state what other settings of the profiler cost. `overwrite`: replace a recording that is there. All
    ranks name the same folder. Raises RecordingFailedError where the block ends before anything is recorded.

    >>> with stepscope.record(out="recording", steps=2, overwrite=True) as recorder:
    ...     for _ in range(40):
    ...         product = torch.ones(64, 64) @ torch.ones(64, 64)
    ...         recorder.step()
    >>> recorder.is_done
    True
    """
    running = current_recorder()
    if running is not None:
        # Under `stepscope trace record`: that recording goes on, and this block's steps are its steps.
        yield Record(running, functools.partial(mark_explicitly, running))
        return
    settings = make_settings(
        steps=steps, warmup=warmup, unprofiled=unprofiled, profiler_warmup=profiler_warmup, settle=settle,
        shapes=shapes, stacks=stacks, memory=memory, et=et, ranges=ranges, lean=lean, overheads=overheads,
        step_marker="mark",
    )  # fmt: skip
    folder = Path(out)
    require_new(folder, overwrite=overwrite)
    recorder = Recorder(settings, folder, overwrite=overwrite)
    handed_out = Record(recorder, recorder.step)
    set_current(recorder)
    try:
        recorder.begin()
        yield handed_out
    finally:
        set_current(None)
        recorder.close()
        if recorder.status != "nothing":
            handed_out.recording = _finish(recorder, link=link)
    if recorder.status == "nothing":
        raise describe_lack(recorder.steps_seen, settings, command=sys.argv)


def _finish(recorder: Recorder, *, link: bool) -> Recording:
    if link and recorder.settings.et:
        write_rank(recorder.out, with_link(recorder.out, recorder.describe()))
    return write_recording(recorder.out, command=sys.argv, settings=recorder.settings)


def with_link(folder: Path, record: RankRecording) -> RankRecording:
    """The record with what was joined; with a notice where that could not be tried. Needs numpy."""
    if record.kineto is None or record.et is None:
        return record
    try:
        from stepscope.formats.execution_trace import read_execution_trace
        from stepscope.traces.link import link
        from stepscope.traces.read import read_timeline

        graph = read_execution_trace(folder / record.et.path)
        timeline = read_timeline(folder / record.kineto.path)
        summary = link(graph, timeline, minimum_share=0.0).summary
    except (StepscopeError, ImportError) as error:
        notices = [*record.notices, f"the two traces were not linked: {error}"]
        return msgspec.structs.replace(record, notices=notices)
    return msgspec.structs.replace(record, linked=summary)
