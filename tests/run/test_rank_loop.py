from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import make_case, make_folder, make_result, make_samples, make_system
from fake_device import FakeDevice
from stepscope.core.errors import MissingDependencyError, StoreWriteError, UsageError
from stepscope.launch.worker import Session
from stepscope.measure import (
    QUICK,
    BarProgress,
    CpuDevice,
    FakeClock,
    LineProgress,
    SilentProgress,
    WallClock,
    format_case_line,
    open_device,
)
from stepscope.records import Case, Notice, Reading, Score, make_request
from stepscope.records.kinds import OperatorObserved
from stepscope.run.control import Alone
from stepscope.run.producer import Prepared, Producer, WrongResultError
from stepscope.run.rank import Lead, RankLoop
from stepscope.run.ranks import CaseSkipped, Ranks
from stepscope.store import RunWriter, StoredRun, verify_run

CASES = [make_case(m=m) for m in range(1, 6)]


class NoReadings:
    def read(self, at: str) -> list[Reading]:
        return [Reading(device="cpu", at="start" if at == "start" else "end", clock_hz=1e9)]


class GivenProducer(Producer):
    """Prepares cases by a function of the test."""

    settings = QUICK

    def __init__(self, prepare: Callable[[Case], Prepared]) -> None:
        super().__init__(Session(verb="ops", request=make_request("ops", {})))
        self.ranks = Ranks(self.session, Alone())
        self._prepare = prepare

    def open(self) -> CpuDevice:
        return CpuDevice()

    def prepare(self, case: Case) -> Prepared:
        return self._prepare(case)


def measure_all(folder: Path, prepare: Callable[[Case], Prepared], stream: io.StringIO | None = None) -> None:
    producer = GivenProducer(prepare)
    loop = RankLoop(producer, producer.open(), clock=FakeClockThatMoves())
    with RunWriter(folder) as writer:
        Lead(loop, writer, LineProgress(stream or io.StringIO()), NoReadings()).run([make_system()], [])


class FakeClockThatMoves(FakeClock):
    """Each reading is a millisecond later."""

    def now_ns(self) -> int:
        self.advance(1e-3)
        return super().now_ns()


def test_one_bad_case_does_not_end_the_others(tmp_path: Path) -> None:
    def prepare(case: Case) -> Prepared:
        kind = case.parameters["m"]
        if kind == 2:
            raise CaseSkipped("unsupported", "not here", "try there")
        if kind == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
        if kind == 4:
            return Prepared(body=lambda: 1 / 0)

        def check() -> None:
            if kind == 5:
                raise WrongResultError("off by 7")

        return Prepared(
            body=lambda: None, score=Score(unit="op/s", work=2), check=check, observed=OperatorObserved(flops=1)
        )

    folder, said = make_folder(tmp_path, CASES), io.StringIO()
    measure_all(folder, prepare, said)
    run = StoredRun(folder)
    states = {result.case.parameters["m"]: result for result in run.results}
    assert [states[m].status for m in range(1, 6)] == ["ok", "skipped", "failed", "failed", "failed"]
    kinds = [failure.kind for m in range(2, 6) if (failure := states[m].failure)]
    assert kinds == ["unsupported", "out_of_memory", "exception", "wrong_result"]
    assert states[4].failure is not None
    assert any("ZeroDivisionError" in line for line in states[4].failure.stack)
    assert states[1].facts == {"flops": 1}
    assert [reading.at for reading in states[1].readings] == ["start", "end"]
    assert run.run is not None
    assert (run.run.cases_ok, run.run.cases_failed, run.run.cases_skipped) == (1, 3, 1)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("[")]
    assert [line.split(" ")[0] for line in lines] == ["[1/5]", "[2/5]", "[3/5]", "[4/5]", "[5/5]"]
    assert "not here" in lines[1]


def test_each_case_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    seen = []

    def prepare(case: Case) -> Prepared:
        seen.append([result.case.key for result in StoredRun(folder).results])
        return Prepared(body=lambda: None)

    measure_all(folder, prepare)
    assert seen == [[case.key for case in CASES[:i]] for i in range(5)]


