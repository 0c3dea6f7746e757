"""The loop's logic in fake time: no test here reads a real clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fake_device import FakeDevice
from stepscope.measure import CpuDevice, Estimate, FakeClock, Measurement, MeasureSettings, measure

SETTINGS = MeasureSettings()


def timed_body(clock: FakeClock, durations: Iterator[float]) -> Callable[[], None]:
    return lambda: clock.advance(next(durations))


def steady(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def noisy(seconds: float, spread: float, seed: int = 1) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield seconds * (1 + spread * rng.random())


def run(durations: Iterator[float], clock: FakeClock | None = None, **changes: float) -> Measurement:
    clock = clock or FakeClock()
    settings = msgspec.structs.replace(SETTINGS, **changes)
    return measure(timed_body(clock, durations), settings=settings, clock=clock, device=CpuDevice())


def sampled(result: Measurement) -> list[float]:
    pairs = zip(result.duration_s, result.iterations, strict=True)
    return [duration / count for duration, count in pairs][result.warmups :]


def test_fast_bodies_are_batched_until_the_clock_is_fine_enough() -> None:
    coarse = FakeClock(resolution_s=1e-4)
    result = run(steady(1e-6), coarse)
    count = result.iterations[-1]
    assert count * 1e-6 >= 100 * coarse.resolution_s
    assert all(duration >= 0.99e-2 for duration in result.duration_s[result.warmups :])
    assert sampled(result)[0] == pytest.approx(1e-6, rel=0.01)
    assert result.notices == []


def test_slow_bodies_are_not_batched() -> None:
    result = run(steady(0.01))
    assert set(result.iterations) == {1}
    assert result.host_share is None


def test_the_first_call_does_not_choose_the_batch() -> None:
    """The first call compiles for two seconds; the body itself takes 10 µs."""

    def durations() -> Iterator[float]:
        yield 2.0
        yield from steady(1e-5)

    result = run(durations())
    assert result.iterations[-1] >= 100
    assert result.duration_s[0] == pytest.approx(2.0)
    assert result.warmups >= 1
    assert max(sampled(result)) == pytest.approx(1e-5, rel=1e-3)


def test_warm_up_lasts_until_the_time_is_stable() -> None:
    """Thirty calls that get faster step by step: none of the slow ones is a sample."""

    def durations() -> Iterator[float]:
        for i in range(30):
            yield 0.01 * (4 - i / 10)
        yield from steady(0.01)

    result = run(durations(), warmup_max_time_s=10.0)
    assert result.warmups >= 30
    assert max(sampled(result)) == pytest.approx(0.01)
    assert result.notices == []


def test_warm_up_lasts_at_least_as_long_as_asked() -> None:
    """Steady for two seconds, then a fifth slower: a load that reaches the power limit only by then."""

    def durations() -> Iterator[float]:
        yield from [0.01] * 200
        yield from steady(0.012)

    brief = run(durations(), warmup_max_time_s=5.0)
    assert brief.warmups < 50
    long = run(durations(), warmup_min_time_s=2.5, warmup_max_time_s=5.0)
    assert long.warmups > 200
    assert min(sampled(long)) == pytest.approx(0.012)


def test_warm_up_that_never_settles_ends_and_says_so() -> None:
    def durations() -> Iterator[float]:
        seconds = 0.05
        while True:
            seconds *= 1.05
            yield seconds

    result = run(durations(), warmup_max_time_s=1.0, max_time_s=5.0)
    assert "not_warm" in {notice.kind for notice in result.notices}
    assert "drift" in {notice.kind for notice in result.notices}


def test_a_steady_body_stops_at_the_minimum() -> None:
    clock = FakeClock()
    result = run(steady(0.01), clock)
    total_s = sum(result.duration_s[result.warmups :])
    assert SETTINGS.min_time_s <= total_s < SETTINGS.min_time_s * 1.3
    assert len(sampled(result)) >= SETTINGS.min_samples


def test_a_noisy_body_is_sampled_until_the_interval_is_narrow() -> None:
    result = run(noisy(0.002, 0.3), max_time_s=60.0)
    values = sorted(sampled(result))
    assert len(values) > 5 * SETTINGS.min_samples
    assert "wide_interval" not in {notice.kind for notice in result.notices}


def test_a_hopeless_body_stops_at_the_limit_with_numbers_and_advice() -> None:
    def durations() -> Iterator[float]:
        rng = random.Random(3)
        while True:
            yield rng.choice([0.01, 0.1])

    result = run(durations(), max_time_s=2.0)
    assert sum(result.duration_s[result.warmups :]) < 2.5
    wide = next(notice for notice in result.notices if notice.kind == "wide_interval")
    assert "±" in wide.message
    assert "doctor" in (wide.hint or "")


def test_slow_samples_still_give_a_few() -> None:
    result = run(steady(10.0))
    assert len(sampled(result)) == SETTINGS.few_samples
    assert "few_samples" in {notice.kind for notice in result.notices}


def test_outliers_are_named_and_kept() -> None:
    def durations() -> Iterator[float]:
        rng = random.Random(5)
        for i in range(10**6):
            yield (0.5 if i > 20 and i % 10 == 0 else 0.01) * (1 + 0.01 * rng.random())

    result = run(durations(), max_time_s=5.0)
    assert max(sampled(result)) > 0.4
    assert "outliers" in {notice.kind for notice in result.notices}


def test_a_fixed_number_of_iterations_is_kept_and_a_coarse_clock_is_told() -> None:
    result = run(steady(1e-4), FakeClock(resolution_s=1e-5), iterations=1)
    assert set(result.iterations) == {1}
    assert "coarse_clock" in {notice.kind for notice in result.notices}


def test_device_work_is_waited_for_and_timed_on_the_device() -> None:
    """Launching takes 5 µs of host time, a kernel 1 ms of device time: without the wait it would look 200× faster."""
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=5e-6)
    result = measure(lambda: device.submit(1e-3), settings=SETTINGS, clock=clock, device=device)
    assert result.device_s is not None
    for wall_s, device_s, count in zip(result.duration_s, result.device_s, result.iterations, strict=True):
        assert wall_s == pytest.approx(count * 1e-3, rel=0.02)
        assert device_s == pytest.approx(count * 1e-3, rel=0.02)
    assert result.host_share == pytest.approx(0.005, abs=0.002)


def test_host_bound_work_shows_in_the_wall_time() -> None:
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=1e-3)
    result = measure(lambda: device.submit(1e-4), settings=SETTINGS, clock=clock, device=device)
    assert sampled(result)[0] == pytest.approx(1.0e-3, rel=0.15)
    assert result.host_share is not None
    assert result.host_share > 0.85


def test_earlier_device_work_is_in_no_sample() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    device.submit(100.0)
    result = measure(lambda: device.submit(0.01), settings=SETTINGS, clock=clock, device=device)
    assert max(result.duration_s) == pytest.approx(0.01)


def test_what_the_body_raises_passes_through_and_gc_is_restored() -> None:
    import gc

    def broken() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        measure(broken, settings=SETTINGS, clock=FakeClock(), device=CpuDevice())
    assert gc.isenabled()


def test_the_live_estimate_is_told_at_most_ten_times_a_second() -> None:
    clock, seen = FakeClock(), []

    def watch(estimate: Estimate) -> None:
        seen.append((clock.now_ns(), estimate))

    measure(
        timed_body(clock, noisy(0.03, 1.0)),
        settings=msgspec.structs.replace(SETTINGS, target_width=0.001),
        clock=clock,
        device=CpuDevice(),
        watch=watch,
    )
    assert {estimate.phase for _, estimate in seen} == {"warm-up", "sampling"}
    times = [at for at, _ in seen]
    assert all(later - earlier >= 100_000_000 for earlier, later in itertools.pairwise(times))


class Recorder:
    """A peer that always follows its own opinion, and counts."""

    def __init__(self) -> None:
        self.agreed, self.aligned = 0, 0

    def agree(self, value: int) -> int:
        self.agreed += 1
        return value

    def align(self) -> int:
        self.aligned += 1
        return 1


def test_ranks_align_before_each_sample_and_agree_on_each_decision() -> None:
    clock, peers = FakeClock(), Recorder()
    result = measure(timed_body(clock, steady(0.01)), settings=SETTINGS, clock=clock, device=CpuDevice(), peers=peers)
    assert peers.aligned == len(result.duration_s)
    assert peers.agreed > 0


class Follower:
    """Rank 1: hears rank 0's decisions and takes them over."""

    def __init__(self, decisions: list[int]) -> None:
        self._decisions = iter(decisions)

    def agree(self, value: int) -> int:
        return next(self._decisions)

    def align(self) -> int:
        return 1


