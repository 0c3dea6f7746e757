"""Follows the steps of a program and records those that were asked for."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stepscope._version import __version__
from stepscope.core.errors import StepscopeError, UsageError, first_line
from stepscope.records import System
from stepscope.traces import KINETO_FOLDER, RECORDING_FILE
from stepscope.traces.recording.evidence import (
    ET_FOLDER,
    FOLDERS,
    LEAN_FOLDER,
    ProfilerSettings,
    RankRecording,
    RecordingStage,
    RecordSettings,
    StageTimes,
    Status,
    describe_file,
    is_recording,
    make_stages,
    rank_file,
    write_rank,
)

_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables of torchrun and env://, Open MPI, MVAPICH, MPICH and Intel MPI, srun."""


class RankIdentity(NamedTuple):
    rank: int
    world_size: int
    local_rank: int


def find_place() -> RankIdentity:
    """torch.distributed knows best where it is initialised; else what the launcher has left in the environment."""
    from_environment = read_place(os.environ)
    try:
        import torch.distributed as dist
    except ImportError:
        return from_environment
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        same = rank == from_environment.rank
        return RankIdentity(rank, dist.get_world_size(), from_environment.local_rank if same else rank)
    return from_environment


def read_place(environ: Mapping[str, str]) -> RankIdentity:
    """Rank 0 of 1 where nobody says otherwise. Variables that are no numbers are somebody else's."""
    for names in _VARIABLES:
        values = [environ.get(name, "") for name in names]
        if values[0].isdecimal() and values[1].isdecimal() and int(values[0]) < int(values[1]):
            rank = int(values[0])
            return RankIdentity(rank, int(values[1]), int(values[2]) if values[2].isdecimal() else rank)
    return RankIdentity(0, 1, 0)


class RecordingFailedError(StepscopeError):
    """The profiler could not be used, or nothing came of it."""

    kind = "recording_failed"


_REFUSALS = (RuntimeError, OSError, AssertionError, RecordingFailedError)
"""What torch raises where its profiler is in use already, and what a full disk does."""


class Profiler(Protocol):
    """What a recorder needs of a profiler; tests bring their own."""

    def prepare(self) -> None: ...
    def start(self) -> None: ...
    def begin_step(self, number: int) -> None: ...
    def end_step(self) -> None: ...
    def stop(self) -> None: ...
    def save(self, kineto: Path) -> None: ...
    def resources(self) -> Path | None: ...
    def discard(self) -> None: ...


ProfilerFactory = Callable[[ProfilerSettings, Path], Profiler]
_FURTHER = {
    "after": "step times after the recording",
    "lean": "the lean timeline",
    "variant": "what each profiler setting costs",
}
"""By when a stage comes."""


def _open_torch_profiler(settings: ProfilerSettings, et_path: Path) -> Profiler:
    from stepscope.traces.recording.torch_profiler import TorchProfiler

    return TorchProfiler(settings, et_path)


def _synchronize() -> None:
    from stepscope.traces.recording.torch_profiler import synchronize

    synchronize()


