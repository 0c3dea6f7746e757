"""Where points come from, and the file that keeps the costs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from collective_examples import alpha_beta, kinked, make_comms_case, make_curve, measure, square_root, write_comms_run
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.core.errors import BadInputError, NewerVersionError, StoreWriteError, UsageError
from stepscope.costs.collective import (
    CollectiveTable,
    MeasuredSize,
    find_cost,
    fit_collective,
    fit_collectives,
    group_curves,
    measurements_of_run,
    read_collective_table,
    read_published_table,
    write_collective_table,
)
from stepscope.store import RunWriter, StoredRun

SIZES = [1024 * 4**i for i in range(6)]
HEADER = "system,nranks,nnodes,bytes,time_us,source\n"


# Runs


def test_a_run_becomes_curves(tmp_path: Path) -> None:
    cases = [make_comms_case(size) for size in SIZES] + [make_comms_case(size, backend="mpi") for size in SIZES]
    cases += [make_comms_case(size, reduction="max") for size in SIZES]
    run = write_comms_run(tmp_path, cases)
    plain, mpi, largest = group_curves(measurements_of_run(run))
    assert [point.size_bytes for point in plain.points] == SIZES
    assert [point.time_s for point in plain.points] == pytest.approx([square_root(size) for size in SIZES])
    assert (plain.operation, plain.members, plain.hosts, plain.backend) == ("all_reduce", 2, 1, "gloo")
    assert (plain.dtype, plain.device, plain.variant) == ("float32", "cpu", {})
    assert (plain.system, plain.fingerprint) == ("Test CPU, 2 threads", make_system().fingerprint)
    assert plain.sources == [run.id]
    assert mpi.backend == "mpi"
    assert largest.variant == {"reduction": "max"}


def test_the_group_counts_and_not_the_world(tmp_path: Path) -> None:
    cases = [make_comms_case(size, ranks=4, groups="split:2") for size in SIZES]
    (curve,) = group_curves(measurements_of_run(write_comms_run(tmp_path, cases, members=2)))
    assert curve.members == 2


def test_wrong_results_are_no_points(tmp_path: Path) -> None:
    cases = [make_comms_case(size) for size in SIZES]
    (curve,) = group_curves(measurements_of_run(write_comms_run(tmp_path, cases, wrong=cases[:3])))
    assert [point.size_bytes for point in curve.points] == SIZES[3:]
    assert fit_collectives([curve]).costs == []


def test_two_runs_of_one_system_are_one_curve_and_of_two_are_two(tmp_path: Path) -> None:
    cases = [make_comms_case(size) for size in SIZES]
    first = write_comms_run(tmp_path, cases)
    second = write_comms_run(tmp_path, cases, lambda size: 3 * square_root(size))
    other = write_comms_run(tmp_path, cases, system=make_system(libraries={"torch": "2.14.0"}))
    forced = write_comms_run(tmp_path, cases, system=make_system(environment={"NCCL_ALGO": "Ring"}))
    curves = group_curves(m for run in (first, second, other, forced) for m in measurements_of_run(run))
    assert len(curves) == 3
    assert curves[0].sources == [first.id, second.id]
    assert [p.time_s for p in curves[0].points] == pytest.approx([2 * square_root(size) for size in SIZES])


def test_imported_runs_are_communication_runs_too(tmp_path: Path) -> None:
    run = write_comms_run(tmp_path, [make_comms_case(size) for size in SIZES], verb="import")
    assert len(group_curves(measurements_of_run(run))) == 1


def test_two_clocks_are_two_curves(tmp_path: Path) -> None:
    cases = [make_comms_case(size) for size in SIZES]
    runs = [write_comms_run(tmp_path, cases, timing=timing) for timing in ("slowest_rank", "own")]
    curves = group_curves(m for run in runs for m in measurements_of_run(run))
    assert [curve.timing for curve in curves] == ["slowest_rank", "own"]


def test_messages_of_no_bytes_are_no_points(tmp_path: Path) -> None:
    run = write_comms_run(tmp_path, [make_comms_case(0, operation="barrier")], alpha_beta)
    fitted = fit_collectives(group_curves(measurements_of_run(run)))
    assert [refusal.label for refusal in fitted.refused] == ["barrier, 2 ranks, gloo, float32"]


def test_other_runs_are_refused(tmp_path: Path) -> None:
    case = make_case(m=1)
    folder = make_folder(tmp_path, [case])
    with RunWriter(folder) as writer:
        writer.append(make_result(case), [make_samples(case, [0.1])])
    with pytest.raises(UsageError, match="bench ops"):
        list(measurements_of_run(StoredRun(folder)))


# Published tables


def write_csv(tmp_path: Path, rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(header + rows)
    return path


def test_a_published_table(tmp_path: Path) -> None:
    path = write_csv(tmp_path, 'A,8,1,1024,13.5,"a, b"\nA,8,,2048,14,\n\nB,16,2,0,9.5,x\n')
    a, a_unknown, b = read_published_table(path)
    assert a == MeasuredSize(a.setting, 1024, pytest.approx(13.5e-6), "a, b")
    assert (a.setting.operation, a.setting.backend, a.setting.members, a.setting.hosts) == ("all_reduce", "nccl", 8, 1)
    assert (a_unknown.setting.hosts, a_unknown.source) == (None, str(path))
    assert (b.setting.system, b.size_bytes) == ("B", 0)


def test_a_table_may_name_another_operation(tmp_path: Path) -> None:
    header = "\ufeffsystem,nranks,bytes,time_us,operation,backend,dtype,device\n"
    (found,) = read_published_table(write_csv(tmp_path, "A,4,64,2,all_gather,rccl,bfloat16,hip\n", header))
    said = msgspec.structs.asdict(found.setting)
    assert [said[name] for name in ("operation", "backend", "dtype")] == ["all_gather", "rccl", "bfloat16"]
    assert said["device"] == "hip"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("A,8,1,1024,13,x\nA,8,1,2048,-1,x\n", 3),
        ("A,8,1,1024,nan,x\n", 2),
        ("A,8,1,1024,inf,x\n", 2),
        ("A,8,1,-8,1,x\n", 2),
        ("A,0,1,8,1,x\n", 2),
        ("A,8,1,1.5,1,x\n", 2),
        ("A,8,1\n", 2),
        ("A,8,1,8,1,x,too,many\nA,8,1,8,?,x\n", 3),
    ],
)
def test_bad_rows_are_named_with_their_line(tmp_path: Path, rows: str, line: int) -> None:
    path = write_csv(tmp_path, rows)
    with pytest.raises(BadInputError, match="not a row") as caught:
        read_published_table(path)
    assert caught.value.where == f"{path}:{line}"
    assert caught.value.hint


def test_tables_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no column nranks, bytes, time_us"):
        read_published_table(write_csv(tmp_path, "", "system,x\n"))
    with pytest.raises(BadInputError, match="no column system"):
        read_published_table(write_csv(tmp_path, "", ""))
    with pytest.raises(BadInputError, match="cannot be read"):
        read_published_table(tmp_path / "missing.csv")
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadInputError):
        read_published_table(binary)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.booleans())
def test_any_text_is_a_table_or_bad_input(tmp_path_factory: pytest.TempPathFactory, text: str, headed: bool) -> None:
    path = tmp_path_factory.mktemp("table") / "t.csv"
    path.write_text((HEADER if headed else "") + text, encoding="utf-8", errors="replace", newline="")
    found: list[MeasuredSize] = []
    with suppress(BadInputError):
        found = read_published_table(path)
    assert all(one.time_s > 0 and one.size_bytes >= 0 for one in found)


# The file


def make_table() -> CollectiveTable:
    curves = [
        make_curve(measure(kinked), sources=["a run"]),
        make_curve(measure(alpha_beta), members=4, fingerprint="f" * 12),
        make_curve(measure(square_root), members=4, dtype="bfloat16", hosts=2),
        make_curve(measure(alpha_beta), members=4, variant={"reduction": "max"}),
    ]
    return CollectiveTable(created_at="2026-01-01T00:00:00Z", costs=[fit_collective(curve) for curve in curves])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = make_table()
    path = tmp_path / "new" / "costs.json"
    written = write_collective_table(path, table.costs)
    assert written.costs == table.costs
    assert read_collective_table(path) == written
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"], "nothing is left beside it"
    content = json.loads(path.read_text())
    assert (content["record"], content["schema_version"]) == ("collective_table", 1)
    assert content["costs"][0]["curve"]["model"] == "piecewise"


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.json"):
        write_collective_table(tmp_path / "costs.csv", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteError, match="cannot be written"):
        write_collective_table(tmp_path / "file" / "costs.json", [])


def changed(path: Path, change: Any) -> Path:
    write_collective_table(path, make_table().costs[:1])
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(record="run"), "holds a 'run' record"),
        (lambda t: t.update(schema_version=0), "which no release wrote"),
        (lambda t: t.pop("costs"), "breaks its format.*costs"),
        (lambda t: t["costs"][0].update(members="eight"), "breaks its format.*members"),
        (lambda t: t["costs"][0]["curve"].update(model="magic"), "breaks its format.*magic"),
        (lambda t: t["costs"][0]["curve"]["times_s"].reverse(), "never fall"),
        (lambda t: t["costs"][0].update(smallest_bytes=0), "no range of sizes"),
        (lambda t: t["costs"][0].update(log_spread=-1), "log_spread"),
        (lambda t: t["costs"][0].update(candidates={}), "candidates"),
    ],
)
def test_bad_tables_are_named_with_the_rule(tmp_path: Path, change: Any, message: str) -> None:
    path = changed(tmp_path / "t.json", change)
    with pytest.raises(BadInputError, match=message) as caught:
        read_collective_table(path)
    assert (caught.value.where, bool(caught.value.hint)) == (str(path), True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"record": "collective_table"}'])
def test_what_is_no_table_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="not a collective_table record"):
        read_collective_table(path)
    with pytest.raises(BadInputError, match="cannot be read"):
        read_collective_table(tmp_path / "missing.json")


def test_a_table_of_the_future_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "t.json", lambda t: t.update(schema_version=2))
    with pytest.raises(NewerVersionError, match="reads up to 1"):
        read_collective_table(path)


def test_finding_a_cost() -> None:
    table = make_table()
    costs = table.costs
    assert find_cost(table, operation="all_reduce", members=8) is costs[0]
    assert find_cost(table, operation="all_reduce", members=4, dtype="float32") is costs[1]
    assert find_cost(table, operation="all_reduce", members=4, dtype="bfloat16", backend="nccl") is costs[2]
    assert find_cost(table, operation="all_reduce", members=4, variant={"reduction": "max"}) is costs[3]
    assert find_cost(table, operation="all_reduce", members=4, system="f" * 12) is costs[1]
    assert find_cost(table, operation="all_reduce", members=8, system="8× Test GPU", device="cuda") is costs[0]


def test_a_cost_that_is_not_there_or_not_the_only_one() -> None:
    table = make_table()
    with pytest.raises(UsageError, match="no cost of all_reduce, 6 ranks, nccl") as caught:
        find_cost(table, operation="all_reduce", members=6, backend="nccl")
    assert "all_reduce, 8 ranks, nccl, float32" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="2 costs of the table answer"):
        find_cost(table, operation="all_reduce", members=4)
    with pytest.raises(UsageError, match="no cost of broadcast") as caught:
        find_cost(msgspec.structs.replace(table, costs=[]), operation="broadcast", members=2)
    assert caught.value.hint == "it has: nothing"
