"""What is read is what was written: seals, hashes, older formats, and numbers that JSON lacks."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path

import pytest

from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.core.errors import BadInputError, CorruptRunError, NewerVersionError, StepscopeError, UsageError
from stepscope.metrics.sql import query_runs
from stepscope.records import (
    CaseResult,
    Failure,
    OperatorRequest,
    Plan,
    System,
    add_seal,
    check_seal,
    encode_document,
    parse_document,
)
from stepscope.records.kinds import CollectiveObserved
from stepscope.store import (
    JournalTail,
    RunWriter,
    StoredRun,
    create_run,
    find_newest,
    list_runs,
    record_failure,
    remove_run,
    run_folders,
    verify_run,
)

CASES = [make_case(m=m) for m in (1, 2, 3)]
FORMAT_1 = Path(__file__).with_name("data") / "format-1"
WRITTEN = (
    "samples/rank-0.jsonl", "begun.json", "writer.lock", "journal.jsonl", "failures.jsonl", "ranks", "ranks/rank-0.log",
    "run.json",
)  # fmt: skip
KILLED = "20261116-154733-gemm-e81190"


def write_run(store: Path, *, finish: bool = True, failure: bool = True) -> Path:
    folder = make_folder(store, CASES)
    if failure:
        record_failure(folder, Failure(kind="rank_died", message="rank 1 died"))
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        for case in CASES:
            writer.append(make_result(case), [make_samples(case, [0.1, 0.2], rank=rank) for rank in (0, 1)])
        if finish:
            writer.finish()
    return folder


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def read_all(folder: Path) -> None:
    run = StoredRun(folder)
    run.cases()


# Flips


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("name", ["run.json", "plan.json", "system.json", "failures.jsonl", "journal.jsonl"])
def test_every_flipped_bit_of_a_record_is_found(tmp_path: Path, name: str, finish: bool) -> None:
    """By whoever reads the run, not only by who verifies it; of a run that was killed, too."""
    folder = write_run(tmp_path, finish=finish)
    path = folder / name
    if not path.exists():
        pytest.skip("a run that was killed has no run.json")
    content = path.read_bytes()
    bits = [*range(8 * len(content))]
    for bit in random.Random(7).sample(bits, 300) + bits[-90 * 8 :: 7] + bits[-9:]:
        flip(path, bit)
        assert verify_run(StoredRun(folder)), bit
        with pytest.raises(BadInputError) as caught:
            read_all(folder)
        assert folder.name in (caught.value.where or ""), bit
        path.write_bytes(content)
    assert verify_run(StoredRun(folder)) == []


@pytest.mark.parametrize("finish", [True, False])
def test_flipped_samples_are_found(tmp_path: Path, finish: bool) -> None:
    folder = write_run(tmp_path, finish=finish)
    path = folder / "samples" / "rank-1.jsonl"
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 5):
        flip(path, bit)
        assert any(one.file.startswith("samples/rank-1.jsonl") for one in verify_run(StoredRun(folder))), bit
        with pytest.raises(CorruptRunError):
            read_all(folder)
        path.write_bytes(content)


# Changes by hand


@pytest.mark.parametrize("field", ["cases_ok", "world_size", "finished_at", "resumed", "id"])
def test_a_changed_field_of_run_json_is_found(tmp_path: Path, field: str) -> None:
    folder = write_run(tmp_path)
    path = folder / "run.json"
    content = json.loads(path.read_bytes())
    content[field] = 7 if isinstance(content[field], int) else "2020-01-01T00:00:00.000Z"
    path.write_text(json.dumps(content, separators=(",", ":")))
    assert [one.file for one in verify_run(StoredRun(folder))] == ["run.json"]
    with pytest.raises(CorruptRunError, match="changed or cut off"):
        read_all(folder)


@pytest.mark.parametrize("field", ["cases_ok", "cases_failed", "world_size", "resumed", "id", "verb", "created_at"])
@pytest.mark.parametrize("run", ["20261116-154713-gemm-4f3261", "20261116-154751-gemm-resumed"])
def test_a_changed_field_of_an_old_run_json_is_found(tmp_path: Path, run: str, field: str) -> None:
    """Format 1 has no seal: what run.json says is held against the other files."""
    folder = shutil.copytree(FORMAT_1 / run, tmp_path / run)
    path = folder / "run.json"
    content = json.loads(path.read_bytes())
    content[field] = content[field] + 1 if isinstance(content[field], int) else "other"
    path.write_text(json.dumps(content))
    (damage,) = verify_run(StoredRun(folder))
    assert damage.file == "run.json"
    assert field in damage.message


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("name", ["plan.json", "run.json", "system.json"])
def test_a_truncated_and_a_newer_record_is_named_by_every_reader(tmp_path: Path, name: str, finish: bool) -> None:
    folder = write_run(tmp_path, finish=finish)
    path = folder / name
    if not path.exists():
        pytest.skip("a run that was killed has no run.json")
    content = path.read_bytes()
    newer = json.dumps({**json.loads(content), "schema_version": 9}).encode()
    for changed in (b"", content[:1], content[: len(content) // 2], content[:-1], newer):
        path.write_bytes(changed)
        with pytest.raises(BadInputError) as caught:
            read_all(folder)
        if name == "run.json" or not finish:
            assert isinstance(caught.value, NewerVersionError) == (changed == newer)
        assert name in str(caught.value.where)
        assert [one.file for one in verify_run(StoredRun(folder))] == [name]
        assert len(list_runs(tmp_path)[1]) == 1


def test_an_emptied_journal_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "journal.jsonl").write_bytes(b"")
    with pytest.raises(CorruptRunError, match=r"journal\.jsonl changed"):
        read_all(folder)


def test_lost_lines_of_a_killed_run_are_found(tmp_path: Path) -> None:
    """A line in the middle by the chain; several at the end by the samples that nothing vouches for."""
    folder = write_run(tmp_path, finish=False)
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[2])
    with pytest.raises(CorruptRunError) as caught:
        read_all(folder)
    assert (caught.value.where or "").endswith("journal.jsonl:2")
    journal.write_bytes(b"")
    assert "lost lines" in verify_run(StoredRun(folder))[0].message
    journal.write_bytes(lines[0] + lines[1])  # as if it had been killed before the last line
    assert verify_run(StoredRun(folder)) == []


def test_a_record_of_another_run_is_refused(tmp_path: Path) -> None:
    """Its seal is whole, and bound to the plan of the run that it belongs to."""
    one, other = (write_run(tmp_path, finish=False) for _ in range(2))
    for name in ("system.json", "journal.jsonl"):
        kept = (one / name).read_bytes()
        (one / name).write_bytes((other / name).read_bytes())
        with pytest.raises(CorruptRunError, match="not what was written"):
            read_all(one)
        (one / name).write_bytes(kept)
    read_all(one)


@pytest.mark.parametrize("name", ["system.json", "failures.jsonl", "journal.jsonl", "plan.json"])
def test_a_file_that_is_gone_is_missed(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path)
    (folder / name).unlink()
    with pytest.raises(CorruptRunError) as caught:
        read_all(folder)
    assert name in str(caught.value)
    assert [run.name for run in run_folders(tmp_path)] == [folder.name]
    assert len(list_runs(tmp_path)[1]) == 1


def test_one_bad_run_does_not_keep_the_others_from_being_asked(tmp_path: Path) -> None:
    good, bad = write_run(tmp_path), write_run(tmp_path)
    flip(bad / "samples" / "rank-0.jsonl", 100)
    runs, damaged = list_runs(tmp_path)
    assert ([run.id for run in runs], damaged) == (sorted([good.name, bad.name]), [])
    result = query_runs(runs, "SELECT DISTINCT run FROM samples")
    assert result.rows == [(good.name,)]
    assert bad.name in (result.damaged[0].where or "")


@pytest.mark.parametrize("change", [{"created_at": "yesterday"}, {"world_size": 1 << 40}])
def test_values_that_no_table_holds_cost_their_run_only(tmp_path: Path, change: dict[str, object]) -> None:
    good, odd = write_run(tmp_path), write_run(tmp_path, finish=False)
    plan = {**json.loads((odd / "plan.json").read_bytes()), **change}
    for name in ("journal.jsonl", "system.json", "failures.jsonl"):
        (odd / name).unlink()
    del plan["seal"]
    (odd / "plan.json").write_bytes(add_seal(json.dumps(plan).encode()))
    result = query_runs(list_runs(tmp_path)[0], "SELECT run FROM runs")
    assert result.rows == [(good.name,)]
    assert odd.name in result.damaged[0].message


def test_the_newest_run_has_no_substitute(tmp_path: Path) -> None:
    older, newest = (shutil.move(write_run(tmp_path), tmp_path / f"2026010{day}-run") for day in (1, 2))
    assert find_newest(tmp_path, beside="").id == newest.name  # type: ignore[union-attr]
    assert find_newest(tmp_path, beside=newest.name).id == older.name  # type: ignore[union-attr]
    flip(older / "plan.json", 99)
    assert find_newest(tmp_path, beside="").id == newest.name  # type: ignore[union-attr]
    flip(newest / "plan.json", 99)
    with pytest.raises(CorruptRunError):
        find_newest(tmp_path, beside="")


# Format 1


def test_runs_of_format_1_are_read_and_checked(tmp_path: Path) -> None:
    runs, damaged = list_runs(FORMAT_1)
    assert damaged == []
    assert {run.id: run.status for run in runs if run.status != "complete"} == {KILLED: "interrupted"}
    assert [run.id for run in runs if not run.is_verified] == [KILLED]
    for run in runs:
        assert verify_run(run) == []
        assert all(case.summary() is not None for case in run.cases())
    for run in runs:
        for name in ("plan.json", "system.json", "journal.jsonl"):
            folder = shutil.copytree(run.folder, tmp_path / run.id / name)
            flip(folder / name, 400)
            if run.status == "complete":
                with pytest.raises(CorruptRunError):
                    read_all(folder)


def test_a_killed_run_of_format_1_goes_on_and_is_checked_afterwards(tmp_path: Path) -> None:
    folder = shutil.copytree(FORMAT_1 / KILLED, tmp_path / KILLED)
    with RunWriter(folder) as writer:
        (case,) = writer.remaining()
        writer.append(make_result(case), [make_samples(case, [0.5])])
        assert StoredRun(folder).journal.sealed is False
        writer.finish()
    run = StoredRun(folder)
    assert (len(run.cases()), run.is_verified, verify_run(run)) == (5, True, [])


def test_a_running_run_is_followed_and_checked(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES)
    with RunWriter(folder) as writer:
        tail = JournalTail(StoredRun(folder))
        for case in CASES:
            writer.append(make_result(case), [make_samples(case, [0.1])])
            assert [one.key for one in tail.read_new()] == [case.key]


# Seals


def test_a_seal_covers_every_byte_and_what_it_is_bound_to() -> None:
    document = add_seal(b'{"schema_version":2,"a":1}', "before")
    assert json.loads(document)["a"] == 1
    assert check_seal(document, where="x", after="before") == json.loads(document)["seal"]
    for changed, after in ((document, "other"), (document + b" ", "before"), (document[:-1], "before"), (b"", "")):
        with pytest.raises(CorruptRunError):
            check_seal(changed, where="x", after=after)
    assert check_seal(b'{"schema_version":1}', where="x") is None


# Special files in a folder from somebody else


@pytest.mark.parametrize("name", ["plan.json", "run.json", "system.json", "journal.jsonl", "samples/rank-0.jsonl"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_run(tmp_path)
    path = folder / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(CorruptRunError, match=r"is a .*, not a file"):
        read_all(folder)
    assert verify_run(StoredRun(folder))
    assert StoredRun(folder).folder == folder


@pytest.mark.parametrize(
    "piece",
    [
        {"file": "../../../etc/passwd"},
        {"file": "/etc/passwd"},
        {"file": "samples/../plan.json"},
        {"offset": -1},
        {"length": -1},
        {"length": 1 << 62},
        {"offset": 1 << 62},
    ],
)
def test_slices_do_not_lead_out_of_the_run_or_of_memory(tmp_path: Path, piece: dict[str, object]) -> None:
    folder = write_run(tmp_path, finish=False)
    path, after, lines = folder / "journal.jsonl", StoredRun(folder).plan_seal, b""
    for line in path.read_bytes().splitlines():
        content = json.loads(line)
        del content["seal"]
        content["samples"] = [{**content["samples"][0], **piece}]
        sealed = add_seal(json.dumps(content).encode(), after)
        lines, after = lines + sealed + b"\n", json.loads(sealed)["seal"]
    path.write_bytes(lines)
    with pytest.raises(BadInputError):
        read_all(folder)


def test_records_that_make_no_sense_are_refused_with_the_rule() -> None:
    system = json.loads(encode_document(make_system()))
    result = json.loads(encode_document(make_result(CASES[0])))
    with pytest.raises(BadInputError, match="at least one host"):
        parse_document(json.dumps({**system, "hosts": []}).encode(), System, where="x")
    result["score"] = {"unit": "furlongs", "work": 1.0}
    with pytest.raises(BadInputError, match="no unit 'furlongs'"):
        parse_document(json.dumps(result).encode(), CaseResult, where="x")
    for broken in (b'{"record":"plan\xff","schema_version":2}', b"[" * 100_000):
        with pytest.raises(BadInputError):
            parse_document(broken, Plan, where="x")


# Numbers that JSON lacks


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1 << 64])
@pytest.mark.parametrize("place", ["request", "parameters"])
def test_a_plan_that_cannot_be_stored_leaves_no_folder(tmp_path: Path, value: float, place: str) -> None:
    case = make_case(**{"skew": value} if place == "parameters" else {})
    cluster = {"deep": [{"skew": value}]} if place == "request" else None
    request = OperatorRequest(cluster=cluster)
    with pytest.raises(BadInputError, match="skew"):
        create_run(tmp_path / "runs", verb="ops", name="x", command=[], request=request, cases=[case])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_facts_that_are_no_numbers_are_left_out_with_a_notice(tmp_path: Path, value: float) -> None:
    folder = make_folder(tmp_path, CASES)
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(
            make_result(CASES[0], observed=CollectiveObserved(error_l2=value, wrong=0)), [make_samples(CASES[0], [0.1])]
        )
        writer.append(make_result(CASES[1]), [make_samples(CASES[1], [0.1, value])])
        writer.finish()
    first, second = StoredRun(folder).cases()
    assert first.result.observed == CollectiveObserved(wrong=0)
    assert "error_l2" in first.result.notices[0].message
    assert (second.result.status, second.samples) == ("failed", [])
    assert second.result.failure is not None
    assert "duration_s[1]" in second.result.failure.message
    assert verify_run(StoredRun(folder)) == []


# Removing


def test_a_link_to_a_run_is_removed_and_the_run_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "elsewhere")
    link = tmp_path / folder.name
    link.symlink_to(folder)
    remove_run(link)
    assert not link.is_symlink()
    assert verify_run(StoredRun(folder)) == []


def test_a_run_without_its_plan_can_be_removed(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "plan.json").unlink()
    remove_run(folder)
    assert list(tmp_path.iterdir()) == []


# Writing into a folder that leads elsewhere


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_a_writer_does_not_follow_links(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_run(tmp_path / "store", finish=False)
    victim, path = tmp_path / "victim", folder / name
    victim.write_bytes(b"precious\n")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "hard link":
        path.hardlink_to(victim)
    else:
        os.mkfifo(path)
    with pytest.raises(StepscopeError) as caught, RunWriter(folder):
        raise AssertionError("it was opened")
    assert isinstance(caught.value, UsageError | CorruptRunError), caught.value
    assert victim.read_bytes() == b"precious\n"


def test_a_folder_of_another_user_is_not_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path, finish=False)
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(folder / "plan.json", 12345, -1)
    with pytest.raises(UsageError, match="another user"):
        RunWriter(folder)
    read_all(folder)
