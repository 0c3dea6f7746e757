from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.errors import BadInputError, UsageError
from stepscope.ops import operators
from stepscope.records import KernelUse
from stepscope.store import (
    KernelRow,
    RunWriter,
    StoredRun,
    create_run,
    read_kernel_table,
    rows_of_run,
    write_kernel_table,
    write_parquet,
)
from stepscope.store.kernel_table import LEADING, TRAILING

SHARED = Path(__file__).parents[3] / "shared" / "data" / "kernels"

words = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda text: not _is_number(text) and text not in {"True", "False"}
)
times = st.floats(1e-9, 1e3).map(lambda value: float(f"{value:.6g}"))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


rows = st.builds(
    KernelRow,
    op=words,
    device=words,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    parameters=st.dictionaries(st.sampled_from(["m", "n", "k", "layout"]), st.integers(0, 2**40) | words),
    direction=st.sampled_from(["forward", "backward"]),
    cache=st.sampled_from(["warm", "cold"]),
    latency_s=times,
    latency_low_s=st.none() | times,
    samples=st.none() | st.integers(1, 100),
    graph_s=st.none() | times,
    flops=st.none() | st.integers(0, 2**60),
    kernels=st.dictionaries(words, st.floats(0.1, 100), max_size=2),
    system=st.none() | words,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, listed: list[KernelRow]) -> None:
    path = tmp_path_factory.mktemp("table") / "t.csv.gz"
    assert write_kernel_table(path, listed) == len(listed)
    assert read_kernel_table(path) == listed


def test_a_run_becomes_a_table(tmp_path: Path) -> None:
    cases = [make_case(m=m, dtype="float32", device="cpu", cache="cold") for m in (8, 16)]
    folder = make_folder(tmp_path, cases)
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        uses = [KernelUse(name="void k<1, 2>", count=2.0, duration_s=1e-6)]
        first = make_result(cases[0], observed={"flops": 10, "moved_bytes": 20}, kernels=uses)
        writer.append(first, [make_samples(cases[0], [1e-3, 2e-3, 3e-3])])
        from stepscope.records import Failure

        writer.append(make_result(cases[1], failure=Failure(kind="x", message="no")))
        writer.finish()
    (row,) = rows_of_run(StoredRun(folder))
    assert row.op == "gemm"
    assert row.device == "Test CPU"
    assert row.parameters == {"m": 8}
    assert (row.direction, row.cache, row.latency_s, row.wall_s) == ("forward", "cold", 2e-3, 2e-3)
    assert (row.flops, row.bytes, row.kernels) == (10, 20, {"void k<1, 2>": 2.0})
    assert row.system == make_system().fingerprint


def test_tables_are_made_of_operator_runs_only(tmp_path: Path) -> None:
    case = make_case(size=8)
    folder = create_run(tmp_path, verb="comms", name="x", command=["x"], request={}, cases=[case])
    with pytest.raises(UsageError, match="operator runs"):
        list(rows_of_run(StoredRun(folder)))


def test_no_parameter_has_the_name_of_a_column() -> None:
    taken = {*LEADING, *TRAILING}
    for operator in operators().values():
        assert not taken & {parameter.name for parameter in operator.parameters}, operator.name


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("op,device,latency_s\nx,y,1\n", ":1", "no column dtype"),
        ("op,device,dtype,latency_s\nx,y,float32,fast\n", ":2", "could not convert"),
        ("op,device,dtype,latency_s\nx,y,float32,1e-3\nx,y,float32\n", ":3", "3 cells instead of 4"),
        ("op,device,dtype,latency_s\nx,y,float32,0\n", ":2", "not above 0"),
        ("op,device,dtype,latency_s\nx,y,float32,nan\n", ":2", "not above 0"),
        ("", ":1", "no column op"),
    ],
)
def test_bad_tables_are_named_with_their_line(tmp_path: Path, text: str, place: str, rule: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(BadInputError, match=rule) as caught:
        read_kernel_table(path)
    assert caught.value.where == f"{path}{place}"


def test_a_torn_file_is_said_to_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"op,device,dtype,latency_s\n" + b"x,y,float32,1\n" * 5000)[:-20])
    with pytest.raises(BadInputError, match="cannot be read"):
        read_kernel_table(path)
    with pytest.raises(BadInputError):
        read_kernel_table(tmp_path / "absent.csv")


def test_tables_of_others_get_our_names(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("op,device,dtype,b,m,n,k,latency_s\nbmm,A100,float32,6,27,21,390,3.5e-05\n"
                    "linear,A100,float32,1,58,13,141,5e-05\n")  # fmt: skip
    bmm, linear = read_kernel_table(path)
    # there n is the reduction dimension
    assert bmm.parameters == {"batch": 6, "m": 27, "k": 21, "n": 390, "layout": "nn", "batching": "packed"}
    assert linear.parameters == {"batch": 58, "in": 13, "out": 141}
    assert linear.cache == "warm"
    assert linear.direction == "forward"


@pytest.mark.parametrize(
    ("name", "count", "ops"),
    [
        ("train_bmm", 87_623, {"bmm"}),
        ("train_linear", 32_224, {"linear"}),
        ("train_softmax", 1_500, {"softmax"}),
        ("train_layer_norm", 1_505, {"layer_norm"}),
        ("train_elementwise", 8_250, {"elementwise", "activation"}),
    ],
)
def test_the_public_tables_are_read_whole(name: str, count: int, ops: set[str]) -> None:
    path = SHARED / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip("the public kernel tables are not here")
    table = read_kernel_table(path)
    assert len(table) == count
    assert {row.op for row in table} == ops
    known = operators()
    for row in table[:: len(table) // 50]:
        declared = {parameter.name for parameter in known[row.op].parameters}
        assert row.parameters.keys() <= declared


def test_parquet_keeps_types(tmp_path: Path) -> None:
    import duckdb

    listed = [
        KernelRow(op="gemm", device="d", dtype="float32", parameters={"m": 8, "layout": "nn"}, latency_s=1e-3, flops=7),
        KernelRow(op="softmax", device="d", dtype="float32", parameters={"rows": 5}, latency_s=2e-3),
    ]
    path = tmp_path / "it's.parquet"
    assert write_parquet(path, listed) == 2
    quoted = str(path).replace("'", "''")
    query = duckdb.sql(f"SELECT m, \"rows\", layout, latency_s, flops FROM read_parquet('{quoted}')")
    assert query.fetchall() == [(8, None, "nn", 1e-3, 7), (None, 5, None, 2e-3, None)]
