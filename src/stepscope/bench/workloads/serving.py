"""A server under load: requests arrive at their own pace, wait, and are generated in batches. The clock is an argument.

Pure Python: only the server that is handed in knows a model.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stepscope.core.errors import UsageError
from stepscope.core.units import format_significant
from stepscope.records.kinds import Serving
from stepscope.stats import quantile_sorted

if TYPE_CHECKING:
    from stepscope.bench.workloads.generation import Generates
    from stepscope.measure.device import Clock
    from stepscope.records import LatencyTarget

POINTS = (50, 95, 99)


def make_arrivals(rate_per_s: float, count: int, *, seed: int = 0) -> list[float]:
    """Seconds after the start of Poisson arrivals; the first request comes one gap after it. Open loop: nothing the
    server does moves them."""
    if not rate_per_s > 0 or count < 1:
        raise UsageError(f"{count} requests at {rate_per_s} per second", hint="both must be above 0")
    source = random.Random(seed)
    return list(accumulate(source.expovariate(rate_per_s) for _ in range(count)))


class Server(Protocol):
    """Generates for one batch of requests at a time."""

    def begin(self, requests: Sequence[int]) -> None:
        """Prefill of these (by their numbers): afterwards each has its first token."""

    def advance(self) -> None:
        """One more token for each of them."""


class DecoderServer:
    """A real decoder behind the queue. Its batches are made beforehand, one for each size that was compiled or
    captured; fewer requests take the next larger one, whose other places are idle."""

    def __init__(self, step: Generates, batches: Mapping[int, Any]) -> None:
        self._batches = dict(sorted(batches.items()))
        self._step = step
        self.advance = step.advance

    def begin(self, requests: Sequence[int]) -> None:
        fitting = next((batch for size, batch in self._batches.items() if size >= len(requests)), None)
        if fitting is None:
            raise UsageError(
                f"{len(requests)} requests do not fit a batch of {max(self._batches, default=0)}",
                hint="serve with a max_batch that a batch was made for",
            )
        self._step.begin(fitting)


class Served(NamedTuple):
    """One request; times in seconds after the start of the load."""

    number: int
    arrival_s: float
    start_s: float
    first_token_s: float
    end_s: float
    tokens: int

    @property
    def wait_s(self) -> float:
        return self.start_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time to first token, as the caller sees it: waiting included."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there was one token only."""
        return (self.end_s - self.first_token_s) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def latency_s(self) -> float:
        """From arrival to last token."""
        return self.end_s - self.arrival_s


class ServedBatch(NamedTuple):
    start_s: float
    end_s: float
    requests: int
    left_waiting: int
    """Requests that had arrived and found no place in it."""


