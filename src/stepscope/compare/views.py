"""Two tables made of comparisons: one system beside another, and optimized beside out-of-the-box."""

from __future__ import annotations

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


class ImplementationTable(msgspec.Struct, frozen=True, kw_only=True):
    """`optimized` (B) beside `ootb` (A) of the same model, mode, config and parameters; below 1 is a gain."""

    comparison: Comparison
    unpaired: list[str]
    """Labels of ootb and optimized cases whose counterpart was not measured."""


def compare_systems(
    a: Sequence[MeasuredCase],
    b: Sequence[MeasuredCase],
    *,
    system_a: tuple[str, str],
    system_b: tuple[str, str],
    level: float = DEFAULT_FAMILY_LEVEL,
) -> SystemTable:
    """Each system is given as its name and fingerprint."""
    same_system = system_a[1] == system_b[1]
    return SystemTable(
        system_a=system_a[0],
        system_b=system_b[0],
        same_system=same_system,
        comparison=compare_cases(a, b, level=level, same_system=same_system),
    )


def compare_implementations(
    cases: Sequence[MeasuredCase], *, level: float = DEFAULT_FAMILY_LEVEL
) -> ImplementationTable:
    """`cases` may come from one run or from several of the same system."""
    pairs, unpaired = pair_ootb_optimized(cases)
    return ImplementationTable(comparison=compare_pairs(pairs, level=level), unpaired=unpaired)


def pair_ootb_optimized(cases: Sequence[MeasuredCase]) -> tuple[list[Pair], list[str]]:
    """Pairs that differ in nothing but the implementation, and the labels of cases left without a counterpart.

    Where a case was given more than once (several runs), the last one counts. Versions must agree: they are
    raised when what is computed changes, and the two implementations of a benchmark compute the same.
    """
    sides: dict[str, dict[str, MeasuredCase]] = {"ootb": {}, "optimized": {}}
    for case in cases:
        implementation = case.result.case.benchmark.implementation
        if implementation in sides:
            sides[implementation][_neutral_key(case.result.case)] = case
    ootb, optimized = sides["ootb"], sides["optimized"]
    pairs = [Pair(ootb[key], optimized[key], _neutral_label(ootb[key])) for key in ootb.keys() & optimized.keys()]
    lonely = [ootb.get(key) or optimized[key] for key in ootb.keys() ^ optimized.keys()]
    return sorted(pairs, key=lambda pair: pair.label), sorted(case.result.case.label for case in lonely)


def _neutral_key(case: Case) -> str:
    return _as_ootb(case).key


def _neutral_label(case: MeasuredCase) -> str:
    label = case.result.case.label
    return label.replace("/ootb/", "/ootb→optimized/", 1)


def _as_ootb(case: Case) -> Case:
    benchmark = msgspec.structs.replace(case.benchmark, implementation="ootb")
    return msgspec.structs.replace(case, benchmark=benchmark)
