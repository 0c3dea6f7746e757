"""What may be said of two runs, case by case: better, worse, no difference found, or not enough data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from stepscope.stats import (
    SPELL_CHANCE,
    SPELL_CHANCE_PROBED,
    SPELL_LOG,
    RatioEstimate,
    compare_processes,
    holm,
    holm_levels,
)
from stepscope.store import MeasuredCase
from stepscope.units import format_ratio, format_share

Verdict = Literal["better", "worse", "no difference found", "not enough data"]

DEFAULT_FAMILY_LEVEL = 0.01
"""Chance of even one false alarm in a whole comparison of two runs."""

MIN_EFFECT = 0.01
"""A difference smaller than this is not called one, however sure it is."""

RESOLUTION = 1.0
"""Where not even a change by this much would have been seen, the answer is "not enough data"."""

MIN_SAMPLES = 5
"""Per side; below, a tenth percentile is only the fastest sample under another name."""

CROWDED_SHARE = 0.05
"""A process from whose host others took this share of the cores was held up: its time is an upper bound at best."""

BLIND_CHANCE = 0.006
"""Where unseen slow spells are likelier than this to have held a side, a note says how to see more."""

HOST_BOUND_SHARE = 0.8
"""Of a sample's time spent issuing it: below, a device works on while the host may be slow or fast."""

SLOW_PROBE = 1.1
"""A process whose reference operation took this much longer than the fastest beside it ran on a slower machine."""

_TRY = "search"
"""Parameter of a case that is only a try of a search for a batch size: timed, never checked. It is written again
here, as readers do not import those who measure."""

NEXT_STEP = "repeat on a quiet machine, measure in more fresh processes (--processes), or use `stepscope ab`"


class CaseComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One row: B beside A for one case. Whatever could not be computed is None, and `reason` says why."""

    key: str
    """Of A's case; pairs inside one run have two keys, and the label tells them apart."""
    label: str
    benchmark: str
    verdict: Verdict
    reason: str
    """One sentence."""
    ratio: float | None = None
    """Quiet time of B over quiet time of A: above 1 is slower."""
    ci_low: float | None = None
    ci_high: float | None = None
    """At the level at which this case was decided inside its family; 1 lies outside exactly when it was significant."""
    p_adjusted: float | None = None
    """To be held against the family's level."""
    n_a: int = 0
    n_b: int = 0
    processes_a: int = 0
    processes_b: int = 0
    held_up_a: int = 0
    held_up_b: int = 0
    """How many of the processes were held up by something else; they are left out where others remain."""
    between_sd: float | None = None
    """Relative standard deviation between processes that the interval allows for."""
    median_a_s: float | None = None
    median_b_s: float | None = None
    score_a: float | None = None
    score_b: float | None = None
    unit: str | None = None
    status_a: str | None = None
    status_b: str | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[CaseComparison]
    only_a: list[str]
    only_b: list[str]
    """Labels of cases without a partner."""
    level: float
    min_effect: float
    resolution: float
    notes: list[str]


class Pair(NamedTuple):
    """Two cases to be held against each other, and what to call them."""

    a: MeasuredCase
    b: MeasuredCase
    label: str


class Side(NamedTuple):
    """The processes of one case on one side."""

    processes: list[list[float]]
    held_up: list[bool]
    probed: bool
    """Whether each process took the reference operation, which shows spells that samples alone do not."""

    @property
    def usable(self) -> list[list[float]]:
        """Undisturbed processes, or all where there is none."""
        quiet = [process for process, held in zip(self.processes, self.held_up, strict=True) if not held]
        return quiet or self.processes

    @property
    def is_held_up(self) -> bool:
        return bool(self.held_up) and all(self.held_up)


class _Tested(NamedTuple):
    row: CaseComparison
    estimate: RatioEstimate
    a: Side
    b: Side


def read_sides(a: MeasuredCase, b: MeasuredCase, *, same_system: bool = True) -> tuple[Side, Side]:
    """Samples by process, and which processes something else held up.

    Others on the cores show in the core time they took; a machine that was slower for its own reasons (a hypervisor
    moved its processors, clocks fell) shows in the reference operation, which only means something on one system.
    """
    evidence = [_read_evidence(case) for case in (a, b)]
    probes = [probe for side in evidence for _, probe in side if probe]
    limit = SLOW_PROBE * min(probes) if probes and same_system else math.inf
    return (_judge_side(a, evidence[0], limit), _judge_side(b, evidence[1], limit))


