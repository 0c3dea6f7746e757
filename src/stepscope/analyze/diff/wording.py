"""The change of a step as a sentence, and what a reader should know beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepscope.analyze.diff.exposure import Side
from stepscope.analyze.diff.noise import ENOUGH_STEPS, STEP_VARIATION
from stepscope.analyze.diff.records import Contribution, TraceDiff
from stepscope.core.units import format_duration, format_share

MOST_NAMED = 3
"""Contributions in the sentence."""
LEAST_NAMED = 0.1
"""Share of the change below which a contribution is not named."""
DOMINANT = 0.8
"""Share of a contribution that one name must have to be named for it."""

_IDLE = {
    "host_idle": "device idle while the host has not launched work yet",
    "sync_idle": "device idle while the host or a stream waits",
    "other_idle": "device idle for other reasons",
}
_CPU_IDLE = "time outside operators"
_COLLECTIVES = (
    (r"all_?reduce", "all-reduce"),
    (r"reduce_?scatter", "reduce-scatter"),
    (r"all_?gather", "all-gather"),
    (r"all_?to_?all", "all-to-all"),
    (r"send_?recv", "send and receive"),
    (r"broadcast", "broadcast"),
    (r"reduce", "reduce"),
)


def describe_change(diff: TraceDiff) -> str:
    """What changed and what it consists of, in words; zero stays zero and noise is called noise."""
    much = format_duration(abs(diff.change_s))
    share = "" if diff.change_share is None else f" ({format_share(abs(diff.change_share))})"
    way = "longer" if diff.change_ns > 0 else "shorter"
    if diff.verdict in ("longer", "shorter"):
        said = f"B's profiled step is {much}{share} {way}{_say_parts(diff)}"
    elif diff.change_ns == 0:
        said = f"No difference found: both profiled steps take the same time{_say_exceptions(diff)}"
    else:
        verdict = "No difference found" if diff.verdict == "no difference found" else "Not enough data"
        bound = format_duration(diff.noise_s)
        may = "are assumed to" if diff.noise_assumed else "may"
        said = (
            f"{verdict}: B's profiled step is {much}{share} {way}, less than the {bound} that steps {may} differ by"
            f"{_say_exceptions(diff)}"
        )
    steps = " and ".join(
        f"{len(side.numbers)} step{'s' if len(side.numbers) > 1 else ''} of {name}"
        for name, side in (("A", diff.a), ("B", diff.b))
    )
    return f"{said} ({steps}).{_say_names(diff)}"


def _say_parts(diff: TraceDiff) -> str:
    """What makes up the change: contributions that go its way, then the clear ones that work against it."""
    up = diff.change_ns > 0
    least = LEAST_NAMED * abs(diff.change_ns)
    large = [one for one in diff.contributions if abs(one.change_ns) >= least]
    along = [one for one in large if (one.change_ns > 0) == up and (one.clear or abs(one.change_ns) >= 3 * least)]
    against = [one for one in large if (one.change_ns > 0) != up and one.clear]
    said = ""
    if along:
        first, *others = along[:MOST_NAMED]
        listed = [f"{format_duration(abs(first.change_s))} of it is {_name(first, diff)}"]
        listed += [f"{format_duration(abs(one.change_s))} {_name(one, diff)}" for one in others]
        said = f": {_and(listed)}"
    if against:
        word = "less" if up else "more"
        listed = [f"{format_duration(abs(one.change_s))} {word} {_name(one, diff)}" for one in against[:MOST_NAMED]]
        said += f"; against it {_and(listed)}"
    return said


def _say_exceptions(diff: TraceDiff) -> str:
    """What changed clearly in a step that as a whole did not."""
    clear = [one for one in diff.contributions if one.clear and one.change_ns]
    if not clear:
        return ""
    least = LEAST_NAMED * abs(clear[0].change_ns)
    listed = [
        f"{format_duration(abs(one.change_s))} {'more' if one.change_ns > 0 else 'less'} {_name(one, diff)}"
        for one in clear[:MOST_NAMED]
        if abs(one.change_ns) >= least
    ]
    return f"; clear in it: {_and(listed)}"


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _name(one: Contribution, diff: TraceDiff) -> str:
    from stepscope.formats.classify import short_name

    main = one.parts[0] if one.parts and abs(one.parts[0].change_ns) >= DOMINANT * abs(one.change_ns) else None
    if one.share.endswith("_idle"):
        if diff.b.device == "cpu" or diff.a.device == "cpu":
            return _CPU_IDLE
        return _IDLE[one.share] + (f" (in {main.name})" if main else "")
    if one.share == "exposed_comm":
        return f"exposed {_collective(main.name) if main else 'communication'}"
    if one.share == "exposed_copy":
        return f"exposed {main.name}" if main else "exposed copies"
    what = "operators" if one.name == "operators" else f"{one.name} kernels"
    return f"{what} ({short_name(main.name)})" if main else what


def _collective(name: str) -> str:
    for pattern, word in _COLLECTIVES:
        if re.search(pattern, name, re.IGNORECASE):
            return word
    return "communication"


def _say_names(diff: TraceDiff) -> str:
    """New, gone and renamed kernels; of operators where there is no device."""
    what = "kernel" if diff.kernels else "operator"
    said = []
    for word, says in (("added", "new"), ("removed", "gone"), ("renamed", "renamed")):
        count = diff.counts.get(f"{what}s {word}", 0)
        if count:
            said.append(f"{count} {what}{'s are' if count > 1 else ' is'} {says}")
    return f" {_and(said)}." if said else ""


def list_notes(a: Side, b: Side) -> list[str]:
    notes = ["times are profiled: the profiler makes host work longer"]
    for name, side in (("A", a), ("B", b)):
        if side.timeline.step_marker == "none":
            notes.append(f"{name} marks no steps: the whole trace counts as one step")
        if side.overlapping:
            notes.append(
                f"in {name} the host runs ahead of the device: a step counts from the end of the device work of the "
                "step before it"
            )
        if len(side.windows) < ENOUGH_STEPS:
            few = "one step" if len(side.windows) == 1 else f"{len(side.windows)} steps"
            notes.append(
                f"{name} has {few}: how much its steps differ is not known, {format_share(STEP_VARIATION, 0)} of a "
                "step is assumed"
            )
    if a.has_device != b.has_device:
        notes.append("only one of the traces has device work: shares of the step mean different things")
    elif not a.has_device:
        notes.append("no device work in these traces: the step is divided among operators on the host")
    return notes
