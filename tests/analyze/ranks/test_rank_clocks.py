"""Planted clock offsets, found again or refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import MS, US, Call, Plan, real_timeline, real_timelines, shift, simulate

from stepscope.analyze.ranks.clocks import Clocks, find_clocks
from stepscope.analyze.ranks.digest import digest
from stepscope.analyze.ranks.matching import match
from stepscope.formats.timeline import Timeline

ALL = (0, 1, 2, 3)


def _clocks(timelines: list[Timeline], resolution_ns: int = 1) -> Clocks:
    return find_clocks(match([digest(timeline) for timeline in timelines]), resolution_ns)


def _offsets_ns(clocks: Clocks) -> list[int | None]:
    return [None if entry.offset_s is None else round(entry.offset_s * 1e9) for entry in clocks.offsets]


def test_offsets_of_one_group() -> None:
    planted = [0, 3 * MS, -750 * US, 12]
    clocks = _clocks(simulate(Plan(4, [[Call("allreduce", ALL)] * 5] * 2, offset_ns=planted.__getitem__)))
    assert _offsets_ns(clocks) == planted
    assert clocks.method == "difference to the reference"
    assert (clocks.reference, clocks.collectives) == (0, 10)
    assert [entry.usable for entry in clocks.offsets] == [False, True, True, True]
    assert clocks.offsets[0].reason == "it is the reference"
    assert clocks.largest_offset_s == pytest.approx(3e-3)


def test_late_ranks_do_not_look_like_clocks() -> None:
    plan = Plan(4, [[Call("allreduce", ALL)] * 5], late_ns=lambda rank, step, call: rank * 400 * US)
    clocks = _clocks(simulate(plan))
    assert _offsets_ns(clocks) == [0, 0, 0, 0]
    assert not any(entry.usable for entry in clocks.offsets)


def test_offsets_through_groups_that_do_not_contain_the_reference() -> None:
    planted = [0, 5 * MS, -2 * MS, 9 * MS]
    calls = [
        Call("allreduce", (0, 1), name="1"),
        Call("allreduce", (2, 3), name="2"),
        Call("allreduce", (1, 3), name="3"),
    ]
    clocks = _clocks(simulate(Plan(4, [calls] * 3, offset_ns=planted.__getitem__)))
    assert clocks.method == "least squares over pairs of ranks that share a group"
    assert _offsets_ns(clocks) == planted


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 12))
def test_any_connected_groups_give_the_planted_offsets(seed: int, ranks: int) -> None:
    choose = random.Random(seed)
    planted = [0, *(choose.randint(-(10**12), 10**12) for _ in range(ranks - 1))]
    chain = [tuple(sorted((choose.randrange(rank), rank))) for rank in range(1, ranks)]
    extra = [tuple(sorted(choose.sample(range(ranks), choose.randint(2, ranks)))) for _ in range(3)]
    calls = [Call("allreduce", members, name=str(i)) for i, members in enumerate([*chain, *extra])]
    clocks = _clocks(simulate(Plan(ranks, [calls] * 2, offset_ns=planted.__getitem__)))
    found = _offsets_ns(clocks)
    assert all(abs((offset or 0) - true) <= 1 for offset, true in zip(found, planted, strict=True))


def test_contradicting_pairs_are_shared_out() -> None:
    """Ends that do not quite coincide: the offsets lie between what the pairs say."""
    groups = ((0, 1), (1, 2), (0, 2))
    calls = [Call("allreduce", members, name=str(i)) for i, members in enumerate(groups)]
    noisy = {(1, 0): 10 * US}  # rank 1 leaves the first group's collectives later than rank 0
    plan = Plan(3, [calls] * 4, end_noise_ns=lambda rank, step, call: noisy.get((rank, call), 0))
    clocks = _clocks(simulate(plan))
    assert _offsets_ns(clocks)[0] == 0
    assert clocks.method == "difference to the reference"
    four = ((0, 1), (1, 2), (2, 3), (1, 3))
    calls = [Call("allreduce", members, name=str(i)) for i, members in enumerate(four)]
    noisy = {(2, 1): 30 * US}
    plan = Plan(4, [calls] * 4, end_noise_ns=lambda rank, step, call: noisy.get((rank, call), 0))
    # Unknown x1 (0–1), x2 and x3 in the triangle 1–2–3, where 1–2 says 30 and the rest 0: thirds.
    assert _offsets_ns(_clocks(simulate(plan))) == [0, 0, 20 * US, 10 * US]


def test_ranks_that_nothing_links() -> None:
    calls = [Call("allreduce", (0, 1), name="1"), Call("allreduce", (2, 3), name="2")]
    clocks = _clocks(simulate(Plan(4, [calls] * 3)))
    assert _offsets_ns(clocks) == [0, 0, None, None]
    assert clocks.offsets[2].reason == "no matched synchronising collective links it to the reference"


def test_broadcasts_and_messages_say_nothing_about_clocks() -> None:
    clocks = _clocks(simulate(Plan(2, [[Call("broadcast"), Call("reduce")] * 3], offset_ns=lambda rank: rank * MS)))
    assert clocks.collectives == 0
    assert _offsets_ns(clocks) == [0, None]


def test_an_offset_within_its_spread_is_refused() -> None:
    noise = random.Random(4)
    plan = Plan(
        2,
        [[Call()] * 20] * 2,
        offset_ns=lambda rank: rank * 3 * US,
        end_noise_ns=lambda rank, step, call: noise.randint(-20 * US, 20 * US),
    )
    entry = _clocks(simulate(plan)).offsets[1]
    assert not entry.usable
    assert entry.reason == "not larger than its spread: no offset can be told from none"
    assert entry.spread_s is not None
    assert 5e-6 < entry.spread_s < 20e-6


def test_noise_does_not_hide_a_large_offset() -> None:
    noise = random.Random(4)
    plan = Plan(
        2,
        [[Call()] * 50] * 2,
        offset_ns=lambda rank: rank * MS,
        end_noise_ns=lambda rank, step, call: noise.randint(-20 * US, 20 * US),
    )
    entry = _clocks(simulate(plan)).offsets[1]
    assert entry.usable
    assert entry.offset_s == pytest.approx(1e-3, abs=6e-6)


def test_a_coarse_clock_is_not_believed_below_its_unit() -> None:
    timelines = simulate(Plan(2, [[Call()] * 5], offset_ns=lambda rank: rank * 1500))
    assert not _clocks(timelines, resolution_ns=1000).offsets[1].usable
    assert _clocks(timelines, resolution_ns=1).offsets[1].usable


def test_two_collectives_are_too_few() -> None:
    entry = _clocks(simulate(Plan(2, [[Call()] * 2], offset_ns=lambda rank: rank * MS))).offsets[1]
    assert not entry.usable
    assert entry.reason == "fewer than 3 matched synchronising collectives"


def test_a_shift_is_never_silent() -> None:
    timeline = simulate(Plan(2, [[Call()] * 3], offset_ns=lambda rank: rank * MS))[1]
    shifted = shift(timeline, MS)
    assert (timeline.core["start_ns"] - shifted.core["start_ns"]).tolist() == [MS] * len(timeline)
    assert (timeline.core["end_ns"] - shifted.core["end_ns"]).tolist() == [MS] * len(timeline)
    assert timeline.steps[0].start_ns - shifted.steps[0].start_ns == MS
    assert shifted.metadata["clock_shift_ns"] == -MS
    assert "clock_shift_ns" not in timeline.metadata
    assert shift(shifted, -MS).metadata["clock_shift_ns"] == 0
    assert shift(shifted, -MS).steps == timeline.steps


def test_a_real_trace_as_two_ranks() -> None:
    first = real_timeline("hta/nccl_parser_config/nccl_data.json.gz")
    second = replace(shift(first, -1_234_567), rank=1)
    clocks = _clocks([first, second])
    assert (clocks.collectives, _offsets_ns(clocks)) == (15, [0, 1_234_567])
    assert clocks.offsets[1].usable


def test_eight_real_ranks_of_one_host_share_a_clock() -> None:
    digests = [digest(timeline) for timeline in real_timelines("param/dlrm8_kineto")]
    assert {item.resolution_ns for item in digests} == {1000}
    clocks = find_clocks(match(digests), 1000)
    assert not any(entry.usable for entry in clocks.offsets)
    assert all(abs(entry.offset_s or 0) <= 2e-6 for entry in clocks.offsets)
    assert all(2e-6 <= (entry.spread_s or 0) <= 4e-6 for entry in clocks.offsets)
