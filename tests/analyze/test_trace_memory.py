"""Memory over time, at its peak, and what is kept."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from trace_samples import Sketch

from stepscope.analyze.step.memory import BEFORE, MOST_POINTS, MemoryOf, trace_memory


def sizes(listed: Iterable[MemoryOf]) -> dict[str, int]:
    return {one.operator: one.bytes for one in listed}


def test_a_step_by_hand() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.operator("aten::mm", 10, 40)
    sketch.operator("aten::empty", 12, 30)
    sketch.memory(20, 100, 0xA, total=1100)
    sketch.operator("aten::relu", 45, 60)
    sketch.memory(50, 300, 0xB, total=1400)
    sketch.memory(70, -300, 0xB, total=1100)
    sketch.memory(80, 50, 0xC, total=1150)
    (found,) = trace_memory(sketch.build(), 1).devices
    assert (found.device, found.events) == ("0", 4)
    assert (found.start_bytes, found.peak_bytes, found.end_bytes) == (1000, 1400, 1150)
    assert found.peak_time_s == 50e-9
    assert sizes(found.at_peak) == {BEFORE: 1000, "aten::relu": 300, "aten::empty": 100}
    assert sizes(found.kept) == {"aten::empty": 100, "no operator recorded": 50}
    assert (found.allocated_bytes, found.freed_bytes) == (450, 300)
    assert [(point.time_s, point.allocated_bytes) for point in found.timeline][:2] == [(20e-9, 1100), (50e-9, 1400)]


def test_an_address_that_is_used_again() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    for time, size in ((10, 100), (20, -100), (30, 200), (40, -200), (50, 70)):
        sketch.memory(time, size, 0xA)
    (found,) = trace_memory(sketch.build(), 1).devices
    assert (found.peak_bytes, found.end_bytes) == (200, 70)
    assert sum(sizes(found.kept).values()) == 70


def test_devices_and_the_cpu_are_apart() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.memory(10, 100, 0xA, total=100)
    sketch.memory(20, 30, 0xA, total=30, device=None)
    assert {one.device: one.peak_bytes for one in trace_memory(sketch.build(), 1).devices} == {"0": 100, "cpu": 30}


def test_many_events_keep_their_peak() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100_000)
    for number in range(3 * MOST_POINTS):
        sketch.memory(number, 1000 if number == 4321 else 1, number, total=5000 if number == 4321 else number)
    (found,) = trace_memory(sketch.build(), 1).devices
    assert len(found.timeline) == MOST_POINTS
    assert max(point.allocated_bytes for point in found.timeline) >= 5000


def test_not_recorded() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 10)
    found = trace_memory(sketch.build(), None)
    assert found.devices == []
    assert found.note is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_what_is_held_adds_up(events: list[tuple[int, int]]) -> None:
    """An address is taken where it is free and given back where it is held."""
    sketch = Sketch()
    sketch.step(1, 0, 100)
    held: dict[int, int] = {}
    total = 0
    for time, (address, size) in enumerate(events):
        change = -held.pop(address) if address in held else size
        if change > 0:
            held[address] = change
        total += change
        sketch.memory(time, change, address, total=total)
    for found in trace_memory(sketch.build(), 1).devices:
        assert sum(one.bytes for one in found.at_peak) == found.peak_bytes
        assert sum(one.bytes for one in found.kept) == found.end_bytes == sum(held.values())
        assert BEFORE not in sizes(found.at_peak)
