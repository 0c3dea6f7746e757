from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.core.errors import (
    BadInputError,
    CorruptRunError,
    NewerVersionError,
    RunBusyError,
    RunNotFoundError,
    StoreNotWritableError,
    StoreWriteError,
    UsageError,
)
from stepscope.metrics.sql import query_runs
from stepscope.records import Case, Failure, make_request
from stepscope.store import (
    JournalTail,
    RunWriter,
    StoredRun,
    create_run,
    find_run,
    list_runs,
    record_failure,
    remove_run,
    resolve_store,
    run_folders,
    verify_run,
)
from stepscope.store import folder as layout
from stepscope.store.folder import AppendFile, whole_lines

CASES = [make_case(m=m) for m in (1, 2, 3)]


def write_cases(folder: Path, cases: list[Case], *, finish: bool = True) -> None:
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        for case in cases:
            writer.append(make_result(case), [make_samples(case, [0.1, 0.2, 0.3])])
        if finish:
            writer.finish()


@pytest.fixture
def complete(tmp_path: Path) -> StoredRun:
    folder = make_folder(tmp_path, CASES)
    write_cases(folder, CASES)
    return StoredRun(folder)


def test_a_complete_run_reads_back(complete: StoredRun) -> None:
    assert complete.status == "complete"
    assert [case.key for case in complete.cases()] == [case.key for case in CASES]
    assert complete.cases()[0].seconds() == [0.1, 0.2, 0.3]
    assert complete.cases()[0].score() == pytest.approx(5)
    assert complete.run is not None
    assert (complete.run.cases_ok, complete.run.cases_failed, complete.run.resumed) == (3, 0, 0)
    assert set(complete.run.files) == {"plan.json", "system.json", "journal.jsonl", "samples/rank-0.jsonl"}
    assert verify_run(complete) == []