class ServingResult(NamedTuple):
    requests: list[Served]
    """In the order of arrival."""
    batches: list[ServedBatch]
    max_batch: int

    @property
    def offered_per_s(self) -> float | None:
        """As drawn: gaps between the first and the last arrival; None for a single request."""
        span_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self.requests) - 1) / span_s if span_s > 0 else None

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token."""
        return self.batches[-1].end_s - self.requests[0].arrival_s

    @property
    def achieved_per_s(self) -> float | None:
        """Requests after the first, as the offered rate counts them: it can reach that and never exceed it."""
        return (len(self.requests) - 1) / self.span_s if self.offered_per_s is not None else None

    @property
    def capacity_per_s(self) -> float | None:
        """What the server does when every batch is full; None where none was."""
        full = [one for one in self.batches if one.requests == self.max_batch]
        busy_s = sum(one.end_s - one.start_s for one in full)
        return len(full) * self.max_batch / busy_s if busy_s > 0 else None

    @property
    def above_capacity(self) -> bool:
        """More was offered than full batches can do: latencies then measure the length of the test, not the server."""
        offered, capacity = self.offered_per_s, self.capacity_per_s
        return offered is not None and capacity is not None and offered > capacity

    @property
    def busy_share(self) -> float:
        """Fraction of the span in which a batch was being generated."""
        return sum(one.end_s - one.start_s for one in self.batches) / self.span_s

    @property
    def longest_queue(self) -> int:
        """Most requests that waited at one moment. A queue is longest just before a batch takes from it."""
        return max(one.requests + one.left_waiting for one in self.batches)

    @property
    def queue_grew(self) -> bool:
        """Each third of the requests waited longer than the one before, and the last arrival found more than a full
        batch before it: seen in the times, whatever the capacity is."""
        third = len(self.requests) // 3
        if not third:
            return False
        waits = [one.wait_s for one in self.requests]
        first, middle, last = (sum(waits[i * third : (i + 1) * third]) for i in range(3))
        last_arrival = self.requests[-1].arrival_s
        unserved = sum(one.start_s > last_arrival for one in self.requests)
        return first < middle < last and unserved > self.max_batch

    @property
    def notice(self) -> str | None:
        """What a reader of the latencies must know first."""
        if not (self.above_capacity or self.queue_grew):
            return None
        grew = "the queue grew to the end" if self.queue_grew else "the test was too short for the queue to show it"
        offered, capacity = self.offered_per_s, self.capacity_per_s
        rates = (
            f"{format_significant(offered)} requests/s were offered" if offered is not None else "requests came at once"
        )
        does = f", full batches do {format_significant(capacity)}" if capacity is not None else ""
        return f"{rates}{does}: {grew}; latencies depend on how long the test ran"

    def describe(self, target: LatencyTarget | None) -> Serving:
        return Serving(
            requests=len(self.requests),
            achieved_per_s=self.achieved_per_s,
            busy_share=self.busy_share,
            longest_queue=self.longest_queue,
            above_capacity=self.above_capacity,
            offered_per_s=self.offered_per_s,
            missed_latency=self.misses(target) if target is not None else None,
            **self.percentiles(),
        )

    def percentiles(self) -> dict[str, float]:
        """Time to first token, time per output token (where there was more than one) and latency, in seconds."""
        found: dict[str, float] = {}
        for name in ("ttft", "tpot", "latency"):
            times = sorted(s for one in self.requests if (s := getattr(one, f"{name}_s")) is not None)
            found |= {f"{name}_p{point}_s": quantile_sorted(times, point / 100) for point in POINTS if times}
        return found

    def misses(self, target: LatencyTarget) -> bool:
        """The first token comes too late, waiting included; a load above capacity always does, however short the
        test was."""
        first = quantile_sorted(sorted(one.ttft_s for one in self.requests), target.percentile / 100)
        return first > target.limit_s or self.above_capacity


def serve(
    arrivals: Sequence[float],
    server: Server,
    *,
    new_tokens: int,
    max_batch: int,
    clock: Clock,
    synchronise: Callable[[], None],
    wait: Callable[[float], None] = time.sleep,
) -> ServingResult:
    """Static batching: when free, the server takes up to `max_batch` waiting requests, oldest first, and is busy until
    they have all their tokens. `wait` lets seconds pass."""
    if not arrivals or new_tokens < 1 or max_batch < 1:
        raise UsageError(
            f"{len(arrivals)} arrivals, {new_tokens} tokens, batches of {max_batch}", hint="all must be at least 1"
        )
    if any(after < before for before, after in pairwise(arrivals)):
        raise UsageError("arrivals are not in order", hint="sort them: the queue is first come, first served")
    # Whole nanoseconds: a wait for the rest of a rounded second would otherwise never end.
    due_ns, zero_ns = [round(one * 1e9) for one in arrivals], clock.now_ns()
    result = ServingResult([], [], max_batch)
    while (taken := len(result.requests)) < len(due_ns):
        start_ns = clock.now_ns() - zero_ns
        if due_ns[taken] > start_ns:
            wait((due_ns[taken] - start_ns) * 1e-9)
            continue
        arrived = bisect_right(due_ns, start_ns)
        batch = range(taken, min(arrived, taken + max_batch))
        server.begin(batch)
        synchronise()
        first_ns = end_ns = clock.now_ns() - zero_ns
        for _ in range(new_tokens - 1):
            server.advance()
            synchronise()
            end_ns = clock.now_ns() - zero_ns
        start_s, first_s, end_s = start_ns * 1e-9, first_ns * 1e-9, end_ns * 1e-9
        result.requests.extend(Served(i, due_ns[i] * 1e-9, start_s, first_s, end_s, new_tokens) for i in batch)
        result.batches.append(ServedBatch(start_s, end_s, len(batch), arrived - batch.stop))
    return result
