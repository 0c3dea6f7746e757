"""The processes of a case on both sides of a comparison, and what their circumstances may have added to their time.

Samples alone cannot tell slower code from a slower machine. Two facts are measured beside each case: the core time that
others took, and a reference operation. Neither forbids a verdict; each says how much of a difference it could explain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.records import RankSamples
from stepscope.stats import SLOW_PHASE_CHANCE, SLOW_PHASE_CHANCE_PROBED, mean
from stepscope.store import MeasuredCase

NOTABLE_LOAD = 0.05
"""Fraction of a host's core time that others took from which on a process counts as loaded."""

HOST_BOUND_SHARE = 0.8
"""Fraction of a sample's time spent issuing it below which the device works on, whether the host is slow or fast."""

SLOW_PROBE = 1.1
"""A process whose reference operation took this much longer than the fastest beside it ran on a slower machine."""

LEAST_UNDISTURBED = 2
"""Undisturbed processes stand alone from so many on: fewer show no difference between themselves."""


class MeasuredProcess(NamedTuple):
    """One process of one side."""

    seconds: list[float]
    """In order of size."""
    load: float
    """Fraction of core time that others took, where it could touch this case; of all ranks the worst."""
    load_bound: float
    """Largest slowdown that this load explains where it reaches a statistic, as a logarithm; infinite: no bound."""
    loaded_time: float
    """Fraction of the time during which others can have been running, on any core."""
    probe_s: float | None
    """Slowest reading of the reference operation that matters here; None: not taken."""
    slow_probe: float = 0.0
    """How much slower the machine itself was than at its best on either side, as a logarithm."""

    @property
    def disturbed(self) -> bool:
        return self.load > 0 or self.slow_probe > 0

    def explained(self, quantile: float) -> float:
        """What the load may have added to this quantile of the samples, as a logarithm.

        Others who ran in a small part of the time slowed as few of the samples, which lie above the quantile.
        """
        untouched = self.loaded_time <= (1 - quantile) / 2
        return 0.0 if untouched else self.load_bound


class ComparedSide(NamedTuple):
    """One case on one side: the processes that count, and how many there are in all."""

    processes: list[MeasuredProcess]
    all_processes: list[MeasuredProcess]

    @property
    def seconds(self) -> list[list[float]]:
        return [process.seconds for process in self.processes]

    @property
    def disturbed(self) -> int:
        return sum(process.disturbed for process in self.all_processes)

    @property
    def probed(self) -> bool:
        return all(process.probe_s is not None for process in self.processes)


def choose_processes(
    a: Sequence[MeasuredProcess], b: Sequence[MeasuredProcess], *, same_system: bool = True, paired: bool = False
) -> tuple[ComparedSide, ComparedSide]:
    """Disturbed processes (where paired: pairs with one) are left out where enough others remain."""
    probes = [process.probe_s for process in (*a, *b) if process.probe_s]
    best = min(probes) if probes and same_system else None
    sides = [[_judge_probe(process, best) for process in side] for side in (a, b)]
    if paired:
        pairs = [pair for pair in zip(*sides, strict=True) if not any(process.disturbed for process in pair)]
        chosen = [list(side) for side in zip(*pairs, strict=True)]
    else:
        chosen = [[process for process in side if not process.disturbed] for side in sides]
    first, second = (
        ComparedSide(kept if len(kept) >= LEAST_UNDISTURBED else side, side)
        for kept, side in zip(chosen or sides, sides, strict=True)
    )
    return first, second


def slow_phase_chance(a: ComparedSide, b: ComparedSide, *, same_system: bool) -> float:
    """How likely a process is to be in a slow phase that nothing shows; reference operations show most of them."""
    return SLOW_PHASE_CHANCE_PROBED if a.probed and b.probed and same_system else SLOW_PHASE_CHANCE


def read_processes(case: MeasuredCase) -> list[MeasuredProcess]:
    by_process: dict[int, list[RankSamples]] = {}
    for samples in case.samples:
        by_process.setdefault(samples.process, []).append(samples)
    seconds = case.seconds_by_process()
    return [
        _read_process(ranks, times, on_host=case.result.timing not in ("device", "slowest_rank_device"))
        for (_, ranks), times in zip(sorted(by_process.items()), seconds, strict=True)
    ]


def _read_process(ranks: Sequence[RankSamples], seconds: list[float], *, on_host: bool) -> MeasuredProcess:
    # A device that never waits for its host is slowed down neither by the host's load nor by its launches.
    waiting = [rank for rank in ranks if on_host and (rank.host_share is None or rank.host_share >= HOST_BOUND_SHARE)]
    loaded = [rank for rank in waiting if (rank.other_share or 0.0) >= NOTABLE_LOAD]
    probes = [probe for rank in waiting for probe in rank.probes_s]
    best_unknown = any(not rank.probes_s for rank in waiting)
    return MeasuredProcess(
        seconds=sorted(seconds),
        load=max((rank.other_share or 0.0 for rank in loaded), default=0.0),
        load_bound=max(map(_bound_load, loaded), default=0.0),
        loaded_time=max(map(_loaded_time, loaded), default=0.0),
        probe_s=None if best_unknown else max(probes, default=0.0),
    )


def _bound_load(rank: RankSamples) -> float:
    """With a core to spare others take bandwidth and cache, at most in proportion; without one threads wait for each
    other, and nothing bounds what that costs."""
    share = rank.other_share or 0.0
    has_room = rank.idle_cores is not None and rank.idle_cores >= 1 and share < 1
    return -math.log1p(-share) if has_room else math.inf


def _loaded_time(rank: RankSamples) -> float:
    return min(1.0, (rank.other_share or 0.0) * rank.host_cores) if rank.host_cores else 1.0


def _judge_probe(process: MeasuredProcess, best: float | None) -> MeasuredProcess:
    if best is None or not process.probe_s or process.probe_s <= SLOW_PROBE * best:
        return process
    return process._replace(slow_probe=math.log(process.probe_s / best))


def explain_slowness(slower: ComparedSide, other: ComparedSide, quantile: float) -> float:
    """How much longer `slower` may have taken than `other` for what happened around them, as a logarithm.

    What both sides met alike cancels, and how much it varies shows between the processes: only the difference counts.
    """
    slow, usual = (mean([process.slow_probe for process in side.processes]) for side in (slower, other))
    probe = max(0.0, slow - usual)
    load = [mean([process.load for process in side.processes]) for side in (slower, other)]
    if load[0] - load[1] < NOTABLE_LOAD:
        return probe
    bounds = [[process.explained(quantile) for process in side.processes] for side in (slower, other)]
    if math.inf in bounds[0]:
        return math.inf
    # A bound that is infinite on the other side only makes the difference larger: it explains nothing here.
    met = mean([0.0 if math.isinf(bound) else bound for bound in bounds[1]])
    return probe + max(0.0, mean(bounds[0]) - met)
