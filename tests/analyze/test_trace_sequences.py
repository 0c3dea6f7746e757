"""Repeated runs of short kernels."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from trace_samples import Sketch

from stepscope.analyze.step.sequences import SHORT_NS, find_sequences
from stepscope.formats.timeline import Timeline


def line(names: str, *, long: str = "", gap: int = 3) -> Timeline:
    """Kernels of 10 ns on one stream, `gap` apart; those in `long` take too long for a sequence."""
    sketch = Sketch()
    sketch.step(1, 0, 10)
    start = 20
    for number, name in enumerate(names):
        length = 2 * SHORT_NS if name in long else 10
        sketch.kernel(name, start, start + length, call=(number % 9, 9))
        start += length + gap
    return sketch.build()


def test_the_repeated_run_is_found_whole() -> None:
    found = find_sequences(line("xabcyabczabcw"), 1)
    best = found.sequences[0]
    assert best.kernels == ["a", "b", "c"]
    assert (best.count, best.launches_saved) == (3, 6)
    assert round(best.gap_s * 1e9) == 3 * 2 * 3
    assert round(best.kernel_s * 1e9) == 3 * 3 * 10
    assert len(found.sequences) == 1
    assert (found.kernels, found.short_kernels) == (13, 13)


def test_long_kernels_and_copies_end_a_run() -> None:
    assert find_sequences(line("abLabLab", long="b"), 1).sequences == []
    assert [one.kernels for one in find_sequences(line("aLcaLcaLcaLc", long="L"), 1).sequences] == [["c", "a"]]


def test_a_run_does_not_overlap_itself() -> None:
    best = find_sequences(line("aaaaaa"), 1, longest=2).sequences[0]
    assert (best.kernels, best.count) == (["a", "a"], 3)


def test_streams_are_apart() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 10)
    for number in range(3):
        start = 100 * number + 20
        sketch.kernel("a", start, start + 10, call=(1, 2))
        sketch.kernel("b", start + 12, start + 20, call=(3, 4), stream=20)
    found = {tuple(one.kernels) for one in find_sequences(sketch.build(), 1).sequences}
    assert ("a", "b") not in found


def test_operators_are_named() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 1000)
    for number in range(3):
        start = 100 * number
        sketch.operator("aten::add", start, start + 20)
        sketch.kernel("a", start + 30, start + 40, call=(start + 1, start + 5))
        sketch.kernel("b", start + 45, start + 50, call=(start + 6, start + 9))
        sketch.fill(start + 55, start + 60, call=(start + 30, start + 31))
    (found,) = find_sequences(sketch.build(), 1).sequences
    assert (found.kernels, found.operators, found.count) == (["a", "b"], ["aten::add", "aten::add"], 3)


def test_no_device() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 10)
    found = find_sequences(sketch.build(), None)
    assert found.sequences == []
    assert found.note is not None


@given(st.text("abc", min_size=1, max_size=30))
@example("bababab")
def test_every_sequence_is_there_as_often_as_said(names: str) -> None:
    found = find_sequences(line(names), 1)
    used = 0
    for one in found.sequences:
        assert one.count >= 3
        assert names.count("".join(one.kernels)) >= one.count
        assert one.launches_saved == one.count * (len(one.kernels) - 1)
        used += one.count * len(one.kernels)
    assert used <= len(names)
    for pair in {names[place : place + 2] for place in range(len(names) - 1)}:
        if names.count(pair) >= 3:
            assert found.sequences