class Bursts(Recorder):
    """Every second time eight samples may follow each other."""

    def align(self) -> int:
        super().align()
        return 8 if self.aligned % 2 else 1


def test_samples_that_follow_each_other_directly_are_kept_one_by_one() -> None:
    clock, peers = FakeClock(), Bursts()
    settings = msgspec.structs.replace(SETTINGS, iterations=1)
    times = itertools.cycle([0.01, 0.011, 0.012])
    result = measure(timed_body(clock, times), settings=settings, clock=clock, device=CpuDevice(), peers=peers)
    assert len(result.duration_s) == len(result.start_ns) == len(result.iterations)
    assert len(result.duration_s) > 3 * peers.aligned
    assert set(result.iterations) == {1}
    assert {round(value, 6) for value in result.duration_s} == {0.01, 0.011, 0.012}
    assert result.start_ns == sorted(result.start_ns)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("warmup", [0, 1, 5, 17])
@pytest.mark.parametrize("seconds", [1e-6, 0.01, 10.0])
def test_counts_that_were_fixed_are_exact_whatever_follows_what_and_however_long_it_takes(
    count: int, warmup: int, seconds: float
) -> None:
    counts = dict.fromkeys(("few_samples", "min_samples", "max_samples"), count)
    settings = msgspec.structs.replace(SETTINGS, iterations=1, warmup_samples=warmup, **counts)
    calls = itertools.count()
    for peers in (None, Recorder(), Bursts()):
        clock = FakeClock()

        def body(clock: FakeClock = clock) -> None:
            next(calls)
            clock.advance(seconds)

        before = next(calls)
        result = measure(body, settings=settings, clock=clock, device=CpuDevice(), peers=peers)
        assert next(calls) - before - 1 == count + warmup
        assert result.warmups == warmup
        assert len(result.duration_s) == count + warmup
        assert not {notice.kind for notice in result.notices} & {"not_warm", "few_samples"}


