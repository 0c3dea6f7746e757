"""A server under load: requests come at their own pace, wait, and are generated in batches. Pure Python; the clock is
an argument."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from stepscope.core.errors import UsageError
from stepscope.core.units import format_significant
from stepscope.stats import quantile_sorted

if TYPE_CHECKING:
    from stepscope.bench.workloads.generation import Generates
    from stepscope.measure.device import Clock
    from stepscope.records import LatencyTarget

Pace = Literal["poisson", "even"]


def make_arrivals(rate_per_s: float, count: int, *, pace: Pace = "poisson", seed: int = 0) -> list[float]:
    """Seconds after the start; the first request comes one gap after it. Open loop: nothing the server does moves
    them."""
    if not rate_per_s > 0 or count < 1:
        raise UsageError(f"{count} requests at {rate_per_s} a second", hint="both must be above 0")
    if pace == "even":
        return [(i + 1) / rate_per_s for i in range(count)]
    source, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate_per_s)
        arrivals.append(now)
    return arrivals


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
        self._step = step
        self._batches = dict(sorted(batches.items()))

    def begin(self, requests: Sequence[int]) -> None:
        for size, batch in self._batches.items():
            if size >= len(requests):
                self._step.begin(batch)
                return
        raise UsageError(
            f"{len(requests)} requests do not fit a batch of {max(self._batches, default=0)}",
            hint="serve with a max_batch that a batch was made for",
        )

    def advance(self) -> None:
        self._step.advance()


class Served(msgspec.Struct, frozen=True, kw_only=True):
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


class ServedBatch(msgspec.Struct, frozen=True, kw_only=True):
    start_s: float
    end_s: float
    requests: int
    left_waiting: int
    """Requests that had come and found no place in it."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of time over all requests, in seconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    largest: float


class ServingResult(msgspec.Struct, frozen=True, kw_only=True):
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
    def achieved_per_s(self) -> float:
        """Requests finished, from the first arrival to the last token of all."""
        return len(self.requests) / (max(one.end_s for one in self.requests) - self.requests[0].arrival_s)

    @property
    def capacity_per_s(self) -> float | None:
        """What the server does when every batch is full; None where none was."""
        full = [one for one in self.batches if one.requests == self.max_batch]
        busy_s = sum(one.end_s - one.start_s for one in full)
        return len(full) * self.max_batch / busy_s if busy_s > 0 else None

    @property
    def above_capacity(self) -> bool:
        """More was offered than full batches can do: latencies then tell the length of the test, not the server."""
        offered, capacity = self.offered_per_s, self.capacity_per_s
        return offered is not None and capacity is not None and offered > capacity

    @property
    def busy_share(self) -> float:
        """Of the time from the first arrival to the last token."""
        span_s = max(one.end_s for one in self.batches) - self.requests[0].arrival_s
        return sum(one.end_s - one.start_s for one in self.batches) / span_s

    @property
    def longest_queue(self) -> int:
        """Most requests that waited at one moment. A queue is longest just before a batch takes from it."""
        return max(one.requests + one.left_waiting for one in self.batches)

    @property
    def mean_queue(self) -> float:
        """Over time: by Little's law, all waiting together over the time in which there was any load."""
        span_s = max(one.end_s for one in self.requests) - self.requests[0].arrival_s
        return sum(one.wait_s for one in self.requests) / span_s

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

    def ttft(self) -> Spread:
        return _spread([one.ttft_s for one in self.requests])

    def tpot(self) -> Spread | None:
        """None where every request asked for one token only."""
        times = [one.tpot_s for one in self.requests if one.tpot_s is not None]
        return _spread(times) if times else None

    def latency(self) -> Spread:
        return _spread([one.latency_s for one in self.requests])

    def misses(self, target: LatencyTarget) -> bool:
        """The first token comes too late, waiting included; a load above capacity always does, however short the
        test was."""
        first = quantile_sorted(sorted(one.ttft_s for one in self.requests), target.percentile / 100)
        return first > target.limit_s or self.above_capacity