def _read_evidence(case: MeasuredCase) -> list[tuple[float, float | None]]:
    """By process: the share others took, and the slowest reading of the reference operation; of all ranks the worst."""
    shares: dict[int, float] = {}
    probes: dict[int, float | None] = {}
    for samples in case.samples:
        number = samples.process
        shares[number] = max(shares.get(number, 0.0), samples.other_share or 0.0)
        # A host that issues faster than the device works cannot hold it up: its probe is as good as the best.
        on_host = case.result.timing != "device"
        matters = on_host and (samples.host_share is None or samples.host_share >= HOST_BOUND_SHARE)
        readings = [*(samples.probes_s if matters else [0.0]), *filter(None, [probes.get(number)])]
        probes[number] = max(readings, default=None)
    return [(shares[number], probes[number]) for number in sorted(shares)]


def _judge_side(case: MeasuredCase, evidence: Sequence[tuple[float, float | None]], limit: float) -> Side:
    held_up = [share >= CROWDED_SHARE or (probe is not None and probe > limit) for share, probe in evidence]
    return Side(case.seconds_by_process(), held_up, probed=all(probe is not None for _, probe in evidence))


def compare_cases(
    a: Sequence[MeasuredCase],
    b: Sequence[MeasuredCase],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    min_effect: float = MIN_EFFECT,
    resolution: float = RESOLUTION,
    same_system: bool = True,
) -> Comparison:
    """Cases of two runs, paired by key; rows in the order of labels, whatever the order they were given in.

    Tries of a search have no row, no share of the level and no word: they count nowhere but in the search.
    """
    by_key_a, by_key_b = ({case.key: case for case in leave_out_tries(side)} for side in (a, b))
    pairs = [Pair(case, by_key_b[key], case.result.case.label) for key, case in by_key_a.items() if key in by_key_b]
    comparison = compare_pairs(
        pairs, level=level, min_effect=min_effect, resolution=resolution, same_system=same_system
    )
    return msgspec.structs.replace(
        comparison,
        only_a=sorted(case.result.case.label for key, case in by_key_a.items() if key not in by_key_b),
        only_b=sorted(case.result.case.label for key, case in by_key_b.items() if key not in by_key_a),
        notes=[*comparison.notes, *_version_notes(by_key_a, by_key_b)],
    )


def leave_out_tries(cases: Sequence[MeasuredCase]) -> list[MeasuredCase]:
    """Of a search for a batch size; the case that it ended with stays."""
    return [case for case in cases if _TRY not in case.result.case.parameters]


def compare_pairs(
    pairs: Sequence[Pair],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    min_effect: float = MIN_EFFECT,
    resolution: float = RESOLUTION,
    same_system: bool = True,
) -> Comparison:
    """The same for pairs that are already made; all of them are one family."""
    ordered = sorted(pairs, key=lambda pair: (pair.label, pair.a.key, pair.b.key))
    prepared = [_prepare(pair, level, same_system=same_system) for pair in ordered]
    tested = [item for item in prepared if isinstance(item, _Tested)]
    p_values = [item.estimate.p_value for item in tested]
    decided = iter(zip(holm(p_values), holm_levels(p_values, level), strict=True))
    rows = []
    for item in prepared:
        if isinstance(item, _Tested):
            adjusted, own_level = next(decided)
            rows.append(_decide(item, adjusted, own_level, level=level, min_effect=min_effect, resolution=resolution))
        else:
            rows.append(item)
    return Comparison(
        rows=rows,
        only_a=[],
        only_b=[],
        level=level,
        min_effect=min_effect,
        resolution=resolution,
        notes=_noise_notes(tested),
    )


def _prepare(pair: Pair, level: float, *, same_system: bool) -> _Tested | CaseComparison:
    """What can be tested, or the row that says why it cannot."""
    a, b = read_sides(pair.a, pair.b, same_system=same_system)
    row = describe_sides(pair, a, b)
    for name, case in (("A", pair.a), ("B", pair.b)):
        if case.result.status != "ok":
            cause = f": {case.result.failure.message}" if case.result.failure else ""
            return msgspec.structs.replace(row, reason=f"the case {_told(case.result.status)} in {name}{cause}")
    for name, side in (("A", a), ("B", b)):
        count = sum(len(process) for process in side.usable)
        if count < MIN_SAMPLES:
            return msgspec.structs.replace(row, reason=f"{name} has {count} samples and {MIN_SAMPLES} are needed")
        if any(not (value > 0 and math.isfinite(value)) for process in side.processes for value in process):
            return msgspec.structs.replace(row, reason=f"{name} holds a sample that is not a time above zero")
    seen = a.probed and b.probed and same_system
    chance = SPELL_CHANCE_PROBED if seen else SPELL_CHANCE
    return _Tested(row, compare_processes(a.usable, b.usable, level=level, spell_chance=chance), a, b)


def _told(status: str) -> str:
    return "was skipped" if status == "skipped" else "failed"


