"""`stepscope trace diff`: what made one trace's step longer than another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import json_option
from stepscope.cli.output import emit
from stepscope.cli.trace_options import Progress, format_signed, marker_options, open_traces, parse_numbers
from stepscope.cli.trace_summaries import diff_two_sums
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration

if TYPE_CHECKING:
    from stepscope.analyze.diff.compare import ChosenRanks
    from stepscope.analyze.diff.records import RankSteps, TraceDiff
    from stepscope.traces.read import TraceSet

SHOWN = 12
SHOWN_RANKS = 8


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--rank", type=int, metavar="N", help="The rank to compare [default: the one whose step changed most].")
@click.option("--steps-a", metavar="N,N…", help="Steps of A to look at [default: all complete ones].")
@click.option("--steps-b", metavar="N,N…", help="Steps of B to look at [default: all complete ones].")
@marker_options
@json_option
def diff(*, a: str, b: str, rank: int | None, steps_a: str | None, steps_b: str | None, **options: Any) -> None:
    """Say what B's step does longer, shorter, more or less often than A's, and how much of the change each is.

    Steps are profiled ones, means over those of middle length. Renamed kernels are matched by operator and place.
    Of several ranks, the one is compared whose step changed most. Jobs with different ranks are compared by the slowest
    of those that both have. Two tables of sums that `nsys stats` printed are compared by class, name and time per call.

    Example: stepscope trace diff before.json.gz after.json.gz
    """
    from stepscope.analyze.diff.compare import choose_ranks, diff_traces

    chosen_part = rank is not None or steps_a is not None or steps_b is not None
    if diff_two_sums(a, b, chosen=chosen_part):
        return
    jobs = [open_traces({**options, "source": source}) for source in (a, b)]
    steps = parse_numbers(steps_a, "--steps-a"), parse_numbers(steps_b, "--steps-b")
    several = max(len(job) for job in jobs) > 1
    chosen = choose_ranks(*map(_step_times, jobs, steps)) if several and rank is None else None
    first, second = (rank, rank) if chosen is None else (chosen.rank_a, chosen.rank_b)
    found = diff_traces(jobs[0].timeline(first), jobs[1].timeline(second), *steps)
    if chosen is not None:
        found = msgspec.structs.replace(found, ranks=chosen.ranks, notes=[_say_choice(chosen), *found.notes])
    emit(msgspec.to_builtins(found), lambda: _format(found))


def _step_times(traces: TraceSet, steps: list[int] | None) -> dict[int, float]:
    """Rank → its profiled step. A rank that cannot be compared is left out, unless none can."""
    from stepscope.analyze.diff.compare import step_time_s

    times: dict[int, float] = {}
    refused: UsageError | None = None
    with Progress("ranks read") as progress:
        for rank in traces.ranks:
            try:
                times[rank] = step_time_s(traces.timeline(rank), steps)
            except UsageError as error:
                refused = error
            progress.show(len(times), len(traces))
    if not times and refused is not None:
        raise refused
    return times


def _say_choice(chosen: ChosenRanks) -> str:
    if chosen.rank_a == chosen.rank_b:
        return f"rank {chosen.rank_a} is compared: {chosen.why}"
    return f"rank {chosen.rank_a} of A is compared with rank {chosen.rank_b} of B: {chosen.why}"


def _format(found: TraceDiff) -> str:
    a, b = (
        f"{side}{'' if rank is None else f' (rank {rank})'} {format_duration(step_s)}"
        for side, rank, step_s in (("A", found.rank_a, found.step_a_s), ("B", found.rank_b, found.step_b_s))
    )
    lines = [
        f"profiled step: {a}, {b}",
        f"means over {len(found.a.middle)} and {len(found.b.middle)} steps of middle length",
        "contributions to the change (they add up):",
    ]
    lines += [
        f"  {format_signed(entry.change_s):>11}  {entry.name[:80]}"
        for entry in found.contributions[:SHOWN]
        if entry.change_ns
    ]
    lines += _list_ranks(found.ranks)
    for title, changes in (("kernels", found.kernels), ("operators", found.operators)):
        told = [one for one in changes if one.status != "same" or one.verdict in ("faster", "slower")]
        lines += [f"{title}:"] if told else []
        for one in told[:SHOWN]:
            word = one.verdict if one.status == "same" else one.status
            lines.append(f"  {format_signed(one.change_s):>11}  {word:9} {one.name[:80]}")
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join([*lines, found.sentence])


def _list_ranks(ranks: Sequence[RankSteps]) -> list[str]:
    """The ranks that changed most, where there are several."""
    if len(ranks) < 2:
        return []
    ordered = sorted(ranks, key=lambda one: (-abs(one.change_s or 0.0), one.rank))
    lines = ["profiled step by rank, A and B:"]
    for one in ordered[:SHOWN_RANKS]:
        a, b = ("no trace" if value is None else format_duration(value) for value in (one.a_s, one.b_s))
        change = "" if one.change_s is None else format_signed(one.change_s)
        lines.append(f"  {change:>11}  rank {one.rank}: {a}, {b}")
    if len(ordered) > SHOWN_RANKS:
        lines.append(f"  and {len(ordered) - SHOWN_RANKS} more ranks")
    return lines
