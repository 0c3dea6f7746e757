"""`stepscope trace diff`: what made one trace's step longer than another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import json_option
from stepscope.cli.output import emit
from stepscope.cli.trace_options import open_traces
from stepscope.errors import ExitCode
from stepscope.units import format_duration

if TYPE_CHECKING:
    from stepscope.analyze.diff.records import NameChange, TraceDiff

SHOWN = 12


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--rank", type=int, metavar="N", help="The rank to compare, where A and B hold several.")
@click.option("--steps-a", metavar="N,N…", help="Steps of A to look at [default: all complete ones].")
@click.option("--steps-b", metavar="N,N…", help="Steps of B to look at [default: all complete ones].")
@click.option("--step-marker", metavar="NAME", help="Each instance of this annotation is a step.")
@click.option("--no-cache", is_flag=True, help="Read the files themselves and keep nothing.")
@json_option
def diff(
    *, a: str, b: str, rank: int | None, steps_a: str | None, steps_b: str | None, as_json: bool, **options: Any
) -> int:
    """Say what B's step does longer, shorter, more or less often than A's, and how much of the change each is.

    Steps are profiled ones, means over those of middle length. Renamed kernels are matched by operator and place.

    Example: stepscope trace diff before.json.gz after.json.gz
    """
    from stepscope.analyze.diff import diff_traces

    sides = [open_traces({**options, "source": source}).timeline(rank) for source in (a, b)]
    found = diff_traces(sides[0], sides[1], parse_steps(steps_a, "--steps-a"), parse_steps(steps_b, "--steps-b"))
    emit(msgspec.to_builtins(found), "" if as_json else _format(found), as_json=as_json)
    return ExitCode.DONE


def parse_steps(text: str | None, option: str) -> list[int] | None:
    """`3,5-7` as numbers."""
    from stepscope.errors import UsageError

    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"{text!r} is no list of steps", hint="write numbers and ranges: 3,5-7", where=option)
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def _format(found: TraceDiff) -> str:
    lines = [
        f"profiled step: A {format_duration(found.step_a_s)}, B {format_duration(found.step_b_s)}",
        f"means over {len(found.a.middle)} and {len(found.b.middle)} steps of middle length",
        "contributions to the change (they add up):",
    ]
    lines += [
        f"  {_signed(entry.change_s):>11}  {entry.name[:80]}"
        for entry in found.contributions[:SHOWN]
        if entry.change_ns
    ]
    for title, changes in (("kernels", found.kernels), ("operators", found.operators)):
        told = [change for change in changes if _is_told(change)][:SHOWN]
        if told:
            lines.append(f"{title}:")
            lines += [_format_change(change) for change in told]
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join([*lines, found.sentence])


def _is_told(change: NameChange) -> bool:
    return change.status != "same" or change.verdict in ("faster", "slower")


def _format_change(change: NameChange) -> str:
    word = change.status if change.status != "same" else change.verdict
    return f"  {_signed(change.change_s):>11}  {word:9} {change.name[:80]}"


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + format_duration(abs(seconds))
