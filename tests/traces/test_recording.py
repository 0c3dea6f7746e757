"""Recording: the stages of a recording, real recordings of a tiny model, and programs recorded from outside."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from stepscope.core.errors import BadInputError, UsageError
from stepscope.traces.recording import Marks, OptimizerCycle, record, step
from stepscope.traces.recording.evidence import (
    LEAN,
    ProfilerSettings,
    Recording,
    RecordSettings,
    make_settings,
    make_stages,
    read_recording,
    write_recording,
)
from stepscope.traces.recording.program import START_UP, RecordedProgram, record_program
from stepscope.traces.recording.recorder import RankIdentity, Recorder, RecordingFailedError, read_place

QUICK = {"warmup": 1, "unprofiled": 1, "profiler_warmup": 1, "steps": 2, "settle": 0}


# Stages, without torch


class FakeProfiler:
    """Writes down what it is told."""

    def __init__(self, said: list[str], et_path: Path) -> None:
        self._said = said
        self._et_path = et_path

    def prepare(self) -> None:
        self._said.append("prepare")

    def start(self) -> None:
        self._said.append("start")

    def begin_step(self, number: int) -> None:
        self._said.append(f"step {number}")

    def end_step(self) -> None:
        self._said.append("end")

    def stop(self) -> None:
        self._said.append("stop")

    def save(self, kineto: Path) -> None:
        kineto.with_name(f"{kineto.name}.gz").write_bytes(b"timeline")
        if self._et_path.parent.name == "et":
            self._et_path.with_name(f"{self._et_path.name}.gz").write_bytes(b"graph")

    def resources(self) -> Path | None:
        return None

    def discard(self) -> None:
        self._said.append("discard")


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A recorder whose clock and device the test moves."""

    def __init__(self, out: Path, **chosen: Any) -> None:
        self.said: list[str] = []
        self.clock = FakeClock()
        self.device_lag_s = 0.0
        self.recorder = Recorder(
            make_settings(**chosen),
            out,
            open_profiler=lambda settings, path: FakeProfiler(self.said, path),
            synchronize=self._wait,
            clock=self.clock,
        )

    def _wait(self) -> None:
        self.clock.now += self.device_lag_s

    def run(self, count: int, step_s: float = 1.0) -> None:
        for _ in range(count):
            self.clock.now += step_s
            self.recorder.step()


def test_stages_follow_each_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path, warmup=2, unprofiled=3, profiler_warmup=1, steps=2, settle=1)
    rig.recorder.begin()
    rig.run(5)
    assert rig.said == ["prepare"]
    rig.run(3)
    assert rig.said == ["prepare", "start", "step 6", "end", "step 7", "end", "stop"]
    assert rig.recorder.recorded_steps == [6, 7]
    assert not rig.recorder.is_done
    rig.run(4)
    assert rig.recorder.is_done
    assert [(one.when, one.steps) for one in rig.recorder.times] == [("before", 3), ("recorded", 2), ("after", 3)]
    rig.run(100)
    assert rig.recorder.steps_seen == 112


def test_times_are_pipelined_and_include_what_the_device_still_does(tmp_path: Path) -> None:
    rig = Rig(tmp_path, warmup=0, unprofiled=4, profiler_warmup=0, steps=2, settle=0)
    rig.recorder.begin()
    rig.device_lag_s = 2.0
    rig.run(3)
    rig.clock.now += 1.0
    rig.recorder.step()
    before = rig.recorder.times[0]
    assert before.intervals_s == [1.0, 1.0, 1.0, 1.0]
    assert before.total_s == 6.0
    assert before.step_s == 1.5
    rig.run(2, step_s=5.0)
    record = rig.recorder.describe()
    assert record.unprofiled_s() == 1.5
    assert record.overheads()[0].ratio == pytest.approx((10.0 + 2.0) / 2 / 1.5)
    assert record.overheads()[0].profiler.label == "timeline, shapes, execution trace"


def test_what_is_before_the_first_mark_is_never_timed(tmp_path: Path) -> None:
    """Nobody said where the first step began."""
    rig = Rig(tmp_path, warmup=0, unprofiled=2, profiler_warmup=0, steps=1, settle=0)
    rig.run(1, step_s=1000.0)
    rig.run(2)
    assert rig.recorder.times[0].total_s == 2.0
    rig = Rig(tmp_path / "warm", warmup=3, unprofiled=0, profiler_warmup=0, steps=1, settle=0)
    rig.run(4)
    assert rig.recorder.recorded_steps == [3]


