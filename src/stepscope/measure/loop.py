"""The measuring loop: calibrate, warm up until stable, sample until sure or out of time, say what is wrong.

Every reading of the clock is kept; only what a saturated queue shows to be spoiled is taken again. The loop's own work
between samples is outside the timed region.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from typing import Protocol

import msgspec

from stepscope.measure.device import Clock, Device
from stepscope.measure.instability import find_notices
from stepscope.measure.surroundings import CoRunningLoad
from stepscope.records import MeasureSettings, Notice, RankSamples
from stepscope.stats import Summary, median_interval, quantile_sorted, summarize

MAX_ITERATIONS = 1 << 24
MAX_QUEUED_ITERATIONS = 128
"""Most iterations of one sample behind a saturated queue: launches and marks must fit into the device's queue."""
MANY_MODULES = 100
"""When so many were loaded since libraries were frozen, they are frozen too."""
HOLD_MARGIN_S, HOLD_FACTOR, LARGEST_HOLD_FACTOR, LONGEST_HOLD_S = 30e-6, 1.5, 20.0, 0.1
"""A hold lasts as long as the host needed to issue the sample, with some to spare; twice that where it was too short,
until it is clear that the call itself waits for the device."""


class Peers(Protocol):
    """How several ranks walk through the loop in step. As it stands, a single process that agrees with itself."""

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank; each decision of the loop goes through here."""
        return value

    def align(self) -> int:
        """Return on all ranks at about the same moment; called before each sample, outside the timed region.

        Says how many samples of one iteration may follow each other directly: what lies between them is then a reading
        of the clock and nothing else. Every rank must be told the same.
        """
        return 1


class NoPeers(Peers):
    """A single process."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a progress bar shows while a case is being measured."""

    phase: str
    samples: int
    median_s: float
    half_width: float | None
    """Relative; None while warming up."""


Watch = Callable[[Estimate], None]


class Measurement(msgspec.Struct, kw_only=True):
    """The samples of one case in one process, in the order they were taken, and what is wrong with them."""

    start_ns: list[int]
    """When each sample began, by the clock that was given."""
    duration_s: list[float]
    iterations: list[int]
    device_s: list[float] | None
    starved: int
    """Samples in which a saturated device had to wait for the host after all: their device time contains launches."""
    allocations: int
    """Times memory was fetched from the driver or the kernel while sampling: none is the aim."""
    host_share: float | None
    warmups: int
    notices: list[Notice]

    @property
    def sampled_iterations(self) -> int:
        return sum(self.iterations[self.warmups :])

    def summary(self) -> Summary:
        """Median and interval of the wall time per iteration, warm-ups left out."""
        taken = zip(self.duration_s[self.warmups :], self.iterations[self.warmups :], strict=True)
        return summarize([duration / count for duration, count in taken])

    def as_samples(
        self,
        case_key: str,
        *,
        rank: int = 0,
        load: CoRunningLoad | None = None,
        probes_s: Sequence[float] = (),
        extra_s: dict[str, list[float]] | None = None,
    ) -> RankSamples:
        count = len(self.duration_s)
        return RankSamples(
            case=case_key,
            rank=rank,
            duration_s=self.duration_s,
            iterations=self.iterations,
            warmup=[i < self.warmups for i in range(count)],
            device_s=self.device_s,
            other_share=load.share if load else None,
            host_cores=load.cores if load else None,
            idle_cores=load.idle_cores if load else None,
            host_share=self.host_share,
            extra_s=extra_s or {},
            probes_s=list(probes_s),
        )


def measure(
    body: Callable[[], object],
    *,
    settings: MeasureSettings,
    clock: Clock,
    device: Device,
    peers: Peers | None = None,
    watch: Watch | None = None,
    before_sample: Callable[[], object] | None = None,
    saturated: bool = False,
) -> Measurement:
    """Time `body`; one call is one iteration. What `body` raises passes through.

    `before_sample` is called before each timed region, outside it (it empties caches). `saturated` is for devices with
    a queue: each sample is taken twice, once by the host's clock and once by marks on the device behind a full queue,
    so that device time does not contain the host's launching; the stop rule then looks at device time, and
    `before_sample` is called before every single call that is marked.
    """
    if saturated and peers is not None:
        raise ValueError("a saturated queue takes spoiled samples again, on which several ranks would have to agree")
    loop = _Loop(
        body=body,
        settings=settings,
        clock=clock,
        device=device,
        peers=peers or NoPeers(),
        watch=watch,
        before_sample=before_sample,
        saturated=saturated and device.has_events,
    )
    with no_garbage_collection():
        iterations = loop.calibrate()
        settled = loop.warm_up(iterations)
        loop.sample(iterations)
    return loop.finish(settled)


