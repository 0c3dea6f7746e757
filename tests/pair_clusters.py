"""Simulated clusters: what every pair of ranks would measure, with noise and with the faults that are asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from stepscope.analyze.network.pair_matrix import Interval, PairMatrix
from stepscope.records import Benchmark, Case, CaseResult, Failure, RankSamples, Score
from stepscope.records.codec import make_observed
from stepscope.records.kinds import PairSpec
from stepscope.stats import median_interval, quantile_sorted
from stepscope.store import MeasuredCase

SMALL, LARGE = 8, 4 << 20
BASE = {"latency": (2e-6, 12e-6), "bandwidth": (LARGE / 40e9, LARGE / 11e9)}
"""Seconds of a message inside a host and between two."""

Slower = Callable[[int, int, str], float]
"""Source, target and quantity → how many times as long it takes."""


class Cluster:
    def __init__(
        self, hosts: int = 8, per_host: int = 1, *, nics: int = 0, slower: Slower = lambda *_: 1.0, seed: int = 0,
        noise: float = 0.05, heavy: bool = False, samples: int = 9, missing: Iterable[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.ranks = list(range(hosts * per_host))
        self.hosts = [f"node{rank // per_host}" for rank in self.ranks]
        self.nics = [f"mlx5_{rank % per_host * nics // per_host}" if nics else None for rank in self.ranks]
        self.slower, self.missing = slower, set(missing)
        self.noise, self.heavy, self.samples = noise, heavy, samples
        self.source = random.Random(seed)

    def on_host(self, host: int) -> set[int]:
        return {rank for rank in self.ranks if self.hosts[rank] == f"node{host}"}

    def times(self, source: int, target: int, quantity: str) -> list[float]:
        """Samples around a middle that itself differs from pair to pair."""
        inside = self.hosts[source] == self.hosts[target]
        middle = BASE[quantity][0 if inside else 1] * self.slower(source, target, quantity) * self._stray()
        return [middle * self._stray() * self._hold_up() for _ in range(self.samples)]

    def _stray(self) -> float:
        return self.source.lognormvariate(0.0, self.noise)

    def _hold_up(self) -> float:
        """With heavy tails one sample in ten is held up, some of them very long."""
        return 1 + self.source.paretovariate(1.5) if self.heavy and self.source.random() < 0.1 else 1.0

    def matrix(self) -> PairMatrix:
        empty: list[list[Any]] = [[None] * len(self.ranks) for _ in self.ranks]
        grids = {name: [list(row) for row in empty] for name in ("l", "li", "b", "bi")}
        for source in self.ranks:
            for target in self.ranks:
                if source == target or (source, target) in self.missing:
                    continue
                ordered = sorted(self.times(source, target, "latency"))
                low, high, _ = median_interval(ordered)
                grids["l"][source][target] = quantile_sorted(ordered, 0.5)
                grids["li"][source][target] = Interval(low, high)
                ordered = sorted(self.times(source, target, "bandwidth"))
                low, high, _ = median_interval(ordered)
                grids["b"][source][target] = LARGE / quantile_sorted(ordered, 0.5)
                grids["bi"][source][target] = Interval(LARGE / high, LARGE / low)
        return PairMatrix(
            benchmark=f"pair/micro/nccl/{len(self.ranks)}ranks", parameters={"dtype": "float32", "device": "cuda"},
            ranks=self.ranks, hosts=self.hosts, nics=self.nics, small_bytes=SMALL, large_bytes=LARGE,
            latency_s=grids["l"], latency_interval_s=grids["li"], bandwidth_bytes_per_s=grids["b"],
            bandwidth_interval_bytes_per_s=grids["bi"], failures=[],
        )  # fmt: skip

    def cases(self, *, failed: Iterable[tuple[int, int]] = ()) -> list[MeasuredCase]:
        """The same as records, as a run keeps them."""
        broken = set(failed)
        return [
            make_pair_case(
                source, target, size,
                None if (source, target) in broken else self.times(source, target, quantity),
                world=len(self.ranks), observed=self._observed(source, target),
            )
            for source in self.ranks
            for target in self.ranks
            for size, quantity in ((SMALL, "latency"), (LARGE, "bandwidth"))
            if source != target and (source, target) not in self.missing
        ]  # fmt: skip

    def _observed(self, source: int, target: int) -> dict[str, Any]:
        observed: dict[str, Any] = {"source_host": self.hosts[source], "target_host": self.hosts[target]}
        if self.nics[source] is not None:
            observed |= {"source_nic": self.nics[source], "target_nic": self.nics[target]}
        return observed


def make_pair_case(
    source: int, target: int, size: int, seconds: list[float] | None, *, world: int = 4, backend: str = "nccl",
    device: str = "cuda", observed: dict[str, Any] | None = None,
) -> MeasuredCase:  # fmt: skip
    """Without seconds it failed."""
    case = Case(
        benchmark=Benchmark(
            model="pair", implementation="micro", mode=backend, config=f"{world}ranks", owner="communication"
        ),
        spec=PairSpec(source=source, target=target, size_bytes=size, device=device),
        world_size=world,
    )
    facts = {"size_bytes": size, "bus_factor": 1.0, "members": 2, "wrong": 0, **(observed or {})}
    result = CaseResult(
        case=case, status="ok" if seconds else "failed", started_at="2026-01-01T00:00:00Z", elapsed_s=0.1,
        failure=None if seconds else Failure(kind="timeout", message="no answer within 10 s"),
        score=Score(unit="GB/s", work=size),
        observed=make_observed(case.spec, facts) if seconds else None,
    )  # fmt: skip
    if not seconds:
        return MeasuredCase(result, [])
    columns = {"duration_s": seconds, "iterations": [1] * len(seconds), "warmup": [False] * len(seconds)}
    return MeasuredCase(result, [RankSamples(case=case.key, rank=source, **columns)])  # type: ignore[arg-type]
