"""The analyses of a trace in the order in which the summary and the page show them.

A new analysis is a module with a function that computes a plain result and one that makes its `Section`, and an entry
here: its section then stands in the summary and on the page, and its result in the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.analyze.critical.path import path_section
from stepscope.analyze.job_section import breakdown_section
from stepscope.analyze.ranks.section import collectives_section
from stepscope.analyze.section import Analysis, Section
from stepscope.analyze.step.counters import counters_section
from stepscope.analyze.step.idle import idle_section
from stepscope.analyze.step.kernels import kernels_section, operators_section
from stepscope.analyze.step.launches import launches_section
from stepscope.analyze.step.memory import memory_section
from stepscope.analyze.step.operator_rates import rate_operators, roofline_section
from stepscope.analyze.step.overheads import overheads_section
from stepscope.analyze.step.sequences import sequences_section
from stepscope.analyze.step.variation import steps_section

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport
    from stepscope.formats.timeline import Timeline

ANALYSES = (
    Analysis("breakdown", breakdown_section),
    Analysis("critical_path", path_section),
    Analysis("kernels", kernels_section),
    Analysis("sequences", sequences_section),
    Analysis("operator_rates", roofline_section, rate_operators, in_summary=False),
    Analysis("idle", idle_section),
    Analysis("collectives", collectives_section),
    Analysis("host_operators", operators_section),
    Analysis("launches", launches_section),
    Analysis("overheads", overheads_section),
    Analysis("steps", steps_section),
    Analysis("memory", memory_section),
    Analysis("counters", counters_section),
)


def compute_more(timeline: Timeline, step: int | None) -> dict[str, Any]:
    """Results by name of the analyses that are no part of the report of a step."""
    return {one.name: one.compute(timeline, step) for one in ANALYSES if one.compute is not None}


def make_sections(job: JobReport, *, for_summary: bool = False) -> Iterator[Section]:
    """What there is to show, in order."""
    for one in ANALYSES:
        section = one.section(job) if one.in_summary or not for_summary else None
        if section is not None and (section.summary or section.has_content):
            yield section
