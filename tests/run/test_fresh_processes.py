"""Fresh processes, one side or two: order, resume, what a failed one says. No process is started here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from builders import make_result, make_samples, make_system
from stepscope.cli.main import run as call
from stepscope.core.errors import UsageError
from stepscope.measure import SilentProgress
from stepscope.records import Failure
from stepscope.run import processes as fresh
from stepscope.run.processes import RunSide, measure_in_processes
from stepscope.store import RunWriter, StoredRun, record_failure, run_folders, verify_run

SIDES = ("OMP_NUM_THREADS=1 ops --op gemm --shape m=8", "ops --op gemm --shape m=16")


class FakeProcesses:
    """Instead of processes: each child run gets three samples; one of them may fail."""

    def __init__(self, stop_at: int | None = None, error: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        self.started: list[tuple[str, Mapping[str, str]]] = []
        self._stop_at, self._error = stop_at, error

    def __call__(self, child: StoredRun, side: RunSide, **shown: Any) -> None:
        if len(self.started) == self._stop_at:
            raise self._error()
        self.started.append((side.stored.id.split("-")[-2], side.environment))
        with RunWriter(child.folder) as writer:
            writer.write_system(make_system())
            for case in writer.remaining():
                writer.append(make_result(case), [make_samples(case, [0.1, 0.1, 0.1])])
            writer.finish()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_STORE", str(tmp_path / "runs"))
    return tmp_path / "runs"


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str, **fake: Any) -> tuple[int, FakeProcesses]:
    processes = FakeProcesses(**fake)
    monkeypatch.setattr(fresh, "run_process", processes)
    return call(list(arguments)), processes


def test_sides_take_turns_and_each_gets_its_variables(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, processes = start(monkeypatch, "ab", *SIDES, "--pairs", "3")
    assert code == 0
    assert [name for name, _ in processes.started] == ["A", "B", "B", "A", "A", "B"]
    assert {name: dict(variables) for name, variables in processes.started} == {"A": {"OMP_NUM_THREADS": "1"}, "B": {}}
    for folder in run_folders(store):
        assert verify_run(StoredRun(folder)) == []
        assert [one.process for one in StoredRun(folder).cases()[0].samples] == [0, 1, 2]


@pytest.mark.parametrize("stop_at", [0, 1, 3, 5])
def test_an_interrupted_comparison_goes_on_with_the_next_process(
    store: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    code, before = start(monkeypatch, "ab", *SIDES, "--pairs", "3", stop_at=stop_at)
    assert code == 130
    assert [StoredRun(folder).status for folder in run_folders(store)] == ["interrupted"] * 2
    code, after = start(monkeypatch, "ab", *SIDES, "--pairs", "3", "--resume")
    assert code == 0
    assert len(before.started) + len(after.started) == 6
    runs = [StoredRun(folder) for folder in run_folders(store)]
    assert [len(run.cases()[0].samples) for run in runs] == [3, 3]
    assert [verify_run(run) for run in runs] == [[], []]


def test_a_comparison_is_finished_with_fewer_pairs_or_gets_more(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, "ab", *SIDES, "--pairs", "8", stop_at=4)[0] == 130
    code, processes = start(monkeypatch, "ab", *SIDES, "--pairs", "2", "--resume")
    assert (code, processes.started) == (0, [])


def test_another_comparison_is_not_continued(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(monkeypatch, "ab", *SIDES, "--pairs", "2", stop_at=1)[0] == 130
    name = run_folders(store)[0].name
    code, processes = start(monkeypatch, "ab", SIDES[0], SIDES[0], "--pairs", "2", "--resume", name)
    assert (code, processes.started) == (2, [])
    assert "is not an interrupted side of this comparison" in capsys.readouterr().err
    assert start(monkeypatch, "ab", SIDES[0], SIDES[0], "--pairs", "2", "--resume")[0] == 0
    assert len(run_folders(store)) == 4


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("ops --op gemn", "gemn"),
        ("nonsense", "is not a benchmark"),
        ("ops", "measures nothing"),
        ("ops --op gemm --processes 3", "--processes has no place in a side"),
        ("workload dlrm/ootb/infer/default.1dev-fp32 --scale tiny --find-batch throughput", "a search decides"),
    ],
)
def test_a_side_that_cannot_be_is_refused_before_anything_is_measured(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, side: str, message: str
) -> None:
    code, processes = start(monkeypatch, "ab", SIDES[0], side)
    assert (code, processes.started, run_folders(store)) == (2, [], [])
    assert message in capsys.readouterr().err


def test_a_store_that_cannot_be_written_costs_no_measurement(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    code, processes = start(monkeypatch, "ab", *SIDES)
    assert (code, processes.started) == (2, [])


def test_processes_of_one_run_are_not_repeated(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ("bench", "ops", "--op", "gemm", "--shape", "m=8", "--processes", "4")
    assert start(monkeypatch, *bench, stop_at=2)[0] == 130
    code, processes = start(monkeypatch, *bench, "--resume")
    assert (code, len(processes.started)) == (0, 2)
    (folder,) = run_folders(store)
    assert [one.process for one in StoredRun(folder).cases()[0].samples] == [0, 1, 2, 3]
    assert not (folder / fresh.PROCESSES_FOLDER).exists()


def test_what_ended_a_process_is_passed_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, "ab", *SIDES, "--pairs", "2", stop_at=0)[0] == 130
    first = StoredRun(run_folders(store)[0])
    (child,) = RunSide(first).children()
    (child.folder / fresh.LOG_FILE).write_text("Traceback\nMemoryError\n")
    error = fresh._explain_failure(child, -9, "process 1 of 2", first)
    assert error.message == "process 1 of 2 ended with -9: MemoryError"
    record_failure(child.folder, Failure(kind="usage", message="no such device", hint="use cpu", where="--device"))
    error = fresh._explain_failure(child, 1, "process 1 of 2", first)
    assert (error.message, error.where) == ("process 1 of 2: no such device", "--device")
    assert error.hint == f"use cpu; finished processes are kept: continue with --resume {first.id}"


def test_a_process_measures_only_the_plan_that_its_parent_wrote(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.run import __main__ as entry

    assert start(monkeypatch, "bench", "ops", "--op", "gemm", "--shape", "m=8", "--processes", "2", stop_at=0)[0] == 130
    (folder,) = run_folders(store)
    (child,) = RunSide(StoredRun(folder)).children()
    measured: list[StoredRun] = []
    monkeypatch.setattr(entry, "execute", measured.append)
    monkeypatch.setattr("sys.argv", ["stepscope.run", str(child.folder), "0" * 64])
    assert (entry.main(), measured) == (1, [])
    assert StoredRun(child.folder).failures[-1].kind == UsageError.kind
    monkeypatch.setattr("sys.argv", ["stepscope.run", str(child.folder), child.plan_seal])
    assert (entry.main(), len(measured)) == (0, 1)


def test_more_processes_are_measured_where_the_noise_asks_for_them(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(monkeypatch, "bench", "ops", "--op", "gemm", "--shape", "m=8", "--processes", "2", stop_at=0)[0] == 130
    stored = StoredRun(run_folders(store)[0])
    processes = FakeProcesses()
    monkeypatch.setattr(fresh, "run_process", processes)
    asked: list[int] = []

    def count_wanted(cases: Any, system: Any) -> int:
        asked.append(len(cases[0].samples))
        return 5

    measure_in_processes([RunSide(stored)], 2, progress=SilentProgress(), count_wanted=count_wanted)
    assert asked == [2, 5]
    assert len(StoredRun(stored.folder).cases()[0].samples) == 5
