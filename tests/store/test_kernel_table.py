from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.bench.ops import operators
from stepscope.cli.runs import export_table
from stepscope.core.errors import BadInputError, UsageError
from stepscope.records import KernelUse, make_request
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

words = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
likes = st.sampled_from(
    ["0213", "1032", "5", "1.5", "-0", "1e6", "1E6", "True", "False", "nan", "inf", "1_0", '"', '"5"', ""]
)
"""Words that look like something else."""
times = st.floats(1e-9, 1e3).map(lambda value: float(f"{value:.6g}"))
numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()


rows = st.builds(
    KernelRow,
    op=words,
    device=words,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    parameters=st.dictionaries(st.sampled_from(["m", "n", "k", "layout"]), numbers | words | likes),
    direction=st.sampled_from(["forward", "backward"]),
    cache=st.sampled_from(["warm", "cold"]),
    latency_s=times,
    latency_low_s=st.none() | times,
    samples=st.none() | st.integers(1, 100),
    graph_s=st.none() | times,
    flops=st.none() | st.integers(0, 2**60),
    kernels=st.dictionaries(words, st.floats(0.1, 100), max_size=2),
    config=st.none() | words,
    system=st.none() | words,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, listed: list[KernelRow]) -> None:
    path = tmp_path_factory.mktemp("table") / "t.csv.gz"
    assert write_kernel_table(path, listed) == len(listed)
    read = read_kernel_table(path)
    assert read == listed
    # 1 == 1.0 == True: equal is not enough
    for ours, theirs in zip(listed, read, strict=True):
        assert {name: type(value) for name, value in theirs.parameters.items()} == {
            name: type(value) for name, value in ours.parameters.items()
        }


def test_words_that_look_like_numbers_survive(tmp_path: Path) -> None:
    parameters = {
        "order": "0213",
        "turn": "1032",
        "p": 0.1,
        "alpha": 1.0,
        "rate": 1e6,
        "m": 213,
        "fused": True,
        "x": "True",
    }
    row = KernelRow(op="permute", device="d", dtype="float32", parameters=parameters, latency_s=1e-3)
    path = tmp_path / "t.csv"
    write_kernel_table(path, [row])
    header, line = path.read_text().splitlines()
    assert header.startswith("op,device,dtype,order,turn,p,alpha,rate,m,fused,x,pass,")
    # 0213 is no number as it stands; 1032 would be one
    assert line.startswith('permute,d,float32,0213,"""1032""",0.1,1.0,1000000.0,213,True,"""True""",forward,')
    (read,) = read_kernel_table(path)
    assert read.parameters == parameters
    assert [type(value) for value in read.parameters.values()] == [str, str, float, float, float, int, bool, str]


def test_a_word_in_torn_quotes_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('op,device,dtype,order,pass,latency_s\npermute,d,float32,"""10",forward,1e-3\n')
    with pytest.raises(BadInputError, match="not a row") as caught:
        read_kernel_table(path)
    assert caught.value.where == f"{path}:2"


def test_tables_without_config_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("op,device,dtype,m,pass,latency_s\ngemm,d,float32,8,forward,1e-3\n")
    (row,) = read_kernel_table(path)
    assert (row.config, row.parameters) == (None, {"m": 8})


@pytest.mark.parametrize("name", ["t.parquet", "t", "t.gz", "t.csv.zip", "t.json"])
def test_a_table_is_not_written_under_another_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.csv or \.csv\.gz"):
        write_kernel_table(tmp_path / name, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t.csv", "t", "t.parquet.gz"])
def test_parquet_is_not_written_under_another_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"named \.parquet"):
        write_parquet(tmp_path / name, [])
    assert not list(tmp_path.iterdir())


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
    assert (row.config, row.system) == ("custom", make_system().fingerprint)


