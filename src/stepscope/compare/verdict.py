"""What may be said of two runs, case by case: better, worse, no difference found, or not enough data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from stepscope.compare.sides import (
    ComparedSide,
    MeasuredProcess,
    choose_processes,
    explain_slowness,
    read_processes,
    slow_phase_chance,
)
from stepscope.core.units import count_of, format_ratio, format_share
from stepscope.stats import (
    SLOW_PHASE_CHANCE,
    RatioEstimate,
    compare_paired,
    compare_processes,
    holm,
    holm_levels,
    mean,
    plan_processes,
    quantile_time,
)
from stepscope.store import MeasuredCase

Verdict = Literal["better", "worse", "no difference found", "not enough data"]

DEFAULT_FAMILY_LEVEL = 0.01
"""Chance of even one false alarm in a whole comparison of two runs."""

MIN_EFFECT = 0.01
"""A difference smaller than this is not called one, however sure it is."""

DEFAULT_RESOLUTION = 0.05
"""A change by this much must be visible; where it is not, the answer is "not enough data"."""

FIRST_LOOK = 5
"""Processes per side with which to find out how much they differ."""

SINGLE = (
    "the noise between processes is unknown there, and only large differences are called; "
    f"measure with --processes {FIRST_LOOK}"
)

PASS_LEVEL = 0.05
"""Chance that a gate passes a case that is exactly at its limit."""

MIN_SAMPLES = 5
"""Per side; below, a tenth percentile is only the fastest sample under another name."""


class Statistic(NamedTuple):
    """A quantile of each process's samples, and its part of a case's chance of a false alarm."""

    name: str
    quantile: float
    weight: float


STATISTICS = (Statistic("p10", 0.1, 0.8), Statistic("median", 0.5, 0.1), Statistic("p95", 0.95, 0.1))
"""Other work only ever adds time, so the fast end repeats best and has most of the level. The median and the tail find
changes that touch slow iterations alone."""


class StatisticRow(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic of one case on both sides: the mean over processes (geometric), and the ratio of the two."""

    name: str
    time_a_s: float
    time_b_s: float
    ratio: float
    """Time of B over time of A: above 1 is slower."""
    ci_low: float
    ci_high: float
    """At the level at which this statistic was decided inside its family: 1 lies outside exactly when it was
    significant. 0 and infinity where the load of a side may explain any difference."""
    significant: bool


class CaseComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One row: B beside A for one case. Whatever could not be computed is None, and `reason` says why."""

    key: str
    """Key of A's case; pairs inside one run have two keys, and the label tells them apart."""
    label: str
    benchmark: str
    verdict: Verdict
    reason: str
    """One sentence."""
    statistic: str | None = None
    """What `time_a_s`, `time_b_s` and `ratio` are of: p10 (10th percentile), or where that shows no difference, the
    median or p95."""
    time_a_s: float | None = None
    time_b_s: float | None = None
    ratio: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    upper_bound: float | None = None
    """Upper bound of the p10 ratio, one-sided with 95 % coverage: what a gate compares with its limit."""
    p_adjusted: float | None = None
    """To be compared with the family's level."""
    statistics: list[StatisticRow] = []
    processes_needed: int | None = None
    """Per side, for a new comparison to see a change of the resolution, planned with an upper bound of the spread
    between processes; None where as many are there, or more than a thousand would be needed."""
    n_a: int = 0
    n_b: int = 0
    processes_a: int = 0
    processes_b: int = 0
    disturbed_a: int = 0
    disturbed_b: int = 0
    """How many of the processes ran on a loaded or slower machine; they are left out where enough others remain."""
    between_sd: float | None = None
    """Relative standard deviation between processes, of the p10 time."""
    between_bound: float | None = None
    """Its upper bound (one-sided, 80 %), which numbers of processes are planned with."""
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


class CasePair(NamedTuple):
    """Two cases to be compared, and what to call them."""

    a: MeasuredCase
    b: MeasuredCase
    label: str


class StatisticEstimate(NamedTuple):
    """One statistic's ratio, with the p-value that is compared with the case's level."""

    statistic: Statistic
    ratio: RatioEstimate

    @property
    def p_value(self) -> float:
        return min(1.0, self.ratio.p_value / self.statistic.weight)


class _Tested(NamedTuple):
    row: CaseComparison
    estimates: list[StatisticEstimate]
    a: ComparedSide
    b: ComparedSide
    slow_chance: float
    paired: bool

    @property
    def p_value(self) -> float:
        return min(estimate.p_value for estimate in self.estimates)

    @property
    def has_single(self) -> bool:
        return min(len(self.a.processes), len(self.b.processes)) == 1


