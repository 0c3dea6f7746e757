"""The search for a batch size as rounds of a run: what was measured decides what is measured next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stepscope.bench.workloads.search import Trial, best_trial, next_batch
from stepscope.records import Case
from stepscope.store import MeasuredCase

WITHOUT_LIMIT = 1 << 20
"""The largest batch where no rule limits it: memory does."""


def next_cases(asked: dict[str, Any], measured: Sequence[MeasuredCase]) -> list[Case]:
    """The next try of each search that is not over, or the size it ended with, to be measured in full.

    Empty when all is done.
    """
    following = []
    done = {case.result.case.key for case in measured}
    for cases in _searches(measured).values():
        size = next_batch(
            [read_trial(case) for case in cases],
            largest=_largest(cases[0].result.case, asked),
            first=int(asked["first"]),
            resolution=float(asked["resolution"]),
        )
        tried = cases[0].result.case
        if size is not None:
            following.append(msgspec.structs.replace(tried, batch_size=size))
        elif (best := best_trial([read_trial(case) for case in cases])) is not None:
            final = _as_final(tried, best.batch_size)
            following += [final] if final.key not in done else []
    return following


def _as_final(tried: Case, batch_size: int) -> Case:
    return msgspec.structs.replace(tried, batch_size=batch_size, spec=msgspec.structs.replace(tried.spec, search=None))


def read_trial(case: MeasuredCase) -> Trial:
    failure = case.result.failure
    failed = case.result.status == "failed" and failure is not None and failure.kind != "out_of_memory"
    return Trial(case.result.case.batch_size or 0, case.score(), not case.missed_latency(), failed)


def _largest(case: Case, asked: dict[str, Any]) -> int:
    from stepscope.bench.workloads.registry import find_workload

    rule = find_workload(case.benchmark.id).declared.max_batch_size
    return min(asked.get("largest") or WITHOUT_LIMIT, rule or WITHOUT_LIMIT)


def _searches(measured: Sequence[MeasuredCase]) -> dict[str, list[MeasuredCase]]:
    """Tries by what they have in common: everything but the batch size."""
    groups: dict[str, list[MeasuredCase]] = {}
    for case in measured:
        if not case.result.case.spec.is_try:
            continue
        common = msgspec.structs.replace(case.result.case, batch_size=None).key
        groups.setdefault(common, []).append(case)
    return groups
