"""What all plots are made of. All text in the returned markup is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepscope.report.axes import Axis, Tick

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 16, 24
MAX_DRAWN_POINTS = 600
"""Dots in one plot; more would only cover each other."""
MAX_SERIES = 6
"""Colours of the page: lines in one plot, one colour each."""


def draw_text(x: float, y: float, text: str, kind: str, anchor: str, *, turn: float = 0.0) -> str:
    """`turn` in degrees, clockwise, around the text's anchor."""
    classes = f' class="{kind}"' if kind else ""
    turned = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}{turned}>{escape(text)}</text>'


def draw_tick_below(tick: Tick, x: Axis, y: float) -> str:
    place = x.place(tick.value)
    anchor = "end" if place > x.end - 16 else "middle"
    return f'<path class="axis" d="M{place:.1f} {y}v4"/>' + draw_text(place, y + 16, tick.text, "", anchor)


def draw_grid_line(x: Axis, y: float, label: str) -> str:
    return f'<path class="grid" d="M{x.start:.1f} {y:.1f}H{x.end:.1f}"/>' + draw_text(
        x.start - 5, y + 4, shorten(label), "", "end"
    )


def shorten(text: str) -> str:
    """`1.000 ms` → `1 ms`: an axis label needs no more digits than it has."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def wrap_svg(
    kind: str, name: str, parts: Sequence[str], *, height: float = HEIGHT, width: float = WIDTH, role: str = "img"
) -> str:
    """`role` is `group` where there are links inside: readers of the screen would not find them in an image."""
    return (
        f'<svg class="plot {kind}" viewBox="0 0 {width} {height:g}" role="{role}" aria-label="{escape(name)}">'
        f"<title>{escape(name)}</title>{''.join(parts)}</svg>"
    )
