"""In a program that `stepscope trace record` has started: watch its steps, and never be the reason that it fails."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import msgspec

from stepscope.core.errors import StepscopeError, first_line
from stepscope.core.files import write_file_atomically
from stepscope.traces.recording.api import set_current
from stepscope.traces.recording.marks import install
from stepscope.traces.recording.recorder import Recorder
from stepscope.traces.recording.settings import RecordSettings

VARIABLE = "STEPSCOPE_RECORDING"
"""What to record, as JSON; set for every process below `stepscope trace record`."""
PROCESSES_FOLDER = "processes"
"""What processes say that recorded nothing; gone when the recording is complete."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent asks of its children."""

    out: str
    settings: RecordSettings
    package: str
    """Folder that holds the package `stepscope`, for interpreters that do not have it."""
    overwrite: bool = False


class SeenProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that loaded torch."""

    pid: int
    steps_seen: int
    notices: list[str]


class Watch:
    """The recorder of this process, its marks, and its end."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._out = Path(assignment.out)
        self._process = os.getpid()
        self._start_anew()

    def _start_anew(self) -> None:
        self._recorder = Recorder(self._assignment.settings, self._out, overwrite=self._assignment.overwrite)
        self._has_ended = False
        set_current(self._recorder)

    def begin(self) -> None:
        install(self._assignment.settings.step_marker, self.step_ended)
        atexit.register(self.end)
        # A process that is forked has made none of the steps that its parent made.
        os.register_at_fork(after_in_child=self._start_anew)
        self._follow_termination()

    def step_ended(self, marker: str) -> None:
        recorder = self._recorder
        recorder.step_marker = marker
        try:
            recorder.step()
        except (StepscopeError, OSError) as error:
            say(first_line(error))
        if self._assignment.settings.stop and recorder.is_done and recorder.status != "nothing":
            say("everything is recorded: the program is stopped")
            sys.exit(0)

    def end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        recorder = self._recorder
        try:
            recorder.close()
            # Of a forked process without steps there is nothing to say: workers that load data are such.
            if recorder.status == "nothing" and (recorder.steps_seen or os.getpid() == self._process):
                self._leave_word(recorder)
        except OSError as error:
            say(f"cannot write to {self._out}: {first_line(error)}")

    def _leave_word(self, recorder: Recorder) -> None:
        folder = self._out / PROCESSES_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        seen = SeenProcess(pid=os.getpid(), steps_seen=recorder.steps_seen, notices=recorder.notices)
        write_file_atomically(folder / f"{os.getpid()}.json", msgspec.json.encode(seen))

    def _follow_termination(self) -> None:
        """A launcher that loses a rank terminates the others: what they have recorded by then is kept."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def keep_and_end(number: int, _: FrameType | None) -> None:
            self.end()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, keep_and_end)


def begin() -> None:
    """Called when the program has loaded torch."""
    Watch(msgspec.json.decode(os.environ[VARIABLE], type=Assignment)).begin()


def say(message: str) -> None:
    sys.stderr.write(f"stepscope: {message}\n")
    sys.stderr.flush()