def describe_sides(pair: Pair, side_a: Side, side_b: Side) -> CaseComparison:
    """The row with everything that needs no test."""
    a, b = pair.a, pair.b
    score = a.result.score or b.result.score
    same_unit = len({case.result.score.unit for case in (a, b) if case.result.score}) == 1
    return CaseComparison(
        key=a.key,
        label=pair.label,
        benchmark=a.result.case.benchmark.id,
        verdict="not enough data",
        reason="",
        n_a=sum(map(len, side_a.processes)),
        n_b=sum(map(len, side_b.processes)),
        processes_a=len(side_a.processes),
        processes_b=len(side_b.processes),
        held_up_a=sum(side_a.held_up),
        held_up_b=sum(side_b.held_up),
        median_a_s=_median(a),
        median_b_s=_median(b),
        score_a=a.score() if same_unit else None,
        score_b=b.score() if same_unit else None,
        unit=score.unit if score and same_unit else None,
        status_a=a.result.status,
        status_b=b.result.status,
    )


def _median(case: MeasuredCase) -> float | None:
    values = case.seconds() if case.result.status == "ok" else []
    return median(values) if values else None


def _decide(
    item: _Tested, adjusted: float, own_level: float, *, level: float, min_effect: float, resolution: float
) -> CaseComparison:
    estimate = item.estimate
    low, high = estimate.interval_at(own_level)
    reach = math.log(high / estimate.ratio)
    significant, distance = adjusted <= level, abs(math.log(estimate.ratio))
    verdict: Verdict = "no difference found"
    seen = f"a change below {format_share(math.expm1(reach), 0)} would not have been seen"
    if significant and distance >= math.log1p(min_effect):
        verdict = "worse" if estimate.ratio > 1 else "better"
        reason = f"the interval leaves out 1 at a family-wise level of {format_share(level)}"
    elif significant:
        reason = f"the difference is smaller than {format_share(min_effect)}"
    elif reach > math.log1p(resolution):
        verdict, reason = "not enough data", f"{seen}; {NEXT_STEP}"
    else:
        reason = f"the interval includes 1; {seen}"
    reason += _median_remark(item.row, low, high)
    row = msgspec.structs.replace(
        item.row,
        verdict=verdict,
        reason=reason,
        ratio=estimate.ratio,
        ci_low=low,
        ci_high=high,
        p_adjusted=adjusted,
        between_sd=estimate.between_sd,
    )
    return _weigh_disturbance(row, item)


def _median_remark(row: CaseComparison, low: float, high: float) -> str:
    """Medians take in every disturbance, and every stall the code itself brings: a reader should hear of both."""
    if row.median_a_s is None or row.median_b_s is None or low <= row.median_b_s / row.median_a_s <= high:
        return ""
    ratio = format_ratio(row.median_b_s / row.median_a_s)
    return f"; the medians differ by {ratio}, so one side was disturbed or runs unevenly"


def _weigh_disturbance(row: CaseComparison, item: _Tested) -> CaseComparison:
    """Being held up only adds time: it can explain why a side is slower, never why it is faster."""
    held_up = [name for name, side in (("A", item.a), ("B", item.b)) if side.is_held_up]
    if not held_up:
        return row
    slower = "B" if item.estimate.ratio > 1 else "A"
    if row.verdict in ("better", "worse") and slower not in held_up:
        return msgspec.structs.replace(
            row, reason=f"{row.reason}; {held_up[0]} was held up by other work, so the difference is larger still"
        )
    names = " and ".join(held_up)
    return msgspec.structs.replace(
        row,
        verdict="not enough data",
        reason=f"the machine was busy or slower while {names} was measured, which alone could explain it; {NEXT_STEP}",
    )


def _noise_notes(tested: Sequence[_Tested]) -> list[str]:
    blind = [item for item in tested if item.estimate.noise and item.estimate.noise.spell_chance > BLIND_CHANCE]
    if not blind:
        return []
    count, size = f"{len(blind)} of {len(tested)} cases", format_share(math.expm1(SPELL_LOG), 0)
    return [
        f"{count}: a slow spell of up to {size} may have held a side, smaller changes cannot be told: use --processes 5"
    ]


def _version_notes(a: Mapping[str, MeasuredCase], b: Mapping[str, MeasuredCase]) -> list[str]:
    """Two versions of a benchmark compute different things: their cases never pair, and that should not puzzle."""
    versions_a = {case.result.case.benchmark.id: case.result.case.benchmark.version for case in a.values()}
    versions_b = {case.result.case.benchmark.id: case.result.case.benchmark.version for case in b.values()}
    return [
        f"{name} has version {versions_a[name]} in A and {versions_b[name]} in B, and is not compared"
        for name in sorted(versions_a.keys() & versions_b.keys())
        if versions_a[name] != versions_b[name]
    ]
