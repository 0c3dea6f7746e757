"""What a comparison of two traces hands out, and its sentence. Times are profiled seconds per step; A is before B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from stepscope.analyze.diff.exposure import ENOUGH_STEPS, STEP_VARIATION, TraceSide
from stepscope.core.collectives import COLLECTIVES, OTHER, SEND_RECV, find_collective
from stepscope.core.units import count_of, format_duration, format_share
from stepscope.formats.classify import short_name

Verdict = Literal["longer", "shorter", "no difference found", "not enough data"]
NameVerdict = Literal["added", "removed", "slower", "faster", "more calls", "fewer calls", "no difference found"]
Status = Literal["same", "renamed", "added", "removed"]


class StepsUsed(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps represent a trace."""

    source: str | None
    marker: str
    """How steps were found; "none": the whole trace is one step."""
    numbers: list[int]
    """Steps looked at: all complete ones, unless asked for others."""
    middle: list[int]
    """Those of middle length: values are means over them, so that one odd step does not count."""
    durations_s: list[float]
    """One per step looked at, in order."""
    step_s: float
    median_s: float
    spread_s: float | None
    """How far steps stray from each other (1.48 median deviations from the median); None for one step."""
    device: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One name's part of a contribution."""

    name: str
    a_s: float
    b_s: float
    change_s: float
    change_ns: int
    """Whole nanoseconds; the parts of a contribution add up to it exactly."""


class Contribution(Part, frozen=True, kw_only=True):
    """What one kind of time adds to the change of the step. All together are the change, exactly. Its name is the
    category of the kernels, or the share itself for idle time."""

    share: str
    """compute, exposed_comm, exposed_copy, host_idle, sync_idle or other_idle, as in a breakdown."""
    share_of_change: float | None
    """Above 1 or below 0 where others work against it; None where the step did not change."""
    clear: bool
    """Whether it is beyond what steps of one trace differ by."""
    a_steps_s: list[float]
    b_steps_s: list[float]
    parts: list[Part]
    """Largest change first."""


class TraceChange(msgspec.Struct, frozen=True, kw_only=True):
    """One name in both traces, or in one of them."""

    name: str
    short_name: str
    status: Status
    a_s: float
    b_s: float
    """Sum of durations: of a step, or of a whole table; of operators on the host, without the operators they call."""
    mean_a_s: float | None
    mean_b_s: float | None
    """Mean duration of one call; None where there is none."""
    change_s: float
    from_calls_s: float
    """Part of the change because there are more or fewer calls, at A's duration (B's where it is new)."""
    from_duration_s: float
    """Part of the change because a call takes longer or shorter."""


class NameChange(TraceChange, frozen=True, kw_only=True):
    """A kernel or an operator."""

    verdict: NameVerdict
    category: str | None
    """Only kernels have one."""
    operator: str | None
    """The operator that launches most of these kernels."""
    names_a: list[str]
    names_b: list[str]
    """As the traces spell it; different where it was renamed."""
    calls_a: float
    calls_b: float
    """A step."""
    exposed_change_ns: int
    """Part of the change of the step: the time in which nothing more important ran on the device."""
    device_a_s: float | None = None
    device_b_s: float | None = None
    """Device time that an operator launched itself; None where the trace has no device."""


class RankSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's profiled step takes in each of two jobs, as means over the steps of middle length."""

    rank: int
    a_s: float | None
    b_s: float | None
    """None: the job has no trace of this rank, or none that can be compared."""
    change_s: float | None


class TraceDiff(msgspec.Struct, frozen=True, kw_only=True):
    """B compared with A."""

    sentence: str
    verdict: Verdict
    rank_a: int | None
    rank_b: int | None
    """The ranks compared; None where the traces name none."""
    step_a_s: float
    step_b_s: float
    change_s: float
    change_ns: int
    change_share: float | None
    """Fraction of A's step; None where that is empty."""
    noise_s: float
    """A change of the step smaller than this could be variation between steps, unless clear contributions are most of
    it."""
    noise_assumed: bool
    """Whether an assumed variation is behind that, because there are too few steps to see theirs."""
    a: StepsUsed
    b: StepsUsed
    contributions: list[Contribution]
    """Largest change first."""
    kernels: list[NameChange]
    operators: list[NameChange]
    """Largest change first."""
    counts: dict[str, int]
    """How many kernels and operators have which verdict or status, such as `kernels added`."""
    notes: list[str]
    ranks: list[RankSteps] = []
    """All ranks that were looked at to choose those compared; empty where they were named."""
    profiled: bool = True


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
        f"{count_of(len(side.numbers), 'step')} of {name}" for name, side in (("A", diff.a), ("B", diff.b))
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
        of = [f" {'of it is ' if one is along[0] else ''}{_name(one, diff)}" for one in along[:MOST_NAMED]]
        listed = [format_duration(abs(one.change_s)) + name for one, name in zip(along, of, strict=False)]
        said = f": {_and(listed)}"
    return said + (f"; against it {_list_changes(against, diff)}" if against else "")


def _say_exceptions(diff: TraceDiff) -> str:
    """What changed clearly in a step that as a whole did not."""
    clear = [one for one in diff.contributions if one.clear and one.change_ns]
    large = [one for one in clear[:MOST_NAMED] if abs(one.change_ns) >= LEAST_NAMED * abs(clear[0].change_ns)]
    return f"; clear in it: {_list_changes(large, diff)}" if clear else ""


def _list_changes(some: Sequence[Contribution], diff: TraceDiff) -> str:
    return _and([
        f"{format_duration(abs(one.change_s))} {'more' if one.change_ns > 0 else 'less'} {_name(one, diff)}"
        for one in some[:MOST_NAMED]
    ])  # fmt: skip


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _name(one: Contribution, diff: TraceDiff) -> str:
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
    """In words, by the name of a kernel or an annotation."""
    code = find_collective(name)
    words = {SEND_RECV: "send and receive", OTHER: "communication"}
    return words.get(code, COLLECTIVES[code].replace("_", "-"))


def _say_names(diff: TraceDiff) -> str:
    """New, gone and renamed kernels; of operators where there is no device."""
    what = "kernel" if diff.kernels else "operator"
    said = []
    for word, says in (("added", "new"), ("removed", "gone"), ("renamed", "renamed")):
        count = diff.counts.get(f"{what}s {word}", 0)
        if count:
            said.append(f"{count} {what}{'s are' if count > 1 else ' is'} {says}")
    return f" {_and(said)}." if said else ""


def list_notes(a: TraceSide, b: TraceSide) -> list[str]:
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