class Recorder:
    """`step()` at the end of every step; everything else follows from the settings."""

    def __init__(
        self,
        settings: RecordSettings,
        out: Path,
        *,
        overwrite: bool = False,
        open_profiler: ProfilerFactory = _open_torch_profiler,
        synchronize: Callable[[], None] = _synchronize,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.settings = settings
        self.out = out
        self._overwrite = overwrite
        self._open_profiler = open_profiler
        self._synchronize = synchronize
        self._clock = clock
        self._waiting = make_stages(settings)
        self._stage: RecordingStage | None = None
        self._left = 0
        self._start_s = self._last_s = 0.0
        self._intervals: list[float] = []
        self._profiler: Profiler | None = None
        self._place: RankIdentity | None = None
        self._marks = 0
        self._has_begun = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._system: System | None = None
        self.steps_seen = 0
        self.step_marker = "mark"
        self.recorded_steps: list[int] = []
        self.times: list[StageTimes] = []
        self.notices: list[str] = []
        self._files: dict[str, Any] = {}
        """What was recorded, by its folder: the fields of a rank's record are called as these are."""
        self._resources: str | None = None
        self._status: Status = "nothing"
        self._is_closed = False

    @property
    def status(self) -> Status:
        return self._status

    @property
    def is_done(self) -> bool:
        """Nothing is left to do; further steps cost a comparison."""
        return self._is_closed or (self._stage is None and not self._waiting)

    def begin(self) -> None:
        """The program's first step begins here. Where nobody says so, only what follows the first mark is seen."""
        self._has_begun = True
        try:
            self._enter_next()
        except _REFUSALS as error:
            self._give_up(error)

    def step(self) -> None:
        """A step of the program has ended here. Raises RecordingFailedError where the profiler refuses."""
        now = self._clock()
        self._marks += 1
        if self._marks % self.settings.every:
            return
        self.steps_seen += 1
        if not self._has_begun:
            self._waiting = _without_first_step(self._waiting)
            self.begin()
            return
        if self._stage is None:
            return
        try:
            self._advance(self._stage, now)
        except _REFUSALS as error:
            self._give_up(error)

    def _advance(self, stage: RecordingStage, now: float) -> None:
        self._intervals.append(now - self._last_s)
        self._last_s = now
        self._left -= 1
        if self._profiler is not None and stage.kind == "profiled":
            self._profiler.end_step()
            if self._left:
                self._profiler.begin_step(self.steps_seen)
        if not self._left:
            self._leave(stage)
            self._enter_next()

    def _enter_next(self) -> None:
        self._stage = self._waiting.pop(0) if self._waiting else None
        self._intervals = []
        if self._stage is None:
            return
        self._left = self._stage.steps
        if self._stage.profiler is not None and self._profiler is None:
            self._profiler = self._open(self._stage, self._stage.profiler)
            self._profiler.prepare()
        if self._stage.kind in ("timed", "profiled"):
            self._synchronize()
        if self._profiler is not None and self._stage.kind == "profiled":
            self._profiler.start()
            self._profiler.begin_step(self.steps_seen)
        self._start_s = self._last_s = self._clock()

    def _open(self, stage: RecordingStage, settings: ProfilerSettings) -> Profiler:
        if stage.when == "recorded":
            rank = self._claim().rank
            return self._open_profiler(settings, self.out / ET_FOLDER / f"rank{rank}.json")
        self._scratch = tempfile.TemporaryDirectory(prefix="stepscope-")
        return self._open_profiler(settings, Path(self._scratch.name) / "et.json")

    def _claim(self) -> RankIdentity:
        """Make this rank's name its own: two processes that both take themselves for rank 0 would mix their files."""
        place = find_place()
        for folder in FOLDERS:
            if folder != LEAN_FOLDER or self.settings.lean:
                (self.out / folder).mkdir(parents=True, exist_ok=True)
        path = rank_file(self.out, place.rank)
        if self._overwrite:
            path.unlink(missing_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise RecordingFailedError(
                f"rank {place.rank} is recorded already in {self.out}",
                hint="choose another folder; programs that start several processes must tell each its RANK",
                where=str(path),
            ) from None
        self._place = place
        return place

    def _leave(self, stage: RecordingStage) -> None:
        """A stage is complete."""
        if stage.kind in ("timed", "profiled"):
            self._synchronize()
            self._keep_times(stage, self._clock())
        if stage.kind == "profiled":
            self._stop(stage, "recorded")
        if self._status != "nothing" and stage.kind in ("timed", "profiled"):
            self._write()

    def _keep_times(self, stage: RecordingStage, end_s: float) -> None:
        total_s = end_s - self._start_s
        self.times.append(
            StageTimes(when=stage.when, profiler=stage.profiler, total_s=total_s, intervals_s=list(self._intervals))
        )

    def _stop(self, stage: RecordingStage, status: Status) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        if stage.when == "recorded":
            self._save(profiler, len(self._intervals))
            self._status = status
            return
        if stage.when == "lean":
            self._save_lean(profiler)
        self._discard(profiler)

    def _discard(self, profiler: Profiler) -> None:
        profiler.discard()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _save(self, profiler: Profiler, steps: int) -> None:
        assert self._place is not None
        name = f"rank{self._place.rank}.json"
        profiler.save(self.out / KINETO_FOLDER / name)
        self.recorded_steps = list(range(self.steps_seen - steps, self.steps_seen))
        for kind in (KINETO_FOLDER, ET_FOLDER):
            path = self.out / kind / f"{name}.gz"
            if path.exists():
                self._files[kind] = describe_file(self.out, path)
        resources = profiler.resources()
        self._resources = str(resources.relative_to(self.out)) if resources else None

    def _save_lean(self, profiler: Profiler) -> None:
        assert self._place is not None
        path = self.out / LEAN_FOLDER / f"rank{self._place.rank}.json"
        profiler.save(path)
        self._files[LEAN_FOLDER] = describe_file(self.out, path.with_name(f"{path.name}.gz"))

    def _give_up(self, error: BaseException) -> None:
        """The program goes on without being recorded; what is on disk stays."""
        self._stage, self._waiting = None, []
        self._profiler = None
        message = f"recording ended: {first_line(error)}"
        self.notices.append(message)
        if self._place is not None:
            self._write()
        if isinstance(error, RecordingFailedError):
            raise error
        raise RecordingFailedError(
            message, hint="does the program use a profiler of its own? Only one can run at a time", where=str(self.out)
        ) from error

    def close(self) -> None:
        """No more steps will come. A recording that is under way is ended and kept."""
        if self._is_closed:
            return
        self._is_closed = True
        self._note_missing()
        stage, self._stage, self._waiting = self._stage, None, []
        if stage is not None and self._profiler is not None:
            try:
                self._close_early(stage)
            except _REFUSALS as error:
                self.notices.append(f"what was being recorded is lost: {first_line(error)}")
        if self._place is not None:
            self._write()

    def _note_missing(self) -> None:
        """What was asked for beyond the recorded steps and is not there."""
        left = [one for one in (self._stage, *self._waiting) if one is not None]
        missing = {_FURTHER[one.when] for one in left if one.kind in ("timed", "profiled") and one.when in _FURTHER}
        if self._status == "recorded" and missing:
            needed = self.steps_seen + self._left + sum(one.steps for one in self._waiting)
            self.notices.append(
                f"the program ended after {self.steps_seen} steps; {needed} are needed for {', '.join(sorted(missing))}"
            )

    def _close_early(self, stage: RecordingStage) -> None:
        if stage.kind != "profiled" or stage.when != "recorded":
            profiler, self._profiler = self._profiler, None
            assert profiler is not None
            profiler.stop()
            self._discard(profiler)
            return
        if self._intervals:
            # Without the unfinished step: up to the last mark, on the host alone.
            self._keep_times(stage, self._last_s)
        self.notices.append(
            f"the program ended after {len(self._intervals)} of {stage.steps} recorded steps; "
            f"step {self.steps_seen} is in the trace as far as it came"
        )
        self._stop(stage, "partial")

    def describe(self) -> RankRecording:
        """What there is so far."""
        place = self._place or find_place()
        return RankRecording(
            **place._asdict(),
            host=socket.gethostname(),
            pid=os.getpid(),
            device=_name_device(),
            versions=_name_versions(),
            status=self._status,
            step_marker=self.step_marker,
            steps_seen=self.steps_seen,
            recorded_steps=self.recorded_steps,
            times=self.times,
            **self._files,
            resources=self._resources,
            notices=self.notices,
            system=self._find_system(place),
        )

    def _find_system(self, place: RankIdentity) -> System | None:
        if self._system is None and place.local_rank == 0:
            from stepscope.system import collect_system

            try:
                self._system = collect_system()
            except (OSError, RuntimeError, ImportError) as error:
                self.notices.append(f"the system could not be described: {first_line(error)}")
        return self._system

    def _write(self) -> None:
        write_rank(self.out, self.describe())


def _without_first_step(stages: list[RecordingStage]) -> list[RecordingStage]:
    """A step whose beginning nobody saw can only be one of those that are left alone."""
    first, *others = stages
    if first.kind != "alone" or first.when != "before":
        return stages
    return [first._replace(steps=first.steps - 1), *others] if first.steps > 1 else others


def _name_device() -> str | None:
    import torch

    from stepscope.traces.recording.torch_profiler import uses_cuda

    return str(torch.cuda.get_device_name()) if uses_cuda() else None


def _name_versions() -> dict[str, str]:
    import torch

    versions = {"stepscope": __version__, "python": sys.version.split()[0], "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    return versions


def require_new(out: Path, *, overwrite: bool) -> None:
    """Before the program has run for hours: the folder is free. Raises UsageError."""
    if is_recording(out):
        if not overwrite:
            raise UsageError(
                f"{out} holds a recording already", hint="choose another folder, or say overwrite", where=str(out)
            )
        (out / RECORDING_FILE).unlink(missing_ok=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be made: {error.strerror}", hint="choose another folder", where=str(out)
        ) from error


def describe_lack(seen: int, settings: RecordSettings, *, command: Sequence[str] = ()) -> RecordingFailedError:
    """The error for a program that made too few steps for anything to be recorded."""
    if not seen:
        return RecordingFailedError(
            "no step was seen: nothing was recorded",
            hint="call stepscope.step() at the end of every step, or use --inference for programs without an optimizer",
            where=" ".join(command) or None,
        )
    begins = settings.steps_before
    steps = "step was" if seen == 1 else "steps were"
    return RecordingFailedError(
        f"{seen} {steps} seen, but recording begins after {begins}: nothing was recorded",
        hint="run more steps, or lower warmup, unprofiled and profiler_warmup",
        where=" ".join(command) or None,
    )
