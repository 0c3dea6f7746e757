"""How much profiled steps differ from each other, and what makes the slow ones slow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import stdev
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.analyze.section import Bar, Bars, Section, field, make_table
from stepscope.analyze.step.breakdown import SHARES, Breakdown, Shares, break_down_steps, list_shares, share_words
from stepscope.analyze.step.numbers import seconds
from stepscope.analyze.step.view import view
from stepscope.core.units import format_duration
from stepscope.formats.timeline import Timeline
from stepscope.stats import quantile_sorted

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

MOST_BARS, MOST_STEPS = 32, 64
"""Steps that the page shows as bars, and in its table."""
SLOW = 1.05
"""A step is slow when it takes more than so many times the median."""


class ProfiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """One profiled step."""

    step: int
    step_s: float
    """Step time, see Breakdown."""
    host_s: float
    """Length of its marker on the host."""
    period_s: float | None
    """From its start to the start of the next; None for the last."""
    breakdown_s: Shares
    is_judged: bool
    """False for the first and the last, where more than two others are there, and for empty ones."""
    is_slow: bool


class ShareVariation(msgspec.Struct, frozen=True, kw_only=True):
    """What one share of the breakdown has to do with the differences."""

    share: str
    median_s: float
    std_s: float | None
    variance_share: float | None
    """Its covariance with the step time over the variance of the step time: adds up to 1 over all shares. None where
    steps do not differ."""
    slow_excess_s: float | None
    """Mean over slow steps minus mean over the others: adds up to the difference of their step times. None without
    slow steps."""


class StepVariation(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between the judged steps."""

    steps: list[ProfiledStep]
    judged: int
    median_s: float | None
    mean_s: float | None
    std_s: float | None
    min_s: float | None
    max_s: float | None
    p95_s: float | None
    variation: float | None
    """Standard deviation over mean."""
    median_period_s: float | None
    """From the start of one step on the host to that of the next."""
    slow_steps: list[int]
    shares: list[ShareVariation]
    explained_by: str | None
    """The share with the largest slow_excess_s; None without slow steps."""
    note: str | None = None


def compare_steps(timeline: Timeline) -> StepVariation:
    """All steps of a trace."""
    trace = view(timeline)
    judged = set(trace.judged_steps())
    found = dict(zip(trace.windows, break_down_steps(timeline), strict=True))
    chosen = [one for number, one in found.items() if number in judged]
    ordered = sorted(one.step_s for one in chosen)
    median = quantile_sorted(ordered, 0.5) if ordered else None
    slow = [] if median is None else [one for one in chosen if one.step_s > SLOW * median]
    starts = [span.start_ns for span in timeline.steps]
    periods = [seconds(later - earlier) for earlier, later in pairwise(starts)]
    shares = _compare_shares(chosen, slow)
    excesses = [(one.slow_excess_s, one.share) for one in shares if one.slow_excess_s is not None]
    times = [
        ProfiledStep(
            step=number,
            step_s=one.step_s,
            host_s=one.host_s,
            period_s=period,
            breakdown_s=one.breakdown_s,
            is_judged=number in judged,
            is_slow=one in slow,
        )
        for (number, one), period in zip(found.items(), [*periods, None], strict=False)
    ]
    judged_periods = sorted(one.period_s for one in times if one.is_judged and one.period_s is not None)
    mean = sum(ordered) / len(ordered) if ordered else None
    deviation = stdev(ordered) if len(ordered) > 1 else None
    return StepVariation(
        steps=times,
        judged=len(chosen),
        median_s=median,
        mean_s=mean,
        std_s=deviation,
        min_s=ordered[0] if ordered else None,
        max_s=ordered[-1] if ordered else None,
        p95_s=quantile_sorted(ordered, 0.95) if ordered else None,
        variation=deviation / mean if deviation is not None and mean else None,
        median_period_s=quantile_sorted(judged_periods, 0.5) if judged_periods else None,
        slow_steps=[one.step for one in times if one.is_judged and one.is_slow],
        shares=shares,
        explained_by=max(excesses)[1] if excesses else None,
        note=None if len(chosen) > 1 else "one step only: its variation is not known",
    )


def _compare_shares(chosen: Sequence[Breakdown], slow: Sequence[Breakdown]) -> list[ShareVariation]:
    if not chosen:
        return []
    parts = np.array([[one.breakdown_ns[share] for share in SHARES] for one in chosen], np.float64)
    is_slow = np.array([one in slow for one in chosen])
    centred = parts.sum(axis=1) - parts.sum(axis=1).mean()
    variance = (centred**2).sum()
    covariances = ((parts - parts.mean(axis=0)) * centred[:, None]).sum(axis=0)
    excess = parts[is_slow].mean(axis=0) - parts[~is_slow].mean(axis=0) if is_slow.any() else None
    return [
        ShareVariation(
            share=share,
            median_s=seconds(float(np.median(parts[:, place]))),
            std_s=seconds(float(parts[:, place].std(ddof=1))) if len(chosen) > 1 else None,
            variance_share=float(covariances[place] / variance) if variance > 0 else None,
            slow_excess_s=None if excess is None else seconds(float(excess[place])),
        )
        for place, share in enumerate(SHARES)
    ]


def steps_section(job: JobReport) -> Section | None:
    variation = job.detail.variation
    if len(variation.steps) < 2:
        return None
    words = share_words(job.detail.breakdown)
    summary = []
    if variation.judged > 1 and variation.median_s is not None and variation.min_s is not None and variation.max_s:
        slow = f", {len(variation.slow_steps)} over 5 % slower than the median" if variation.slow_steps else ""
        why = f" ({words[variation.explained_by]})" if variation.explained_by else ""
        of = f"{variation.judged} of {len(variation.steps)}"
        summary.append(
            f"{variation.judged if variation.judged == len(variation.steps) else of} profiled steps: median step time "
            f"{format_duration(variation.median_s)}, {format_duration(variation.min_s)} to "
            f"{format_duration(variation.max_s)}{slow}{why}"
        )
    shown = variation.steps[:MOST_BARS]
    some = f", the first {len(shown)}" if len(shown) < len(variation.steps) else ""
    bars = Bars(
        name="Breakdown by step",
        caption=f"Steps of rank {job.telling_rank}{some}",
        words=words,
        bars=[Bar(f"step {one.step}", one.step_s, list_shares(one.breakdown_s)) for one in shown],
    )
    caption = f"Steps of rank {job.telling_rank}; slow ones take over 5 % more than the median"
    table = make_table("Steps", caption, variation.steps, [
        field("Step", "step", "count"),
        field("Profiled step", "step_s", "s", "Without device work of the steps before"),
        field("On the host", "host_s", "s"),
        field("To the next", "period_s", "s"),
        *(field(words[name], f"breakdown_s.{name}", "s") for name in SHARES),
        field("", lambda one: "slow" if one.is_slow else "" if one.is_judged else "not judged"),
    ], most=MOST_STEPS)  # fmt: skip
    return Section(id="steps", title="Steps", summary=summary, charts=[bars], tables=[table])
