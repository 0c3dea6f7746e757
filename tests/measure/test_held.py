"""A device behind a queue in fake time: device time must hold the work and not the host's launching."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fake_device import FakeDevice
from stepscope.measure import CpuDevice, FakeClock, Measurement, MeasureSettings, measure
from stepscope.measure.instability import find_queue_notices
from stepscope.measure.loop import MAX_QUEUED_ITERATIONS
from stepscope.records import Reading
from stepscope.run.rank import RestedReadings

SETTINGS = MeasureSettings(min_time_s=0.01, max_time_s=0.2)


def run_held(
    kernel_s: float, launch_s: float, *, saturated: bool = True, settings: MeasureSettings = SETTINGS
) -> Measurement:
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=launch_s)
    return measure(lambda: device.submit(kernel_s), settings=settings, clock=clock, device=device, saturated=saturated)


def device_times(result: Measurement) -> list[float]:
    assert result.device_s is not None
    return [
        time / count
        for time, count in zip(result.device_s[result.warmups :], result.iterations[result.warmups :], strict=True)
    ]


def wall_times(result: Measurement) -> list[float]:
    pairs = zip(result.duration_s[result.warmups :], result.iterations[result.warmups :], strict=True)
    return [time / count for time, count in pairs]


def test_a_kernel_shorter_than_its_launch_is_told_apart_from_it() -> None:
    result = run_held(kernel_s=2e-6, launch_s=10e-6)
    assert device_times(result) == pytest.approx([2e-6] * len(device_times(result)), rel=1e-3)
    assert wall_times(result)[0] == pytest.approx(10e-6, rel=0.05)
    assert result.starved == 0


def test_without_a_hold_the_gaps_are_in_the_device_time() -> None:
    result = run_held(kernel_s=2e-6, launch_s=10e-6, saturated=False)
    assert device_times(result)[0] == pytest.approx(10e-6, rel=0.05)


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 5e-3), st.floats(1e-7, 1e-4))
def test_device_time_is_the_kernels_whatever_the_host_needs(kernel_s: float, launch_s: float) -> None:
    result = run_held(kernel_s, launch_s)
    assert device_times(result) == pytest.approx([kernel_s] * len(device_times(result)), rel=1e-2, abs=2e-9)


def test_a_sample_fits_into_the_queue() -> None:
    result = run_held(kernel_s=1e-7, launch_s=1e-6)
    assert max(result.iterations) == MAX_QUEUED_ITERATIONS


def test_a_call_that_waits_for_the_device_is_found_out() -> None:
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=10e-6)

    def waiting() -> None:
        device.submit(2e-6)
        device.synchronize()

    result = measure(waiting, settings=SETTINGS, clock=clock, device=device, saturated=True)
    assert result.starved == len(device_times(result))
    assert [notice.kind for notice in find_queue_notices(result.starved, 0, 100)] == ["queue_starved"]


def test_a_hold_that_was_too_short_is_made_longer() -> None:
    """Marking takes the host as long as launching: the first hold ends too soon, a later one does not."""
    clock = FakeClock()

    class SlowMarks(FakeDevice):
        def mark(self) -> float:
            clock.advance(30e-6)
            return super().mark()

    device = SlowMarks(clock, launch_s=5e-6)
    result = measure(lambda: device.submit(1e-6), settings=SETTINGS, clock=clock, device=device, saturated=True)
    assert result.starved == 0
    assert device_times(result)[-1] == pytest.approx(1e-6, rel=1e-2)


@pytest.mark.parametrize("saturated", [True, False])
def test_before_sample_is_outside_the_time_and_before_every_stretch(saturated: bool) -> None:
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=1e-6)
    order: list[str] = []

    def before_sample() -> None:
        order.append("f")
        device.submit(5e-3)

    def body() -> None:
        order.append("b")
        device.submit(4e-4)

    settings = MeasureSettings(min_time_s=0.01, max_time_s=0.1, iterations=3)
    result = measure(
        body, settings=settings, clock=clock, device=device, before_sample=before_sample, saturated=saturated
    )
    stretches = "".join(order).split("f")[1:]
    laps, singles = stretches.count("bbb"), stretches.count("b")
    assert laps == len(result.duration_s)
    assert singles == (3 * laps if saturated else 0)
    assert len(stretches) == laps + singles
    assert max(device_times(result)) == pytest.approx(4e-4, rel=0.01)
    assert max(wall_times(result)) == pytest.approx(4e-4, rel=0.02)


def test_a_call_behind_a_flush_that_takes_long_to_issue_is_covered_by_the_hold() -> None:
    """Issuing takes longer than `before_sample`: without a hold the device would wait for every call."""
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=200e-6)
    settings = MeasureSettings(min_time_s=0.01, max_time_s=0.1, iterations=4)
    result = measure(
        lambda: device.submit(2e-6), settings=settings, clock=clock, device=device,
        before_sample=lambda: device.hold(20e-6), saturated=True,
    )  # fmt: skip
    assert result.starved == 0
    assert device_times(result)[-1] == pytest.approx(2e-6, rel=1e-2)


def test_a_cpu_is_never_held() -> None:
    clock = FakeClock()
    result = measure(lambda: clock.advance(1e-3), settings=SETTINGS, clock=clock, device=CpuDevice(), saturated=True)
    assert result.device_s is None
    assert result.starved == 0


def test_the_stop_rule_looks_at_device_time() -> None:
    """The host's launching is noisy beyond hope; the kernels are steady: a few samples do."""
    clock = FakeClock()
    device = FakeDevice(clock)
    turn = 0

    def body() -> None:
        nonlocal turn
        turn += 1
        clock.advance(1e-6 * (1 + turn % 7))
        device.submit(3e-5)

    result = measure(body, settings=MeasureSettings(), clock=clock, device=device, saturated=True)
    assert result.notices == []
    assert len(device_times(result)) < 400


def test_fetching_memory_while_timing_gets_a_word() -> None:
    assert find_queue_notices(0, 0, 100) == []
    (notice,) = find_queue_notices(0, 300, 100)
    assert notice.kind == "allocations"
    assert "300 times in 100" in notice.message


def count_readings(rest_s: float, cases: int) -> list[int]:
    class Counting:
        def read(self, at: str) -> list[Reading]:
            return [Reading(device="cpu", at=at)]  # type: ignore[arg-type]

    readings = RestedReadings(Counting(), rest_s)
    read: Callable[[str], list[Reading]] = readings.read  # type: ignore[assignment]
    return [len(read("start")) + len(read("end")) for _ in range(cases)]


def test_readings_rest_between_quick_cases_and_come_in_pairs() -> None:
    assert count_readings(rest_s=100.0, cases=4) == [2, 0, 0, 0]
    assert count_readings(rest_s=0.0, cases=3) == [2, 2, 2]
