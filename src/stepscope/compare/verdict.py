"""What may be said of two runs, case by case: better, worse, no difference found, or not enough data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from stepscope.stats import (
    BetweenSource,
    RatioEstimate,
    compare_processes,
    holm,
    holm_levels,
    is_disturbed,
)
from stepscope.store.view import MeasuredCase
from stepscope.units import format_ratio, format_share

Verdict = Literal["better", "worse", "no difference found", "not enough data"]

DEFAULT_FAMILY_LEVEL = 0.01
"""Chance of even one false alarm in a whole comparison of two runs."""

MIN_EFFECT = 0.01
"""A difference smaller than this is not called one, however sure it is."""

RESOLUTION = 0.5
"""Where not even a change by this much would have been seen, the answer is "not enough data"."""

CONFIRMING_PROCESSES = 2
"""A side is called the slower one only when at least this many of its processes were measured: one process in
twenty was starved of its cores for its whole life on the machine studied, and its samples do not always show it."""

MIN_SAMPLES = 5
"""Per side; below, a tenth percentile is only the fastest sample under another name."""

MORE_PROCESSES = "measure in 6 or more fresh processes a side, or run the two side by side with `stepscope ab`"


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
    between_sd: float | None = None
    between_source: BetweenSource | None = None
    quiet_a_s: float | None = None
    quiet_b_s: float | None = None
    median_a_s: float | None = None
    median_b_s: float | None = None
    score_a: float | None = None
    score_b: float | None = None
    unit: str | None = None
    status_a: str | None = None
    status_b: str | None = None
    """`ok`, `failed` or `skipped`; None where the case is missing."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[CaseComparison]
    only_a: list[str]
    only_b: list[str]
    """Labels of cases that the other side does not have."""
    level: float
    min_effect: float
    resolution: float
    notes: list[str]


class Pair(NamedTuple):
    """Two cases to be held against each other, and what to call them."""

    a: MeasuredCase
    b: MeasuredCase
    label: str


class _Limits(NamedTuple):
    level: float
    min_effect: float
    resolution: float
    confirming_processes: int


class _Prepared(NamedTuple):
    pair: Pair
    estimate: RatioEstimate | None
    obstacle: str | None
    """Why there is no estimate, or why it must not be used."""


def compare_cases(
    a: Sequence[MeasuredCase],
    b: Sequence[MeasuredCase],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    min_effect: float = MIN_EFFECT,
    resolution: float = RESOLUTION,
    confirming_processes: int = CONFIRMING_PROCESSES,
    history: Mapping[str, Sequence[float]] | None = None,
) -> Comparison:
    """Cases of two runs, paired by key; rows in the order of labels, whatever the order they were given in.

    `history` has, by case key, the `quiet_time` of earlier runs on the same system (seconds). On a machine that
    runs nothing else, `confirming_processes=1` lets a single process a side decide.
    """
    by_key_a, by_key_b = {case.key: case for case in a}, {case.key: case for case in b}
    pairs = [Pair(case, by_key_b[key], case.result.case.label) for key, case in by_key_a.items() if key in by_key_b]
    comparison = compare_pairs(
        pairs,
        level=level,
        min_effect=min_effect,
        resolution=resolution,
        confirming_processes=confirming_processes,
        history=history,
    )
    return msgspec.structs.replace(
        comparison,
        only_a=sorted(case.result.case.label for key, case in by_key_a.items() if key not in by_key_b),
        only_b=sorted(case.result.case.label for key, case in by_key_b.items() if key not in by_key_a),
        notes=[*comparison.notes, *_version_notes(by_key_a, by_key_b)],
    )


def compare_pairs(
    pairs: Sequence[Pair],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    min_effect: float = MIN_EFFECT,
    resolution: float = RESOLUTION,
    confirming_processes: int = CONFIRMING_PROCESSES,
    history: Mapping[str, Sequence[float]] | None = None,
) -> Comparison:
    """The same for pairs that are already made; all of them are one family."""
    ordered = sorted(pairs, key=lambda pair: (pair.label, pair.a.key, pair.b.key))
    prepared = [_prepare(pair, (history or {}).get(pair.a.key, ()), level) for pair in ordered]
    tested = [item for item in prepared if item.estimate is not None]
    # A case set aside still counts as one of the family: it was looked at before it was set aside.
    p_values = [item.estimate.p_value if item.estimate and item.obstacle is None else 1.0 for item in tested]
    decisions = {
        id(item): decision for item, *decision in zip(tested, holm(p_values), holm_levels(p_values, level), strict=True)
    }
    limits = _Limits(level, min_effect, resolution, confirming_processes)
    rows = []
    for item in prepared:
        row = _describe_sides(item)
        if item.estimate is not None and item.obstacle is None:
            adjusted, own_level = decisions[id(item)]
            row = _decide(row, item.estimate, adjusted, own_level, limits)
        rows.append(row)
    return Comparison(
        rows=rows,
        only_a=[],
        only_b=[],
        level=level,
        min_effect=min_effect,
        resolution=resolution,
        notes=_noise_notes([item.estimate for item in tested if item.estimate is not None]),
    )