def test_a_folder_without_run_json_is_interrupted_and_can_be_continued(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    write_cases(folder, CASES[:1], finish=False)
    assert StoredRun(folder).status == "interrupted"
    with RunWriter(folder) as writer:
        assert StoredRun(folder).status == "running"
        assert writer.remaining() == CASES[1:]
    write_cases(folder, CASES[1:])
    done = StoredRun(folder)
    assert [result.case.key for result in done.results] == [case.key for case in CASES]
    assert done.run is not None
    assert done.run.resumed == 2
    assert verify_run(done) == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_run_cut_off_at_any_byte_keeps_its_whole_lines(data: st.DataObject) -> None:
    """What a power cut can leave: any prefix of the journal, and at least the samples it vouches for."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch), CASES)
        write_cases(folder, CASES[:2], finish=False)
        journal, samples = folder / layout.JOURNAL_FILE, folder / "samples" / "rank-0.jsonl"
        content = journal.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        journal.write_bytes(content[:cut])
        finished = content[:cut].count(b"\n")
        with samples.open("ab") as file:
            file.write(data.draw(st.binary(max_size=20)))
        assert len(StoredRun(folder).results) == finished
        with RunWriter(folder) as writer:
            for case in writer.remaining():
                writer.append(make_result(case), [make_samples(case, [0.5])])
            writer.finish()
        run = StoredRun(folder)
        assert sorted(result.case.key for result in run.results) == sorted(case.key for case in CASES)
        assert verify_run(run) == []
        assert len(samples.read_bytes().splitlines()) == 3


def test_a_finished_run_is_not_reopened(complete: StoredRun) -> None:
    with pytest.raises(UsageError, match="complete"):
        RunWriter(complete.folder)


def test_only_one_process_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path, CASES)
    monkeypatch.setattr("stepscope.store.folder.hold_lock.__wrapped__.__defaults__", (0.1,))
    with RunWriter(folder), pytest.raises(RunBusyError):
        RunWriter(folder)
    with RunWriter(folder), pytest.raises(RunBusyError):
        remove_run(folder)


def test_a_resumed_run_stays_on_its_system(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    write_cases(folder, CASES[:1], finish=False)
    with RunWriter(folder) as writer, pytest.raises(UsageError, match="not the system"):
        writer.write_system(make_system(libraries={"torch": "2.6.0"}))
    with RunWriter(folder) as writer, pytest.raises(UsageError, match="not the settings"):
        writer.write_system(make_system(environment={"OMP_NUM_THREADS": "7"}))


def _write_many(store: Path, count: int) -> None:
    for _ in range(count):
        write_cases(make_folder(store, CASES), CASES)


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_many, args=(tmp_path, 15)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    runs, damaged = list_runs(tmp_path)
    assert len(runs) == 30
    assert damaged == []
    assert all(run.status == "complete" and verify_run(run) == [] for run in runs)


def test_a_repeated_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        make_folder(tmp_path, [CASES[0], CASES[0]])
    assert run_folders(tmp_path) == []


def test_runs_are_found_by_folder_and_by_unique_prefix(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path, CASES), make_folder(tmp_path, CASES)
    assert find_run(tmp_path, str(first)).id == first.name
    assert find_run(tmp_path, second.name).id == second.name
    shared = next(i for i, (a, b) in enumerate(zip(first.name, second.name, strict=True)) if a != b)
    assert find_run(tmp_path, first.name[: shared + 1]).id == first.name
    with pytest.raises(RunNotFoundError, match="2 runs"):
        find_run(tmp_path, first.name[:shared])
    with pytest.raises(RunNotFoundError, match="no run"):
        find_run(tmp_path, "nothing")


def test_the_store_is_the_option_then_the_variable_then_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_STORE", "/from/variable")
    assert resolve_store("/from/option") == Path("/from/option")
    assert resolve_store(None) == Path("/from/variable")
    monkeypatch.delenv("STEPSCOPE_STORE")
    assert resolve_store(None) == Path("stepscope-runs")


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreNotWritableError) as caught:
        make_folder(tmp_path / "file" / "store", CASES)
    assert "--store" in (caught.value.hint or "")


# Damage


def damage(folder: Path, name: str, content: bytes | None) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["plan.json", "system.json", "journal.jsonl", "samples/rank-0.jsonl"])
def test_a_flipped_bit_is_found(complete: StoredRun, name: str) -> None:
    content = bytearray((complete.folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    damage(complete.folder, name, bytes(content))
    found = verify_run(StoredRun(complete.folder))
    assert any(one.file == name for one in found)


def test_missing_and_foreign_files_are_found(complete: StoredRun) -> None:
    damage(complete.folder, "samples/rank-0.jsonl", None)
    damage(complete.folder, "extra.txt", b"hello")
    messages = {one.file: one.message for one in verify_run(StoredRun(complete.folder))}
    assert messages["samples/rank-0.jsonl"] == "is missing"
    assert "not part" in messages["extra.txt"]


def test_changed_samples_are_never_read_as_evidence(complete: StoredRun) -> None:
    path = complete.folder / "samples" / "rank-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.9", 1))
    with pytest.raises(CorruptRunError) as caught:
        complete.cases()
    assert "rank-0.jsonl" in (caught.value.where or "")


def test_a_broken_journal_line_is_named(complete: StoredRun) -> None:
    path = complete.folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{broken}\n" + lines[2])
    with pytest.raises(BadInputError) as caught:
        _ = StoredRun(complete.folder).results
    assert (caught.value.where or "").endswith("journal.jsonl:2")


def test_a_shortened_samples_file_stops_a_resume(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    write_cases(folder, CASES[:2], finish=False)
    damage(folder, "samples/rank-0.jsonl", b"")
    with pytest.raises(CorruptRunError, match="shorter"):
        RunWriter(folder)


def test_lists_go_on_past_damaged_and_newer_runs(tmp_path: Path) -> None:
    good, broken, newer = (make_folder(tmp_path, CASES) for _ in range(3))
    damage(broken, "plan.json", b"{")
    plan = json.loads((newer / "plan.json").read_bytes())
    damage(newer, "plan.json", json.dumps({**plan, "schema_version": 99}).encode())
    (tmp_path / "not-a-run").mkdir()
    runs, damaged = list_runs(tmp_path)
    assert [run.id for run in runs] == [good.name]
    assert {type(error) for error in damaged} == {CorruptRunError, NewerVersionError}
    with pytest.raises(CorruptRunError, match="not a run folder"):
        StoredRun(tmp_path / "not-a-run")


def test_removal(complete: StoredRun) -> None:
    remove_run(complete.folder)
    assert run_folders(complete.folder.parent) == []
    assert list(complete.folder.parent.iterdir()) == []


def test_failures_are_kept_beside_the_evidence(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    record_failure(folder, Failure(kind="rank_died", message="rank 2 died", rank=2, last_lines=["bang"]))
    assert StoredRun(folder).failures[0].last_lines == ["bang"]
    write_cases(folder, CASES)
    run = StoredRun(folder).run
    assert run is not None
    assert [failure.kind for failure in run.failures] == ["rank_died"]


# A disk that fills up


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "lines")
    file.append(b"first")

    def half_then_full(descriptor: int, data: bytes, offset: int) -> int:
        if offset == 6:
            os.lseek(descriptor, 0, os.SEEK_END)
            os.write(descriptor, data[:3])
            return 3
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half_then_full)
        with pytest.raises(StoreWriteError, match="No space left") as caught:
            file.append(b"second")
    assert "--resume" in (caught.value.hint or "")
    assert (tmp_path / "lines").read_bytes() == b"first\n"
    file.append(b"third")
    file.close()
    assert list(whole_lines((tmp_path / "lines").read_bytes())) == [(1, b"first"), (2, b"third")]


def test_following_a_run_shows_each_case_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    tail = JournalTail(StoredRun(folder))
    assert tail.read_new() == []
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        for case in CASES:
            writer.append(make_result(case), [make_samples(case, [1.0])])
            assert [one.key for one in tail.read_new()] == [case.key]
    assert tail.read_new() == []


# SQL


def test_sql_has_a_row_for_each_sample(tmp_path: Path) -> None:
    case, count = make_case(m=1), 10_001
    ranks = [make_samples(case, [float(number) for number in range(1, 1 + count)], rank=rank) for rank in (0, 1)]
    ranks[1] = msgspec.structs.replace(ranks[1], device_s=[0.5] * count, iterations=[2] * count)
    folder = make_folder(tmp_path, [case])
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(make_result(case), ranks)
    found = query_runs(
        [StoredRun(folder)],
        "SELECT rank, process, count(*), min(i), max(i), bool_and(i + 1 = duration_s), max(per_iteration_s), "
        "sum(device_s), bool_or(warmup), typeof(any_value(i)) FROM samples GROUP BY ALL ORDER BY rank",
    )
    kept = (0, count, 0, count - 1, True)
    assert found.rows == [
        (0, *kept, 10_001.0, None, False, "INTEGER"),
        (1, *kept, 5000.5, count / 2, False, "INTEGER"),
    ]


def test_sql_sees_cases_and_samples(complete: StoredRun) -> None:
    rows = query_runs(
        [complete], "SELECT json_extract(parameters, '$.m')::INT m, median_s, n FROM cases ORDER BY m"
    ).rows
    assert rows == [(1, 0.2, 3), (2, 0.2, 3), (3, 0.2, 3)]
    total = query_runs(
        [complete], "SELECT count(*), sum(per_iteration_s) FROM samples JOIN cases USING (run, case_key)"
    )
    assert total.rows[0][0] == 9
    assert total.rows[0][1] == pytest.approx(1.8)
    assert query_runs([complete], "SELECT status, system FROM runs").rows == [("complete", make_system().fingerprint)]
    assert query_runs([complete, complete], "SELECT count(*) FROM systems").rows == [(1,)]


def test_sql_works_on_nothing_and_on_failures(tmp_path: Path) -> None:
    assert query_runs([], "SELECT count(*) FROM samples").rows == [(0,)]
    folder = create_run(tmp_path, verb="ops", name="x", command=[], request=make_request("ops", {}), cases=CASES[:1])
    with RunWriter(folder) as writer:
        writer.append(make_result(CASES[0], failure=Failure(kind="exception", message="boom")))
    assert query_runs([StoredRun(folder)], "SELECT status, cause, median_s FROM cases").rows == [
        ("failed", "boom", None)
    ]


@pytest.mark.parametrize("query", ["SELEC", "SELECT * FROM nowhere", "SELECT * FROM read_csv('/etc/passwd')"])
def test_sql_refuses_with_the_table_names(complete: StoredRun, query: str) -> None:
    with pytest.raises(UsageError) as caught:
        query_runs([complete], query)
    assert "samples" in (caught.value.hint or "")