def _spread(times: list[float]) -> Spread:
    ordered = sorted(times)
    p50, p90, p95, p99 = (quantile_sorted(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
    return Spread(p50=p50, p90=p90, p95=p95, p99=p99, largest=ordered[-1])


def serve(
    arrivals: Sequence[float],
    server: Server,
    *,
    new_tokens: int | Sequence[int],
    max_batch: int,
    clock: Clock,
    synchronise: Callable[[], None],
    wait: Callable[[float], None] = time.sleep,
) -> ServingResult:
    """Static batching: when free, the server takes up to `max_batch` waiting requests, oldest first, and is busy until
    the one that wants most tokens has them all; the others end when they have theirs. `wait` lets seconds pass."""
    tokens = [new_tokens] * len(arrivals) if isinstance(new_tokens, int) else list(new_tokens)
    _refuse_nonsense(arrivals, tokens, max_batch)
    shift = _Shift(
        arrivals=arrivals, tokens=tokens, server=server, max_batch=max_batch, clock=clock, synchronise=synchronise,
        wait=wait,
    )  # fmt: skip
    return shift.run()


def _refuse_nonsense(arrivals: Sequence[float], tokens: Sequence[int], max_batch: int) -> None:
    if not arrivals or len(tokens) != len(arrivals):
        raise UsageError(
            f"{len(arrivals)} arrivals and {len(tokens)} numbers of tokens", hint="give one number for each arrival"
        )
    if min(tokens) < 1 or max_batch < 1:
        raise UsageError(f"{min(tokens)} tokens, batches of {max_batch}", hint="both must be at least 1")
    if any(after < before for before, after in pairwise(arrivals)):
        raise UsageError("arrivals are not in order", hint="sort them: the queue is first come, first served")


class _Shift:
    """The server at work, from the first arrival to the last token. Times are whole nanoseconds inside: a wait for
    the rest of a rounded second would otherwise never end."""

    def __init__(
        self,
        *,
        arrivals: Sequence[float],
        tokens: Sequence[int],
        server: Server,
        max_batch: int,
        clock: Clock,
        synchronise: Callable[[], None],
        wait: Callable[[float], None],
    ) -> None:
        self._due_ns = [round(one * 1e9) for one in arrivals]
        self._tokens = tokens
        self._server = server
        self._max_batch = max_batch
        self._clock = clock
        self._synchronise = synchronise
        self._wait = wait
        self._start_ns = clock.now_ns()
        self._served: list[Served] = []
        self._batches: list[ServedBatch] = []

    def run(self) -> ServingResult:
        count, taken = len(self._due_ns), 0
        while taken < count:
            now_ns = self._now_ns()
            if self._due_ns[taken] > now_ns:
                self._wait((self._due_ns[taken] - now_ns) * 1e-9)
                continue
            come = taken
            while come < count and self._due_ns[come] <= now_ns:
                come += 1
            size = min(come - taken, self._max_batch)
            self._generate(range(taken, taken + size), now_ns, left_waiting=come - taken - size)
            taken += size
        return ServingResult(requests=self._served, batches=self._batches, max_batch=self._max_batch)

    def _generate(self, requests: Sequence[int], start_ns: int, *, left_waiting: int) -> None:
        self._server.begin(requests)
        marks_ns = [self._finished_ns()]
        for _ in range(max(self._tokens[i] for i in requests) - 1):
            self._server.advance()
            marks_ns.append(self._finished_ns())
        for i in requests:
            self._served.append(
                Served(
                    number=i,
                    arrival_s=self._due_ns[i] * 1e-9,
                    start_s=start_ns * 1e-9,
                    first_token_s=marks_ns[0] * 1e-9,
                    end_s=marks_ns[self._tokens[i] - 1] * 1e-9,
                    tokens=self._tokens[i],
                )
            )
        self._batches.append(
            ServedBatch(
                start_s=start_ns * 1e-9, end_s=marks_ns[-1] * 1e-9, requests=len(requests), left_waiting=left_waiting
            )
        )

    def _finished_ns(self) -> int:
        self._synchronise()
        return self._now_ns()

    def _now_ns(self) -> int:
        return self._clock.now_ns() - self._start_ns