def compare_cases(
    a: Sequence[MeasuredCase],
    b: Sequence[MeasuredCase],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    min_effect: float = MIN_EFFECT,
    resolution: float = DEFAULT_RESOLUTION,
    same_system: bool = True,
) -> Comparison:
    """Verdicts on the cases of two runs, paired by key; rows in the order of labels.

    `a`, `b`: measured cases, as `StoredRun.cases` gives them. `level`, `resolution`: as for `compare`. `min_effect`: a
    change by less than this fraction is never called. `same_system`: whether both were measured on one machine. Tries
    of a search have no row, no part of the level and no word: they count nowhere but in the search.

    >>> cases = stepscope.find_run("latest").cases()
    >>> [row.ratio for row in stepscope.compare_cases(cases, cases).rows]
    [1.0]
    """
    by_key_a, by_key_b = ({case.key: case for case in leave_out_tries(side)} for side in (a, b))
    pairs = [CasePair(case, by_key_b[key], case.result.case.label) for key, case in by_key_a.items() if key in by_key_b]
    comparison = compare_pairs(
        pairs, level=level, min_effect=min_effect, resolution=resolution, same_system=same_system
    )
    return replace(
        comparison,
        only_a=sorted(case.result.case.label for key, case in by_key_a.items() if key not in by_key_b),
        only_b=sorted(case.result.case.label for key, case in by_key_b.items() if key not in by_key_a),
        notes=[*comparison.notes, *_version_notes(by_key_a, by_key_b)],
    )


def leave_out_tries(cases: Sequence[MeasuredCase]) -> list[MeasuredCase]:
    """Without the tries of a search for a batch size; the case that it ended with stays."""
    return [case for case in cases if not case.result.case.spec.is_try]


def compare_pairs(
    pairs: Sequence[CasePair],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    min_effect: float = MIN_EFFECT,
    resolution: float = DEFAULT_RESOLUTION,
    same_system: bool = True,
    paired: bool = False,
) -> Comparison:
    """The same for pairs that are already made; all of them are one family.

    `paired`: process i of A ran beside process i of B, and only differences inside these pairs count.
    """
    ordered = sorted(pairs, key=lambda pair: (pair.label, pair.a.key, pair.b.key))
    prepared = [_prepare(pair, same_system=same_system, paired=paired) for pair in ordered]
    tested = [item for item in prepared if isinstance(item, _Tested)]
    p_values = [item.p_value for item in tested]
    single = sum(item.has_single for item in tested)
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
        notes=[f"cases with a single process on a side: {single} of {len(tested)}; {SINGLE}"] if single else [],
    )


def _prepare(pair: CasePair, *, same_system: bool, paired: bool) -> _Tested | CaseComparison:
    """What can be tested, or the row that says why it cannot."""
    read = [read_processes(case) for case in (pair.a, pair.b)]
    row = _describe_pair(pair, *read)
    for name, case, processes in zip("AB", (pair.a, pair.b), read, strict=True):
        if case.result.status != "ok":
            cause = f": {case.result.failure.message}" if case.result.failure else ""
            told = "was skipped" if case.result.status == "skipped" else "failed"
            return replace(row, reason=f"the case {told} in {name}{cause}")
        count = sum(len(process.seconds) for process in processes)
        if count < MIN_SAMPLES:
            return replace(row, reason=f"{name} has {count} samples and {MIN_SAMPLES} are needed")
        if any(not (value > 0 and math.isfinite(value)) for process in processes for value in process.seconds):
            return replace(row, reason=f"{name} holds a sample that is not a time above zero")
    a, b = choose_processes(*read, same_system=same_system, paired=paired)
    if paired and len(a.processes) < 2:
        return replace(row, reason="one pair of processes shows no noise; at least two are needed")
    chance = slow_phase_chance(a, b, same_system=same_system)
    row = replace(row, disturbed_a=a.disturbed, disturbed_b=b.disturbed)
    return _Tested(row, _estimate_sides(a, b, chance, paired=paired), a, b, chance, paired)


def _estimate_sides(a: ComparedSide, b: ComparedSide, slow_chance: float, *, paired: bool) -> list[StatisticEstimate]:
    def explain(quantile: float) -> tuple[float, float]:
        return explain_slowness(a, b, quantile), explain_slowness(b, a, quantile)

    return estimate_ratios(a.seconds, b.seconds, slow_chance=slow_chance, paired=paired, explain=explain)