def test_bursts_do_not_exceed_the_largest_number_of_samples() -> None:
    clock, settings = FakeClock(), msgspec.structs.replace(SETTINGS, iterations=1, min_samples=21, max_samples=21)
    result = measure(
        timed_body(clock, noisy(0.01, 0.5)), settings=settings, clock=clock, device=CpuDevice(), peers=Bursts()
    )
    assert len(sampled(result)) == 21


def test_a_wide_interval_of_a_fixed_count_asks_for_more_iterations() -> None:
    counts = dict.fromkeys(("few_samples", "min_samples", "max_samples"), 6)
    result = run(noisy(0.01, 2.0), **counts)
    (wide,) = [notice for notice in result.notices if notice.kind == "wide_interval"]
    assert "--iterations" in (wide.hint or "")
    assert "--max-time" not in (wide.hint or "")


def test_a_rank_with_another_speed_takes_the_same_steps() -> None:
    clock = FakeClock()
    decisions: list[int] = []

    class Leader(Recorder):
        def agree(self, value: int) -> int:
            decisions.append(value)
            return value

    leading = measure(
        timed_body(clock, noisy(3e-4, 0.2)), settings=SETTINGS, clock=clock, device=CpuDevice(), peers=Leader()
    )
    slow = FakeClock()
    following = measure(
        timed_body(slow, noisy(7e-3, 0.9, seed=9)),
        settings=SETTINGS,
        clock=slow,
        device=CpuDevice(),
        peers=Follower(decisions),
    )
    assert following.iterations == leading.iterations
    assert following.warmups == leading.warmups


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-7, 0.5),
    st.floats(0, 2),
    st.integers(0, 1000),
    st.floats(1e-9, 1e-3),
)
def test_any_body_ends_in_bounded_time_with_all_its_samples(
    seconds: float, spread: float, seed: int, resolution_s: float
) -> None:
    clock = FakeClock(resolution_s)
    calls = 0
    durations = noisy(seconds, spread, seed)

    def body() -> None:
        nonlocal calls
        calls += 1
        clock.advance(next(durations))

    settings = msgspec.structs.replace(SETTINGS, max_time_s=0.5, warmup_max_time_s=0.5, min_time_s=0.1)
    result = measure(body, settings=settings, clock=clock, device=CpuDevice())
    assert sum(result.iterations) == calls
    assert len(result.duration_s) - result.warmups >= settings.few_samples
    longest_s = max(result.duration_s)
    assert clock.now_ns() * 1e-9 <= 3 + (settings.few_samples + 2 * settings.window + 6) * max(longest_s, resolution_s)


@pytest.mark.parametrize(
    "change",
    [
        {"target_width": 0.0},
        {"level": 1.0},
        {"min_time_s": 5.0},
        {"min_samples": 2},
        {"iterations": 0},
    ],
)
def test_settings_that_cannot_be(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|above"):
        MeasureSettings(**change)  # type: ignore[arg-type]
