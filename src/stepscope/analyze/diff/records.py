"""What a comparison of two traces hands out. Times are seconds a step of profiled time; A is before, B after."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["longer", "shorter", "no difference found", "not enough data"]
NameVerdict = Literal["added", "removed", "slower", "faster", "more calls", "fewer calls", "no difference found"]
Status = Literal["same", "renamed", "added", "removed"]


class StepsUsed(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps of a trace speak for it."""

    source: str | None
    marker: str
    """How steps were found; "none": the whole trace is one step."""
    numbers: list[int]
    """Steps looked at: all complete ones, unless asked for others."""
    middle: list[int]
    """Those of middle length: values are means over them, so that one odd step does not count."""
    durations_s: list[float]
    """Of all steps looked at, in order."""
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


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of time adds to the change of the step. All together are the change, exactly."""

    share: str
    """compute, exposed_comm, exposed_copy, host_idle, sync_idle or other_idle, as in a breakdown."""
    name: str
    """Category of the kernels, or the share itself for idle time."""
    a_s: float
    b_s: float
    change_s: float
    change_ns: int
    share_of_change: float | None
    """Above 1 or below 0 where others work against it; None where the step did not change."""
    clear: bool
    """Whether it is beyond what steps of one trace differ by."""
    a_steps_s: list[float]
    b_steps_s: list[float]
    parts: list[Part]
    """Largest change first."""


class NameChange(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel or an operator in both traces, or in one of them."""

    name: str
    short_name: str
    status: Status
    verdict: NameVerdict
    category: str | None
    """Of kernels."""
    operator: str | None
    """Of kernels: the operator that launches most of them."""
    names_a: list[str]
    names_b: list[str]
    """As the traces spell it; different where it was renamed."""
    calls_a: float
    calls_b: float
    """A step."""
    a_s: float
    b_s: float
    """Sum of durations a step; of operators on the host, without the operators they call."""
    mean_a_s: float | None
    mean_b_s: float | None
    """Of one call; None where there is none."""
    change_s: float
    from_calls_s: float
    """Part of the change because there are more or fewer calls, at A's duration (B's where it is new)."""
    from_duration_s: float
    """Part of the change because a call takes longer or shorter."""
    exposed_change_ns: int
    """Part of the change of the step: the time in which nothing more important ran on the device."""
    device_a_s: float | None = None
    device_b_s: float | None = None
    """Of operators: device time they launched themselves; None where the trace has no device."""


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
    """Of A's step; None where that is empty."""
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
