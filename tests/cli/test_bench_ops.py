"""The contract of `stepscope bench ops`, `runs` and `report`, with the real command."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_process import Answer, Stepscope, stepscope_in

from stepscope.store import StoredRun, run_folders

pytestmark = pytest.mark.usefixtures("one_thread")

GEMM = ("bench", "ops", "--op", "gemm", "--dtype", "float32", "--device", "cpu")
QUICK = ("--quick", "--json")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "runs"


@pytest.fixture(scope="module")
def measured(shared_store: Path) -> Answer:
    """One measurement, for all who ask what is left of one."""
    answer = stepscope_in(shared_store)(*GEMM, "--shape", "m=64,n=64,k=64", *QUICK, OMP_NUM_THREADS="1")
    assert answer.code == 0
    return answer


@pytest.fixture
def run_id(measured: Answer, store: Path) -> str:
    """The measured run, in a store that the test may spoil."""
    folder = Path(measured.data["run"])
    shutil.copytree(folder, store / folder.name)
    return folder.name


def test_the_contract(measured: Answer, shared_store: Path) -> None:
    (case,) = measured.data["cases"]
    assert case["unit"] == "TFLOP/s"
    summary = case["summary"]
    assert summary["n"] == len(case["samples_s"])
    assert summary["ci_low_s"] <= summary["median_s"] <= summary["ci_high_s"]
    assert case["score"] == pytest.approx(2 * 64**3 / summary["median_s"] / 1e12)
    assert Path(case["run"]).parent == shared_store
    run = StoredRun(Path(case["run"]))
    assert run.status == "complete"
    assert run.system is not None
    assert run.system.libraries["torch"]
    assert run.cases()[0].seconds() == case["samples_s"]
    assert any(run.cases()[0].samples[0].warmup)
    assert "[1/1] gemm/micro/forward/custom" in measured.err


def test_several_shapes_and_passes_and_a_skip_exit_with_zero(here: Stepscope) -> None:
    arguments = ("--shape", "m=8", "--shape", "m=1M,n=1M,k=1M", "--pass", "forward", "--pass", "backward")
    answer = here(*GEMM, *arguments, *QUICK)
    assert answer.code == 0
    assert [case["status"] for case in answer.data["cases"]] == ["ok", "ok", "skipped", "skipped"]
    assert answer.data["cases"][2]["failure"]["kind"] == "does_not_fit"
    assert answer.data["cases"][2]["summary"] is None


def test_text_output_has_the_table_and_the_folder(here: Stepscope) -> None:
    answer = here(*GEMM, "--shape", "m=8", "--quick")
    assert answer.code == 0
    header = next(line for line in answer.out.splitlines() if "Model" in line)
    for column in ("Model", "Implementation", "Mode", "Config", "Batch Size", "Score", "Units"):
        assert column in header
    assert "run: " in answer.out


def test_runs_list_show_export_verify_sql_rm(here: Stepscope, run_id: str, store: Path, tmp_path: Path) -> None:
    first = run_id
    (row,) = here("runs", "list", "--json").data["runs"]
    assert (row["id"], row["status"], row["cases_ok"]) == (first, "complete", 1)
    assert first in here("runs", "list").out

    shown = here("runs", "show", first[:-2], "--json").data
    assert shown["cases"][0]["benchmark"] == "gemm/micro/forward/custom"
    assert shown["system_record"]["hosts"]
    assert "gemm" in here("runs", "show", first).out

    rows = list(csv.DictReader(io.StringIO(here("runs", "export", "--format", "csv").out)))
    assert len(rows) == 1
    assert float(rows[0]["median_s"]) > 0
    exported = tmp_path / "out.json"
    assert here("runs", "export", "--format", "json", "-o", str(exported)).code == 0
    assert json.loads(exported.read_text())
    assert "| gemm" in here("runs", "export", first, "--format", "markdown").out

    assert here("runs", "verify", "--json").data["runs"] == [
        {"id": first, "intact": True, "verified": True, "damage": []}
    ]
    query = "SELECT benchmark, count(*) FROM cases JOIN samples USING (run, case_key) GROUP BY 1"
    assert here("runs", "sql", query, "--json").data["rows"][0][0] == "gemm/micro/forward/custom"
    assert "samples(" in here("runs", "sql", "--tables").out

    page = tmp_path / "page.html"
    assert here("report", first, "-o", str(page)).code == 0
    assert page.read_text().startswith("<!doctype html>") or page.read_text().startswith("<!DOCTYPE html>")

    journal = store / first / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"gemm", b"gemn", 1))
    damaged = here("runs", "verify", "--json")
    assert damaged.code == 1
    assert damaged.data["runs"][0]["intact"] is False

    assert here("runs", "rm", first).code == 0
    assert here("runs", "list", "--json").data["runs"] == []


def test_listing_operators_and_benchmarks(here: Stepscope) -> None:
    ops = here("bench", "ops", "--list", "--json").data["ops"]
    assert {op["name"] for op in ops} >= {"gemm", "linear", "embedding_bag"}
    assert all({"name", "parameters", "dtypes", "passes"} <= set(op) for op in ops)
    benchmarks = here("bench", "list", "--json").data["benchmarks"]
    assert any(one["id"] == "dlrm/ootb/train/small.1dev-embed32-fp32" for one in benchmarks)
    assert all({"id", "version", "domain", "modes", "precisions"} <= set(one) for one in benchmarks)
    assert {one["model"] for one in benchmarks} == {
        "dlrm", "xlmr", "cvt", "oscar", "rnnt", "resnext3d", "regnety", "resnet50", "vgg16", "inception-v3",
        "bert-base", "bert-large", "gpt2", "llama",
    }  # fmt: skip


def test_the_small_dlrm_scores_examples(here: Stepscope) -> None:
    answer = here("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", *QUICK)
    (case,) = answer.data["cases"]
    assert (case["unit"], case["batch_size"], answer.code) == ("ex/s", 128, 0)
    assert case["score"] == pytest.approx(128 / case["summary"]["median_s"])


def test_examples_of_all_accumulated_batches_count(here: Stepscope) -> None:
    answer = here("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", "--accumulate", "3", *QUICK)
    (case,) = answer.data["cases"]
    assert (case["parameters"]["accumulate"], case["batch_size"], answer.code) == (3, 128, 0)
    assert case["score"] == pytest.approx(3 * 128 / case["summary"]["median_s"])


# Bad input: one message, the right exit code, no traceback (checked for every call by the fixture)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "ops", "--op", "gem"),
        ("bench", "ops", "--op", "gemm", "--shape", "m=0"),
        ("bench", "ops", "--op", "gemm", "--shape", "m=-1"),
        ("bench", "ops", "--op", "gemm", "--shape", "m=lots"),
        ("bench", "ops", "--op", "gemm", "--dtype", "float33"),
        ("bench", "ops", "--op", "gemm", "--device", "abacus"),
        ("bench", "ops", "--op", "gemm", "--max-time", "never"),
        ("bench", "ops", "--op", "gemm", "--max-samples", "0"),
        ("bench", "ops", "--op", "gemm", "--shape", "m=8", "--shape", "m=8"),
        ("bench", "ops", "--op", "gemm", "--resume", "nothing"),
        ("bench", "ops"),
        ("bench", "ops", "--colective", "x"),
        ("bench", "workload", "dlrm/ootb/train/none"),
        ("bench", "workload", "dlrm"),
        ("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", "--precision", "int4"),
        ("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", "--batch-size", "1000000000"),
        ("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", "--batch-sizes", "1,x"),
        ("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", "--accumulate", "0"),
        ("bench", "workload", "dlrm/ootb/train/small.1dev-embed32-fp32", "--accumulate", "1000"),
        ("bench", "workload", "dlrm/ootb/infer/default.1dev-fp32", "--accumulate", "2"),
        ("bench", "workload", "nowhere.py:build", "--accumulate", "2"),
        ("bench", "workload", "nowhere.py:build"),
        ("bench", "suite", "proxy", "--model", "alexnet"),
        ("bench", "comms", "--collective", "all_reduse"),
        ("bench", "comms", "--collective", "all_reduce", "--sizes", "1M:1K:x2"),
        ("bench", "comms", "--collective", "all_reduce", "--sizes", "many"),
        ("bench", "comms", "--collective", "all_reduce", "--sizes", "3"),
        ("bench", "comms", "--collective", "all_reduce", "--ranks", "0"),
        ("runs", "show", "nothing"),
        ("runs", "sql", "SELECT * FROM nowhere"),
        ("report", "nothing"),
        ("report",),
        ("compare", "a", "b"),
        ("check", "--baseline", "nothing"),
        ("ab", "ops --op gemm", "nonsense"),
        ("nonsense",),
    ],
)
def test_bad_input(here: Stepscope, store: Path, arguments: tuple[str, ...]) -> None:
    answer = here(*arguments, "--json")
    assert answer.code == 2
    error = answer.error
    assert error["kind"]
    assert error["message"]
    assert error["hint"]
    assert set(error) == {"kind", "message", "hint", "where"}
    assert all(StoredRun(folder).results == [] for folder in run_folders(store))


def test_errors_for_people_are_one_message(stepscope: Stepscope) -> None:
    answer = stepscope("bench", "ops", "--op", "gem")
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.splitlines() == [
        "error: there is no operator 'gem'",
        "  where: --op",
        "  next: did you mean gemm?",
    ]


def test_a_corrupted_and_a_newer_run(here: Stepscope, run_id: str, store: Path) -> None:
    run = run_id
    path = store / run / "run.json"
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps({**content, "schema_version": 99}))
    newer = here("runs", "show", run, "--json")
    assert (newer.code, newer.error["kind"]) == (2, "newer_version")
    assert "upgrade" in newer.error["hint"]
    path.write_bytes(b"\x00garbage")
    broken = here("runs", "show", run, "--json")
    assert (broken.code, broken.error["kind"]) == (2, "corrupt_run")
    assert broken.error["where"] == str(path)
    listed = here("runs", "list", "--json")
    assert listed.code == 0
    assert listed.data["damaged"][0]["where"] == str(path)


def test_a_store_that_cannot_be_written(here: Stepscope, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    answer = here(*GEMM, "--store", str(blocked), "--json")
    assert (answer.code, answer.error["kind"]) == (2, "store_not_writable")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; a read-only mount is tried below")
def test_a_folder_without_write_permission(here: Stepscope, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    answer = here(*GEMM, "--store", str(locked), "--json")
    assert (answer.code, answer.error["kind"]) == (2, "store_not_writable")


# Kill and resume


SWEEP = (
    "--shape",
    "m=32",
    "--shape",
    "m=48",
    "--shape",
    "m=64",
    "--shape",
    "m=80",
    "--shape",
    "m=96",
    "--shape",
    "m=112",
)


def restore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(store: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "stepscope", *arguments],
        env={**os.environ, "STEPSCOPE_STORE": str(store)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A test run started in the background inherits an ignored SIGINT and would pass it on.
        preexec_fn=restore_interrupts,  # noqa: PLW1509 - no threads here
    )


def wait_for_cases(store: Path, count: int, process: subprocess.Popen[bytes], limit_s: float = 60) -> Path:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for folder in run_folders(store):
            if len(StoredRun(folder).results) >= count:
                return folder
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"no {count} cases within {limit_s} s")


def test_a_killed_run_keeps_its_cases_and_resumes_each_once(here: Stepscope, store: Path) -> None:
    sweep = (*GEMM, *SWEEP, "--min-time", "300ms", "--max-time", "300ms")
    process = start(store, *sweep)
    folder = wait_for_cases(store, 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = [(result.case.key, result.samples[0].sha256) for result in StoredRun(folder).results]
    assert 2 <= len(kept) < 6
    (row,) = here("runs", "list", "--json").data["runs"]
    assert (row["status"], row["cases_ok"], row["cases_planned"]) == ("interrupted", len(kept), 6)
    assert "runs resume" in here("runs", "show", folder.name).out

    answer = here(*sweep, "--resume", "--json")
    assert answer.code == 0
    assert Path(answer.data["run"]) == folder
    after = [(result.case.key, result.samples[0].sha256) for result in StoredRun(folder).results]
    assert after[: len(kept)] == kept
    assert len({key for key, _ in after}) == len(after) == 6
    run = StoredRun(folder).run
    assert run is not None
    assert run.resumed == 1
    assert here("runs", "verify", "--json").code == 0


def test_resuming_by_name_and_with_other_cases(here: Stepscope, store: Path) -> None:
    sweep = (*GEMM, *SWEEP[:4], "--min-time", "300ms", "--max-time", "300ms")
    process = start(store, *sweep)
    folder = wait_for_cases(store, 1, process)
    process.kill()
    process.communicate()
    other = here(*GEMM, "--shape", "m=999", "--resume", folder.name, "--json")
    assert (other.code, other.error["kind"]) == (2, "usage")
    assert "runs resume" in other.error["hint"]
    done = here("runs", "resume", folder.name, "--json")
    assert done.code == 0
    assert len(done.data["cases"]) == 2
    again = here("runs", "resume", folder.name, "--json")
    assert (again.code, again.error["kind"]) == (2, "usage")


def test_an_interrupt_keeps_what_is_done_and_exits_with_130(store: Path) -> None:
    process = start(store, *GEMM, *SWEEP, "--min-time", "1s", "--max-time", "1s", "--json")
    folder = wait_for_cases(store, 1, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert StoredRun(folder).status == "interrupted"
    assert len(StoredRun(folder).results) >= 1
