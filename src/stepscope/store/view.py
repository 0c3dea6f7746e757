"""A stored run as readers see it: results with their samples, ready for statistics."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from stepscope.records import CaseResult, RankSamples, slowest_rank_seconds
from stepscope.stats import Summary, quantile_sorted, summarize
from stepscope.units import scale_score


class MeasuredCase(NamedTuple):
    """A case's result and its samples; everything derived is computed here, on reading."""

    result: CaseResult
    samples: list[RankSamples]

    @property
    def key(self) -> str:
        return self.result.case.key

    def seconds_by_process(self) -> list[list[float]]:
        """Seconds per iteration, one list a fresh process; ranks folded into one as the result says."""
        processes: dict[int, list[RankSamples]] = defaultdict(list)
        for samples in self.samples:
            processes[samples.process].append(samples)
        return [self._fold(processes[number]) for number in sorted(processes)]

    def _fold(self, ranks: list[RankSamples]) -> list[float]:
        if self.result.timing == "slowest_rank":
            return slowest_rank_seconds(ranks)
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

    def summary(self) -> Summary | None:
        """None for a case that failed or was skipped."""
        values = self.seconds()
        return summarize(values) if values else None

    def score(self) -> float | None:
        """In `result.score.unit`: work of one iteration over the median time."""
        rule, summary = self.result.score, self.summary()
        if rule is None or summary is None or summary.median_s <= 0:
            return None
        return scale_score(rule.work / summary.median_s, rule.unit)

    def missed_latency(self) -> bool | None:
        """Whether the stated percentile is over the limit; None where the benchmark has no limit."""
        target = self.result.latency_target
        values = sorted(self.seconds())
        if target is None or not values:
            return None
        return quantile_sorted(values, target.percentile / 100) > target.limit_s