def _prepare(pair: Pair, history: Sequence[float], level: float) -> _Prepared:
    for side, case in (("A", pair.a), ("B", pair.b)):
        if case.result.status != "ok":
            cause = f": {case.result.failure.message}" if case.result.failure else ""
            return _Prepared(pair, None, f"the case {_status_verb(case.result.status)} in {side}{cause}")
    a, b = pair.a.seconds_by_process(), pair.b.seconds_by_process()
    for side, processes in (("A", a), ("B", b)):
        count = sum(len(process) for process in processes)
        if count < MIN_SAMPLES:
            return _Prepared(pair, None, f"{side} has {count} samples and {MIN_SAMPLES} are needed")
        if any(not (value > 0 and math.isfinite(value)) for process in processes for value in process):
            return _Prepared(pair, None, f"{side} holds a sample that is not a time above zero")
    estimate = compare_processes(a, b, level=level, history=history)
    # Being kept from the cores only adds time, so it can spoil the case against the slower side and no other.
    slower, side, faster = (b, "B", a) if estimate.ratio > 1 else (a, "A", b)
    if estimate.p_value <= level and is_disturbed(slower, faster):
        return _Prepared(
            pair,
            estimate,
            f"{side} is the slower one, and its samples bear the marks of a machine busy with other work: "
            f"close other programs and measure again, or {MORE_PROCESSES}",
        )
    return _Prepared(pair, estimate, None)


def _status_verb(status: str) -> str:
    return "was skipped" if status == "skipped" else "failed"


def _describe_sides(item: _Prepared) -> CaseComparison:
    """The row with everything that needs no test; its verdict stands where there is an obstacle."""
    a, b = item.pair.a, item.pair.b
    estimate, score = item.estimate, a.result.score or b.result.score
    seconds_a, seconds_b = a.seconds_by_process(), b.seconds_by_process()
    same_unit = len({case.result.score.unit for case in (a, b) if case.result.score}) == 1
    return CaseComparison(
        key=a.key,
        label=item.pair.label,
        benchmark=a.result.case.benchmark.id,
        verdict="not enough data",
        reason=item.obstacle or "",
        ratio=estimate.ratio if estimate else None,
        n_a=sum(map(len, seconds_a)),
        n_b=sum(map(len, seconds_b)),
        processes_a=sum(1 for process in seconds_a if process),
        processes_b=sum(1 for process in seconds_b if process),
        between_sd=estimate.between_sd if estimate else None,
        between_source=estimate.between_source if estimate else None,
        quiet_a_s=estimate.quiet_a_s if estimate else None,
        quiet_b_s=estimate.quiet_b_s if estimate else None,
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
    row: CaseComparison, estimate: RatioEstimate, adjusted: float, own_level: float, limits: _Limits
) -> CaseComparison:
    low, high = estimate.interval_at(own_level)
    reach = math.log(high / estimate.ratio)
    significant, distance = adjusted <= limits.level, abs(math.log(estimate.ratio))
    slower = ("B", estimate.processes_b) if estimate.ratio > 1 else ("A", estimate.processes_a)
    seen = f"a change below {format_share(math.expm1(reach), 0)} would not have been seen"
    verdict: Verdict
    if significant and distance < math.log1p(limits.min_effect):
        verdict, reason = "no difference found", f"the difference is smaller than {format_share(limits.min_effect)}"
    elif significant and slower[1] < limits.confirming_processes:
        verdict = "not enough data"
        reason = (
            f"{slower[0]} looks slower, but was measured in {slower[1]} process only, which a busy machine can starve "
            f"from start to end: confirm with {limits.confirming_processes} or more"
        )
    elif significant:
        verdict = "worse" if estimate.ratio > 1 else "better"
        reason = f"the interval leaves out 1 at a family-wise level of {format_share(limits.level)}"
    elif reach > math.log1p(limits.resolution):
        verdict, reason = "not enough data", f"{seen}; {MORE_PROCESSES}"
    else:
        verdict, reason = "no difference found", f"the interval includes 1; {seen}"
    return msgspec.structs.replace(
        row,
        verdict=verdict,
        reason=reason + _median_remark(row, low, high),
        ci_low=low,
        ci_high=high,
        p_adjusted=adjusted,
    )


def _median_remark(row: CaseComparison, low: float, high: float) -> str:
    """Medians take in every disturbance, and every stall the code itself brings: a reader should hear of both."""
    if row.median_a_s is None or row.median_b_s is None or low <= row.median_b_s / row.median_a_s <= high:
        return ""
    ratio = format_ratio(row.median_b_s / row.median_a_s)
    return f"; the medians differ by {ratio}, so one side was disturbed or runs unevenly"


def _noise_notes(tested: Sequence[RatioEstimate]) -> list[str]:
    assumed = sum(estimate.between_source == "assumed" for estimate in tested)
    if not assumed:
        return []
    count = f"{assumed} of {len(tested)} cases have too few processes to show how much processes differ"
    return [f"{count}; slow spells of 17 % are allowed for, so smaller changes cannot be told there: {MORE_PROCESSES}"]


def _version_notes(a: Mapping[str, MeasuredCase], b: Mapping[str, MeasuredCase]) -> list[str]:
    versions_a = {case.result.case.benchmark.id: case.result.case.benchmark.version for case in a.values()}
    versions_b = {case.result.case.benchmark.id: case.result.case.benchmark.version for case in b.values()}
    return [
        f"{name} is version {versions_a[name]} in A and {versions_b[name]} in B: they compute different things "
        "and are not compared"
        for name in sorted(versions_a.keys() & versions_b.keys())
        if versions_a[name] != versions_b[name]
    ]