def test_several_marks_may_make_a_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path, warmup=0, unprofiled=0, profiler_warmup=0, steps=1, every=3)
    rig.recorder.begin()
    rig.run(2)
    assert rig.recorder.steps_seen == 0
    rig.run(1)
    assert rig.recorder.recorded_steps == [0]


def test_an_early_end_keeps_what_there_is(tmp_path: Path) -> None:
    rig = Rig(tmp_path, warmup=0, unprofiled=0, profiler_warmup=0, steps=3)
    rig.recorder.begin()
    rig.run(2)
    rig.recorder.close()
    rig.recorder.close()
    assert rig.said[-1] == "stop"
    assert rig.recorder.status == "partial"
    assert rig.recorder.recorded_steps == [0, 1]
    recording = write_recording(tmp_path, command=["train"], settings=rig.recorder.settings)
    assert "after 2 of 3 recorded steps" in recording.ranks[0].notices[0]
    assert recording.ranks[0].overheads() == []


def test_lean_and_other_settings_come_after_the_recording(tmp_path: Path) -> None:
    stages = make_stages(RecordSettings(lean=True, overheads=True, unprofiled=0))
    profiled = [stage for stage in stages if stage.kind == "profiled"]
    assert [stage.when for stage in profiled] == ["recorded", "lean", *["variant"] * 4]
    assert profiled[1].profiler == LEAN
    assert len({stage.profiler for stage in profiled}) == len(profiled)
    rig = Rig(tmp_path, warmup=0, unprofiled=1, profiler_warmup=0, steps=1, settle=0, lean=True, overheads=True)
    rig.recorder.begin()
    rig.run(20)
    found = rig.recorder.describe()
    assert rig.recorder.is_done
    assert found.lean is not None
    assert len(found.overheads()) == 6


def test_what_a_short_program_leaves_unmeasured_is_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, warmup=0, unprofiled=1, profiler_warmup=1, steps=1, settle=1, lean=True)
    rig.recorder.begin()
    rig.run(5)
    rig.recorder.close()
    assert rig.recorder.status == "recorded"
    assert rig.recorder.notices == ["the program ended after 5 steps; 7 are needed for the lean timeline"]


def test_on_a_device_only_steps_before_the_profiler_count(tmp_path: Path) -> None:
    """CUPTI stays attached afterwards."""
    rig = Rig(tmp_path, warmup=0, unprofiled=1, profiler_warmup=0, steps=1, settle=0)
    rig.recorder.begin()
    rig.run(2)
    rig.run(1, step_s=3.0)
    found = rig.recorder.describe()
    assert found.unprofiled_s() == 2.0
    assert msgspec.structs.replace(found, device="NVIDIA H200").unprofiled_s() == 1.0


def test_two_processes_cannot_both_be_one_rank(tmp_path: Path) -> None:
    """The second one says so and goes on without recording."""
    chosen = {"warmup": 0, "unprofiled": 0, "profiler_warmup": 0, "steps": 1}
    first, second = Rig(tmp_path, **chosen), Rig(tmp_path, **chosen)
    first.recorder.begin()
    with pytest.raises(RecordingFailedError, match="rank 0 is recorded already"):
        second.recorder.begin()
    second.run(3)
    assert second.recorder.status == "nothing"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [({"steps": 0}, "steps is 0"), ({"warmup": -1}, "below 0"), ({"et": False, "ranges": True}, "ranges"),
     ({"step_marker": "moon"}, "moon")],
)  # fmt: skip
def test_settings_that_cannot_be(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_settings(**chosen)


def test_the_last_optimizer_ends_a_step() -> None:
    cycle, one, two = OptimizerCycle(), object(), object()
    assert [cycle.ends_step(each) for each in (one, two, one, two, one, two)] == [True, False, False, True, False, True]


def test_own_marks_silence_the_optimizer() -> None:
    ended: list[str] = []
    marks = Marks("auto", ended.append)
    marks.end("optimizer")
    marks.end("mark")
    marks.end("optimizer")
    marks.end("mark")
    assert ended == ["optimizer", "mark", "mark"]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, RankIdentity(0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, RankIdentity(3, 8, 1)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, RankIdentity(2, 4, 2)),
        ({"SLURM_PROCID": "5"}, RankIdentity(0, 1, 0)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, RankIdentity(0, 1, 0)),
        ({"RANK": "9", "WORLD_SIZE": "2"}, RankIdentity(0, 1, 0)),
    ],
)
def test_the_rank_is_what_the_launcher_says(variables: dict[str, str], place: RankIdentity) -> None:
    assert read_place(variables) == place


# In this process, with torch


@pytest.fixture(scope="module")
def train() -> Callable[[], None]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(4, 16), torch.randint(0, 4, (4,))

    def run() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return run


