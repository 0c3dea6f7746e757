"""Progress on stderr: a bar with the live estimate on a terminal, one line a case elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Self, TextIO

from stepscope.core.units import escape_controls, format_duration, format_share, format_significant, wrap_line
from stepscope.measure.loop import Estimate
from stepscope.records import Case, CaseResult, RankSamples
from stepscope.store import MeasuredCase


def format_case_line(result: CaseResult, samples: Sequence[RankSamples]) -> str:
    """`label: median ± half width (n), score` or the reason there is none."""
    label = result.case.label
    measured = MeasuredCase(result, list(samples))
    summary = measured.summary()
    if summary is None:
        reason = result.failure.message if result.failure else "no samples"
        return escape_controls(f"{label}: {result.status}: {reason}")
    score = measured.score()
    scored = f", {format_significant(score)} {result.score.unit}" if score is not None and result.score else ""
    width = format_share(summary.relative_half_width)
    line = f"{label}: {format_duration(summary.median_s)} ± {width} (n={summary.n}){scored}"
    return escape_controls(line + "".join(f"\n    {notice.message}" for notice in result.notices))


class LineProgress:
    """For logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._place = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def case_started(self, case: Case, index: int, total: int, *, note: str = "") -> None:
        """`note`: which part of a longer run this is, such as one of several processes."""
        self._place = f"[{index}/{total}]" + (f" {note}:" if note else "")

    def estimate(self, estimate: Estimate) -> None:
        return

    def case_done(self, result: CaseResult, samples: Sequence[RankSamples]) -> None:
        self._stream.write(f"{self._place} {format_case_line(result, samples)}\n")
        self._stream.flush()


class SilentProgress(LineProgress):
    def case_done(self, result: CaseResult, samples: Sequence[RankSamples]) -> None:
        return


class BarProgress:
    """For people watching: bar, count and clock, and what is measured as far as the line has room for it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._bar: Any = RichProgress(
            BarColumn(bar_width=24, table_column=Column(width=24)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            console=Console(stderr=True),
            expand=True,
            transient=True,
        )
        self._task: Any = None
        self._label = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def case_started(self, case: Case, index: int, total: int, *, note: str = "") -> None:
        self._label = f"{note}: {case.label}" if note else case.label
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, description=self._label, completed=index - 1, total=total)

    def estimate(self, estimate: Estimate) -> None:
        width = "" if estimate.half_width is None else f" ± {format_share(estimate.half_width)}"
        text = f"{self._label}: {estimate.phase} {format_duration(estimate.median_s)}{width} (n={estimate.samples})"
        self._bar.update(self._task, description=text)

    def case_done(self, result: CaseResult, samples: Sequence[RankSamples]) -> None:
        console = self._bar.console
        lines = format_case_line(result, samples).split("\n")
        fitting = [part for line in lines for part in wrap_line(line, console.width)]
        console.print("\n".join(fitting), markup=False, highlight=False)
        self._bar.advance(self._task)


def open_progress(*, quiet: bool = False) -> LineProgress | BarProgress:
    if quiet:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()
