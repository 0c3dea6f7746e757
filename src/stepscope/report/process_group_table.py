"""Runs of `bench comms --init-only`: what each phase of forming a process group took, by rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.core.units import format_duration
from stepscope.records.kinds import LATER_PHASES, SETUP_PHASES, ProcessGroupObserved
from stepscope.report.text import align, plain
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


def format_process_groups(views: Sequence[ProcessGroupView]) -> str:
    """`#` lines: one table per case, one row per phase, one column per rank."""
    blocks = []
    for view in views:
        ranks = sorted({rank for phase in view.phases for rank in phase.rank_median_s})
        rows = [["phase", "slowest", "first time", *(f"rank {rank}" for rank in ranks)]]
        rows += [
            [
                phase.name.replace("_", " "),
                format_duration(phase.median_s),
                format_duration(phase.cold_s) if phase.cold_s is not None else "-",
                *(format_duration(phase.rank_median_s[rank]) if rank in phase.rank_median_s else "-" for rank in ranks),
            ]
            for phase in view.phases
        ]
        head = f"# {plain(view.label)}: median per phase; the first three are the case's time"
        blocks.append("\n".join([head, *(f"# {line}" for line in align(rows, [False] + [True] * (len(ranks) + 2)))]))
    return "\n#\n".join(blocks)
