"""Runs of `bench comms --init-only`: what each phase of forming a process group took, by rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.core.units import format_duration
from stepscope.records.kinds import LATER_PHASES, SETUP_PHASES, ProcessGroupObserved
from stepscope.report.table import Column, format_table, show
from stepscope.stats import median
from stepscope.store import MeasuredCase


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one case."""

    name: str
    median_s: float
    """On the rank where it took longest in the median."""
    cold_s: float | None
    """When the processes did it for the first time, on the rank where it took longest."""
    rank_median_s: dict[int, float]


class ProcessGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    key: str
    label: str
    phases: list[PhaseView]


def read_process_groups(cases: Sequence[MeasuredCase]) -> list[ProcessGroupView]:
    """Cases of other kinds, and those without times, are left out."""
    return [
        ProcessGroupView(key=one.result.case.key, label=one.result.case.label, phases=_read_phases(one, observed))
        for one in cases
        if isinstance(observed := one.result.observed, ProcessGroupObserved) and one.samples
    ]


def _read_phases(measured: MeasuredCase, observed: ProcessGroupObserved) -> list[PhaseView]:
    phases = []
    for name in (*SETUP_PHASES, *LATER_PHASES):
        ranks: dict[int, list[float]] = {}
        for samples in measured.samples:
            ranks.setdefault(samples.rank, []).extend(samples.extra_s.get(name, []))
        medians = {rank: found for rank, values in ranks.items() if (found := median(values)) is not None}
        if medians:
            longest_s = max(medians.values())
            phases.append(
                PhaseView(name=name, median_s=longest_s, cold_s=observed.cold.get(name), rank_median_s=medians)
            )
    return phases


def format_process_groups(views: Sequence[ProcessGroupView], *, width: int | None = None) -> str:
    """`#` lines: one table per case, one row per phase, one column per rank."""
    blocks = []
    for view in views:
        columns: list[Column[PhaseView]] = [
            Column("phase", lambda one: one.name.replace("_", " "), role="case"),
            Column("slowest", lambda one: format_duration(one.median_s), numeric=True),
            Column("first time", lambda one: show(one.cold_s, format_duration), numeric=True),
            *map(_rank_column, sorted({rank for one in view.phases for rank in one.rank_median_s})),
        ]
        head = f"# {view.label}: median per phase; the first three are the case's time"
        blocks.append("\n".join([head, *format_table(columns, view.phases, width=width)]))
    return "\n#\n".join(blocks)


def _rank_column(rank: int) -> Column[PhaseView]:
    return Column(f"rank {rank}", lambda one: show(one.rank_median_s.get(rank), format_duration), numeric=True, drop=1)
