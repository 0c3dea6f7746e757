"""Recording a program from outside: started unchanged, with a start-up file that watches its steps."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from stepscope.core.errors import StepscopeError, UsageError, first_line
from stepscope.core.files import write_file_atomically
from stepscope.traces.recording import install, set_current, with_link
from stepscope.traces.recording.evidence import (
    FOLDERS,
    Recording,
    RecordSettings,
    read_ranks,
    write_rank,
    write_recording,
)
from stepscope.traces.recording.recorder import Recorder, RecordingFailedError, describe_lack, read_place, require_new

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


START_UP = Path(__file__).parent / "start_up"
PACKAGE = Path(__file__).parents[3]
STDERR = 2
"""Its descriptor: what stands in for sys.stderr need not have one."""
DEFAULT_FOLDER = "stepscope-recordings"


class RecordedProgram(NamedTuple):
    """A program has ended."""

    exit_code: int
    """Its own; 128 + n where signal n ended it."""
    recording: Recording | None
    lack: StepscopeError | None
    """Why there is no recording."""


def name_folder(command: Sequence[str]) -> Path:
    """A new one for each program: the time, and the name of its script."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    script = next((word for word in command if word.endswith(".py")), command[0])
    return Path(DEFAULT_FOLDER) / f"{stamp}-{Path(script).stem}"


def record_program(
    command: Sequence[str],
    settings: RecordSettings,
    out: Path,
    *,
    overwrite: bool = False,
    link: bool = True,
    quiet: bool = False,
) -> RecordedProgram:
    """Run the command to its end and gather what its processes recorded.

    `quiet` sends its standard output to standard error. Raises UsageError where it cannot be started.
    """
    out = out.resolve()
    is_shared = read_place(os.environ).world_size > 1
    if not is_shared:
        require_new(out, overwrite=overwrite)
        _clear(out, overwrite=overwrite)
    out.mkdir(parents=True, exist_ok=True)
    try:
        exit_code = _run(command, _environment(settings, out, overwrite=overwrite), quiet=quiet)
    except UsageError:
        _remove_empty(out)
        raise
    ranks = [one for one in read_ranks(out) if one.status != "nothing"]
    if not ranks:
        lack = _explain_lack(out, settings, command)
        _remove_empty(out)
        return RecordedProgram(exit_code, None, lack)
    shutil.rmtree(out / PROCESSES_FOLDER, ignore_errors=True)
    if link:
        for one in ranks:
            write_rank(out, with_link(out, one))
    recording = write_recording(out, command=command, settings=settings, exit_code=exit_code)
    return RecordedProgram(exit_code, recording, None)


def _environment(settings: RecordSettings, out: Path, *, overwrite: bool) -> dict[str, str]:
    assignment = Assignment(out=str(out), settings=settings, package=str(PACKAGE), overwrite=overwrite)
    paths = [str(START_UP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: msgspec.json.encode(assignment).decode()}


def _run(command: Sequence[str], environment: dict[str, str], *, quiet: bool) -> int:
    try:
        process = subprocess.Popen(list(command), env=environment, stdout=STDERR if quiet else None)
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be started: {error.strerror}",
            hint="write the command after --, for example: stepscope trace record -- python train.py",
            where=command[0],
        ) from error
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # It reaches the program too, which ends in its own way.
            continue
        return 128 - code if code < 0 else code


def _clear(out: Path, *, overwrite: bool) -> None:
    """What an earlier recording left; nothing else is touched."""
    left = [out / name for name in (*FOLDERS, PROCESSES_FOLDER) if (out / name).exists()]
    if left and not overwrite:
        raise UsageError(
            f"{out} holds part of a recording", hint="choose another folder, or say --overwrite", where=str(left[0])
        )
    for folder in left:
        shutil.rmtree(folder)


def _explain_lack(out: Path, settings: RecordSettings, command: Sequence[str]) -> StepscopeError:
    """From what the processes said when they ended."""
    files = sorted((out / PROCESSES_FOLDER).glob("*.json"))
    found = [msgspec.json.decode(path.read_bytes(), type=SeenProcess) for path in files]
    notices = [notice for one in found for notice in one.notices]
    words = " ".join(command)
    if notices:
        return RecordingFailedError(notices[0], hint="nothing was recorded", where=words)
    if not found:
        return RecordingFailedError(
            "no process of the program loaded torch and came to its end: nothing was recorded",
            hint="python -I, -E and -S, os._exit and kill -9 cannot be followed: use stepscope.record in the program",
            where=words,
        )
    return describe_lack(max(one.steps_seen for one in found), settings, command=command)


def _remove_empty(out: Path) -> None:
    """A folder without a recording would be taken for one."""
    for name in (*FOLDERS, PROCESSES_FOLDER):
        shutil.rmtree(out / name, ignore_errors=True)
    if not any(out.iterdir()):
        out.rmdir()
