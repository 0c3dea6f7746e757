"""Two tables made of comparisons: one system beside another, and optimized beside out-of-the-box."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, Comparison, Pair, compare_cases, compare_pairs
from stepscope.records import Case
from stepscope.store import MeasuredCase


class SystemTable(msgspec.Struct, frozen=True, kw_only=True):
    """The same cases on two systems; ratios are times on B over times on A."""

    system_a: str
    system_b: str
    same_system: bool
    """By fingerprint: two runs of one system belong into an ordinary comparison."""
    comparison: Comparison


_FINEST = ("fp32", "tf32", "bf16", "fp16", "fp8", "None")
"""Precisions from the finest on; `None` of what has none."""

_TRY = "search"
"""Parameter of a case that is only a try of a search for a batch size: timed, never checked."""


class Gains(msgspec.Struct, frozen=True, kw_only=True):
    """How many times the score of `ootb` the optimized forms reach."""

    benchmarks: int
    geometric_mean: float
    least: float
    least_label: str


class ImplementationTable(msgspec.Struct, frozen=True, kw_only=True):
    """`optimized` (B) beside `ootb` (A) of the same model, mode, config and parameters; below 1 is a gain.

    An optimized case in a precision that was not measured out of the box stands beside the out-of-the-box case of the
    same benchmark in another one, and its label says so.
    """

    comparison: Comparison
    same_precision: Gains | None
    """Over the pairs that share a precision; None without any."""
    any_precision: Gains | None
    """Over all benchmarks, each in the precision with the largest gain."""
    unpaired: list[str]
    """Labels of ootb and optimized cases whose counterpart was not measured."""
    without_score: list[str]
    """Labels of pairs that are in no mean, as one of them has no score: it failed, was skipped or was not checked."""


def compare_systems(
    a: Sequence[MeasuredCase],
    b: Sequence[MeasuredCase],
    *,
    system_a: tuple[str, str],
    system_b: tuple[str, str],
    level: float = DEFAULT_FAMILY_LEVEL,
) -> SystemTable:
    """Each system is given as its name and fingerprint. Tries of a search are in no row."""
    same_system = system_a[1] == system_b[1]
    return SystemTable(
        system_a=system_a[0],
        system_b=system_b[0],
        same_system=same_system,
        comparison=compare_cases(_leave_out_tries(a), _leave_out_tries(b), level=level, same_system=same_system),
    )


def compare_implementations(
    cases: Sequence[MeasuredCase], *, level: float = DEFAULT_FAMILY_LEVEL
) -> ImplementationTable:
    """`cases` may come from one run or from several of the same system."""
    pairs, unpaired = pair_ootb_optimized(cases)
    same = [pair for pair in pairs if _precision(pair.a) == _precision(pair.b)]
    return ImplementationTable(
        comparison=compare_pairs(pairs, level=level),
        same_precision=_find_gains(same),
        any_precision=_find_gains(pairs),
        unpaired=unpaired,
        without_score=[pair.label for pair in pairs if not (pair.a.score() and pair.b.score())],
    )


def _find_gains(pairs: Sequence[Pair]) -> Gains | None:
    best: dict[str, float] = {}
    for pair in pairs:
        before, after = pair.a.score(), pair.b.score()
        if before and after:
            label = f"{pair.a.result.case.benchmark.id} batch {pair.a.result.case.batch_size}"
            best[label] = max(best.get(label, 0.0), after / before)
    if not best:
        return None
    least = min(best, key=lambda label: best[label])
    return Gains(
        benchmarks=len(best),
        geometric_mean=math.exp(math.fsum(map(math.log, best.values())) / len(best)),
        least=best[least],
        least_label=least,
    )


def pair_ootb_optimized(cases: Sequence[MeasuredCase]) -> tuple[list[Pair], list[str]]:
    """Pairs that differ in nothing but the implementation, and the labels of cases left without a counterpart.

    Where a case was given more than once (several runs), the last one counts. Versions must agree: they are
    raised when what is computed changes, and the two implementations of a benchmark compute the same. Tries of a
    search are neither paired nor left over.
    """
    sides: dict[str, dict[str, MeasuredCase]] = {"ootb": {}, "optimized": {}}
    for case in _leave_out_tries(cases):
        implementation = case.result.case.benchmark.implementation
        if implementation in sides:
            sides[implementation][_neutral_key(case.result.case)] = case
    ootb, optimized = sides["ootb"], sides["optimized"]
    pairs = [Pair(ootb[key], optimized[key], _neutral_label(ootb[key])) for key in ootb.keys() & optimized.keys()]
    # Of several out-of-the-box precisions the finest is what others are measured against.
    coarse_first = sorted(ootb.values(), key=lambda case: _FINEST.index(str(_precision(case))), reverse=True)
    by_benchmark = {_neutral_key(case.result.case, any_precision=True): case for case in coarse_first}
    lonely = {key: case for key, case in ootb.items() if key not in optimized}
    for key in optimized.keys() - ootb.keys():
        fast = optimized[key]
        plain = by_benchmark.get(_neutral_key(fast.result.case, any_precision=True))
        if plain is None:
            lonely[key] = fast
        else:
            lonely.pop(_neutral_key(plain.result.case), None)
            change = f" ({_precision(plain)}→{_precision(fast)})"
            pairs.append(Pair(plain, fast, _neutral_label(plain) + change))
    labels = sorted(case.result.case.label for case in lonely.values())
    return sorted(pairs, key=lambda pair: pair.label), labels


def _leave_out_tries(cases: Sequence[MeasuredCase]) -> list[MeasuredCase]:
    return [case for case in cases if _TRY not in case.result.case.parameters]


def _precision(case: MeasuredCase) -> object:
    return case.result.case.parameters.get("precision")


def _neutral_key(case: Case, *, any_precision: bool = False) -> str:
    neutral = _as_ootb(case)
    if any_precision:
        parameters = {name: value for name, value in case.parameters.items() if name != "precision"}
        neutral = msgspec.structs.replace(neutral, parameters=parameters)
    return neutral.key


def _neutral_label(case: MeasuredCase) -> str:
    label = case.result.case.label
    return label.replace("/ootb/", "/ootb→optimized/", 1)


def _as_ootb(case: Case) -> Case:
    benchmark = msgspec.structs.replace(case.benchmark, implementation="ootb")
    return msgspec.structs.replace(case, benchmark=benchmark)
