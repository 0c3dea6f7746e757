from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from stepscope.measure.instability import judge_times
from stepscope.measure.surroundings import CpuUse, find_co_running_load, read_cpu_use
from stepscope.records import MeasureSettings

START = CpuUse(idle_s=100, total_s=200, own_s=10, stolen_s=0)


def later(*, idle_s: float, own_s: float, stolen_s: float = 0.0) -> CpuUse:
    """Ten seconds on two cores."""
    return CpuUse(idle_s=100 + idle_s, total_s=220, own_s=10 + own_s, stolen_s=stolen_s)


def told(after: CpuUse) -> str | None:
    found = find_co_running_load(START, after, 2)
    assert found is not None
    notice = found.as_notice()
    return notice.message if notice else None


def test_a_quiet_machine_is_no_notice() -> None:
    assert told(later(idle_s=10, own_s=10)) is None
    assert told(later(idle_s=0.5, own_s=19)) is None


def test_others_are_counted_in_cores() -> None:
    found = find_co_running_load(START, later(idle_s=2, own_s=9), 2)
    assert found is not None
    assert (found.other_cores, found.stolen_cores) == (pytest.approx(0.9), 0)
    assert told(later(idle_s=2, own_s=9)) == "other processes used 0.9 of 2 cores while this was measured"


def test_stolen_time_is_told_apart() -> None:
    message = "the hypervisor took 20.0 % of the cores away while this was measured"
    assert told(later(idle_s=6, own_s=10, stolen_s=4)) == message


def test_a_span_below_the_tick_tells_nothing() -> None:
    assert find_co_running_load(START, CpuUse(idle_s=100, total_s=200.04, own_s=10, stolen_s=0), 2) is None


def test_a_real_busy_process_is_seen() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        before = read_cpu_use()
        time.sleep(1.0)
        found = find_co_running_load(before, read_cpu_use(), os.cpu_count() or 1)
    finally:
        busy.kill()
        busy.wait()
    assert found is not None
    assert found.other_cores > 0.5
    assert found.as_notice() is not None


def test_an_interval_just_above_its_target_is_told_apart_from_it() -> None:
    settings = MeasureSettings(target_width=0.01)
    times = [1.0 + 0.01004 * side for side in (-1, 1)] * 20
    (wide,) = [one for one in judge_times(times, settings) if one and one.kind == "wide_interval"]
    assert "±1.004 %" in wide.message
    assert "the target is ±1.000 %" in wide.message
