"""A stored run as readers see it: results with their samples, ready for statistics."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from stepscope.core.units import scale_score
from stepscope.records import CaseResult, RankSamples, slowest_rank_seconds
from stepscope.records.kinds import OperatorSpec, WorkloadObserved
from stepscope.stats import Summary, median, quantile_sorted, summarize

ARRIVAL = "arrival"
"""Name in `RankSamples.extra_s`: when this rank began each iteration, in seconds after the first rank."""

LATENCY_PERCENTILES = (50, 75, 95, 99)


LOADER = "loader"
"""Name in `RankSamples.extra_s`: seconds per step when every batch came through a loader."""

TTFT, TPOT = "ttft", "tpot"
"""Names in `RankSamples.extra_s`: seconds to the first token of a batch, and for each one after it."""

NO_PARTS = (ARRIVAL, "graph", "kernel", LOADER, TTFT, TPOT)
"""Further times that are no part of an iteration."""


class MeasuredCase(NamedTuple):
    """A case's result and its samples; everything derived is computed here, on reading."""

    result: CaseResult
    samples: list[RankSamples]

    @property
    def key(self) -> str:
        return self.result.case.key

    def seconds_by_process(self) -> list[list[float]]:
        """Seconds per iteration, one list per fresh process; ranks folded into one as the result says."""
        return [self._fold(ranks) for ranks in self._by_process()]

    def _by_process(self) -> list[list[RankSamples]]:
        processes: dict[int, list[RankSamples]] = defaultdict(list)
        for samples in self.samples:
            processes[samples.process].append(samples)
        return [processes[number] for number in sorted(processes)]

    def _fold(self, ranks: list[RankSamples]) -> list[float]:
        if self.result.timing in {"slowest_rank", "slowest_rank_device"}:
            return slowest_rank_seconds(ranks, device=self.result.timing == "slowest_rank_device")
        if self.result.timing == "device":
            return [value for rank in ranks for value in rank.device_seconds() or []]
        return [value for rank in ranks for value in rank.seconds()]

    def seconds(self) -> list[float]:
        return [value for process in self.seconds_by_process() for value in process]

    def wall_seconds(self) -> list[float]:
        """By the host's clock, launching included, whatever the case's own times are."""
        return [value for samples in self.samples for value in samples.seconds()]

    def extra_seconds(self, name: str) -> list[float]:
        """Further times that were taken (`graph`, `kernel`); empty where they were not."""
        return [value for samples in self.samples for value in samples.extra_s.get(name, [])]

    def device_seconds(self) -> list[float] | None:
        columns = [samples.device_seconds() for samples in self.samples]
        if not columns or any(column is None for column in columns):
            return None
        return [value for column in columns if column for value in column]

    def parts_s(self) -> dict[str, float]:
        """Medians of the times that parts of an iteration took, by name, on the rank where each took longest."""
        names = dict.fromkeys(name for samples in self.samples for name in samples.extra_s)
        middles = {
            name: [median(rank.extra_s[name]) for rank in self.samples if name in rank.extra_s] for name in names
        }
        return {
            name: max(value for value in values if value is not None)
            for name, values in middles.items()
            if name not in NO_PARTS and any(value is not None for value in values)
        }

    def summary(self) -> Summary | None:
        """None for a case that failed or was skipped."""
        values = self.seconds()
        return summarize(values) if values else None

    def latency_s(self, name: str | None = None) -> dict[str, float]:
        """`p50`, `p75`, `p95`, `p99`, `min`, `max` and `mean` over all iterations; empty where there are none.

        With `name` of further times instead (`ttft`).
        """
        ordered = sorted(self.seconds() if name is None else self.extra_seconds(name))
        if not ordered:
            return {}
        percentiles = {f"p{percent}": quantile_sorted(ordered, percent / 100) for percent in LATENCY_PERCENTILES}
        return {**percentiles, "min": ordered[0], "max": ordered[-1], "mean": math.fsum(ordered) / len(ordered)}

    def _arrivals(self) -> Iterator[tuple[list[int], tuple[float, ...]]]:
        """By iteration: the ranks, and how long after the first of them each began; nothing where it was not taken."""
        for process in self._by_process():
            by_rank = {one.rank: one.extra_s[ARRIVAL] for one in process if one.extra_s.get(ARRIVAL)}
            ranks = sorted(by_rank)
            for row in zip(*(by_rank[rank] for rank in ranks), strict=False):
                yield ranks, row

    def rank_means_s(self) -> dict[int, float]:
        """Average seconds per iteration by rank, over all processes, by the clock that gives the case its time."""
        on_device = self.result.timing == "slowest_rank_device"
        times: dict[int, list[float]] = defaultdict(list)
        for samples in self.samples:
            times[samples.rank] += (samples.device_seconds() or []) if on_device else samples.seconds()
        return {rank: math.fsum(times[rank]) / len(times[rank]) for rank in sorted(times) if times[rank]}

    def skew_s(self) -> float | None:
        """How long the first rank had to wait for the last one to begin, in the median; None without arrivals."""
        return median([max(row) for _, row in self._arrivals()])

    def straggler(self) -> tuple[int, float] | None:
        """The rank that was last to begin most often, and in which share of the iterations; None without arrivals.

        Iterations that all ranks began at the same moment have no last one.
        """
        lasts = Counter(ranks[row.index(max(row))] for ranks, row in self._arrivals() if max(row) > 0)
        if not lasts:
            return None
        rank = min(lasts, key=lambda rank: (-lasts[rank], rank))
        return rank, lasts[rank] / lasts.total()

    def straggler_rank(self) -> int | None:
        found = self.straggler()
        return found[0] if found is not None else None

    def typical_s(self, summary: Summary | None = None) -> float | None:
        """Seconds of an iteration that scores are made of: the median; where iterations differ in what they do, the
        mean over whole rounds of them. `summary` where it is at hand. None for a case that failed or was skipped."""
        steps = self._round_steps()
        if steps is None:
            known = summary or self.summary()
            return known.median_s if known is not None else None
        timed = [pair for process in self._timed() for pair in keep_whole_rounds(process, steps)]
        # Not even one round: what there is.
        timed = timed or [pair for process in self._timed() for pair in process]
        count = sum(iterations for _, iterations in timed)
        return math.fsum(seconds * iterations for seconds, iterations in timed) / count if count else None

    def _round_steps(self) -> int | None:
        """Iterations that together stand for all, where they differ; None: they are alike."""
        observed = self.result.observed
        steps = observed.round_steps if isinstance(observed, WorkloadObserved) else None
        return steps if steps is not None and steps > 1 else None

    def _timed(self) -> list[list[tuple[float, int]]]:
        """By process: seconds per iteration of each sample, and its iterations."""
        return [
            list(zip(self._fold(ranks), (count for one in ranks for count in one.counted_iterations()), strict=False))
            for ranks in self._by_process()
        ]

    def score(self, summary: Summary | None = None) -> float | None:
        """In `result.score.unit`: work of one iteration over `typical_s`. `summary` where it is at hand."""
        return self._score_at(self.typical_s(summary))

    def loader_score(self) -> float | None:
        """As `score`, with batches from a loader; None where that was not timed."""
        return self._score_at(self.loader_s())

    def _score_at(self, step_s: float | None) -> float | None:
        rule = self.result.score
        return scale_score(rule.work / step_s, rule.unit) if rule is not None and step_s and step_s > 0 else None

    def loader_s(self) -> float | None:
        """As `typical_s`; where iterations differ, each time is that of whole rounds already."""
        times = self.extra_seconds(LOADER)
        if not times or self._round_steps() is None:
            return median(times)
        return math.fsum(times) / len(times)

    def missed_latency(self) -> bool | None:
        """Whether the stated percentile is over the limit; None where the benchmark has no limit."""
        target = self.result.latency_target
        # Where text is generated, the limit is on its first token.
        values = sorted(self.extra_seconds(TTFT) or self.seconds())
        if target is None or not values:
            return None
        return quantile_sorted(values, target.percentile / 100) > target.limit_s


