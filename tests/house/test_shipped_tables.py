"""The kernel tables that ship: whole, small enough, with their machine, and nowhere faster than memory can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.ops import operators
from stepscope.records import System, parse_document
from stepscope.store import KernelRow, read_kernel_table
from stepscope.system import find_device_peak

FOLDER = Path(__file__).parents[2] / "data" / "kernels"
TABLES = sorted(FOLDER.glob("*.csv.gz"))
LARGEST_BYTES = 6_000_000


@pytest.fixture(scope="module", params=TABLES, ids=lambda path: path.name)
def table(request: pytest.FixtureRequest) -> tuple[Path, list[KernelRow]]:
    return request.param, read_kernel_table(request.param)


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


def test_no_cold_row_is_faster_than_the_datasheet(table: tuple[Path, list[KernelRow]]) -> None:
    for row in table[1]:
        peak = find_device_peak(row.device)
        if peak is None or row.cache != "cold" or row.unique_bytes is None:
            continue
        rate = row.unique_bytes / row.latency_s
        assert rate <= peak.memory_bytes_per_s, (row.op, row.direction, row.parameters, rate / 1e12)


def test_times_are_in_order(table: tuple[Path, list[KernelRow]]) -> None:
    """Kernels alone take no longer than a replay, and that no longer than a marked call, but for noise."""
    with_graph = [row for row in table[1] if row.graph_s and row.kernel_s]
    for row in with_graph:
        assert row.latency_low_s is not None
        assert row.latency_low_s <= row.latency_s
    late = [row for row in with_graph if row.graph_s and row.graph_s > 1.1 * row.latency_s]
    assert len(late) <= 0.02 * len(with_graph)