def estimate_ratios(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    slow_chance: float = SLOW_PHASE_CHANCE,
    paired: bool = False,
    explain: Callable[[float], tuple[float, float]] = lambda quantile: (0.0, 0.0),
) -> list[StatisticEstimate]:
    """Every statistic's ratio, B over A, from the samples of each process; `explain`: what circumstances may have added
    to this quantile of A's and of B's."""

    def compare(quantile: float) -> RatioEstimate:
        if paired:  # sides that take turns meet what happens around them alike; how much it varies shows between pairs
            return compare_paired(list(zip(a, b, strict=True)), quantile=quantile, slow_chance=slow_chance)
        return compare_processes(a, b, quantile=quantile, slow_chance=slow_chance, explained=explain(quantile))

    return [StatisticEstimate(statistic, compare(statistic.quantile)) for statistic in STATISTICS]


def lead_estimate(estimates: Sequence[StatisticEstimate]) -> StatisticEstimate:
    """The one that decides: that with the smallest p-value."""
    return min(estimates, key=lambda estimate: estimate.p_value)


def _describe_pair(
    pair: CasePair, processes_a: Sequence[MeasuredProcess], processes_b: Sequence[MeasuredProcess]
) -> CaseComparison:
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
        n_a=sum(len(process.seconds) for process in processes_a),
        n_b=sum(len(process.seconds) for process in processes_b),
        processes_a=len(processes_a),
        processes_b=len(processes_b),
        score_a=a.score() if same_unit else None,
        score_b=b.score() if same_unit else None,
        unit=score.unit if score and same_unit else None,
        status_a=a.result.status,
        status_b=b.result.status,
    )


def _decide(
    item: _Tested, adjusted: float, own_level: float, *, level: float, min_effect: float, resolution: float
) -> CaseComparison:
    statistics = [_decide_statistic(item, estimate, own_level) for estimate in item.estimates]
    fast_end = item.estimates[0].ratio
    called = [row for row in statistics if row.significant and abs(math.log(row.ratio)) >= math.log1p(min_effect)]
    lead_name = lead_estimate(item.estimates).statistic.name
    shown = next((row for row in called if row.name == lead_name), called[0] if called else statistics[0])
    row = replace(
        item.row,
        statistic=shown.name,
        **{name: getattr(shown, name) for name in ("time_a_s", "time_b_s", "ratio", "ci_low", "ci_high")},
        upper_bound=fast_end.interval_at(2 * PASS_LEVEL)[1],
        p_adjusted=adjusted,
        between_sd=fast_end.between_sd,
        between_bound=fast_end.between_bound,
        statistics=statistics,
    )
    if called:
        verdict: Verdict = "worse" if shown.ratio > 1 else "better"
        reason = f"the {shown.name} times differ at a family-wise level of {format_share(level)}"
        # Where another statistic went the other way, a reader must hear of it.
        against = [one for one in called if (one.ratio > 1) != (shown.ratio > 1)]
        reason += "".join(
            f"; but the {one.name} times differ the other way, by {format_ratio(one.ratio)}" for one in against
        )
        return replace(row, verdict=verdict, reason=reason)
    return _decide_uncalled(item, row, own_level, min_effect=min_effect, resolution=resolution)


def _decide_uncalled(
    item: _Tested, row: CaseComparison, own_level: float, *, min_effect: float, resolution: float
) -> CaseComparison:
    """Whether a change of the resolution would have been seen; if not, how many processes would show it."""
    first, fast_end = row.statistics[0], item.estimates[0].ratio
    seen = math.log(fast_end.ratio / first.ci_low) - fast_end.explained_b if first.ci_low else math.inf
    explained = max(fast_end.explained_a, fast_end.explained_b)
    limit = f"a change below {format_share(math.expm1(seen), 0 if seen > 0.1 else 1)} would not have been seen"
    if explained > math.log1p(resolution):
        return replace(row, reason=_tell_disturbance(item, explained))
    needed: int | None = FIRST_LOOK
    if not item.has_single:
        chance, size = item.slow_chance, math.log1p(resolution)
        needed = plan_processes(
            fast_end.between_bound, size, own_level * STATISTICS[0].weight, slow_chance=chance, paired=item.paired
        )
    fewest = min(len(side.processes) for side in (item.a, item.b))
    if seen > math.log1p(resolution):
        limit = _tell_left_out(item) + limit
        # Sides that differ in their spread leave fewer degrees of freedom than a plan expects: these were too few.
        needed = needed and max(needed, fewest + 1)
        reason = f"{limit}; {_tell_needed(needed, item, resolution)}"
        return replace(row, reason=reason, processes_needed=needed)
    small = any(one.significant for one in row.statistics)
    reason = f"the difference is smaller than {format_share(min_effect)}" if small else "the interval includes 1"
    return replace(
        row,
        verdict="no difference found",
        reason=f"{reason}; {limit}",
        processes_needed=needed if needed and needed > fewest else None,
    )