def keep_whole_rounds(timed: Sequence[tuple[float, int]], steps: int) -> Sequence[tuple[float, int]]:
    """The longest beginning of samples (seconds, iterations) whose iterations are whole rounds of so many steps."""
    sums = accumulate(iterations for _, iterations in timed)
    ends = [place for place, total in enumerate(sums, start=1) if total % steps == 0]
    return timed[: ends[-1]] if ends else []


_BANDWIDTHS = {"read": "read", "memset": "write", "memcpy": "copy"}
"""Operator → the bandwidth it shows."""


class Ceilings(NamedTuple):
    """Measured on one device in one run. Work per second in base units; a missing one was not measured."""

    matrix_flops_per_s: dict[str, float]
    """By dtype: a large square matmul."""
    bytes_per_s: dict[str, float]
    """`read`, `write`, `copy` (both directions counted), each of a stream many times any cache."""


def find_ceilings(cases: Iterable[MeasuredCase]) -> dict[str, Ceilings]:
    """By device, from the cases of one run that were measured as ceilings; empty where none were."""
    found: dict[str, Ceilings] = {}
    for measured in cases:
        spec, rule = measured.result.case.spec, measured.result.score
        if measured.result.status != "ok" or rule is None or not isinstance(spec, OperatorSpec):
            continue
        if not spec.is_measured_peak or spec.device is None or spec.dtype is None:
            continue
        summary = measured.summary()
        if summary is None or summary.median_s <= 0:
            continue
        ceilings = found.setdefault(spec.device, Ceilings({}, {}))
        rate = rule.work / summary.median_s
        if spec.op in _BANDWIDTHS:
            ceilings.bytes_per_s[_BANDWIDTHS[spec.op]] = rate
        else:
            ceilings.matrix_flops_per_s[spec.dtype] = rate
    return found
