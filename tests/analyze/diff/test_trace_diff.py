"""Two traces compared: planted changes are found with their amounts, everything adds up, noise is called noise."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import planting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import LINEAR, RESNET, rows_named
from same_timeline import ALEXNET, GPT2, NCCL, real_trace

from stepscope.analyze.diff.compare import apportion, diff_traces
from stepscope.analyze.diff.exposure import TraceSide
from stepscope.analyze.diff.records import NameChange, TraceDiff
from stepscope.analyze.step.breakdown import break_down
from stepscope.core.errors import UsageError
from stepscope.formats.classify import normal_name
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    HOST_KINDS,
    KERNEL,
    KINDS,
    OPERATOR,
    RUNTIME,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.cut import cut
from stepscope.traces.finish import finish

HOST_ONLY = [KINDS[kind] for kind in HOST_KINDS]
TRACES = [GPT2, NCCL, LINEAR, ALEXNET]


def assert_adds_up(diff: TraceDiff) -> None:
    assert sum(one.change_ns for one in diff.contributions) == diff.change_ns
    for one in diff.contributions:
        assert sum(part.change_ns for part in one.parts) == one.change_ns
        assert one.change_s == pytest.approx(one.b_s - one.a_s, abs=2e-9 * (1 + len(one.parts)))
    assert diff.change_s == pytest.approx(diff.step_b_s - diff.step_a_s, abs=1e-9)
    for used, step_s in ((diff.a, diff.step_a_s), (diff.b, diff.step_b_s)):
        middle = [
            length for number, length in zip(used.numbers, used.durations_s, strict=True) if number in used.middle
        ]
        assert step_s == pytest.approx(sum(middle) / len(middle))
    for change in (*diff.kernels, *diff.operators):
        assert change.change_s == pytest.approx(change.from_calls_s + change.from_duration_s, abs=1e-9)
    json.loads(msgspec.json.encode(diff))


def change_of(changes: list[NameChange], name: str) -> NameChange:
    (found,) = [change for change in changes if name in (change.name, *change.names_a, *change.names_b)]
    return found


def idle_change(diff: TraceDiff) -> int:
    return sum(one.change_ns for one in diff.contributions if one.share.endswith("_idle"))


def expected_change(diff: TraceDiff, before: list[float], added: list[float]) -> float:
    """Of a mean over middle steps when each step changes by a known amount."""
    a = [v for number, v in zip(diff.a.numbers, before, strict=True) if number in diff.a.middle]
    after = [v + more for v, more in zip(before, added, strict=True)]
    b = [v for number, v in zip(diff.b.numbers, after, strict=True) if number in diff.b.middle]
    return sum(b) / len(b) - sum(a) / len(a)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_does_not_differ_from_itself(name: str) -> None:
    trace = real_trace(name)
    diff = diff_traces(trace, trace)
    assert diff.verdict == "no difference found"
    assert diff.sentence.startswith("No difference found: both profiled steps take the same time")
    assert (diff.change_ns, diff.change_s) == (0, 0)
    assert not any(
        one.change_ns or one.clear or any(part.change_ns for part in one.parts) for one in diff.contributions
    )
    for change in (*diff.kernels, *diff.operators):
        assert (change.status, change.verdict) == ("same", "no difference found")
        assert (change.change_s, change.from_calls_s, change.from_duration_s, change.exposed_change_ns) == (0, 0, 0, 0)
    assert not any(diff.counts.values())
    assert_adds_up(diff)


@pytest.mark.parametrize("name", [GPT2, NCCL, LINEAR, ALEXNET])
def test_every_nanosecond_of_a_step_has_one_name(name: str) -> None:
    trace = real_trace(name)
    side = TraceSide(trace, None)
    for number, window in zip(side.numbers, side.windows, strict=True):
        part, exposed = side.work.exposed(window)
        _, idle = side.idle(window)
        assert (exposed >= 0).all()
        assert int(exposed.sum()) + int(idle.sum()) == window.length_ns
        known = break_down(trace, number)
        if (known.window_start_ns, known.window_end_ns) == window:
            shares = [int(exposed[side.work.share[part] == share].sum()) for share in range(3)]
            assert [*shares, *idle.sum(axis=0).tolist()] == list(known.breakdown_ns.values())


@pytest.mark.parametrize("name", [GPT2, NCCL, ALEXNET])
def test_a_kernel_that_takes_twice_as_long(name: str) -> None:
    trace = real_trace(name)
    kernel = planting.lonely_kernel(trace)
    rows = rows_named(trace, KERNEL, kernel)
    diff = diff_traces(trace, planting.slow_down(trace, rows))
    assert_adds_up(diff)
    added = planting.by_step(trace, rows, diff.a.numbers)
    change = change_of(diff.kernels, normal_name(kernel))
    assert change is diff.kernels[0]
    assert change.verdict == "slower"
    assert change.calls_a == change.calls_b
    assert change.mean_b_s == pytest.approx(2 * change.mean_a_s)  # type: ignore[operator]
    assert change.exposed_change_ns == pytest.approx(expected_change(diff, added, added), abs=1)
    lengths = [length * 1e9 for length in diff.a.durations_s]
    assert diff.change_ns == pytest.approx(expected_change(diff, lengths, added), abs=1)
    part = next(p for one in diff.contributions for p in one.parts if p.name == normal_name(kernel))
    assert part.change_ns == change.exposed_change_ns
    others = [one for one in diff.kernels if one is not change]
    assert all(one.verdict == "no difference found" for one in others)
    if diff.a.middle == diff.b.middle:
        assert all(one.change_s == 0 for one in others)
        assert idle_change(diff) == 0


def test_the_sentence_names_the_cause() -> None:
    trace = real_trace(NCCL)
    builder_kernel = planting.lonely_kernel(trace)
    slower = trace
    for _ in range(4):
        slower = planting.slow_down(slower, rows_named(slower, KERNEL, builder_kernel))
    diff = diff_traces(trace, slower)
    assert diff.verdict == "longer"
    assert diff.sentence.startswith("B's profiled step is ")
    assert " longer: " in diff.sentence
    assert " of it is " in diff.sentence
    assert diff.sentence.endswith("(3 steps of A and 3 steps of B).")
    assert diff.contributions[0].clear
    assert diff.contributions[0].parts[0].name == normal_name(builder_kernel)
    back = diff_traces(slower, trace)
    assert back.verdict == "shorter"
    assert back.change_ns == -diff.change_ns


def test_a_kernel_that_is_gone() -> None:
    trace = real_trace(GPT2)
    kernel = planting.lonely_kernel(trace)
    rows = rows_named(trace, KERNEL, kernel)
    spent = int(planting.durations(trace, rows).sum())
    diff = diff_traces(trace, planting.remove(trace, rows))
    assert_adds_up(diff)
    change = change_of(diff.kernels, normal_name(kernel))
    assert (change.status, change.verdict) == ("removed", "removed")
    assert (change.calls_a, change.calls_b) == (len(rows), 0)
    assert diff.change_ns == change.exposed_change_ns == -spent
    assert diff.counts["kernels removed"] == 1
    assert "1 kernel is gone" in diff.sentence
    assert sum(bool(one.change_s) for one in diff.kernels) == 1
    back = diff_traces(planting.remove(trace, rows), trace)
    assert change_of(back.kernels, normal_name(kernel)).verdict == "added"
    assert back.change_ns == spent


def test_fewer_calls_are_not_called_faster() -> None:
    trace = real_trace(GPT2)
    kernel = planting.lonely_kernel(trace, least_calls=8)
    rows = rows_named(trace, KERNEL, kernel)
    diff = diff_traces(trace, planting.remove(trace, rows[::2]))
    change = change_of(diff.kernels, normal_name(kernel))
    assert change.verdict == "fewer calls"
    assert change.calls_b == len(rows) // 2
    assert diff.change_ns == -int(planting.durations(trace, rows[::2]).sum())


@pytest.mark.parametrize(
    "new",
    [
        "sm90_xmma_gemm_bf16_tilesize128x128x64_cublas",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
    ],
)
def test_a_kernel_under_another_name(new: str) -> None:
    trace = real_trace(GPT2)
    kernel = next(
        name
        for name in dict.fromkeys(trace.texts[code] for code in trace.core["name"][rows_of(trace, "gemm")].tolist())
        if len(rows_named(trace, KERNEL, name)) > 5
    )
    rows = rows_named(trace, KERNEL, kernel)
    diff = diff_traces(trace, planting.rename(trace, kernel, new))
    assert_adds_up(diff)
    change = change_of(diff.kernels, normal_name(new))
    assert (change.status, change.verdict) == ("renamed", "no difference found")
    assert (change.names_a, change.names_b) == ([normal_name(kernel)], [normal_name(new)])
    assert diff.change_ns == 0
    assert all(one.change_ns == 0 for one in diff.contributions)
    assert diff.counts["kernels renamed"] == 1
    assert diff.counts["kernels added"] == diff.counts["kernels removed"] == 0
    assert "1 kernel is renamed" in diff.sentence
    slower = planting.rename(planting.slow_down(trace, rows), kernel, new)
    change = change_of(diff_traces(trace, slower).kernels, normal_name(new))
    assert (change.status, change.verdict) == ("renamed", "slower")
    assert change.mean_b_s == pytest.approx(2 * change.mean_a_s, rel=0.05)  # type: ignore[operator]


def rows_of(trace: Timeline, category: str) -> np.ndarray:
    from stepscope.formats.classify import CATEGORIES

    return np.flatnonzero(trace.core["category"] == CATEGORIES.index(category))


def test_several_new_names_are_paired_by_their_places() -> None:
    trace = real_trace(GPT2)
    names = list(dict.fromkeys(trace.texts[code] for code in trace.core["name"][trace.rows(KERNEL)].tolist()))[:20]
    renamed = trace
    for place, name in enumerate(names):
        renamed = planting.rename(renamed, name, f"other_{place}")
    diff = diff_traces(trace, renamed)
    pairs = {tuple(one.names_a): one.names_b for one in diff.kernels if one.status == "renamed"}
    right = sum(pairs.get((normal_name(name),)) == [f"other_{place}"] for place, name in enumerate(names))
    assert right >= 0.9 * len(names)
    assert diff.change_ns == 0


def test_spellings_of_one_kernel_are_one() -> None:
    trace = real_trace(GPT2)
    kernel = (
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)"
    )
    diff = diff_traces(
        trace, planting.rename(trace, kernel, "void at::native::vectorized_gather_kernel<(int)16, long>(T1 *)")
    )
    assert diff.counts["kernels renamed"] == 0
    assert not any(diff.counts.values())


def test_a_new_operator() -> None:
    trace = real_trace(NCCL)
    diff = diff_traces(trace, planting.add_operator(trace, "mine::wrapper", "aten::relu_"))
    assert_adds_up(diff)
    calls = len(rows_named(trace, OPERATOR, "aten::relu_"))
    change = change_of(diff.operators, "mine::wrapper")
    assert (change.status, change.verdict, change.calls_a) == ("added", "added", 0)
    assert change.calls_b == pytest.approx(calls / 3)
    assert diff.counts["operators added"] == 1
    assert (diff.change_ns, diff.verdict) == (0, "no difference found")
    assert not any(diff.counts[key] for key in diff.counts if key.startswith("kernels"))


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_the_order_of_steps_does_not_matter(order: tuple[int, ...]) -> None:
    trace = real_trace(NCCL)
    diff = diff_traces(trace, planting.reorder_steps(trace, order))
    assert diff.verdict == "no difference found"
    assert diff.change_ns == 0
    assert not any(diff.counts.values())


def test_numbers_of_steps_may_differ() -> None:
    trace = real_trace(LINEAR)
    diff = diff_traces(trace, cut(trace, steps=range(5, 21)))
    assert_adds_up(diff)
    assert (len(diff.a.numbers), len(diff.b.numbers)) == (38, 14)
    assert diff.verdict == "no difference found"
    assert not any(diff.counts[f"kernels {word}"] for word in ("added", "removed", "more calls", "fewer calls"))
    chosen = diff_traces(trace, trace, steps_a=[7, 8, 9], steps_b=[7, 8, 9, 10])
    assert (chosen.a.numbers, chosen.b.numbers) == ([7, 8, 9], [7, 8, 9, 10])
    assert_adds_up(chosen)


def test_steps_that_run_into_each_other_are_counted_once() -> None:
    trace = real_trace(RESNET)
    kernel = planting.lonely_kernel(trace)
    rows = rows_named(trace, KERNEL, kernel)
    side = TraceSide(trace, None)
    assert side.overlapping
    for before, after in zip(side.windows, side.windows[1:], strict=False):
        assert after.start_ns >= before.end_ns
    diff = diff_traces(trace, planting.slow_down(trace, rows))
    assert_adds_up(diff)
    lengths = [length * 1e9 for length in diff.a.durations_s]
    added = planting.by_step(trace, rows, diff.a.numbers)
    assert diff.change_ns == pytest.approx(expected_change(diff, lengths, added), abs=1)
    assert any("runs ahead" in note for note in diff.notes)


def test_traces_without_a_device() -> None:
    trace = cut(real_trace(NCCL), kinds=HOST_ONLY)
    same = diff_traces(trace, trace)
    assert (same.change_ns, same.verdict, same.kernels) == (0, "no difference found", [])
    side = TraceSide(trace, None)
    for number, window in zip(side.numbers, side.windows, strict=True):
        part, exposed = side.work.exposed(window)
        known = break_down(trace, number).breakdown_ns
        assert int(exposed[side.work.share[part] == 0].sum()) == known["compute"]
        assert int(exposed[side.work.share[part] == 1].sum()) == known["exposed_comm"]
        assert int(side.idle(window)[1].sum()) == known["other_idle"]
    slower = planting.slow_down(trace, rows_named(trace, OPERATOR, "aten::cudnn_convolution"))
    diff = diff_traces(trace, slower)
    assert_adds_up(diff)
    assert diff.change_ns > 0
    assert diff.contributions[0].parts[0].name == "aten::cudnn_convolution"
    assert change_of(diff.operators, "aten::cudnn_convolution").device_a_s is None
    assert any("no device work" in note for note in diff.notes)
    mixed = diff_traces(real_trace(NCCL), trace)
    assert_adds_up(mixed)
    assert any("only one of the traces" in note for note in mixed.notes)


def test_whole_traces_stand_for_a_step_where_none_is_marked() -> None:
    trace = real_trace(ALEXNET)
    diff = diff_traces(trace, trace)
    assert diff.a.marker == "none"
    assert any("marks no steps" in note for note in diff.notes)


def test_what_is_not_there_is_said() -> None:
    trace = real_trace(NCCL)
    with pytest.raises(UsageError, match="no step 99"):
        diff_traces(trace, trace, steps_b=[99])
    with pytest.raises(UsageError, match="no steps to compare"):
        diff_traces(trace, trace, steps_a=[])
    with pytest.raises(UsageError, match="trace B has no events"):
        diff_traces(trace, TimelineBuilder().build())


def steps_with(kernel_ns: list[list[int]], *, host_ns: int = 100, communicate: bool = False) -> Timeline:
    """Steps that launch one kernel after the other, each from an operator of its own."""
    builder = TimelineBuilder()
    clock, correlation = 1_000_000, 0
    for number, step in enumerate(kernel_ns):
        begin = clock
        for place, length in enumerate(step):
            correlation += 1
            builder.add(OPERATOR, f"aten::op{place}", clock, clock + host_ns, thread=(1, 1))
            builder.add(RUNTIME, "cudaLaunchKernel", clock + 10, clock + 20, thread=(1, 1), correlation=correlation)
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if communicate and place == 0 else f"kernel_{place}"
            builder.add(KERNEL, name, clock + 30, clock + 30 + length, device=0, stream=7, correlation=correlation)
            clock += max(host_ns, 30 + length)
        builder.add(ANNOTATION, f"ProfilerStep#{number}", begin, clock, thread=(1, 1))
        clock += 50
    return finish(builder.build())


def test_noise_is_not_called_a_difference() -> None:
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(30):
        a, b = (
            steps_with((random.normal(1, 0.05, (6, 4)) * [40_000, 9_000, 700, 100_000]).astype(int).tolist())
            for _ in range(2)
        )
        diff = diff_traces(a, b)
        wrong += diff.verdict != "no difference found" or any(diff.counts.values())
        wrong += any(one.clear for one in diff.contributions)
    assert wrong <= 2


def test_a_real_difference_is_found_in_noise() -> None:
    random = np.random.default_rng(6)
    base = np.array([40_000, 9_000, 700, 100_000])
    a = steps_with((random.normal(1, 0.02, (8, 4)) * base).astype(int).tolist(), communicate=True)
    b = steps_with((random.normal(1, 0.02, (8, 4)) * base * [1.5, 1, 1, 1]).astype(int).tolist(), communicate=True)
    diff = diff_traces(a, b)
    assert diff.verdict == "longer"
    assert ": 2" in diff.sentence or ": 19." in diff.sentence
    assert "of it is exposed all-reduce" in diff.sentence
    verdicts = {change.short_name: change.verdict for change in diff.kernels}
    assert verdicts.pop("ncclDevKernel_AllReduce_Sum_f32_RING_LL") == "slower"
    assert set(verdicts.values()) == {"no difference found"}


def test_one_step_each_is_not_enough_for_a_small_change() -> None:
    diff = diff_traces(steps_with([[100_000]]), steps_with([[110_000]]))
    assert diff.verdict == "not enough data"
    assert diff.sentence.startswith("Not enough data: B's profiled step is 10.00 µs")
    assert any("one step" in note for note in diff.notes)
    assert diff_traces(steps_with([[100_000]]), steps_with([[200_000]])).verdict == "longer"


def test_one_odd_step_does_not_count() -> None:
    usual = [[100_000, 5_000]] * 6
    diff = diff_traces(steps_with(usual), steps_with([*usual[:3], [900_000, 5_000], *usual[3:]]))
    assert diff.verdict == "no difference found"
    assert diff.change_ns == 0


STEPS = st.lists(st.lists(st.integers(0, 5_000), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(STEPS, STEPS, st.integers(30, 3_000), st.booleans())
def test_contributions_always_add_up(a: list[list[int]], b: list[list[int]], host_ns: int, talks: bool) -> None:
    diff = diff_traces(steps_with(a, host_ns=host_ns, communicate=talks), steps_with(b, communicate=talks))
    assert_adds_up(diff)
    back = diff_traces(steps_with(b, communicate=talks), steps_with(a, host_ns=host_ns, communicate=talks))
    assert back.change_ns == pytest.approx(-diff.change_ns, abs=1)


WORK = st.tuples(
    st.sampled_from([KERNEL, COPY]), st.sampled_from(["ncclDevKernel_AllReduce", "gemm", "add"]),
    st.integers(0, 400), st.integers(0, 90), st.integers(0, 2),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(WORK, max_size=12), st.lists(WORK, max_size=12))
def test_overlapping_work_is_counted_once(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> None:
    def build(works: list[tuple[int, ...]]) -> Timeline:
        builder = TimelineBuilder()
        builder.add(ANNOTATION, "ProfilerStep#1", 0, 200, thread=(1, 1))
        for kind, name, start, length, stream in works:
            builder.add(kind, name, start, start + length, device=0, stream=stream)  # type: ignore[arg-type]
        return finish(builder.build())

    one, other = build(a), build(b)
    diff = diff_traces(one, other)
    assert_adds_up(diff)
    for trace in (one, other):
        side = TraceSide(trace, None)
        known = break_down(trace, 1)
        part, exposed = side.work.exposed(side.windows[0])
        shares = [int(exposed[side.work.share[part] == share].sum()) for share in range(3)]
        assert shares == list(known.breakdown_ns.values())[:3]


@given(st.lists(st.integers(-(10**12), 10**12), max_size=30), st.integers(1, 1000))
def test_parts_of_nanoseconds_are_shared_out(numerators: list[int], denominator: int) -> None:
    shared = apportion(numerators, denominator)
    assert 2 * denominator * abs(sum(shared) * denominator - sum(numerators)) <= denominator * denominator
    for share, numerator in zip(shared, numerators, strict=True):
        assert abs(share * denominator - numerator) < denominator or numerator % denominator == 0
