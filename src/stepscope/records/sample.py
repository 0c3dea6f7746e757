"""Raw measured values. Statistics are derived from them on reading and never stored in their place."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the clock around a number of iterations."""

    duration_s: float
    """Wall time of all the iterations together."""
    iterations: int
    device_s: float | None = None
    """Time between two device events around the same iterations, where the device has them; of as many iterations
    behind a full queue, where the device was held."""
    warmup: bool = False
    """Kept as evidence, left out of statistics."""

    @property
    def per_iteration_s(self) -> float:
        return self.duration_s / self.iterations


class RankSamples(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one case on one rank in one process, in the order they were taken, column by column."""

    case: str
    """Key of the case."""
    rank: int = 0
    process: int = 0
    """Which fresh process took them, where a case is measured in several; noise between processes is seen so."""
    duration_s: list[float]
    iterations: list[int]
    warmup: list[bool]
    device_s: list[float] | None = None
    other_share: float | None = None
    """Share of the host's core time that others took (processes, other machines) meanwhile; None: unknown."""
    host_cores: int | None = None
    """Logical cores of the host; with it `other_share` tells how much of the time others were running at all."""
    idle_cores: float | None = None
    """Cores' worth of time that nobody used meanwhile."""
    host_share: float | None = None
    """On a device with a queue: the share of a sample's time the host needed to issue it, in the median. Near 1 the
    device waits for the host; None where work is done when the call returns."""
    extra_s: dict[str, list[float]] = {}
    """Further times by their name, seconds per iteration: `graph` (replayed without launches), `kernel` (the kernels
    alone, by the profiler)."""
    probes_s: list[float] = []
    """Times of a fixed reference operation just before and just after these samples; empty: not taken."""

    def __post_init__(self) -> None:
        lengths = {len(self.duration_s), len(self.iterations), len(self.warmup)}
        lengths |= {len(self.device_s)} if self.device_s is not None else set()
        if len(lengths) != 1:
            raise ValueError(f"the columns of samples differ in length: {sorted(lengths)}")
        if min(self.iterations, default=1) < 1:
            raise ValueError("a sample must cover at least one iteration")

    def __len__(self) -> int:
        return len(self.duration_s)

    def __iter__(self) -> Iterator[Sample]:
        for i, (duration, count, warmup) in enumerate(zip(self.duration_s, self.iterations, self.warmup, strict=True)):
            device = self.device_s[i] if self.device_s is not None else None
            yield Sample(duration_s=duration, iterations=count, device_s=device, warmup=warmup)

    def seconds(self) -> list[float]:
        """Wall seconds per iteration, one value a sample, warm-ups left out."""
        return [
            duration / count
            for duration, count, warmup in zip(self.duration_s, self.iterations, self.warmup, strict=True)
            if not warmup
        ]

    def device_seconds(self) -> list[float] | None:
        """Device seconds per iteration, where the device told them."""
        if self.device_s is None:
            return None
        return [
            duration / count
            for duration, count, warmup in zip(self.device_s, self.iterations, self.warmup, strict=True)
            if not warmup
        ]


def slowest_rank_seconds(ranks: list[RankSamples], *, device: bool = False) -> list[float]:
    """Per sample, the time of the rank that took longest: a collective is over when its last rank is.

    Ranks measure in step, so sample i of one rank belongs to sample i of every other.
    """
    columns = [(rank.device_seconds() or []) if device else rank.seconds() for rank in ranks]
    return [max(row) for row in zip(*columns, strict=True)]