@dataclass(kw_only=True)
class _Loop:
    body: Callable[[], object]
    settings: MeasureSettings
    clock: Clock
    device: Device
    peers: Peers
    watch: Watch | None
    before_sample: Callable[[], object] | None
    saturated: bool
    hold_factor: float = HOLD_FACTOR
    starved: list[bool] = field(default_factory=list)
    allocations: int = 0
    starts: list[int] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    device_times: list[float] = field(default_factory=list)
    host_shares: list[float] = field(default_factory=list)
    warmups: int = 0
    watched_at_ns: int = 0

    def calibrate(self) -> int:
        """How many iterations a sample needs so that the clock's step and the waiting around it do not matter."""
        settings = self.settings
        if settings.iterations is not None:
            return settings.iterations
        wanted_s = max(settings.min_sample_s, self.clock.resolution_s / settings.resolution_share)
        self._take(1)  # may compile or load: never choose a count by it
        count = 1
        while True:
            took_s = self._take(count)
            most = MAX_QUEUED_ITERATIONS if self.saturated else MAX_ITERATIONS
            enough = took_s >= wanted_s or count >= most
            grown = count * 10 if took_s <= 0 else min(count * 10, int(count * wanted_s * 1.2 / took_s) + 1, most)
            following = self.peers.agree(count if enough else max(grown, count + 1))
            if following == count:
                return count
            count = following

    def warm_up(self, count: int) -> bool:
        """Sample until two neighbouring windows agree. False: time was up first."""
        settings, start_ns = self.settings, self.clock.now_ns()
        if settings.warmup_samples is not None:
            while (left := settings.warmup_samples - len(self.durations)) > 0:
                self._take(count, most=left)
            self.warmups = len(self.durations)
            return True
        while True:
            self._take(count)
            times = self._per_iteration(0)
            taken = len(times)
            self._report("warm-up", times, None)
            elapsed_s = self._seconds_since(start_ns)
            ready = taken >= settings.warmup_min_samples and elapsed_s >= settings.warmup_min_time_s
            settled = ready and _windows_agree(times, settings)
            expired = elapsed_s >= settings.warmup_max_time_s
            verdict = self.peers.agree(2 if settled else int(expired))
            if verdict:
                self.warmups = taken
                return verdict == 2

    def sample(self, count: int) -> None:
        """The stop rule is looked at when the number of samples has grown by a tenth, not after each."""
        start_ns, look_at = self.clock.now_ns(), self.settings.few_samples
        fetched = self.device.allocations()
        while True:
            self._take(count, most=self.settings.max_samples + self.warmups - len(self.durations))
            taken = len(self.durations) - self.warmups
            if taken < look_at:
                continue
            look_at = taken + max(1, taken // 10)
            if self.peers.agree(int(self._is_enough(taken, self._seconds_since(start_ns)))):
                self.allocations = self.device.allocations() - fetched
                return

    def _is_enough(self, taken: int, elapsed_s: float) -> bool:
        settings = self.settings
        if taken >= settings.max_samples or elapsed_s >= settings.max_time_s:
            return True
        times = sorted(self._per_iteration(self.warmups))
        low, high, _ = median_interval(times, settings.level)
        width = (high - low) / 2 / (quantile_sorted(times, 0.5) or 1.0)
        self._report("sampling", times, width)
        return taken >= settings.min_samples and elapsed_s >= settings.min_time_s and width <= settings.target_width

    def finish(self, settled: bool) -> Measurement:
        has_events = self.device.has_events
        return Measurement(
            start_ns=self.starts,
            duration_s=self.durations,
            iterations=self.counts,
            device_s=self.device_times if has_events else None,
            host_share=quantile_sorted(sorted(self.host_shares[self.warmups :]), 0.5) if has_events else None,
            warmups=self.warmups,
            starved=sum(self.starved[self.warmups :]),
            allocations=self.allocations,
            notices=find_notices(
                self._per_iteration(0)[: self.warmups],
                self._per_iteration(self.warmups),
                settled=settled,
                sample_s=min(self.durations[self.warmups :]),
                resolution_s=self.clock.resolution_s,
                settings=self.settings,
            ),
        )

    def _take(self, count: int, most: int = MAX_ITERATIONS) -> float:
        """One sample: both ends wait for the device, so that neither earlier nor later work is in it. Where samples
        may follow each other directly, several, and at most so many."""
        body, clock, device = self.body, self.clock, self.device
        following = min(self.peers.align(), most)
        if following > 1 and count == 1 and not device.has_events and self.before_sample is None:
            return self._take_directly(following)
        if self.before_sample is not None:
            self.before_sample()
        device.synchronize()
        began = device.mark()
        start_ns = clock.now_ns()
        for _ in repeat(None, count):
            body()
        ended = device.mark()
        issued_ns = clock.now_ns()
        device.synchronize()
        stop_ns = clock.now_ns()
        took_s = (stop_ns - start_ns) * 1e-9
        self.starts.append(start_ns)
        self.durations.append(took_s)
        self.counts.append(count)
        if self.saturated:
            self._take_saturated(count, (issued_ns - start_ns) * 1e-9)
        elif device.has_events:
            self.device_times.append(device.elapsed_s(began, ended))
        if device.has_events:
            self.host_shares.append((issued_ns - start_ns) / max(stop_ns - start_ns, 1))
        return took_s

    def _take_directly(self, samples: int) -> float:
        """Samples of one iteration with nothing between them: in a pause threads fall asleep, as in no real loop."""
        body, now_ns = self.body, self.clock.now_ns
        starts, stops = [0] * samples, [0] * samples
        for i in range(samples):
            starts[i] = now_ns()
            body()
            stops[i] = now_ns()
        took = [(stop - start) * 1e-9 for start, stop in zip(starts, stops, strict=True)]
        self.starts += starts
        self.durations += took
        self.counts += [1] * samples
        return took[-1]

    def _take_saturated(self, count: int, issue_s: float) -> None:
        """Device time of as many iterations behind a full queue; again with a longer hold where the queue starved."""
        while True:
            took_s, starved = self._time_saturated(count, issue_s)
            if not starved or self.hold_factor > LARGEST_HOLD_FACTOR:
                break
            self.hold_factor *= 2
        self.starved.append(starved)
        self.device_times.append(took_s)

    def _time_saturated(self, count: int, issue_s: float) -> tuple[float, bool]:
        """Seconds of all calls, each between two marks, and whether the device reached one before it was issued."""
        if self.before_sample is not None:
            return self._time_each_prepared(count, issue_s / count)
        body, device = self.body, self.device
        device.hold(min(issue_s * self.hold_factor + HOLD_MARGIN_S, LONGEST_HOLD_S))
        marks = [device.mark()]
        for _ in repeat(None, count):
            body()
            marks.append(device.mark())
        starved = device.has_reached(marks[0])
        device.synchronize()
        return device.elapsed_s(marks[0], marks[-1]), starved

    def _time_each_prepared(self, count: int, issue_s: float) -> tuple[float, bool]:
        """`before_sample` before every call: that and a short hold keep the device busy while the call is issued."""
        body, device, starved = self.body, self.device, False
        pairs = []
        for _ in repeat(None, count):
            if self.before_sample is not None:
                self.before_sample()
            device.hold(min(issue_s * (self.hold_factor - 1) + HOLD_MARGIN_S, LONGEST_HOLD_S / count))
            began = device.mark()
            body()
            pairs.append((began, device.mark()))
            starved |= device.has_reached(began)
        device.synchronize()
        return sum(device.elapsed_s(began, ended) for began, ended in pairs), starved

    def _per_iteration(self, start: int) -> list[float]:
        """The times that are looked at: device time behind a saturated queue, wall time elsewhere."""
        times = self.device_times if self.saturated else self.durations
        return [d / n for d, n in zip(times[start:], self.counts[start:], strict=True)]

    def _seconds_since(self, start_ns: int) -> float:
        return (self.clock.now_ns() - start_ns) * 1e-9

    def _report(self, phase: str, times: list[float], half_width: float | None) -> None:
        """At most ten times a second: a terminal is slow."""
        now_ns = self.clock.now_ns()
        if self.watch is None or now_ns - self.watched_at_ns < 100_000_000:
            return
        self.watched_at_ns = now_ns
        median = quantile_sorted(sorted(times), 0.5)
        self.watch(Estimate(phase=phase, samples=len(times), median_s=median, half_width=half_width))


def _windows_agree(times: list[float], settings: MeasureSettings) -> bool:
    """Whether the last window's median is that of the window before, to the share asked for or to the noise."""
    width = settings.window
    if len(times) < 2 * width:
        return False
    before, after = sorted(times[-2 * width : -width]), sorted(times[-width:])
    middle = quantile_sorted(before, 0.5)
    spread = min(before[-1] - before[0], after[-1] - after[0])
    return abs(quantile_sorted(after, 0.5) - middle) <= max(settings.stable_share * middle, spread / 2)


@cache
def freeze_libraries() -> None:
    """What is alive by now (torch, mostly) stays: later collections pass over it, a thousand times faster.

    Called before the first model is built, which would stay, too. When the process ends, everything is collected like
    anything else, or libraries complain of leaks.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


def freeze_new_libraries() -> None:
    """The same for libraries that cases loaded since (transformers, the compiler), where no model is alive.

    Collecting them takes up to half a second, and there are several collections per case.
    """
    _freeze_again(len(sys.modules) // MANY_MODULES)


@cache
def _freeze_again(many_modules: int) -> None:
    gc.unfreeze()
    gc.collect()  # of what was frozen before, too: not everything that was alive then is a library
    gc.freeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a sample would be measured as part of it."""
    was_enabled = gc.isenabled()
    gc.collect()
    freeze_libraries()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
