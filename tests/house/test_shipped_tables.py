"""The kernel tables that ship: whole, small enough, with their machine, and nowhere faster than memory can be."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from stepscope.bench.ops import operators
from stepscope.records import System, parse_document
from stepscope.store import KernelRow, read_kernel_table
from stepscope.system import find_device_peak

FOLDER = Path(__file__).parents[2] / "data" / "kernels"
TABLES = sorted(FOLDER.glob("*.csv.gz"))
LARGEST_BYTES = 6_000_000
H200 = FOLDER / "nvidia-h200.csv.gz"


def first_device(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return next(csv.DictReader(file))["device"]


GPU_TABLES = [path for path in TABLES if find_device_peak(first_device(path))]
NO_GPU_TABLE = pytest.param(None, marks=pytest.mark.skip(reason="no table of a GPU with a known peak ships yet"))


@pytest.fixture(scope="module", params=TABLES, ids=lambda path: path.name)
def table(request: pytest.FixtureRequest) -> tuple[Path, list[KernelRow]]:
    return request.param, read_kernel_table(request.param)


@pytest.fixture(scope="module", params=GPU_TABLES or [NO_GPU_TABLE], ids=lambda path: path.name if path else "none")
def gpu_table(request: pytest.FixtureRequest) -> list[KernelRow]:
    return read_kernel_table(request.param)


def test_there_are_tables() -> None:
    assert TABLES


def test_rows_belong_to_the_machine_beside_them(table: tuple[Path, list[KernelRow]]) -> None:
    path, rows = table
    record = path.with_name(path.name.replace(".csv.gz", ".system.json"))
    system = parse_document(record.read_bytes(), System, where=str(record))
    assert {row.system for row in rows} == {system.fingerprint}
    assert path.stat().st_size < LARGEST_BYTES
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()


def test_rows_are_what_the_operators_declare(table: tuple[Path, list[KernelRow]]) -> None:
    known = operators()
    for row in table[1]:
        operator = known[row.op]
        assert row.parameters.keys() == {parameter.name for parameter in operator.parameters}
        assert row.direction in operator.passes
        work = operator.work(row.parameters, row.dtype, row.direction)
        assert (row.flops, row.bytes) == work
    passes = {(row.op, row.direction) for row in table[1]}
    assert len({op for op, _ in passes}) >= 15
    assert len([op for op, direction in passes if direction == "backward"]) >= 10


def test_times_lie_in_their_intervals(table: tuple[Path, list[KernelRow]]) -> None:
    assert table[1]
    for row in table[1]:
        assert row.latency_low_s is not None
        assert row.latency_high_s is not None
        assert row.latency_low_s <= row.latency_s <= row.latency_high_s


def test_every_row_says_its_config(table: tuple[Path, list[KernelRow]]) -> None:
    assert table[1]
    assert all(row.config for row in table[1])


def test_ceilings_are_told_apart() -> None:
    rows = read_kernel_table(FOLDER / "amd-epyc-2-cores.csv.gz")
    ceilings = [(row.op, row.dtype, row.cache) for row in rows if row.config == "ceiling"]
    assert ceilings == [
        ("gemm", "float32", "cold"),
        ("gemm", "bfloat16", "cold"),
        ("gemm", "int8", "cold"),
        ("read", "float32", "cold"),
        ("memset", "int8", "cold"),
        ("memcpy", "int8", "cold"),
    ]
    assert {row.config for row in rows[len(ceilings) :]} == {"custom"}


def test_no_cold_row_is_faster_than_the_datasheet(gpu_table: list[KernelRow]) -> None:
    peak = find_device_peak(gpu_table[0].device)
    assert peak is not None
    assert {row.device for row in gpu_table} == {gpu_table[0].device}
    cold = [row for row in gpu_table if row.cache == "cold"]
    assert len({row.op for row in cold}) >= 10
    for row in cold:
        assert row.unique_bytes is not None
        rate = row.unique_bytes / row.latency_s
        assert rate <= peak.memory_bytes_per_s, (row.op, row.direction, row.parameters, rate / 1e12)


def test_times_are_in_order(gpu_table: list[KernelRow]) -> None:
    """Kernels alone take no longer than a replay, and that no longer than a marked call, but for noise."""
    with_graph = [row for row in gpu_table if row.graph_s and row.kernel_s]
    assert len(with_graph) >= 100
    late = [row for row in with_graph if row.graph_s and row.graph_s > 1.1 * row.latency_s]
    assert len(late) <= 0.02 * len(with_graph)


def test_the_h200_table_is_whole() -> None:
    if not H200.exists():
        pytest.skip("the H200 table is not made yet")
    rows = read_kernel_table(H200)
    assert len(rows) >= 12_000
    assert len({row.op for row in rows}) >= 15
    assert {row.direction for row in rows} >= {"forward", "backward"}
    assert {row.dtype for row in rows} >= {"float32", "tf32", "bfloat16"}
    assert {row.cache for row in rows} == {"warm", "cold"}
    assert {row.device for row in rows} == {"NVIDIA H200"}