def _decide_statistic(item: _Tested, estimate: StatisticEstimate, own_level: float) -> StatisticRow:
    quantile, level = estimate.statistic.quantile, own_level * estimate.statistic.weight
    low, high = estimate.ratio.interval_at(level)
    logs = [[math.log(quantile_time(process, quantile)) for process in side.seconds] for side in (item.a, item.b)]
    times = [math.exp(mean(side)) for side in logs]
    return StatisticRow(
        name=estimate.statistic.name,
        time_a_s=times[0],
        time_b_s=times[1],
        ratio=estimate.ratio.ratio,
        ci_low=low,
        ci_high=high,
        significant=estimate.ratio.p_value <= level,
    )


def _tell_disturbance(item: _Tested, explained: float) -> str:
    names = [name for name, side in (("A", item.a), ("B", item.b)) if any(p.disturbed for p in side.processes)]
    size = "any difference" if math.isinf(explained) else f"{format_share(math.expm1(explained), 0)}"
    measured = f"{' and '.join(names)} {'were' if len(names) > 1 else 'was'} measured"
    return (
        f"the machine was loaded or slower while {measured}, which could explain {size}; "
        "measure again with less co-running load, or use `stepscope ab`"
    )


def _tell_left_out(item: _Tested) -> str:
    """Why a comparison has fewer processes than were measured."""
    left_out = [
        f"{len(side.all_processes) - len(side.processes)} of {name}'s {len(side.all_processes)} processes"
        for name, side in (("A", item.a), ("B", item.b))
        if len(side.processes) < len(side.all_processes)
    ]
    return f"without {' and '.join(left_out)}, which ran on a loaded or slower machine, " if left_out else ""


def _tell_needed(needed: int | None, item: _Tested, resolution: float) -> str:
    size = format_share(resolution, 0 if resolution >= 0.1 else 1)
    unit, option = ("pairs", "--pairs") if item.paired else ("processes per side", "--processes")
    if needed is None:
        return f"seeing a change of {size} would need more than 1,000 {unit}: the machine is too noisy for it"
    if item.has_single:
        return f"one process shows no noise between processes: measure both sides with --processes {needed}"
    return f"{needed} {unit} would show one of {size} ({option} {needed})"


def _version_notes(a: Mapping[str, MeasuredCase], b: Mapping[str, MeasuredCase]) -> list[str]:
    """Two versions of a benchmark compute different things: their cases never pair, and that should not puzzle."""
    versions_a = {case.result.case.benchmark.id: case.result.case.benchmark.version for case in a.values()}
    versions_b = {case.result.case.benchmark.id: case.result.case.benchmark.version for case in b.values()}
    return [
        f"{name} has version {versions_a[name]} in A and {versions_b[name]} in B, and is not compared"
        for name in sorted(versions_a.keys() & versions_b.keys())
        if versions_a[name] != versions_b[name]
    ]


ORDER: tuple[Verdict, ...] = ("worse", "better", "no difference found", "not enough data")


def describe(row: CaseComparison, name_a: str = "A", name_b: str = "B") -> str:
    """One sentence with factor, interval and n; the faster side is the subject."""
    count = f"n = {row.n_a} and {row.n_b} in {row.processes_a} and {count_of(row.processes_b, 'process', 'processes')}"
    if row.ratio is None or row.ci_low is None or row.ci_high is None:
        return f"{row.label}: not enough data: {row.reason}."
    if row.verdict in ("better", "worse"):
        inverse = row.verdict == "worse"
        faster, slower = (name_a, name_b) if inverse else (name_b, name_a)
        factor = row.ratio if inverse else 1 / row.ratio
        low, high = (row.ci_low, row.ci_high) if inverse else (1 / row.ci_high, 1 / row.ci_low)
        spread = f"{factor:.2f} ± {max(high - factor, factor - low):.2f}"
        return (
            f"{row.label}: {faster} ran {spread} times faster than {slower} "
            f"({row.statistic} times, {low:.2f} to {high:.2f}, {count})."
        )
    told = f"{name_b} took {format_ratio(row.ratio)} the {row.statistic} time of {name_a}"
    interval = f"({format_ratio(row.ci_low)} to {format_ratio(row.ci_high)}, {count})"
    return f"{row.label}: {row.verdict}: {told} {interval}; {row.reason}."


def describe_comparison(comparison: Comparison) -> str:
    """The closing sentence: how many of each, at which level."""
    if not comparison.rows:
        return "The two runs share no case, so nothing was compared."
    counts = Counter(row.verdict for row in comparison.rows)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    cases = count_of(len(comparison.rows), "case", "cases")
    alone = len(comparison.only_a) + len(comparison.only_b)
    missing = f"; {count_of(alone, 'case is', 'cases are')} on one side only" if alone else ""
    chance = f"the chance of even one false alarm among them is at most {format_share(comparison.level)}"
    return f"Of {cases}: {told}; {chance}{missing}."
