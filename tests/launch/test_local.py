"""Self-launched ranks that die, hang, never join or leave: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from builders import make_case, make_folder
from stepscope.core.errors import RankDiedError, RankHungError
from stepscope.launch import launch_local
from stepscope.launch.local import describe_death
from stepscope.launch.watchdog import Heartbeat, beat_path, failure_path, read_beat, write_rank_failure
from stepscope.store import StoredRun

pytestmark = pytest.mark.ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, [make_case(m=1)])


@pytest.fixture(autouse=True)
def workers_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def launch(folder: Path, name: str, *, ranks: int = 2, hang_limit_s: float = 60) -> float:
    start = time.monotonic()
    try:
        target = name if ":" in name else f"rank_deaths:{name}"
        launch_local(folder=folder, target=target, ranks=ranks, hang_limit_s=hang_limit_s)
    finally:
        took_s = time.monotonic() - start
    return took_s


BEFORE: set[int] = set()


@pytest.fixture(autouse=True)
def processes_of_other_tests_are_known() -> None:
    """multiprocessing keeps a helper process for the whole session; it is nobody's rank."""
    BEFORE.clear()
    BEFORE.update(process.pid for process in psutil.Process().children(recursive=True))


def children_of_this_test() -> list[str]:
    found = [process for process in psutil.Process().children(recursive=True) if process.pid not in BEFORE]
    return [" ".join(process.cmdline()) for process in found if process.status() != psutil.STATUS_ZOMBIE]


def test_ranks_that_finish_leave_their_words_and_no_process(folder: Path) -> None:
    launch(folder, "finish")
    assert "rank 1 of 2 was here" in (folder / "ranks" / "rank-1.log").read_text()
    assert not list((folder / "ranks").glob("*.beat"))
    assert StoredRun(folder).failures == []
    assert children_of_this_test() == []


@pytest.mark.parametrize(
    ("module", "expected"), [("rank_deaths", "forked"), ("rank_threads", "started"), ("rank_stuck_forks", "started")]
)
def test_ranks_are_forked_where_that_is_as_good_as_a_new_process(folder: Path, module: str, expected: str) -> None:
    launch(folder, f"{module}:tell_whose_child")
    for rank in range(2):
        assert f"\n{expected} " in "\n" + (folder / "ranks" / f"rank-{rank}.log").read_text()


def test_a_rank_that_is_stopped_before_it_joins_is_named(folder: Path) -> None:
    with pytest.raises(RankHungError, match="rank 1 sent no heartbeat for 3 s"):
        launch(folder, "stop_before_joining", hang_limit_s=3)
    (failure,) = StoredRun(folder).failures
    assert (failure.kind, failure.rank) == ("rank_hung", 1)
    assert children_of_this_test() == []


def test_a_killed_rank_ends_the_run_and_is_named(folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankDiedError) as caught:
        launch(folder, "kill_rank_1", ranks=3)
    assert time.monotonic() - start < 30
    assert caught.value.where == "rank 1"
    assert "--resume" in (caught.value.hint or "")
    (failure,) = StoredRun(folder).failures
    assert (failure.kind, failure.rank, failure.exit_code) == ("rank_died", 1, -signal.SIGKILL)
    assert "SIGKILL" in failure.message
    assert failure.last_lines[-1] == "rank 1 is about to die"
    assert children_of_this_test() == []


@pytest.mark.usefixtures("warm_rank_server")
def test_an_exception_leaves_its_stack(folder: Path) -> None:
    with pytest.raises(RankDiedError, match="the network is down"):
        launch(folder, "raise_on_rank_1")
    (failure,) = StoredRun(folder).failures
    assert failure.rank == 1
    assert any("raise_on_rank_1" in line for line in failure.stack)


@pytest.mark.parametrize(
    ("worker", "code"), [("raise_and_abort_on_the_way_out", -signal.SIGABRT), ("raise_in_a_group_that_aborts", 1)]
)
def test_what_a_rank_said_counts_more_than_how_its_process_ended(folder: Path, worker: str, code: int) -> None:
    """In a group the process leaves at once, so that its exit code is its own."""
    with pytest.raises(RankDiedError, match="the disk is full"):
        launch(folder, worker, ranks=1)
    (failure,) = StoredRun(folder).failures
    assert failure.exit_code == code
    assert any("raise_and_abort_on_the_way_out" in line for line in failure.stack)


