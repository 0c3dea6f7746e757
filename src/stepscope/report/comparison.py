"""Verdicts between two sides as text and Markdown; what decides them is elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from stepscope.report.columns import NONE
from stepscope.report.markdown import escape, markdown_table
from stepscope.report.text import align, plain
from stepscope.units import format_duration, format_ratio, format_significant


class ComparedCase(Protocol):
    """One case on both sides; None where a side has no value."""

    @property
    def key(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def ratio(self) -> float | None: ...
    @property
    def ci_low(self) -> float | None: ...
    @property
    def ci_high(self) -> float | None: ...
    @property
    def n_a(self) -> int: ...
    @property
    def n_b(self) -> int: ...
    @property
    def verdict(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def median_a_s(self) -> float | None: ...
    @property
    def median_b_s(self) -> float | None: ...
    @property
    def score_a(self) -> float | None: ...
    @property
    def score_b(self) -> float | None: ...
    @property
    def unit(self) -> str | None: ...


_TITLES = ("Case", "A", "B", "Ratio", "Interval", "n", "Verdict")
_NUMERIC = (False, True, True, True, True, True, False)


def render_comparison_text(rows: Sequence[ComparedCase]) -> str:
    """Data rows, and everything else on lines that begin with `#`."""
    lines = align([_TITLES, *map(_cells, rows)], _NUMERIC)
    body = ["# " + lines[0], *("  " + line for line in lines[1:])]
    remarks = [f"# {plain(row.label)}: {plain(row.reason)}" for row in rows if row.reason]
    return "\n".join([*body, *remarks, f"# {_closing_line(rows)}"]) + "\n"


def render_comparison_markdown(rows: Sequence[ComparedCase]) -> str:
    table = markdown_table(_TITLES, [_cells(row) for row in rows], _NUMERIC)
    remarks = [f"- {escape(row.label)}: {escape(row.reason)}" for row in rows if row.reason]
    return "\n".join([*table, "", *([*remarks, ""] if remarks else []), escape(_closing_line(rows))]) + "\n"


def _cells(row: ComparedCase) -> list[str]:
    return [
        row.label,
        _side(row.median_a_s, row.score_a, row.unit),
        _side(row.median_b_s, row.score_b, row.unit),
        format_ratio(row.ratio) if row.ratio is not None else NONE,
        _interval(row),
        f"{row.n_a}/{row.n_b}",
        row.verdict,
    ]


def _side(median_s: float | None, score: float | None, unit: str | None) -> str:
    if median_s is None:
        return NONE
    shown = format_duration(median_s)
    return f"{shown} ({format_significant(score)} {unit})" if score is not None and unit else shown


def _interval(row: ComparedCase) -> str:
    if row.ci_low is None or row.ci_high is None:
        return NONE
    return f"{format_ratio(row.ci_low)}–{format_ratio(row.ci_high)}"


def _closing_line(rows: Sequence[ComparedCase]) -> str:
    counts = Counter(row.verdict for row in rows)
    verdicts = ", ".join(f"{number} {plain(verdict)}" for verdict, number in counts.most_common())
    return f"{len(rows)} case{'' if len(rows) == 1 else 's'}{': ' if verdicts else ''}{verdicts}"
