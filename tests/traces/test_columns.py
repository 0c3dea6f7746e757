"""Columns of the compiled scanner grow by doubling; rows of the tolerant parser are put between theirs afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from same_rows import rows_of

from stepscope.formats.readers.kineto import scanner as columns
from stepscope.formats.readers.kineto.scanner import GrowingColumn, scan_kineto
from stepscope.formats.readers.kineto.tolerant import read_kineto

HANDED_OVER: dict[str, Callable[[int, int], bool]] = {
    "no row": lambda row, rows: False,
    "every row": lambda row, rows: True,
    "the first": lambda row, rows: row == 0,
    "the last": lambda row, rows: row == rows - 1,
    "every third": lambda row, rows: row % 3 == 0,
    "all but one": lambda row, rows: row != rows // 2,
}


@pytest.mark.parametrize("name", HANDED_OVER)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_a_trace_around_every_doubling(name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time with more than three decimals is handed over; the columns begin with room for eight rows."""
    monkeypatch.setattr(columns, "FIRST_CELLS", 8)
    path = tmp_path / "t.json"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"op{row % 5}", "pid": 1, "tid": 1, "ts": row, "dur": 1.5,
         "args": {"External id": row, "unknown": [row]}}
        for row in range(rows)
    ]  # fmt: skip
    texts = [
        json.dumps(one).replace('"dur": 1.5', '"dur": 1.50001' if HANDED_OVER[name](row, rows) else '"dur": 1.5')
        for row, one in enumerate(events)
    ]
    path.write_text('{"traceEvents": [' + ", ".join(texts) + "]}")
    compiled, tolerant = scan_kineto(path, piece_bytes=500), read_kineto(path)
    assert compiled.core["start_ns"].tolist() == tolerant.core["start_ns"].tolist()
    assert rows_of(compiled) == rows_of(tolerant)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("past", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("doublings", [0, 1, 3])
@pytest.mark.parametrize("in_file", [False, True])
def test_insertion_at_the_edge_of_the_room(  # noqa: PLR0917
    share: float, past: int, doublings: int, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scanned and inserted cells together reach just below, to and beyond each capacity, in sections and at once."""
    monkeypatch.setattr(columns, "FIRST_CELLS", 1024)
    monkeypatch.setattr(columns, "_MOVED_CELLS", 100)
    total = (1024 << doublings) + past
    inserted = round(total * share)
    dice = np.random.default_rng(total + inserted)
    kept = dice.integers(0, 1 << 30, total - inserted)
    cells = dice.integers(0, 1 << 40, inserted)
    places = np.sort(dice.integers(0, len(kept) + 1, inserted))
    column = GrowingColumn("correlation", tmp_path if in_file else None)
    for part in np.array_split(kept, 7):
        column.extend(part)
    column.insert(places, cells)
    assert column.finish().tolist() == np.insert(kept, places, cells).tolist()


def test_times_of_nineteen_digits(tmp_path: Path) -> None:
    """Microseconds since 1970 with nanoseconds: more rows than the first room has."""
    path = tmp_path / "t.json"
    record = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 17000000%08d.123, "dur": 1.5}'
    path.write_text('{"traceEvents": [' + ",".join(record % row for row in range(20_000)) + "]}")
    compiled = scan_kineto(path)
    assert compiled.core["start_ns"].tolist() == [1700000000000000123 + 1000 * row for row in range(20_000)]
