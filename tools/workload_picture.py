"""The picture of docs/workloads.md: how much faster the optimized implementations are, from the same values as its
table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from stepscope.core.units import format_significant
from stepscope.report.charts import Axis
from workload_table import Line, format_precision

WIDTH, ROW, TOP, LABELS, RIGHT = 720, 24, 54, 150, 120
TICKS = (1, 2, 5, 10, 20)
STYLE = (
    "text{fill:#333}.axis{fill:#777}.grid{stroke:#8884}.any{fill:#4a6fa5}.same{fill:#d98b3a}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{fill:#999}}"
)
TITLE = "Optimized over out of the box"


def draw_gains(lines: list[Line]) -> str:
    """One bar for each benchmark, on a logarithmic axis; its first part is what the same precision gains."""
    height = TOP + ROW * len(lines) + 30
    x = Axis(1.0, 25.0, LABELS, WIDTH - RIGHT, logarithmic=True)
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t">',
        f'<title id="t">{TITLE}</title><style>{STYLE}</style>',
        *_draw_legend(),
        *_draw_grid(x, height),
        *(part for place, line in enumerate(lines) for part in _draw_bar(x, TOP + ROW * place, line)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _draw_legend() -> Iterator[str]:
    yield f'<text x="{LABELS}" y="18" font-weight="600">{TITLE}</text>'
    for place, (kind, text) in enumerate((("same", "same precision"), ("any", "any precision that is allowed"))):
        left = LABELS + 130 * place
        yield f'<rect class="{kind}" x="{left}" y="28" width="12" height="12"/>'
        yield f'<text x="{left + 17}" y="39">{text}</text>'


def _draw_grid(x: Axis, height: int) -> Iterator[str]:
    for tick in TICKS:
        place = x.place(tick)
        yield f'<path class="grid" d="M{place:.1f} {TOP}V{height - 26}"/>'
        yield f'<text class="axis" x="{place:.1f}" y="{height - 10}" text-anchor="middle">{tick}×</text>'


def _draw_bar(x: Axis, top: int, line: Line) -> Iterator[str]:
    model, _, mode, _ = line.plain["benchmark"].split("/")
    yield f'<text x="{LABELS - 10}" y="{top + 16}" text-anchor="end">{escape(f"{model}, {mode}")}</text>'
    for kind, gain in zip(("any", "same"), reversed(line.gains), strict=True):
        if gain is not None and gain > 1:
            width = x.place(gain) - x.start
            yield f'<rect class="{kind}" x="{x.start}" y="{top + 4}" width="{width:.1f}" height="{ROW - 8}"/>'
    _, best = line.gains
    if best is not None and line.best is not None:
        text = f"{format_significant(best, 3)}× in {format_precision(line.best)}"
        yield f'<text x="{x.place(max(best, 1.0)) + 6:.1f}" y="{top + 16}">{escape(text)}</text>'
