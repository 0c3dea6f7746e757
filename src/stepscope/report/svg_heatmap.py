"""Heat maps of pairs of ranks: the stronger the colour, the slower; what a finding is about has an outline."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import NamedTuple

from stepscope.report.heatmap import Heatmap
from stepscope.report.svg_parts import WIDTH, draw_text, wrap_svg

MAX_WRITTEN = 10
"""Up to so many rows the cells have room for their numbers."""
MAX_NAMED = 24
"""Up to so many rows the hosts stand beside them."""

_RIGHT, _TOP, _BOTTOM = 4, 24, 20
_LEAST, _MOST = 0.05, 0.6
"""Opacity of the fastest and the slowest: numbers can be read above it in both themes."""
_LETTER = 6.2
"""Width of a letter of the axes at most."""
_LONGEST = 14
"""Letters of a host's name beside a row."""


class _Square(NamedTuple):
    """Where the matrix stands, and the size of one of its cells."""

    left: float
    cell: float


def draw_heatmap(heatmap: Heatmap, name: str) -> str:
    labels = _row_labels(heatmap)
    count = len(labels)
    left = 8 + _LETTER * max(map(len, labels), default=0)
    square = _Square(left, (WIDTH - left - _RIGHT) / max(1, count))
    parts = [_axes(heatmap, labels, square)]
    parts += [_cell(heatmap, square, i, j) for i in range(count) for j in range(count) if i != j]
    parts.append(_home_borders(heatmap.units.homes, square))
    return wrap_svg("heatmap", name, parts, height=math.ceil(_TOP + count * square.cell + _BOTTOM))


def _row_labels(heatmap: Heatmap) -> list[str]:
    """The rank, and its host where each has another one."""
    units = heatmap.units
    if len(set(units.homes)) < len(units.homes) or len(units.homes) > MAX_NAMED:
        return units.names
    return [f"{name} {_shorten(home)}" for name, home in zip(units.names, units.homes, strict=True)]


def _shorten(name: str) -> str:
    """The end of a host's name tells it apart."""
    return name if len(name) <= _LONGEST else f"…{name[-_LONGEST + 1 :]}"


def _axes(heatmap: Heatmap, labels: list[str], square: _Square) -> str:
    """Every label where there is room, else every second, fourth …"""
    left, cell = square
    names = heatmap.units.names
    widest = _LETTER * max(map(len, names), default=0) + 4
    across, down = (label_step(room, cell) for room in (widest, 12.0))
    parts = [
        draw_text(left - 4, _TOP + (i + 0.5) * cell + 4, labels[i], "", "end") for i in range(0, len(labels), down)
    ]
    parts += [
        draw_text(left + (j + 0.5) * cell, _TOP - 6, names[j], "", "middle") for j in range(0, len(names), across)
    ]
    foot = f"rows send, columns receive ({heatmap.units.kind})"
    parts.append(draw_text(left + len(names) * cell / 2, _TOP + len(names) * cell + 15, foot, "", "middle"))
    return "".join(parts)


def label_step(room: float, cell: float) -> int:
    """1 where every cell has room for its label, else 2, 4 …"""
    step = 1
    while step * cell < room:
        step *= 2
    return step


def _cell(heatmap: Heatmap, square: _Square, i: int, j: int) -> str:
    left, cell = square
    box = Box(left + j * cell, _TOP + i * cell, cell, cell)
    said = describe_cell(heatmap, i, j)
    if heatmap.heat[i][j] is None:
        return draw_cell(box, None, said, kind="failed" if (i, j) in heatmap.units.failed else "gap")
    text = heatmap.texts[i][j] if len(heatmap.texts) <= MAX_WRITTEN else ""
    return draw_cell(box, heatmap.heat[i][j], said, kind="marked" if (i, j) in heatmap.marked else "", text=text)


class Box(NamedTuple):
    x: float
    y: float
    wide: float
    high: float


def draw_cell(box: Box, heat: float | None, said: str, *, kind: str = "", text: str = "") -> str:
    """`heat` from 0 to 1; None: no value. `said` shows when the pointer rests on the cell, `text` stands in it."""
    x, y, wide, high = box
    narrow = min(wide, high)
    gap = min(1.0, narrow / 10)
    place = f'x="{x + gap / 2:.1f}" y="{y + gap / 2:.1f}" width="{wide - gap:.1f}" height="{high - gap:.1f}"'
    look = f'class="{f"cell {kind}".strip()}" {place}'
    if heat is not None:
        # In small cells a thick outline would hide what it marks.
        look += f' fill-opacity="{_LEAST + heat * (_MOST - _LEAST):.2f}" stroke-width="{min(1.4, narrow / 12):.1f}"'
    drawn = f"<rect {look}><title>{escape(said)}</title></rect>"
    return drawn + draw_text(x + wide / 2, y + high / 2 + 4, text, "value", "middle") if text else drawn


def describe_cell(heatmap: Heatmap, i: int, j: int) -> str:
    units = heatmap.units
    failure = units.failed.get((i, j))
    measured = heatmap.details[i][j] or (None if failure else "not measured")
    return f"{units.long_names[i]} → {units.long_names[j]}: {', '.join(filter(None, (measured, failure)))}"


def _home_borders(homes: list[str], square: _Square) -> str:
    """Lines between hosts, where one has several ranks."""
    if len(set(homes)) in {0, 1, len(homes)}:
        return ""
    left, cell = square
    size = len(homes) * cell
    steps = [
        f"M{left + k * cell:.1f} {_TOP}v{size:.1f}M{left:.1f} {_TOP + k * cell:.1f}h{size:.1f}"
        for k, (home, following) in enumerate(pairwise(homes), start=1)
        if home != following
    ]
    return f'<path class="home" d="{"".join(steps)}"/>'
