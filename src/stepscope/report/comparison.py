"""Verdicts between two sides as text and Markdown; what decides them is elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from stepscope.core.units import format_duration, format_ratio
from stepscope.report.columns import NONE
from stepscope.report.markdown import escape, markdown_table
from stepscope.report.text import align, plain


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
    def statistic(self) -> str | None: ...
    @property
    def time_a_s(self) -> float | None: ...
    @property
    def time_b_s(self) -> float | None: ...
    @property
    def processes_a(self) -> int: ...
    @property
    def processes_b(self) -> int: ...


_TITLES = ("Case", "Of", "A", "B", "B/A", "Interval", "n", "Processes", "Verdict")
_NUMERIC = (False, False, True, True, True, True, True, True, False)


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
        row.statistic or NONE,
        format_duration(row.time_a_s) if row.time_a_s is not None else NONE,
        format_duration(row.time_b_s) if row.time_b_s is not None else NONE,
        format_ratio(row.ratio) if row.ratio is not None else NONE,
        _interval(row),
        f"{row.n_a}/{row.n_b}",
        f"{row.processes_a}/{row.processes_b}",
        row.verdict,
    ]


def _interval(row: ComparedCase) -> str:
    if row.ci_low is None or row.ci_high is None:
        return NONE
    return f"{format_ratio(row.ci_low)}–{format_ratio(row.ci_high)}"  # ∞ where load may explain any difference


def _closing_line(rows: Sequence[ComparedCase]) -> str:
    counts = Counter(row.verdict for row in rows)
    verdicts = ", ".join(f"{number} {plain(verdict)}" for verdict, number in counts.most_common())
    return f"{len(rows)} case{'' if len(rows) == 1 else 's'}{': ' if verdicts else ''}{verdicts}"