def test_only_what_is_left_is_measured(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(make_result(CASES[1]), [make_samples(CASES[1], [1.0])])
    measured = []

    def prepare(case: Case) -> Prepared:
        measured.append(case)
        return Prepared(body=lambda: None)

    said = io.StringIO()
    measure_all(folder, prepare, said)
    assert measured == [CASES[0], *CASES[2:]]
    assert said.getvalue().startswith("[2/5]")


def test_a_full_disk_is_no_failed_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path, CASES)
    original = RunWriter.append

    def append(self: RunWriter, result: object, samples: object = ()) -> object:
        if len(self.plan.cases) - len(self.remaining()) == 2:
            raise StoreWriteError("cannot write journal.jsonl: No space left on device")
        return original(self, result, samples)  # type: ignore[arg-type]

    monkeypatch.setattr(RunWriter, "append", append)
    with pytest.raises(StoreWriteError):
        measure_all(folder, lambda case: Prepared(body=lambda: None))
    assert len(StoredRun(folder).results) == 2
    assert StoredRun(folder).status == "interrupted"


def test_a_keyboard_interrupt_ends_the_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)

    def prepare(case: Case) -> Prepared:
        if case == CASES[2]:
            raise KeyboardInterrupt
        return Prepared(body=lambda: None)

    with pytest.raises(KeyboardInterrupt):
        measure_all(folder, prepare)
    assert len(StoredRun(folder).results) == 2


def test_a_line_says_median_width_n_score_and_notices() -> None:
    case = make_case(m=1)
    result = make_result(case, work=3, notices=[Notice(kind="drift", message="it moves")])
    line = format_case_line(result, [make_samples(case, [0.5, 0.5, 0.5])])
    assert line == "gemm/micro/forward/custom[m=1]: 500.0 ms ± 0.0 % (n=3), 6.000 op/s\n    it moves"


def test_silence_and_bars_take_the_same_calls(capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.measure import Estimate

    case = make_case(m=1)
    for progress in (SilentProgress(), BarProgress()):
        with progress:
            progress.case_started(case, 1, 2)
            progress.estimate(Estimate(phase="sampling", samples=3, median_s=0.1, half_width=0.02))
            progress.case_done(make_result(case), [make_samples(case, [0.5])])
    assert capsys.readouterr().err.count("gemm/micro/forward/custom[m=1]: 500.0 ms") == 1


def test_the_wall_clock_knows_its_step() -> None:
    clock = WallClock()
    assert 0 < clock.resolution_s < 1e-3
    assert clock.now_ns() <= clock.now_ns()


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "", "cuda:-1"])
def test_devices_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError):
        open_device(name)


def test_a_missing_device_is_refused_and_nothing_falls_back() -> None:
    import torch

    if torch.cuda.is_available():
        with pytest.raises(UsageError, match="visible"):
            open_device("cuda:99")
    else:
        with pytest.raises(UsageError, match="no CUDA"):
            open_device("cuda")


def test_without_torch_the_next_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError) as caught:
        open_device("cpu")
    assert "stepscope[produce]" in (caught.value.hint or "")


def test_the_probe_reads_alike_and_rests_in_between() -> None:
    from stepscope.measure.surroundings import open_probe

    probe = open_probe(CpuDevice())
    assert probe is not None
    first = probe.read()
    assert 0 < first < 0.1
    assert probe.read() == first, "a reading is used again for a while"
    assert open_probe(FakeDevice(FakeClock())) is None


def test_a_case_that_kills_the_process_twice_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]\n"
        "from test_rank_loop import measure_all\n"
        "from stepscope.run.producer import Prepared\n"
        "def prepare(case):\n"
        "    if case.parameters['m'] == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return Prepared(body=lambda: None)\n"
        f"measure_all(Path({str(folder)!r}), prepare)\n"
    )
    ends = [subprocess.run([sys.executable, "-c", code], check=False).returncode for _ in range(3)]
    assert ends == [-signal.SIGKILL, -signal.SIGKILL, 0]
    run = StoredRun(folder)
    states = {result.case.parameters["m"]: result for result in run.results}
    assert [states[m].status for m in range(1, 6)] == ["ok", "ok", "failed", "ok", "ok"]
    assert states[3].failure is not None
    assert states[3].failure.kind == "process_died"
    assert not (folder / "begun.json").exists()
    assert verify_run(run) == []


def test_a_case_that_was_stopped_by_the_user_is_no_deadly_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)

    def stop(case: Case) -> Prepared:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            measure_all(folder, stop)
    measure_all(folder, lambda case: Prepared(body=lambda: None))
    assert {result.status for result in StoredRun(folder).results} == {"ok"}
