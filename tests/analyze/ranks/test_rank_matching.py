"""Calls of several ranks laid side by side."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import MS, US, Call, Plan, collective_fields, make_digests, real_timelines, simulate

from stepscope.analyze.ranks.digest import RankDigest, digest
from stepscope.analyze.ranks.matching import Matching, match, summarize_matching
from stepscope.core.collectives import COLLECTIVES
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import KERNEL, TimelineBuilder
from stepscope.traces.finish import finish

ALL = (0, 1, 2, 3)
STEP = (Call("allreduce", ALL), Call("_allgather_base", ALL, 500), Call("broadcast", ALL, 20), Call("all_to_all", ALL))


def _digests(plan: Plan) -> list[RankDigest]:
    return [digest(timeline) for timeline in simulate(plan)]


def _names(matching: Matching) -> list[str]:
    return [COLLECTIVES[code] for code in matching.collective]


def _reasons(matching: Matching) -> dict[str, int]:
    return {entry.reason: entry.calls for entry in summarize_matching(matching).unmatched}


def _without(item: RankDigest, *calls: int) -> RankDigest:
    """A digest that lacks some of its calls, as a trace that was not recorded from the start."""
    from stepscope.analyze.ranks.digest import calls_of

    rows = np.delete(calls_of(item), calls)
    return msgspec.structs.replace(item, calls=rows.tobytes())


def test_one_group_of_four() -> None:
    matching = match(_digests(Plan(4, [STEP, STEP])))
    assert _names(matching) == ["all_reduce", "all_gather", "broadcast", "all_to_all"] * 2
    assert matching.count.tolist() == [4] * 8
    assert matching.step.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert matching.size_bytes.tolist() == [4000, 8000, 80, 4000] * 2
    assert matching.bus_bytes.tolist() == [6000, 6000, 80, 3000] * 2
    assert matching.members.tolist() == [4] * 8
    summary = summarize_matching(matching)
    assert (summary.collectives, summary.calls, summary.matched_calls) == (8, 32, 32)
    assert summary.methods == {"call in the group": 8}
    assert (summary.unmatched, summary.short_ranks, summary.without_group) == ([], [], 0)


def test_members_of_a_run_are_ordered_by_rank() -> None:
    matching = match(_digests(Plan(4, [STEP])))
    assert matching.rank[matching.member].reshape(-1, 4).tolist() == [[0, 1, 2, 3]] * 4


def test_the_order_of_the_digests_does_not_matter() -> None:
    digests = _digests(Plan(4, [STEP]))
    shuffled = [digests[place] for place in (2, 0, 3, 1)]
    first, second = match(digests), match(shuffled)
    for name in ("ranks", "member", "first", "collective", "group", "size_bytes", "unmatched"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist(), name


def test_several_groups_with_their_own_count() -> None:
    tensor = [
        Call("allreduce", (0, 1), 10, name="1", description="tp"),
        Call("allreduce", (2, 3), 10, name="2", description="tp"),
    ]
    data = [
        Call("allreduce", (0, 2), 30, name="3", description="dp"),
        Call("allreduce", (1, 3), 30, name="4", description="dp"),
    ]
    matching = match(_digests(Plan(4, [[*tensor, *tensor, *data]] * 2)))
    assert len(matching) == 12
    assert set(matching.count.tolist()) == {2}
    pairs = matching.ranks[matching.rank[matching.member]].reshape(-1, 2)
    assert {tuple(pair) for pair in pairs.tolist()} == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert sorted(group.members or "" for group in matching.groups) == ["0,2", "0-1", "1,3", "2-3"]


def test_two_groups_of_the_same_members() -> None:
    calls = [Call("allreduce", (0, 1), 10, name="1"), Call("allreduce", (0, 1), 20, name="2")]
    matching = match(_digests(Plan(2, [calls])))
    assert matching.size_bytes.tolist() == [40, 80]
    assert len(matching.groups) == 2


def test_groups_that_have_other_names_on_other_ranks() -> None:
    calls = [Call("allreduce", (0, 1), 10, name="1"), Call("allreduce", (0, 1), 20, name="2")]
    first, second = _digests(Plan(2, [calls]))
    renamed = [msgspec.structs.replace(group, name=f"other{group.name}") for group in second.groups]
    matching = match([first, msgspec.structs.replace(second, groups=renamed)])
    assert matching.size_bytes.tolist() == [40, 80]


def test_a_group_that_one_rank_did_not_use_takes_no_other_groups_place() -> None:
    calls = [Call("allreduce", (0, 1), 10, name="1"), Call("allreduce", (0, 1), 20, name="2")]
    first = _digests(Plan(2, [calls]))[0]
    second = _digests(Plan(2, [calls[1:]]))[1]
    matching = match([first, second])
    assert matching.size_bytes.tolist() == [80]
    assert _reasons(matching) == {"only one rank of its group is given": 1}


def test_other_collectives_and_other_sizes_are_not_matched() -> None:
    right = _digests(Plan(2, [[Call("allreduce"), Call("allreduce", elements=7), Call("broadcast")]]))
    wrong = _digests(Plan(2, [[Call("reduce"), Call("allreduce", elements=8), Call("broadcast")]]))
    matching = match([right[0], wrong[1]])
    assert _names(matching) == ["broadcast"]
    assert _reasons(matching) == {"another collective on another rank": 2, "another size on another rank": 2}


def test_a_missing_call_spoils_its_kind_in_its_step_alone() -> None:
    """The order over all calls is off by one behind the gap, and equal sizes would not show it."""
    digests = _digests(Plan(4, [STEP] * 5))
    matching = match([*digests[:3], _without(digests[3], 0)])
    summary = summarize_matching(matching)
    assert summary.methods == {"call of its kind in the step": 19}
    assert summary.short_ranks[0].rank == 3
    assert (summary.short_ranks[0].calls, summary.short_ranks[0].most) == (19, 20)
    assert _reasons(matching) == {"absent on another rank of its group": 3}


def test_a_trace_that_begins_a_step_later_is_matched_by_steps() -> None:
    steps = [[Call("allreduce", (0, 1), 10 + step), Call("allreduce", (0, 1), 50 + step)] for step in range(4)]
    first, second = _digests(Plan(2, steps))
    matching = match([first, _without(second, 0, 1)])
    assert summarize_matching(matching).methods == {"call of its kind in the step": 6}
    assert matching.step.tolist() == [2, 2, 3, 3, 4, 4]
    assert _reasons(matching) == {"absent on another rank of its group": 2}


def test_a_shorter_trace_without_steps_is_not_guessed_at() -> None:
    first, second = _digests(Plan(2, [[Call()] * 6]))
    matching = match([first, _without(second, 0)])
    assert len(matching) == 0
    assert _reasons(matching) == {"absent on another rank of its group": 11}


def test_sequence_numbers_decide() -> None:
    def numbered(item: RankDigest, offset: int) -> RankDigest:
        from stepscope.analyze.ranks.digest import calls_of

        rows = calls_of(item).copy()
        rows["sequence"] = np.arange(len(rows)) + offset
        rows["step"] = -1
        return msgspec.structs.replace(item, calls=rows.tobytes())

    first, second = _digests(Plan(2, [[Call("allreduce", (0, 1), 10)] * 6]))
    matching = match([numbered(first, 100), _without(numbered(second, 100), 0, 1)])
    assert summarize_matching(matching).methods == {"sequence number": 4}
    starts = matching.of_members("call").reshape(-1, 2)
    assert starts.tolist() == [[3, 3], [4, 4], [5, 5], [6, 6]]


def test_several_calls_under_one_sequence_number() -> None:
    first, second = _digests(Plan(2, [[Call("allreduce", (0, 1), 10), Call("allreduce", (0, 1), 20)] * 2]))
    from stepscope.analyze.ranks.digest import calls_of

    changed = []
    for item in (first, second):
        rows = calls_of(item).copy()
        rows["sequence"] = [1, 1, 2, 2]
        changed.append(msgspec.structs.replace(item, calls=rows.tobytes()))
    matching = match(changed)
    assert summarize_matching(matching).methods == {"sequence number": 4}
    assert matching.size_bytes.tolist() == [40, 80, 40, 80]


def test_without_records_order_and_kernel_decide() -> None:
    plan = Plan(
        4, [[Call("all_reduce", ALL), Call("all_to_all", ALL, 30), Call("all_reduce", ALL, 70)]], metadata=False
    )
    matching = match(_digests(plan))
    assert _names(matching) == ["all_reduce", "all_to_all", "all_reduce"]
    assert matching.assumed.tolist() == [True] * 3
    assert matching.members.tolist() == [4] * 3
    assert matching.bus_bytes.tolist() == [6000, 90, 420]
    assert summarize_matching(matching).without_group == 3


def test_a_kernel_known_by_name_alone_fits_what_others_say() -> None:
    """A rank whose launch is not in the trace knows only SendRecv; its peers know that it is an all-to-all."""
    timelines = simulate(Plan(2, [[Call("all_to_all")]], metadata=False))
    builder = TimelineBuilder()
    kernel = next(row for row in timelines[1].rows(KERNEL) if "SendRecv" in (timelines[1].text("name", int(row)) or ""))
    times = [int(timelines[1].core[name][kernel]) for name in ("start_ns", "end_ns")]
    builder.add(KERNEL, "ncclDevKernel_SendRecv(ncclDevComm*)", *times, device=0, stream=20)
    orphan = replace(finish(builder.build(rank=1, world_size=2)), steps=timelines[1].steps)
    matching = match([digest(timelines[0]), digest(orphan)])
    assert _names(matching) == ["all_to_all"]
    assert matching.unmatched.tolist() == []


def test_groups_unknown_and_not_all_ranks_given_leave_the_size_open() -> None:
    plan = Plan(4, [[Call("all_reduce", ALL), Call("_all_gather_base", ALL)]], metadata=False)
    matching = match(_digests(plan)[:3])
    assert matching.members.tolist() == [0, 0]
    assert matching.size_bytes.tolist() == [4000, -1]
    assert matching.bus_bytes.tolist() == [-1, -1]


def test_messages_meet_their_other_end() -> None:
    builders = [TimelineBuilder() for _ in range(3)]

    def message(rank: int, name: str, peer: int | None, start: int) -> None:
        fields = {**collective_fields(Call(name, (0, 1, 2), 100)), "peer": peer}
        builders[rank].add(KERNEL, "ncclDevKernel_SendRecv(x*)", start, start + 10, device=0, stream=20, **fields)

    for number in range(3):
        message(0, "send", 1, 100 * number)
        message(1, "recv", 0, 100 * number + 5)
    message(1, "send", 2, 1000)
    message(2, "recv", 1, 1001)
    message(2, "send", 0, 2000)  # nobody receives it
    message(2, "recv", None, 3000)
    matching = match([digest(finish(builder.build(rank=rank))) for rank, builder in enumerate(builders)])
    assert _names(matching) == ["send"] * 4
    pairs = matching.ranks[matching.rank[matching.member]].reshape(-1, 2).tolist()
    assert pairs == [[0, 1]] * 3 + [[1, 2]]
    assert _reasons(matching) == {
        "only one rank of its group is given": 1,
        "the other end of the message is not recorded": 1,
    }


def test_one_rank_alone() -> None:
    matching = match(_digests(Plan(4, [STEP]))[:1])
    assert len(matching) == 0
    assert _reasons(matching) == {"only one rank of its group is given": 4}


def test_ranks_without_any_call() -> None:
    empty = [digest(finish(TimelineBuilder().build(rank=rank, world_size=2))) for rank in range(2)]
    matching = match(empty)
    assert (len(matching), matching.unmatched.tolist()) == (0, [])
    full = _digests(Plan(2, [[Call()]]))
    assert _reasons(match([full[0], empty[1]])) == {"only one rank of its group is given": 1}
    assert summarize_matching(match([full[0], empty[1]])).short_ranks[0].calls == 0


def test_ranks_must_be_told_apart() -> None:
    first, second = _digests(Plan(2, [[Call()]]))
    with pytest.raises(UsageError, match="two traces are of rank 0"):
        match([first, first])
    unknown = msgspec.structs.replace(second, rank=None)
    with pytest.raises(UsageError, match="does not say of which rank"):
        match([first, unknown])
    assert match([unknown]).ranks.tolist() == [0]
    with pytest.raises(UsageError, match="version 99"):
        match([first, msgspec.structs.replace(second, version=99)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 4))
def test_any_program_is_matched_wholly(seed: int, ranks: int, steps: int) -> None:
    """Whatever groups, collectives and sizes: all ranks run the same program, so everything has its counterpart."""
    choose = random.Random(seed)
    groups = [tuple(sorted(choose.sample(range(ranks), choose.randint(2, ranks)))) for _ in range(3)]
    program = []
    for _ in range(steps):
        picked = [choose.randrange(len(groups)) for _ in range(choose.randint(1, 6))]
        names = ("allreduce", "_allgather_base", "_reduce_scatter_base", "all_to_all", "broadcast")
        program.append([Call(choose.choice(names), groups[i], choose.randint(1, 9), name=str(i)) for i in picked])
    plan = Plan(ranks, program, offset_ns=lambda rank: rank * 7 * MS, late_ns=lambda r, s, c: (r * 31 + s + c) % 5 * US)
    matching = match(_digests(plan))
    assert len(matching) == sum(map(len, program))
    assert len(matching.unmatched) == 0
    expected = sum(len(call.members) for calls in program for call in calls)
    assert len(matching.member) == expected
    for run in np.split(matching.member, matching.first[1:]):
        rows = matching.rows[run]
        assert len(set(rows["collective"].tolist())) == 1
        assert len(set(rows["end_ns"].tolist() - matching.rank[run] * 7 * MS)) == 1, "one end for all"


def test_a_thousand_ranks() -> None:
    matching = match(make_digests(1000, 200))
    assert len(matching) == 200
    assert matching.count.tolist() == [1000] * 200


def test_eight_real_ranks_without_records() -> None:
    matching = match([digest(timeline) for timeline in real_timelines("param/dlrm8_kineto")])
    assert _names(matching) == ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]
    assert matching.count.tolist() == [8] * 8
    assert matching.size_bytes.tolist()[4] == 394241 * 4
    assert len(matching.unmatched) == 0
