"""Recording from inside a program: `with stepscope.record(out=…) as recorder: … recorder.step()`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.traces.recording.evidence import RankRecording, Recording, write_rank, write_recording
from stepscope.traces.recording.recorder import Recorder, describe_lack, require_new
from stepscope.traces.recording.settings import make_settings

_current: list[Recorder] = []
"""The recorder of this process, at most one: torch's profiler cannot run twice."""


class Record:
    """What `record` hands out. After the block, `recording` is what was written."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.recording: Recording | None = None

    @property
    def is_done(self) -> bool:
        """Everything is recorded and timed: the loop may end."""
        return self._recorder.is_done

    def step(self) -> None:
        """A step has ended."""
        self._recorder.step()


def current_recorder() -> Recorder | None:
    return _current[-1] if _current else None


def set_current(recorder: Recorder | None) -> None:
    _current[:] = [] if recorder is None else [recorder]


def step() -> None:
    """A step of this program has ended. Does nothing where nobody records, so that it may stay in the program."""
    recorder = current_recorder()
    if recorder is None:
        return
    from stepscope.traces.recording.marks import mark_explicitly

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
    """Record `steps` steps of the loop in this block into the folder `out`, one pair of traces per rank.

    Before them pass `warmup` steps that are left alone, `unprofiled` steps that are timed without the profiler and
    `profiler_warmup` steps that it throws away; after them `settle` and `unprofiled` steps again, where the loop goes
    on. All ranks name the same folder. Raises RecordingFailedError where the block ends before anything is recorded.
    """
    running = current_recorder()
    if running is not None:
        # Under `stepscope trace record`: that recording goes on, and this block's steps are its steps.
        yield Record(_Explicit(running))
        return
    settings = make_settings(
        steps=steps, warmup=warmup, unprofiled=unprofiled, profiler_warmup=profiler_warmup, settle=settle,
        shapes=shapes, stacks=stacks, memory=memory, et=et, ranges=ranges, lean=lean, overheads=overheads,
        step_marker="mark",
    )  # fmt: skip
    folder = Path(out)
    require_new(folder, overwrite=overwrite)
    recorder = Recorder(settings, folder, overwrite=overwrite)
    handed_out = Record(recorder)
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
        from stepscope.traces.recording.api import with_link

        write_rank(recorder.out, with_link(recorder.out, recorder.describe()))
    return write_recording(recorder.out, command=sys.argv, settings=recorder.settings)


class _Explicit(Recorder):
    """Hands its steps to a recorder that was there before."""

    def __init__(self, running: Recorder) -> None:
        super().__init__(running.settings, running.out)
        self._running = running

    @property
    def is_done(self) -> bool:
        return self._running.is_done

    def step(self) -> None:
        from stepscope.traces.recording.marks import mark_explicitly

        mark_explicitly(self._running)


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