@pytest.fixture(scope="module")
def recording(train: Callable[[], None], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recording]:
    out = tmp_path_factory.mktemp("recording") / "tiny"
    with record(out=out, steps=2, warmup=1, unprofiled=2, ranges=True) as recorder:
        while not recorder.is_done:
            train()
            recorder.step()
    assert recorder.recording is not None
    return out, recorder.recording


def read_json(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def test_both_traces_hold_the_same_steps(recording: tuple[Path, Recording]) -> None:
    out, found = recording
    rank = found.ranks[0]
    assert rank.status == "recorded"
    assert rank.recorded_steps == [4, 5]
    assert rank.kineto is not None
    assert rank.et is not None
    events = [event["name"] for event in read_json(out / rank.kineto.path)["traceEvents"]]
    nodes = [node["name"] for node in read_json(out / rank.et.path)["nodes"]]
    for number in (4, 5):
        assert events.count(f"ProfilerStep#{number}") == nodes.count(f"ProfilerStep#{number}") == 1
    assert events.count("Optimizer.step#SGD.step") == nodes.count("Optimizer.step#SGD.step") == 2
    assert rank.linked is not None
    assert rank.linked.linked_share == 1.0
    assert rank.linked.operators > 50


def test_the_record_names_what_it_was_made_of(recording: tuple[Path, Recording]) -> None:
    out, found = recording
    assert read_recording(out) == found
    rank = found.ranks[0]
    assert rank.kineto is not None
    data = (out / rank.kineto.path).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (rank.kineto.size_bytes, rank.kineto.sha256)
    assert found.system is not None
    assert found.system.libraries["torch"] == rank.versions["torch"]
    assert found.command == sys.argv
    assert [(one.when, one.steps) for one in rank.times] == [("before", 2), ("recorded", 2), ("after", 2)]
    assert rank.overheads()[0].profiler == ProfilerSettings(ranges=True)
    assert not list(out.rglob("*.json.tmp"))


def test_ranges_of_whole_numbers_are_kept(recording: tuple[Path, Recording]) -> None:
    from stepscope.formats.execution_trace import read_execution_trace

    out, found = recording
    assert found.ranks[0].et is not None
    graph = read_execution_trace(out / found.ranks[0].et.path)
    ranges = [json.loads(node.tensor_range) for node in graph if node.tensor_range]
    assert ranges
    assert all(0 <= low <= high < 4 for one in ranges for low, high in one.values())
    assert "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE" not in os.environ


def test_a_block_that_ends_early_is_kept(train: Callable[[], None], tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK, "link": False}
    with record(out=tmp_path / "part", **settings) as recorder:
        for _ in range(4):
            train()
            recorder.step()
        train()
    assert recorder.recording is not None
    assert recorder.recording.ranks[0].status == "partial"


def test_a_block_that_ends_too_early_says_when_recording_would_begin(tmp_path: Path) -> None:
    def record_two() -> None:
        with record(out=tmp_path / "few", **QUICK) as recorder:  # type: ignore[arg-type]
            recorder.step()
            recorder.step()

    with pytest.raises(RecordingFailedError, match="2 steps were seen, but recording begins after 3"):
        record_two()


def test_an_exception_in_the_block_is_the_one_that_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), record(out=tmp_path / "out", **QUICK):
        1 / 0  # noqa: B018


def test_a_profiler_of_the_program_itself_is_left_alone(train: Callable[[], None], tmp_path: Path) -> None:
    import torch

    chosen: dict[str, Any] = {**QUICK, "warmup": 0, "unprofiled": 0}

    def record_inside() -> None:
        with record(out=tmp_path / "out", **chosen):
            train()

    with torch.profiler.profile() as own:
        with pytest.raises(RecordingFailedError, match="own profiler is running"):
            record_inside()
        train()
    assert len(own.events()) > 0


def test_a_recording_is_not_written_over(recording: tuple[Path, Recording]) -> None:
    with pytest.raises(UsageError, match="holds a recording already"), record(out=recording[0]):
        pass


def test_marks_without_a_recorder_do_nothing() -> None:
    step()


