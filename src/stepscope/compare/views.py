"""Comparisons of whole runs: two runs, two sides measured in turn, optimized beside out-of-the-box."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.compare.verdict import (
    DEFAULT_FAMILY_LEVEL,
    DEFAULT_RESOLUTION,
    CasePair,
    Comparison,
    compare_cases,
    compare_pairs,
    leave_out_tries,
)
from stepscope.core.errors import UsageError
from stepscope.records import Case
from stepscope.store import MeasuredCase, StoredRun


def compare_runs(
    a: StoredRun, b: StoredRun, *, level: float = DEFAULT_FAMILY_LEVEL, resolution: float = DEFAULT_RESOLUTION
) -> Comparison:
    """Verdicts for every case that both have."""
    places = [run.system.place if run.system else None for run in (a, b)]
    found = compare_cases(a.cases(), b.cases(), level=level, resolution=resolution, same_system=places[0] == places[1])
    checks = [getattr(run.plan.request, "check", None) for run in (a, b)]
    if checks[0] == checks[1] or None in checks:
        return found
    # Results that are checked between the timed calls may leave other data in the caches.
    note = (
        f"A was measured with --check {checks[0]} and B with --check {checks[1]}; "
        "measure both sides with the same one to be sure that a difference is not the check's"
    )
    return msgspec.structs.replace(found, notes=[*found.notes, note])


def compare_interleaved(
    a: StoredRun, b: StoredRun, *, level: float = DEFAULT_FAMILY_LEVEL, resolution: float = DEFAULT_RESOLUTION
) -> Comparison:
    """Verdicts from pairs of processes; the cases of the two sides pair up by key, else by their order.

    Only differences inside the pairs count: what the machine did to both at that hour cancels.
    """
    cases_a, cases_b = a.cases(), b.cases()
    keys_b = {case.key: case for case in cases_b}
    if all(case.key in keys_b for case in cases_a):
        pairs = [(case, keys_b[case.key]) for case in cases_a]
    elif len(cases_a) == len(cases_b):
        pairs = list(zip(cases_a, cases_b, strict=True))
    else:
        raise UsageError(
            f"side A has {len(cases_a)} cases and side B has {len(cases_b)}, and they do not pair up",
            hint="give both sides the same number of shapes or sizes",
        )
    labels = [
        one.result.case.label + (f" | {other.result.case.label}" if one.key != other.key else "")
        for one, other in pairs
    ]
    labelled = [CasePair(*pair, label) for pair, label in zip(pairs, labels, strict=True)]
    return compare_pairs(labelled, level=level, resolution=resolution, same_system=False, paired=True)


_FINEST = ("fp32", "tf32", "bf16", "fp16", "fp8", "None")
"""Precisions from the finest on; `None` of what has none."""


class Gains(msgspec.Struct, frozen=True, kw_only=True):
    """How many times the score of `ootb` the optimized implementations reach."""

    benchmarks: int
    """Each batch size, number of ranks and set of parameters of a benchmark counts by itself."""
    geometric_mean: float
    least: float
    least_label: str


class ImplementationTable(msgspec.Struct, frozen=True, kw_only=True):
    """`optimized` (B) beside `ootb` (A) of the same model, mode, config and parameters; below 1 is a gain.

    An optimized case also stands beside the out-of-the-box case of the same benchmark in the finest precision that was
    measured, where that is another one, and its label says so. A mean is made of decided rows alone.
    """

    comparison: Comparison
    same_precision: Gains | None
    """Over the pairs that share a precision, each precision by itself; None without any."""
    any_precision: Gains | None
    """For each benchmark, the fastest optimized implementation, in any precision, over the out-of-the-box one in the
    finest precision that was measured: more coarse out-of-the-box cases change nothing here."""
    unpaired: list[str]
    """Labels of ootb and optimized cases that have no counterpart, neither in a row nor in a mean."""
    without_score: list[str]
    """Labels of pairs that are in no mean, as one of them has no score: it failed, was skipped or was not checked."""
    undecided: list[str]
    """Labels of pairs that are in no mean, as their verdict is "not enough data"."""


def compare_implementations(
    cases: Sequence[MeasuredCase],
    *,
    level: float = DEFAULT_FAMILY_LEVEL,
    resolution: float = DEFAULT_RESOLUTION,
) -> ImplementationTable:
    """`cases` may come from one run or from several of the same system."""
    pairs, unpaired = pair_ootb_optimized(cases)
    comparison = compare_pairs(pairs, level=level, resolution=resolution)
    scored = [
        (pair, row) for pair, row in zip(pairs, comparison.rows, strict=True) if pair.a.score() and pair.b.score()
    ]
    decided = [pair for pair, row in scored if row.verdict != "not enough data"]
    finest = {case.key for case in _find_references(_split_by_implementation(cases)[0]).values()}
    return ImplementationTable(
        comparison=comparison,
        same_precision=_find_gains([pair for pair in decided if _precision(pair.a) == _precision(pair.b)]),
        any_precision=_find_gains([pair for pair in decided if pair.a.key in finest], any_precision=True),
        unpaired=unpaired,
        without_score=[pair.label for pair in pairs if not (pair.a.score() and pair.b.score())],
        undecided=[pair.label for pair, row in scored if row.verdict == "not enough data"],
    )


def _find_gains(pairs: Sequence[CasePair], *, any_precision: bool = False) -> Gains | None:
    """The largest gain of each case; with `any_precision` cases that differ in it alone are one."""
    best: dict[str, tuple[float, str]] = {}
    for pair in pairs:
        before, after = pair.a.score(), pair.b.score()
        if before and after:
            key = _neutral_key(pair.b.result.case, any_precision=any_precision)
            found = (after / before, _name_in_full(pair))
            best[key] = max(best.get(key, found), found)
    if not best:
        return None
    least, least_label = min(best.values())
    return Gains(
        benchmarks=len(best),
        geometric_mean=math.exp(math.fsum(math.log(gain) for gain, _ in best.values()) / len(best)),
        least=least,
        least_label=least_label,
    )


def _name_in_full(pair: CasePair) -> str:
    """With what a label leaves to the columns of a table."""
    case = pair.a.result.case
    batch = f" batch {case.batch_size}" if case.batch_size is not None else ""
    ranks = f" on {case.world_size} ranks" if case.world_size > 1 else ""
    return f"{pair.label}{batch}{ranks}"


def pair_ootb_optimized(cases: Sequence[MeasuredCase]) -> tuple[list[CasePair], list[str]]:
    """Pairs of `ootb` and `optimized` by their labels, and the labels of cases left without a counterpart.

    An optimized case stands beside the out-of-the-box case that differs in nothing but the implementation, and beside
    its benchmark's reference, the out-of-the-box case in the finest precision, where that is another one.

    Where a case was given more than once (several runs), the last one counts. Versions must agree: they are
    raised when what is computed changes, and the two implementations of a benchmark compute the same. Tries of a
    search are neither paired nor left over.
    """
    ootb, optimized = _split_by_implementation(cases)
    references = _find_references(ootb)
    pairs = [
        _make_pair(plain, fast)
        for key, fast in optimized.items()
        for plain in _distinct(ootb.get(key), references.get(_neutral_key(fast.result.case, any_precision=True)))
    ]
    paired = {case.key for pair in pairs for case in (pair.a, pair.b)}
    left = [case for case in (*ootb.values(), *optimized.values()) if case.key not in paired]
    ordered = sorted(pairs, key=lambda pair: (pair.label, pair.a.key, pair.b.key))
    return ordered, sorted(case.result.case.label for case in left)


def _distinct(*cases: MeasuredCase | None) -> list[MeasuredCase]:
    return list({case.key: case for case in cases if case is not None}.values())


def _split_by_implementation(
    cases: Sequence[MeasuredCase],
) -> tuple[dict[str, MeasuredCase], dict[str, MeasuredCase]]:
    """Out of the box and optimized, by a key that two cases share which differ in nothing else."""
    sides: dict[str, dict[str, MeasuredCase]] = {"ootb": {}, "optimized": {}}
    for case in leave_out_tries(cases):
        implementation = case.result.case.benchmark.implementation
        if implementation in sides:
            sides[implementation][_neutral_key(case.result.case)] = case
    return sides["ootb"], sides["optimized"]


def _find_references(ootb: Mapping[str, MeasuredCase]) -> dict[str, MeasuredCase]:
    """The out-of-the-box case of each benchmark in the finest precision that there is."""

    def coarseness(case: MeasuredCase) -> int:
        """Models of users have precisions that only they know."""
        name = str(_precision(case))
        return _FINEST.index(name) if name in _FINEST else len(_FINEST)

    coarse_first = sorted(ootb.values(), key=coarseness, reverse=True)
    return {_neutral_key(case.result.case, any_precision=True): case for case in coarse_first}


def _make_pair(plain: MeasuredCase, fast: MeasuredCase) -> CasePair:
    before, after = _precision(plain), _precision(fast)
    change = f" ({before}→{after})" if before != after else ""
    return CasePair(plain, fast, plain.result.case.label.replace("/ootb/", "/ootb→optimized/", 1) + change)


def _precision(case: MeasuredCase) -> str | None:
    return case.result.case.spec.precision


def _neutral_key(case: Case, *, any_precision: bool = False) -> str:
    benchmark = msgspec.structs.replace(case.benchmark, implementation="ootb")
    spec = case.spec.without_precision() if any_precision else case.spec
    return msgspec.structs.replace(case, benchmark=benchmark, spec=spec).key
