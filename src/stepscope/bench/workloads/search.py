"""Which batch size to try next. Knows no clock and no device: it is told every try again, so that a run can go on."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import msgspec

from stepscope.records import BatchSearch, Case
from stepscope.records.kinds import WorkloadSpec
from stepscope.store import MeasuredCase

DEFAULT_RESOLUTION = 1 / 16
"""How close to the best size the search ends, as a fraction of the bracket's middle."""
FALL = 0.02
"""Throughput has fallen where it is so much below the best; less is noise or a plateau."""
FALLS = 2
"""In a row, and doubling ends: a single one is often a size that the device's libraries dislike."""


class BatchTrial(NamedTuple):
    batch_size: int
    throughput: float | None
    """Examples a second; None: it did not fit, or failed."""
    in_time: bool = True
    """Whether the latency limit was kept."""
    failed: bool = False
    """For another reason than room: some models need more than one example."""

    @property
    def worth(self) -> float:
        return self.throughput if self.throughput is not None and self.in_time else -1.0


def next_batch(
    trials: Iterable[BatchTrial], *, largest: int, first: int = 1, resolution: float = DEFAULT_RESOLUTION
) -> int | None:
    """The size to try after these; None: the search is over, see `best_trial`."""
    known = {trial.batch_size: trial for trial in trials}
    search = _search(largest, first, resolution)
    try:
        wanted = next(search)
        while wanted in known:
            wanted = search.send(known[wanted])
    except StopIteration:
        return None
    return wanted


def best_trial(trials: Sequence[BatchTrial]) -> BatchTrial | None:
    """The largest throughput within the limits; of equal ones the smaller batch. None where no size was in time."""
    valid = [trial for trial in trials if trial.worth >= 0]
    return max(valid, key=lambda trial: (trial.worth, -trial.batch_size), default=None)


def _search(largest: int, first: int, resolution: float) -> Generator[int, BatchTrial, None]:
    """Doubles until it no longer pays or fits, then narrows down between the neighbours of the best."""
    tried: list[BatchTrial] = []
    size, falls = min(first, largest), 0
    while True:
        trial = yield size
        tried.append(trial)
        best = max(one.worth for one in tried)
        falls = falls + 1 if best >= 0 and trial.worth < (1 - FALL) * best else 0
        has_only_failed = all(one.failed for one in tried)
        if (trial.worth < 0 and not has_only_failed) or falls == FALLS or size == largest:
            break
        size = min(2 * size, largest)
    place = max(range(len(tried)), key=lambda i: (tried[i].worth, -i))
    if tried[place].worth < 0:
        return
    low = tried[place - 1].batch_size if place else 0
    high = tried[place + 1].batch_size if place + 1 < len(tried) else tried[place].batch_size
    yield from _narrow(low, high, tried[place].batch_size, resolution)


def _narrow(low: int, high: int, middle: int, resolution: float) -> Generator[int, BatchTrial, None]:
    """Fibonacci search over the sizes between two that are worse, the ends included."""
    granule = max(1, int(middle * resolution))
    candidates = [size for size in range(low, high + 1) if size > 0 and (size - middle) % granule == 0]
    numbers = _fibonacci(len(candidates) + 1)
    # Places beyond the list stand for sizes that are known to be worse: they are never tried.
    start = 0
    worths: dict[int, float] = {}
    for before, further in zip(reversed(numbers[:-1]), reversed([0, *numbers[:-2]]), strict=True):
        left, right = start + further - 1, start + before - 1
        for place in {left, right}:
            if place not in worths:
                if not 0 <= place < len(candidates):
                    worths[place] = -2.0 - place
                else:
                    trial = yield candidates[place]
                    worths[place] = trial.worth
        if left >= 0 and worths[right] > worths[left]:
            start += further


def _fibonacci(least: int) -> list[int]:
    """1, 2, 3, 5 … up to the first that is at least `least`."""
    numbers = [1, 2]
    while numbers[-1] < least:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers


WITHOUT_LIMIT = 1 << 20
"""The largest batch where no rule limits it: memory does."""


def next_cases(asked: BatchSearch, measured: Sequence[MeasuredCase]) -> list[Case]:
    """The next try of each search that is not over, or the size it ended with, to be measured in full."""
    following = []
    done = {case.result.case.key for case in measured}
    for cases in _searches(measured).values():
        size = next_batch(
            [read_trial(case) for case in cases],
            largest=_largest(cases[0].result.case, asked),
            first=asked.first,
            resolution=asked.resolution,
        )
        tried = cases[0].result.case
        if size is not None:
            following.append(msgspec.structs.replace(tried, batch_size=size))
        elif (best := best_trial([read_trial(case) for case in cases])) is not None:
            spec = msgspec.structs.replace(tried.spec, search=None)
            final = msgspec.structs.replace(tried, batch_size=best.batch_size, spec=spec)
            following += [final] if final.key not in done else []
    return following


def read_trial(case: MeasuredCase) -> BatchTrial:
    failure = case.result.failure
    failed = case.result.status == "failed" and failure is not None and failure.kind != "out_of_memory"
    return BatchTrial(case.result.case.batch_size or 0, case.score(), not case.missed_latency(), failed)


def _largest(case: Case, asked: BatchSearch) -> int:
    from stepscope.bench.workloads.registry import find_workload

    is_of_suite = isinstance(case.spec, WorkloadSpec)
    rule = find_workload(case.benchmark.id).declared.max_batch_size if is_of_suite else None
    return min(asked.largest or WITHOUT_LIMIT, rule or WITHOUT_LIMIT)


def _searches(measured: Sequence[MeasuredCase]) -> dict[str, list[MeasuredCase]]:
    """Tries by what they have in common: everything but the batch size."""
    groups: dict[str, list[MeasuredCase]] = {}
    for case in measured:
        if not case.result.case.spec.is_try:
            continue
        common = msgspec.structs.replace(case.result.case, batch_size=None).key
        groups.setdefault(common, []).append(case)
    return groups