def test_the_rank_that_failed_first_is_blamed(folder: Path) -> None:
    """What the others report when it is gone has no fixed words."""
    (folder / "ranks").mkdir()
    for rank, message, at_s in ((0, "the pair was torn down", 200), (1, "no room", 100), (2, "Broken pipe", 50)):
        write_rank_failure(folder / "ranks", rank, RuntimeError(message))
        os.utime(failure_path(folder / "ranks", rank), (at_s, at_s))
    failure = describe_death(folder, 3, {}, 0, "")
    assert failure.rank == 1
    assert "no room" in failure.message


@pytest.mark.usefixtures("warm_rank_server")
def test_words_of_an_earlier_attempt_explain_nothing(folder: Path) -> None:
    (folder / "ranks").mkdir(exist_ok=True)
    write_rank_failure(folder / "ranks", 1, RuntimeError("no room, last time"))
    with pytest.raises(RankDiedError, match="SIGKILL"):
        launch(folder, "kill_at_once")


def test_a_crash_in_native_code_leaves_its_stack_in_the_log(folder: Path) -> None:
    with pytest.raises(RankDiedError, match="SIGSEGV"):
        launch(folder, "crash_rank_0")
    assert "crash_rank_0" in (folder / "ranks" / "rank-0.log").read_text()


def test_a_hung_rank_is_told_from_those_that_wait_for_it(folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankHungError) as caught:
        launch(folder, "hang_rank_1", ranks=3, hang_limit_s=3)
    assert time.monotonic() - start < 30
    assert caught.value.where == "rank 1"
    (failure,) = StoredRun(folder).failures
    assert (failure.kind, failure.rank) == ("rank_hung", 1)
    assert "measuring" in failure.message
    assert any("oversleep" in line for line in failure.stack), failure.stack
    assert children_of_this_test() == []


def test_a_stopped_rank_is_noticed_although_it_cannot_answer(folder: Path) -> None:
    with pytest.raises(RankHungError) as caught:
        launch(folder, "stop_rank_1", ranks=2, hang_limit_s=3)
    assert caught.value.where == "rank 1"
    assert children_of_this_test() == []


def test_a_worker_that_cannot_be_imported_is_a_dead_rank(folder: Path) -> None:
    with pytest.raises(RankDiedError, match="no_such_function"):
        launch(folder, "no_such_function")


def test_ranks_die_with_their_killed_parent(folder: Path) -> None:
    source = (
        "from pathlib import Path\n"
        "from stepscope.launch import launch_local\n"
        f"launch_local(folder=Path({str(folder)!r}), target='rank_deaths:wait_long', ranks=2, hang_limit_s=60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source])
    deadline = time.monotonic() + 60
    beats = [None, None]
    while not all(beat and beat.phase == "waiting" for beat in beats):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        beats = [read_beat(folder / "ranks", rank) for rank in range(2)]
    ranks = [psutil.Process(beat.pid) for beat in beats if beat]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=15)
    assert len(gone) == 2, alive


def test_a_heartbeat_ends_a_process_that_stops_beating(tmp_path: Path) -> None:
    """The alarm inside the process, which also works under launchers that do not watch."""
    source = (
        "import sys, time\n"
        "from stepscope.launch import Heartbeat\n"
        "Heartbeat(rank=0, limit_s=0.5, log=sys.stderr).beat('sleeping')\n"
        "def oversleep(): time.sleep(60)\n"
        "oversleep()\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)
    assert time.monotonic() - start < 20
    assert done.returncode != 0
    assert "oversleep" in done.stderr


def test_beats_tell_phase_and_order(tmp_path: Path) -> None:
    heartbeat = Heartbeat(rank=3, limit_s=60, log=sys.stderr)
    heartbeat.move_to(tmp_path, sys.stderr)
    heartbeat.beat("preparing", "abc")
    heartbeat.beat("measuring", "abc")
    beat = read_beat(tmp_path, 3)
    assert beat is not None
    assert (beat.phase, beat.case, beat.number, beat.pid) == ("measuring", "abc", 2, os.getpid())
    heartbeat.disarm()
    heartbeat.stop()
    assert not beat_path(tmp_path, 3).exists()