def test_exporting_all_runs_tells_which_are_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [make_case(m=m, dtype="float32", device="cpu") for m in (8, 16)]
    store, output = tmp_path / "store", tmp_path / "t.csv"
    whole, stopped, damaged = (make_folder(store, cases) for _ in range(3))
    other = create_run(store, verb="comms", name="x", command=["x"], request=make_request("comms", {}), cases=cases)
    for folder, count in ((whole, 2), (stopped, 1)):
        with RunWriter(folder) as writer:
            for case in cases[:count]:
                writer.append(make_result(case, observed={"flops": 1, "moved_bytes": 2}), [make_samples(case, [1e-3])])
            writer.write_system(make_system())
            if folder == whole:
                writer.finish()
    (damaged / "plan.json").write_text("{")
    export_table([], "table", output, store)
    told = capsys.readouterr().err
    assert f"interrupted: {stopped.name}, with 1 of its 2 cases" in told
    assert "left out: " in told
    assert damaged.name in told
    assert whole.name not in told
    assert other.name not in told
    assert sorted(row.parameters["m"] for row in read_kernel_table(output)) == [8, 8, 16]


@pytest.mark.parametrize(("kind", "name"), [("table", "t.parquet"), ("parquet", "t.csv")])
def test_exports_look_at_the_name_first(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        export_table([str(tmp_path / "absent.csv")], kind, tmp_path / name, tmp_path)
    assert caught.value.where == str(tmp_path / name)


def test_tables_are_made_of_operator_runs_only(tmp_path: Path) -> None:
    case = make_case(size=8)
    folder = create_run(
        tmp_path, verb="comms", name="x", command=["x"], request=make_request("comms", {}), cases=[case]
    )
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
        ("op,device,dtype,pass,latency_s\nx,y,float32,forward,fast\n", ":2", "Expected `float`"),
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


def parquet_types(path: Path) -> dict[str, str]:
    import duckdb

    quoted = str(path).replace("'", "''")
    return {name: kind for name, kind, *_ in duckdb.sql(f"DESCRIBE SELECT * FROM read_parquet('{quoted}')").fetchall()}


FIXED_TYPES = {
    **dict.fromkeys(["op", "device", "dtype", "pass", "cache", "kernels", "config", "system"], "VARCHAR"),
    **dict.fromkeys(["latency_s", "latency_low_s", "latency_high_s", "wall_s", "graph_s", "kernel_s"], "DOUBLE"),
    **dict.fromkeys(["samples", "flops", "bytes", "unique_bytes"], "BIGINT"),
}


def test_parquet_has_types(tmp_path: Path) -> None:
    import duckdb

    first = {"m": 8, "layout": "nn", "order": "0213", "p": 0.5, "fused": True, "dim": 1, "in": 3}
    second = {"rows": 5, "p": 1, "fused": False, "dim": "all", "order": "1032"}
    listed = [
        KernelRow(op="gemm", device="d", dtype="float32", parameters=first, latency_s=1e-3, flops=7, config="A"),
        KernelRow(op="softmax", device="d", dtype="float32", parameters=second, latency_s=2e-3, kernels={"k": 2.0}),
    ]
    path = tmp_path / "it's.parquet"
    assert write_parquet(path, listed) == 2
    parameters = {
        **dict.fromkeys(["m", "in", "rows"], "BIGINT"),
        **dict.fromkeys(["layout", "order", "dim"], "VARCHAR"),
        "p": "DOUBLE",
        "fused": "BOOLEAN",
    }
    types = parquet_types(path)
    assert types == {**FIXED_TYPES, **parameters}
    # the columns of the CSV, in its order
    assert list(types) == [*LEADING, "m", "layout", "order", "p", "fused", "dim", "in", "rows", *TRAILING]
    quoted = str(path).replace("'", "''")
    names = 'm, "rows", layout, "order", p, fused, dim, latency_s, flops, kernels, config'
    assert duckdb.sql(f"SELECT {names} FROM read_parquet('{quoted}')").fetchall() == [
        (8, None, "nn", "0213", 0.5, True, "1", 1e-3, 7, None, "A"),
        (None, 5, None, "1032", 1.0, False, "all", 2e-3, None, '{"k":2.0}', None),
    ]


def test_an_empty_parquet_has_the_same_types(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    assert write_parquet(path, []) == 0
    assert parquet_types(path) == FIXED_TYPES
