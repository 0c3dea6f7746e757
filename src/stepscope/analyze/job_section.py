"""Where the step of each rank went, with and without the profiler; and what else is said of a whole job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.analyze.section import Bar, Bars, Brief, Field, Section, Table, field, make_table
from stepscope.analyze.step.breakdown import SHARES, Shares, list_shares, share_words
from stepscope.core.units import count_of, format_duration

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport, RankSummary

ALL_RANKS = 8
"""The summary of larger jobs shows a few ranks."""
ENDS = 3
"""How many of the slowest ranks are shown then."""
MOST_BARS = 32
"""Ranks with a bar of their own on the page; more of them are grouped."""
GROUPS = 24
MOST_RANKS = 64
BUSY_SHARES = ("compute", "exposed_comm", "exposed_copy")
IDLE_SHARES = tuple(name for name in SHARES if name not in BUSY_SHARES)


def rescale(shares: Shares, step_s: float, *, on_device: bool) -> Shares:
    """An estimate of the breakdown without the profiler: shares that add up to `step_s`, which was measured without it.

    The profiler slows the host and hardly touches the device. So time in which the device is busy stays as it is, and
    idle time, in proportion, fills what is left of the step. Where the busy time alone is longer than the step, it is
    scaled down and no idle time remains. Without a device everything is the host's time and scales alike.
    """
    parts: dict[str, float] = msgspec.structs.asdict(shares)
    busy_s, idle_s = (sum(parts[name] for name in names) for names in (BUSY_SHARES, IDLE_SHARES))
    if not on_device or idle_s <= 0 or busy_s >= step_s:
        kept = SHARES if not on_device or idle_s <= 0 else BUSY_SHARES
        whole = sum(parts[name] for name in kept)
        return Shares(**{name: parts[name] * step_s / whole if name in kept and whole else 0.0 for name in SHARES})
    rest_s = step_s - busy_s
    return Shares(**{name: parts[name] / idle_s * rest_s if name in IDLE_SHARES else parts[name] for name in SHARES})


def breakdown_section(job: JobReport) -> Section:
    words = share_words(job.detail.breakdown)
    caption = "Profiled step of each rank; lengths are times"
    if len(job.ranks) > MOST_BARS:
        caption = "Profiled steps: the slowest, median and fastest rank, then means of neighbouring ranks"
    charts = []
    if len(job.ranks) > 1 or not job.unprofiled_step_s:
        charts.append(Bars("Breakdown of the profiled step by rank", caption, words, rank_bars(job.ranks)))
    if job.unprofiled_step_s:
        charts.append(_without_profiler(job, job.unprofiled_step_s))
    ordered = by_step_time(job.ranks)
    summary: list[str | Brief | Bars] = [Bars("Steps", "", words, _few_bars(job.ranks))]
    if len(ordered) > ALL_RANKS:
        shortest, longest = format_duration(ordered[-1].step_s), format_duration(ordered[0].step_s)
        summary.append(f"  {len(ordered)} ranks, profiled step {shortest} to {longest}")
    tables = [_ranks_table(job)] if len(ordered) > 1 else []
    return Section(id="breakdown", title="Breakdown", summary=summary, charts=charts, tables=tables)


def by_step_time(ranks: list[RankSummary]) -> list[RankSummary]:
    """Slowest first."""
    return sorted(ranks, key=lambda one: (-one.step_s, one.rank))


def median_rank(ranks: list[RankSummary]) -> RankSummary:
    return by_step_time(ranks)[len(ranks) // 2]


def _few_bars(ranks: list[RankSummary]) -> list[Bar]:
    if len(ranks) <= ALL_RANKS:
        return [_rank_bar(str(one.rank), one) for one in ranks]
    ordered = by_step_time(ranks)
    chosen = [*((" slow", one) for one in ordered[:ENDS]), (" median", median_rank(ranks)), (" fast", ordered[-1])]
    return [_rank_bar(f"{one.rank}{label}", one) for label, one in chosen]


def rank_bars(ranks: list[RankSummary]) -> list[Bar]:
    """One per rank; of many ranks the slowest, the median and the fastest, and then means of neighbours."""
    if len(ranks) <= MOST_BARS:
        return [_rank_bar(f"rank {one.rank}", one) for one in ranks]
    ordered = by_step_time(ranks)
    single = (("slowest", ordered[0]), ("median", median_rank(ranks)), ("fastest", ordered[-1]))
    bars = [_rank_bar(f"{word}: {one.rank}", one) for word, one in single]
    size = -(-len(ranks) // GROUPS)
    for first in range(0, len(ranks), size):
        group = ranks[first : first + size]
        columns = zip(*(list_shares(one.breakdown_s) for one in group), strict=True)
        label = f"{group[0].rank}–{group[-1].rank}" if len(group) > 1 else f"rank {group[0].rank}"
        mean_s = sum(one.step_s for one in group) / len(group)
        bars.append(Bar(label, mean_s, [sum(column) / len(group) for column in columns]))
    return bars


def _rank_bar(label: str, summary: RankSummary) -> Bar:
    return Bar(label, summary.step_s, list_shares(summary.breakdown_s))


def _without_profiler(job: JobReport, unprofiled_s: float) -> Bars:
    """The profiled step and an estimate of the one without the profiler, on one axis."""
    # Where the host runs ahead, only the exclusive time of a step compares with one that was measured alone.
    steps = {one.step: one for one in job.detail.variation.steps}
    profiled = steps.get(job.detail.step) or job.detail.breakdown
    on_device = job.detail.breakdown.has_device
    estimate = rescale(profiled.breakdown_s, unprofiled_s, on_device=on_device)
    how = "the device's busy time as profiled, idle time scaled to fit" if on_device else "all parts scaled alike"
    whose = f" of rank {job.telling_rank}" if len(job.ranks) > 1 else ""
    return Bars(
        name="Breakdown with and without the profiler",
        caption=f"Exclusive time of the step{whose} with and without the profiler: {format_duration(unprofiled_s)} "
        f"were measured without it; how they divide is an estimate ({how})",
        words=share_words(job.detail.breakdown),
        bars=[
            Bar("profiled", profiled.step_s, list_shares(profiled.breakdown_s)),
            Bar("unprofiled", unprofiled_s, list_shares(estimate)),
        ],
    )


def _ranks_table(job: JobReport) -> Table:
    """Slowest first."""
    words = share_words(job.detail.breakdown)
    waiting = {one.rank: one for one in job.across.waiting} if job.across is not None else {}
    lateness = {one.rank: one for one in job.across.stragglers.ranks} if job.across is not None else {}

    def part(name: str) -> Field:
        return field(
            words[name], lambda one: getattr(one.breakdown_s, name) / one.step_s if one.step_s else 0.0, "share"
        )

    def late(name: str) -> Callable[[RankSummary], Any]:
        return lambda one: getattr(lateness.get(one.rank), name, None)

    only = job.across.step if job.across is not None else None
    waited = "waiting and lateness over all steps" if only is None else "waiting in it, lateness over all steps"
    caption = f"Fractions of each rank's own step; {waited}"
    return make_table("Ranks", caption, by_step_time(job.ranks), [
        field("Rank", "rank", "count"),
        field("Profiled step", "step_s", "s"),
        *map(part, SHARES),
        field("Hidden", "hidden_comm_share", "share", "Fraction of communication that ran beside compute"),
        field("Waiting", lambda one: getattr(waiting.get(one.rank), "wait_s", None), "s", "In collectives"),
        field("Last to", late("last_calls"), "count", "Collectives at which it arrived last"),
        field("Kept others", late("caused_s"), "s", "How long other ranks waited for it, summed over them"),
        field("Verdict", late("verdict")),
    ], most=MOST_RANKS, is_folded=False)  # fmt: skip


# What the views say of a job beside its sections


def name_source(job: JobReport) -> str:
    """A folder by its name; a single file with its folder, since many are called the same."""
    path = Path(job.source)
    is_file = len(job.ranks) == 1 and path.parent.name
    return f"{path.parent.name}/{path.name}" if is_file else path.name or job.source


def count_ranks(job: JobReport) -> str:
    ranks = len(job.ranks)
    of = f" of {job.world_size}" if job.world_size is not None and job.world_size != ranks else ""
    return f"{count_of(ranks, 'rank')}{of}"


def describe_choice(job: JobReport) -> str:
    """Which step, and why that one."""
    if job.detail.step_marker == "none":
        return "no steps marked: the whole trace"
    if len(job.steps) <= 1:
        return f"step {job.step}, the only one" if job.steps else f"step {job.step}"
    if job.chosen.startswith("step "):
        return f"step {job.step}, nearest to the median step time among {len(job.steps)}"
    return f"step {job.step} of {len(job.steps)}, {job.chosen}"


def all_notes(job: JobReport) -> list[str]:
    """Everything to know before believing a number; what was repaired while reading comes first."""
    notes = [*job.notes, *job.detail.notes]
    if job.across is not None:
        notes += job.across.notes
        late = job.across.stragglers.note
        notes += [late] if late and len(job.ranks) > 1 else []
    if job.critical is not None:
        notes += job.critical.notes
    repaired = {f"{what}: {count}" for summary in job.ranks for what, count in summary.repairs.items()}
    return list(dict.fromkeys([*list_repairs(job), *(note for note in notes if note not in repaired)]))


def list_repairs(job: JobReport) -> list[str]:
    """One note at most, so that none of them is left out where room is short."""
    sums: Counter[str] = sum((Counter(summary.repairs) for summary in job.ranks), Counter())
    listed = "; ".join(f"{what}: {count}" for what, count in sums.items())
    return [f"repaired while reading: {listed}"] if listed else []
