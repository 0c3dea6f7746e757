"""Timelines from whole columns: rows come in parts (a table each), belong to processes, and are joined per process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stepscope.formats.timeline import COLUMN, COLUMNS, MISSING, Array, Block, Integers, Thread, Timeline


class RowPart(NamedTuple):
    """Rows of one table: cells by column of a Timeline (texts as codes), and whose they are."""

    cells: dict[str, Any]
    process: Integers
    thread: Integers | None = None
    """Any number that tells threads apart; None: rows of a device."""


def join_parts(parts: Sequence[RowPart], process: int, texts: Sequence[str]) -> tuple[Timeline, list[int]]:
    """The rows of one process, in the order of the parts; and the numbers of its threads, in the order of `threads`."""
    mine: list[tuple[RowPart, Integers]] = [(part, np.flatnonzero(part.process == process)) for part in parts]
    chosen = [(part, rows) for part, rows in mine if len(rows)]
    names = {name for part, _ in chosen for name in part.cells}
    columns = {name: _joined(name, chosen) for name in names}
    columns["thread"], numbers = _thread_indices(chosen)
    count = len(columns["thread"])
    timeline = Timeline(
        rank=None,
        world_size=None,
        core={spec.name: _core(spec.name, columns, count) for spec in COLUMNS if spec.block is None},
        blocks=_blocks(columns, count),
        texts=texts,
        threads=[Thread("", str(number)) for number in numbers],
    )
    return timeline, numbers


def _joined(name: str, chosen: list[tuple[RowPart, Integers]]) -> Any:
    missing = np.nan if COLUMN[name].form == "float" else MISSING
    cells = [part.cells[name][rows] if name in part.cells else np.full(len(rows), missing) for part, rows in chosen]
    return np.concatenate(cells)


def _thread_indices(chosen: list[tuple[RowPart, Integers]]) -> tuple[Integers, list[int]]:
    host = np.concatenate([np.full(len(rows), part.thread is not None) for part, rows in chosen])
    numbers = [part.thread[rows] for part, rows in chosen if part.thread is not None]
    used, inverse = np.unique(np.concatenate(numbers) if numbers else np.empty(0, np.int64), return_inverse=True)
    index = np.full(len(host), MISSING, np.int64)
    index[host] = inverse
    return index, used.tolist()


def _core(name: str, columns: dict[str, Any], count: int) -> Array:
    if name not in columns:
        return np.full(count, MISSING, np.int64)
    cells: Array = columns[name].astype(np.uint8 if name == "kind" else np.int64)
    return cells


def _blocks(columns: dict[str, Any], count: int) -> dict[str, Block]:
    found: dict[str, dict[str, Any]] = {}
    for name, cells in columns.items():
        block = COLUMN[name].block
        if block is not None:
            found.setdefault(block, {})[name] = cells
    blocks: dict[str, Block] = {}
    for block, named in found.items():
        has = np.zeros(count, bool)
        for name, cells in named.items():
            has |= ~np.isnan(cells) if COLUMN[name].form == "float" else cells != MISSING
        rows = np.flatnonzero(has)
        if len(rows):
            blocks[block] = Block(rows=rows, columns={name: cells[rows] for name, cells in named.items()})
    return blocks