def test_a_folder_without_a_recording(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no recording"):
        read_recording(tmp_path)
    (tmp_path / "recording.json").write_text('{"record": "run"}')
    with pytest.raises(BadInputError, match="not what a recording writes"):
        read_recording(tmp_path)


# Programs, recorded from outside

PROGRAM = """
import sys
import torch

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(int(sys.argv[1])):
    if number == int(sys.argv[2]):
        raise SystemExit(7)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("the program's own words")
"""

INFERENCE = """
import torch
import stepscope

inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
model = torch.nn.Sequential(inner, torch.nn.Linear(8, 4))
with torch.no_grad():
    for _ in range(1000000):
        model(torch.ones(2, 8))
"""

RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def run_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordedProgram]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(source: str, *arguments: object, launcher: tuple[str, ...] = (), **chosen: Any) -> RecordedProgram:
        script = tmp_path / "program.py"
        script.write_text(source)
        command = [sys.executable, *launcher, str(script), *map(str, arguments)]
        return record_program(command, make_settings(**{**QUICK, **chosen}), tmp_path / "out", quiet=True)

    return run


def test_a_program_is_recorded_by_its_optimizer(run_program: Callable[..., RecordedProgram], tmp_path: Path) -> None:
    done = run_program(PROGRAM, 8, -1)
    assert done.exit_code == 0
    assert done.recording is not None
    rank = done.recording.ranks[0]
    assert (rank.status, rank.recorded_steps, rank.steps_seen) == ("recorded", [3, 4], 8)
    assert rank.step_marker == "optimizer"
    assert rank.linked is not None
    assert rank.linked.linked_share == 1.0
    assert done.recording.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["et", "kineto", "ranks"]
    # The optimizer's own span ends inside its step: the boundary lies behind it.
    assert rank.kineto is not None
    events = read_json(tmp_path / "out" / rank.kineto.path)["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("ph") == "X"}
    whole, optimizer = spans["ProfilerStep#4"], spans["Optimizer.step#AdamW.step"]
    assert whole["ts"] <= optimizer["ts"]
    assert optimizer["ts"] + optimizer["dur"] <= whole["ts"] + whole["dur"]


def test_a_program_that_fails_keeps_its_exit_code_and_its_recording(
    run_program: Callable[..., RecordedProgram],
) -> None:
    done = run_program(PROGRAM, 8, 4)
    assert done.exit_code == 7
    assert done.recording is not None
    rank = done.recording.ranks[0]
    assert (rank.status, rank.recorded_steps) == ("partial", [3])


def test_the_command_says_that_no_step_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.cli.trace_record import record as command

    monkeypatch.chdir(tmp_path)
    Path("idle.py").write_text("import torch\n")
    result = CliRunner().invoke(command, ["--json", "--", sys.executable, "idle.py"], standalone_mode=False)
    assert result.return_value == 1
    error = json.loads(result.stdout)["error"]
    assert error["message"] == "no step was seen: nothing was recorded"
    assert "stepscope.step()" in error["hint"]
    assert not list(tmp_path.glob("stepscope-recordings/*"))


def test_inference_is_recorded_by_its_outermost_module_and_stopped(
    run_program: Callable[..., RecordedProgram], tmp_path: Path
) -> None:
    done = run_program(INFERENCE, step_marker="forward", stop=True, et=False)
    assert done.exit_code == 0
    assert done.recording is not None
    rank = done.recording.ranks[0]
    assert (rank.step_marker, rank.recorded_steps, rank.et) == ("forward", [3, 4], None)
    assert rank.steps_seen == 6
    assert rank.kineto is not None
    events = read_json(tmp_path / "out" / rank.kineto.path)["traceEvents"]
    assert sum(event["name"] == "aten::tanh" for event in events) == 2


@pytest.mark.ranks
def test_every_rank_of_a_launcher_is_recorded(run_program: Callable[..., RecordedProgram], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_program(RANKS, launcher=launcher)
    assert done.exit_code == 0
    assert done.recording is not None
    assert [(one.rank, one.world_size, one.status) for one in done.recording.ranks] == [
        (0, 2, "recorded"),
        (1, 2, "recorded"),
    ]
    assert done.recording.system is not None
    assert len(done.recording.system.hosts) == 1
    for rank in done.recording.ranks:
        assert rank.kineto is not None
        assert rank.linked is not None
        assert rank.linked.linked_share == 1.0
        assert read_json(tmp_path / "out" / rank.kineto.path)["distributedInfo"]["rank"] == rank.rank


def test_programs_without_torch_are_left_alone(tmp_path: Path) -> None:
    """And a start-up file that ours hides still runs."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import builtins\nbuiltins.was_here = True\n")
    code = "import sys, builtins; print(was_here, any(name.startswith('stepscope') for name in sys.modules))"
    variables = {**os.environ, "PYTHONPATH": f"{START_UP}{os.pathsep}{hidden}", "STEPSCOPE_RECORDING": "{}"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    assert not done.stderr


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be started"):
        record_program(["there-is-no-such-program"], make_settings(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
