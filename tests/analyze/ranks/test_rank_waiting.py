"""Waiting told from moving data; stragglers named only where there are some."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import MS, US, Call, Plan, collective_fields, make_digests, simulate

from stepscope.analyze.ranks.digest import digest
from stepscope.analyze.ranks.matching import match
from stepscope.analyze.ranks.ranks_report import explain_ranks
from stepscope.analyze.ranks.stragglers import Stragglers
from stepscope.analyze.ranks.waiting import find_waiting
from stepscope.analyze.step.intervals import union_lengths
from stepscope.analyze.step.numbers import run_medians
from stepscope.formats.timeline import KERNEL, Timeline, TimelineBuilder
from stepscope.traces.finish import finish

ALL = (0, 1, 2, 3)
Late = Callable[[int, int, int], int]


def _timelines(late: Late, *, steps: int = 1, calls: int = 1, ranks: int = 4, **more: object) -> list[Timeline]:
    members = tuple(range(ranks))
    program = [[Call("allreduce", members, transfer_ns=50 * US)] * calls] * steps
    return simulate(Plan(ranks, program, late_ns=late, **more))  # type: ignore[arg-type]


def _only_rank_two(rank: int, step: int, call: int) -> int:
    return 300 * US if rank == 2 else 0


def test_everybody_waits_for_the_late_one() -> None:
    matching = match([digest(timeline) for timeline in _timelines(_only_rank_two)])
    for basis in ("starts", "durations"):
        waiting = find_waiting(matching, basis)  # type: ignore[arg-type]
        assert waiting.wait_s.tolist() == pytest.approx([300e-6, 300e-6, 0, 300e-6])
        assert waiting.transfer_s.tolist() == pytest.approx([50e-6])
        assert waiting.skew_s.tolist() == pytest.approx([300e-6])
        assert waiting.late_s.tolist() == pytest.approx([0, 0, 300e-6, 0])
        assert waiting.last.tolist() == [2]


def test_clocks_apart_spoil_starts_but_not_durations() -> None:
    timelines = _timelines(_only_rank_two, offset_ns=lambda rank: rank * 10 * MS)
    matching = match([digest(timeline) for timeline in timelines])
    assert find_waiting(matching, "starts").wait_s.tolist() != pytest.approx([300e-6, 300e-6, 0, 300e-6])
    assert find_waiting(matching, "durations").wait_s.tolist() == pytest.approx([300e-6, 300e-6, 0, 300e-6])
    aligned = find_waiting(matching, "starts", [0, 10 * MS, 20 * MS, 30 * MS])
    assert aligned.wait_s.tolist() == pytest.approx([300e-6, 300e-6, 0, 300e-6])


def test_waiting_never_exceeds_the_call() -> None:
    """A rank that left before the last one arrived cannot have waited until then."""
    plan = Plan(
        2,
        [[Call()]],
        late_ns=lambda rank, step, call: rank * MS,
        end_noise_ns=lambda r, s, c: -900 * US if r == 0 else 0,
    )
    waiting = find_waiting(match([digest(timeline) for timeline in simulate(plan)]), "starts")
    assert waiting.wait_s[0] == pytest.approx(waiting.duration_s[0])
    assert waiting.wait_s[1] == 0


def test_waiting_in_a_broadcast_cannot_be_told() -> None:
    timelines = simulate(Plan(2, [[Call("broadcast"), Call("allreduce")]], late_ns=lambda rank, step, call: rank * MS))
    waiting = find_waiting(match([digest(timeline) for timeline in timelines]), "starts")
    assert np.isnan(waiting.wait_s).tolist() == [True, True, False, False]
    assert np.isnan(waiting.transfer_s).tolist() == [True, False]
    assert waiting.last.tolist() == [-1, 1]


def test_a_receive_waits_for_its_send() -> None:
    def message(rank: int, name: str, start: int, end: int) -> Timeline:
        builder = TimelineBuilder()
        fields = {**collective_fields(Call(name, (0, 1), 100)), "peer": 1 - rank}
        builder.add(KERNEL, "ncclDevKernel_SendRecv(x*)", start, end, device=0, stream=20, **fields)
        return finish(builder.build(rank=rank))

    matching = match([digest(message(0, "recv", 1000, 2100)), digest(message(1, "send", 2000, 2100))])
    waiting = find_waiting(matching, "starts")
    assert waiting.wait_s[0] == pytest.approx(1e-6)
    assert np.isnan(waiting.wait_s[1])
    assert waiting.transfer_s[0] == pytest.approx(100e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_waiting_and_transfer_make_up_the_duration(seed: int, ranks: int) -> None:
    choose = random.Random(seed)
    planted = {(r, c): choose.randint(0, MS) for r in range(ranks) for c in range(5)}
    timelines = _timelines(lambda rank, step, call: planted[rank, call], calls=5, ranks=ranks)
    matching = match([digest(timeline) for timeline in timelines])
    for basis in ("starts", "durations"):
        waiting = find_waiting(matching, basis)  # type: ignore[arg-type]
        whole = waiting.wait_s + waiting.transfer_s[matching.owner()]
        assert whole.tolist() == pytest.approx(waiting.duration_s.tolist(), abs=1e-12)
        expected = [max(planted[r, c] for r in range(ranks)) - planted[r, c] for c in range(5) for r in range(ranks)]
        assert (waiting.wait_s * 1e9).tolist() == pytest.approx(expected, abs=1e-3)


# Stragglers


def _find(late: Late, **more: int) -> Stragglers:
    return explain_ranks(_timelines(late, **more), clocks="durations").stragglers


def _jitter(seed: int, width_ns: int) -> Late:
    noise = random.Random(seed)
    cells: dict[tuple[int, int, int], int] = {}

    def late(rank: int, step: int, call: int) -> int:
        return cells.setdefault((rank, step, call), noise.randint(0, width_ns))

    return late


def test_a_planted_straggler_is_named_with_its_lateness() -> None:
    jitter = _jitter(1, 20 * US)
    found = _find(lambda r, s, c: jitter(r, s, c) + (200 * US if r == 5 else 0), ranks=8, steps=4, calls=10)
    assert found.stragglers == [5]
    assert found.units == "collectives"
    entry = found.ranks[5]
    assert entry.median_s == pytest.approx(200e-6, abs=10e-6)
    assert entry.low_s is not None
    assert entry.high_s is not None
    assert entry.low_s <= entry.median_s <= entry.high_s  # type: ignore[operator]
    assert entry.last_calls == 40
    assert entry.last_share == 1.0
    assert entry.skew_s == pytest.approx(40 * 200e-6, rel=0.1)
    assert entry.caused_s == pytest.approx(7 * 40 * 200e-6, rel=0.1), "seven others waited each time"
    assert entry.verdict == "significantly late throughout"


def test_steps_are_the_units_where_there_are_enough() -> None:
    jitter = _jitter(2, 20 * US)
    found = _find(lambda r, s, c: jitter(r, s, c) + (MS if r == 1 and c == 0 else 0), ranks=4, steps=12, calls=4)
    assert (found.units, found.stragglers) == ("steps", [1])
    assert found.ranks[1].units == 12
    assert found.ranks[1].median_s == pytest.approx(1e-3, abs=100e-6)


def test_a_rank_late_once_a_step_shows_in_few_steps_of_many_ranks() -> None:
    """Late at one of twenty calls: the median call hides it, but nobody else is the latest in every step."""
    jitter = _jitter(3, 20 * US)
    found = _find(lambda r, s, c: jitter(r, s, c) + (2 * MS if r == 6 and c == 0 else 0), ranks=8, steps=3, calls=20)
    assert found.units == "collectives"
    assert found.stragglers == [6]
    assert found.ranks[6].verdict == "the latest in each of 3 steps"


def test_the_same_with_two_ranks_cannot_be_decided() -> None:
    jitter = _jitter(4, 20 * US)
    found = _find(lambda r, s, c: jitter(r, s, c) + (2 * MS if r == 1 and c == 0 else 0), ranks=2, steps=3, calls=20)
    assert found.stragglers == []
    assert found.ranks[1].verdict == "the latest in each of 3 steps: too few ranks and steps to decide"


def test_a_single_burst_is_no_straggler() -> None:
    jitter = _jitter(5, 20 * US)
    late: Late = lambda r, s, c: jitter(r, s, c) + (5 * MS if r == 2 and s < 5 else 0)  # noqa: E731
    found = _find(late, ranks=4, steps=8, calls=8)
    assert found.stragglers == []
    assert found.ranks[2].last_share is not None
    assert found.ranks[2].last_share > 0.9, "who was last most is shown all the same"


def test_lateness_below_the_jitter_is_noise() -> None:
    jitter = _jitter(6, 200 * US)
    found = _find(lambda r, s, c: jitter(r, s, c) + (20 * US if r == 2 else 0), ranks=4, steps=20, calls=5)
    assert found.stragglers == []


def test_healthy_ranks_are_left_in_peace() -> None:
    """Thirty healthy runs; at most five in a hundred may name anybody."""
    named = 0
    for seed in range(30):
        named += bool(_find(_jitter(seed, 100 * US), ranks=6, steps=2, calls=12).stragglers)
    assert named <= 2


def test_a_clock_that_is_off_is_no_straggler() -> None:
    timelines = _timelines(
        _jitter(7, 10 * US), ranks=4, steps=4, calls=5, offset_ns=lambda rank: 700 * US * (rank == 3)
    )
    recorded = explain_ranks(timelines, clocks="as recorded")
    assert recorded.stragglers.stragglers == []
    assert recorded.stragglers.ranks[3].floor_s == pytest.approx(700e-6, rel=0.05)
    assert any("700 µs apart" in note.replace("700.0", "700") for note in recorded.notes)
    assert any("`--clocks aligned` takes that off" in note for note in recorded.notes)
    aligned, chosen = explain_ranks(timelines, clocks="aligned"), explain_ranks(timelines)
    assert aligned.stragglers.stragglers == []
    assert (chosen.clocks, chosen.stragglers) == ("aligned", aligned.stragglers)


def test_most_clocks_being_off_makes_the_right_ones_no_stragglers() -> None:
    """Three of four clocks run behind: as recorded, the one that is right looks late."""
    timelines = _timelines(_jitter(8, 10 * US), ranks=4, steps=4, calls=5, offset_ns=lambda rank: -MS * (rank > 0))
    found = explain_ranks(timelines, clocks="as recorded").stragglers
    assert found.ranks[0].median_s == pytest.approx(1e-3, rel=0.05)
    assert found.stragglers == []


def test_lateness_that_is_handed_on_is_not_blamed_on_who_hands_it_on() -> None:
    """Rank 0 holds up rank 1 in their group; both then come late to the groups with ranks 2 and 3."""
    inner = [Call("allreduce", (0, 1), name="1"), Call("allreduce", (2, 3), name="2")]
    outer = [Call("allreduce", (0, 2), name="3"), Call("allreduce", (1, 3), name="4")]
    plan = Plan(4, [[*inner, *outer]] * 12, late_ns=lambda rank, step, call: MS if rank == 0 and call == 0 else 0)
    found = explain_ranks(simulate(plan)).stragglers
    assert found.stragglers == [0]
    assert found.ranks[0].own_median_s == pytest.approx(0.5e-3, rel=1e-3), "the middle of two lies half way"


def test_the_late_one_of_two_causes_all_their_waiting() -> None:
    """In a group of two, half the wait is the distance to the median arrival: that is skew, not waiting."""
    found = _find(lambda r, s, c: 200 * US if r == 1 else 0, ranks=2, steps=4, calls=5)
    assert found.ranks[1].caused_s == pytest.approx(20 * 200e-6)
    assert found.ranks[1].skew_s == pytest.approx(20 * 100e-6)
    assert (found.ranks[0].caused_s, found.ranks[0].last_calls) == (0, 0)


def test_those_who_come_last_together_share_the_blame() -> None:
    found = _find(lambda r, s, c: 200 * US if r in (1, 3) else 0, ranks=4, steps=3, calls=4)
    assert [entry.caused_s for entry in found.ranks] == pytest.approx([0, 12 * 200e-6, 0, 12 * 200e-6])
    assert [entry.last_calls for entry in found.ranks] == [0, 12, 0, 12]
    assert found.ranks[1].last_share == pytest.approx(0.5)


def test_only_lateness_beyond_noise_stands_out() -> None:
    jitter = _jitter(5, 20 * US)
    burst: Late = lambda r, s, c: jitter(r, s, c) + (5 * MS if r == 2 and s < 2 else 0)  # noqa: E731
    assert [entry.rank for entry in _find(burst, ranks=4, steps=3, calls=20).ranks if entry.stands_out] == [2]
    assert not any(entry.stands_out for entry in _find(jitter, ranks=4, steps=8, calls=8).ranks)
    assert not any(entry.stands_out for entry in _find(_only_rank_two, ranks=4, steps=1, calls=2).ranks)


def test_too_few_calls_decide_nothing() -> None:
    found = _find(_only_rank_two, ranks=4, steps=1, calls=2)
    assert found.stragglers == []
    assert found.ranks[2].verdict == "too few units to decide"
    assert found.note == "seen in 1 step only: what is late there need not be late in others"


def test_nobody_to_compare_with() -> None:
    found = explain_ranks(_timelines(_only_rank_two)[:1]).stragglers
    assert (found.units, found.skew_s, found.note) == (None, None, "not applicable: one rank alone")


def test_one_late_rank_of_a_thousand() -> None:
    found = explain_ranks(make_digests(1000, 60, steps=3))
    assert found.stragglers.stragglers == [17]
    assert found.stragglers.ranks[17].median_s == pytest.approx(1e-3, abs=20e-6)


# Helpers


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), max_size=60))
def test_run_medians(rows: list[tuple[int, int]]) -> None:
    key, value = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    found = run_medians(value, key, 4)
    for code in range(4):
        own = value[key == code]
        assert np.isnan(found[code]) if not len(own) else found[code] == np.median(own)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)), max_size=40))
def test_union_lengths(rows: list[tuple[int, int, int]]) -> None:
    group, start, length = (np.array([row[i] for row in rows], np.int64) for i in (0, 1, 2))
    found = union_lengths(start + 10**18, start + length + 10**18, group, 3)
    for code in range(3):
        covered = {moment for g, s, n in rows if g == code for moment in range(s, s + n)}
        assert found[code] == len(covered)
