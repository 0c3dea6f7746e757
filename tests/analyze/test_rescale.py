"""The estimate of a step's breakdown without the profiler."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.job_section import BUSY_SHARES, rescale
from stepscope.analyze.step.breakdown import SHARES, Shares


def shares(*values: float) -> Shares:
    return Shares(**dict(zip(SHARES, values, strict=True)))


def test_busy_time_is_kept_and_idle_time_fills_the_rest() -> None:
    found = rescale(shares(10, 4, 2, 60, 20, 4), 37, on_device=True)
    assert msgspec.structs.astuple(found) == pytest.approx((10, 4, 2, 15, 5, 1))


def test_a_step_shorter_than_the_busy_time_has_no_idle_time() -> None:
    found = rescale(shares(60, 20, 0, 10, 5, 5), 40, on_device=True)
    assert msgspec.structs.astuple(found) == pytest.approx((30, 10, 0, 0, 0, 0))


def test_without_idle_time_or_without_a_device_everything_scales_alike() -> None:
    assert msgspec.structs.astuple(rescale(shares(6, 2, 0, 0, 0, 0), 10, on_device=True)) == pytest.approx(
        (7.5, 2.5, 0, 0, 0, 0)
    )
    on_cpu = rescale(shares(60, 0, 0, 0, 0, 40), 50, on_device=False)
    assert msgspec.structs.astuple(on_cpu) == pytest.approx((30, 0, 0, 0, 0, 20))


TIMES = st.lists(st.floats(0, 10), min_size=len(SHARES), max_size=len(SHARES))


@given(TIMES, st.floats(0.001, 100), st.booleans())
def test_parts_add_up_to_the_step_and_none_is_negative(values: list[float], step_s: float, on_device: bool) -> None:
    before = shares(*values)
    after = rescale(before, step_s, on_device=on_device)
    parts = msgspec.structs.astuple(after)
    assert all(part >= 0 for part in parts)
    if sum(values) > 1e-6:
        assert sum(parts) == pytest.approx(step_s)
    busy = sum(getattr(before, name) for name in BUSY_SHARES)
    if on_device and busy < step_s and sum(values) - busy > 1e-6:
        assert all(getattr(after, name) == getattr(before, name) for name in BUSY_SHARES)
