"""The report over ranks: the same from timelines and digests, in any order; planted values come out again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from simulated_ranks import MS, US, Call, Plan, real_timeline, real_timelines, shift, simulate

from stepscope.analyze.ranks.digest import PAIRED_BY_ORDER, RankDigest, StepDigest, calls_of, digest, step_times_ns
from stepscope.analyze.ranks.ranks_report import RanksReport, explain_ranks
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import ANNOTATION, KERNEL, Timeline, TimelineBuilder
from stepscope.traces.finish import finish

ALL = (0, 1, 2, 3)
STEP = (
    Call("allreduce", ALL, 250_000, 100 * US),
    Call("_allgather_base", ALL, 100_000, 80 * US),
    Call("broadcast", ALL, 20, 10 * US),
)


def _plan(**more: object) -> Plan:
    return Plan(4, [STEP] * 6, **more)  # type: ignore[arg-type]


def test_digests_in_any_order_give_the_same_report() -> None:
    timelines = simulate(_plan(late_ns=lambda rank, step, call: rank * 30 * US, offset_ns=lambda rank: rank * MS))
    direct = msgspec.json.encode(explain_ranks(timelines, clocks="aligned"))
    packed = [msgspec.msgpack.encode(digest(timeline)) for timeline in timelines]
    for order in ((3, 1, 0, 2), (2, 3, 1, 0)):
        unpacked = (msgspec.msgpack.decode(packed[place], type=RankDigest) for place in order)
        assert msgspec.json.encode(explain_ranks(unpacked, clocks="aligned")) == direct
    as_json = [msgspec.json.decode(msgspec.json.encode(digest(t)), type=RankDigest) for t in timelines]
    assert msgspec.json.encode(explain_ranks(as_json, clocks="aligned")) == direct
    assert msgspec.json.decode(direct, type=RanksReport).ranks == [0, 1, 2, 3]


def test_a_digest_is_small_and_has_room_for_more() -> None:
    timeline = simulate(_plan())[0]
    found = digest(timeline)
    assert len(msgspec.msgpack.encode(found)) < 100 * 18 + 1000
    more = msgspec.structs.replace(found, extra=b"other reports")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(more), type=RankDigest).extra == b"other reports"


def test_planted_offset_lateness_and_links_come_out_together() -> None:
    """Clocks up to a second apart, rank 2 late, the links of ranks 2 and 3 at a third of the others' rate."""
    fast = Call("allreduce", (0, 1), 1_000_000, 100 * US, name="1", description="tp")
    slow = Call("allreduce", (2, 3), 1_000_000, 300 * US, name="2", description="tp")
    world = Call("allreduce", ALL, 500, 20 * US, name="0", description="dp")
    planted = [0, 1_000 * MS, -40 * MS, 3 * US]
    plan = Plan(
        4,
        [[fast, slow, world] * 3] * 8,
        late_ns=lambda rank, step, call: 150 * US if rank == 2 else 0,
        offset_ns=planted.__getitem__,
    )
    report = explain_ranks(simulate(plan), clocks="aligned")
    found = [round((entry.offset_s or 0) * 1e9) for entry in report.clock_offsets.offsets]
    assert found == planted
    groups = {group.members: group for group in report.groups}
    assert groups["0-1"].busbw_bytes_per_s == pytest.approx(4e6 / 100e-6)
    assert groups["2-3"].busbw_bytes_per_s == pytest.approx(4e6 / 300e-6)
    assert groups["0-1"].wait_share == pytest.approx(0)
    row = next(row for row in report.table if row.size_bytes == 4_000_000)
    assert (row.count, row.group, row.group_size, row.includes_waiting) == (48, "tp", 2, False)
    assert (row.fastest_s, row.slowest_s) == pytest.approx((100e-6, 300e-6))
    assert report.stragglers.stragglers == [2]
    assert report.stragglers.ranks[2].last_share == pytest.approx(1.0)
    # Rank 3 is late for the others too, because it waits for rank 2 and for their link: that is not its own doing.
    assert report.stragglers.ranks[3].verdict == "late only because others had kept it waiting before"
    assert report.stragglers.ranks[3].own_median_s == pytest.approx(-3 * 75e-6), "ahead of the middle of the two"
    assert report.matching.unmatched == []


def test_the_table_of_one_plan() -> None:
    report = explain_ranks(simulate(_plan(late_ns=lambda rank, step, call: 60 * US if rank == 1 else 0)))
    by_name = {row.collective: row for row in report.table}
    reduce = by_name["all_reduce"]
    assert (reduce.dtype, reduce.size_bytes, reduce.count, reduce.matched) == ("float32", 1_000_000, 6, True)
    assert reduce.total_s == pytest.approx(6 * 160e-6)
    assert reduce.median_s == pytest.approx(160e-6)
    assert reduce.transfer_s == pytest.approx(100e-6)
    assert reduce.wait_share == pytest.approx(3 * 60 / (3 * 160 + 100))
    assert reduce.algbw_bytes_per_s == pytest.approx(1e6 / 100e-6)
    assert reduce.busbw_bytes_per_s == pytest.approx(1.5e6 / 100e-6)
    gather = by_name["all_gather"]
    assert (gather.size_bytes, gather.busbw_bytes_per_s) == (1_600_000, pytest.approx(1.2e6 / 80e-6))
    broadcast = by_name["broadcast"]
    assert (broadcast.transfer_s, broadcast.wait_share, broadcast.includes_waiting) == (None, None, True)
    assert broadcast.algbw_bytes_per_s == pytest.approx(80 / 70e-6), "waiting included: a lower bound"
    assert [row.total_s for row in report.table] == sorted((row.total_s for row in report.table), reverse=True)


def test_ranks_and_steps() -> None:
    report = explain_ranks(simulate(_plan(late_ns=lambda rank, step, call: 60 * US if rank == 1 and call == 0 else 0)))
    waits = [entry.wait_s for entry in report.waiting]
    assert waits == pytest.approx([6 * 60e-6, 0, 6 * 60e-6, 6 * 60e-6])
    assert [entry.wait_by_durations_s for entry in report.waiting] == pytest.approx(waits)
    assert [entry.calls for entry in report.waiting] == [18] * 4
    assert [entry.step for entry in report.steps] == [1, 2, 3, 4, 5, 6]
    step = report.steps[2]
    assert (step.collectives, step.calls, step.latest_rank) == (3, 12, 1)
    assert step.skew_s == pytest.approx(60e-6)
    assert step.profiled_step_s == pytest.approx((3 * 200 + 60 + 190) * 1e-6)
    assert step.skew_share == pytest.approx(60 / 850)
    assert step.wait_s == pytest.approx(60e-6)
    assert report.over_steps.steps == [2, 3, 4, 5], "the first and the last do not count"
    assert report.over_steps.skew_share == pytest.approx(60 / 850)


def test_one_step_alone() -> None:
    timelines = simulate(_plan(late_ns=lambda rank, step, call: step * 10 * US if rank == 1 else 0))
    report = explain_ranks(timelines, step=3)
    assert report.step == 3
    assert [entry.step for entry in report.steps] == [3]
    assert (report.matching.collectives, report.matching.calls) == (3, 12)
    assert report.steps[0].skew_s == pytest.approx(2 * 20e-6)
    assert report.clock_offsets.collectives == 12, "clocks are looked at in all steps"
    with pytest.raises(UsageError, match="no rank has a step 99") as caught:
        explain_ranks(timelines, step=99)
    assert caught.value.hint == "steps: 1, 2, 3, 4, 5, 6"


def test_work_is_compared_without_waiting() -> None:
    """Rank 1 computes 300 instead of 200 µs before the first of three calls."""
    report = explain_ranks(simulate(_plan(late_ns=lambda rank, step, call: 100 * US if rank == 1 and call == 0 else 0)))
    balance = report.balance
    mean = (4 * 600 + 100) / 4
    assert balance.imbalance == pytest.approx(700 / mean, rel=1e-4)
    assert (balance.busiest_rank, balance.steps, balance.reason) == (1, 6, None)
    assert balance.busy_s[1] == pytest.approx(700e-6, rel=1e-4)
    assert balance.end_spread_s == pytest.approx(0)
    assert report.steps[0].imbalance == pytest.approx(700 / mean, rel=1e-4)


def test_the_spread_of_ends_needs_clocks() -> None:
    timelines = simulate(_plan(offset_ns=lambda rank: rank * MS))
    assert explain_ranks(timelines, clocks="as recorded").balance.end_spread_s == pytest.approx(3e-3)
    aligned = explain_ranks(timelines, clocks="aligned")
    assert aligned.balance.end_spread_s == pytest.approx(0)
    assert aligned.notes == []


def test_clocks_are_aligned_where_they_can_be() -> None:
    """Rank 2 is late; the clocks of ranks 1 and 3 are milliseconds off, which as recorded hides it."""
    off = {1: 5 * MS, 3: -3 * MS}
    timelines = simulate(
        _plan(late_ns=lambda rank, step, call: 200 * US * (rank == 2), offset_ns=lambda rank: off.get(rank, 0))
    )
    report = explain_ranks(timelines)
    assert report.clocks == "aligned"
    assert report.clocks_because == "offsets of up to 5.000 ms were found from collectives and taken off"
    assert report.stragglers.stragglers == [2]
    recorded = explain_ranks(timelines, clocks="as recorded").stragglers.ranks
    assert max(recorded, key=lambda entry: entry.caused_s).rank == 1, "a clock ahead looks late"


def test_clocks_that_agree_are_left_alone() -> None:
    report = explain_ranks(simulate(_plan()))
    assert (report.clocks, report.clocks_because) == ("as recorded", "no clock offset can be told from none")
    assert report.notes == []


def test_impossible_starts_leave_durations() -> None:
    """Two collectives are too few for an offset, but a rank that leaves before another begins shows a wrong clock."""
    plan = Plan(
        3,
        [[Call("allreduce", (0, 1, 2))] * 2],
        late_ns=lambda rank, step, call: 100 * US * (rank == 1),
        offset_ns=lambda rank: 20 * MS * (rank == 2),
    )
    report = explain_ranks(simulate(plan))
    assert report.clocks == "durations"
    assert "in 2 of 2 collectives a rank left before another had begun" in report.clocks_because
    assert any(note.startswith("no clocks were compared") for note in report.notes)
    assert [entry.wait_s for entry in report.waiting] == pytest.approx([200e-6, 0, 200e-6])


def test_ranks_that_count_steps_differently_are_paired() -> None:
    plan = _plan(late_ns=lambda rank, step, call: 60 * US if rank == 1 else 0)
    digests = [digest(timeline) for timeline in simulate(plan)]
    calls = calls_of(digests[1]).copy()
    calls["step"] = np.where(calls["step"] >= 0, calls["step"] + 10, -1)
    steps = [msgspec.structs.replace(entry, number=entry.number + 10) for entry in digests[1].steps]
    other = msgspec.structs.replace(digests[1], steps=steps, calls=calls.tobytes())
    paired = explain_ranks([digests[0], other, *digests[2:]])
    alike = explain_ranks(digests)
    assert paired.notes == [PAIRED_BY_ORDER]
    assert msgspec.structs.replace(paired, notes=[]) == alike


def test_one_step_keeps_clocks_and_stragglers_of_all() -> None:
    timelines = simulate(_plan(late_ns=lambda rank, step, call: 60 * US if rank == 1 else 0))
    whole, one = explain_ranks(timelines), explain_ranks(timelines, step=3)
    assert (one.stragglers, one.clock_offsets) == (whole.stragglers, whole.clock_offsets)
    assert sum(row.count for row in one.table) == one.matching.collectives < whole.matching.collectives
    assert (one.waiting[0].wait_s or 0) < (whole.waiting[0].wait_s or 0)


def test_a_member_without_calls_is_told() -> None:
    timelines = simulate(_plan())
    silent = finish(TimelineBuilder().build(rank=3, world_size=4))
    report = explain_ranks([*timelines[:3], silent])
    assert any(
        note.startswith("rank 3 is a member of group") and note.endswith("sizes and waiting there are lower bounds")
        for note in report.notes
    )


def test_steps_that_overlap_on_the_device_are_counted_once() -> None:
    """The host runs ahead: every interval lasts until the device has done all that was launched."""
    spans = [(0, 200), (100, 400), (200, 600), (700, 800)]
    steps = [StepDigest(number=number, start_ns=start, end_ns=end) for number, (start, end) in enumerate(spans)]
    item = msgspec.structs.replace(digest(simulate(_plan())[0]), steps=steps)
    assert step_times_ns(item) == {0: 200, 1: 200, 2: 200, 3: 100}


def test_many_sizes_are_put_together() -> None:
    calls = [Call("all_to_all", ALL, 100 + 7 * number) for number in range(40)]
    report = explain_ranks(simulate(Plan(4, [calls])))
    rows = [row for row in report.table if row.collective == "all_to_all"]
    assert 1 < len(rows) < 6
    assert sum(row.count for row in rows) == 40
    assert all(row.size_range_bytes is not None for row in rows)


def test_some_ranks_of_many() -> None:
    report = explain_ranks(simulate(_plan())[:3])
    assert report.notes == ["3 of 4 ranks: a rank that is not here may have come later, so waiting is a lower bound"]
    assert report.groups[0].ranks == 3


def test_calls_that_match_nothing_are_counted() -> None:
    first, second = simulate(Plan(2, [[Call(), Call("allreduce", elements=5)]]))
    other = simulate(Plan(2, [[Call(), Call("allreduce", elements=6)]]))[1]
    report = explain_ranks([first, other])
    assert "2 of 4 calls were not matched (50.0 %); see the reasons" in report.notes
    assert sum(row.count for row in report.table if not row.matched) == 2
    assert report.waiting[0].matched_calls == 1
    assert second.rank == 1


def test_a_run_on_the_host_alone() -> None:
    def rank_on_host(rank: int) -> Timeline:
        builder = TimelineBuilder()
        for step in range(3):
            begin = step * 10 * MS
            builder.add(ANNOTATION, f"ProfilerStep#{step}", begin, begin + 9 * MS, thread=(1, 1))
            start = begin + (2 * MS if rank == 1 else MS)
            builder.add(
                ANNOTATION,
                "gloo:all_reduce",
                start,
                begin + 5 * MS,
                thread=(1, 2),
                shapes="[[1000]]",
                types='["float"]',
            )
        return finish(builder.build(rank=rank, world_size=2))

    report = explain_ranks([rank_on_host(0), rank_on_host(1)])
    assert report.matching.collectives == 3
    assert [entry.wait_s for entry in report.waiting] == pytest.approx([3e-3, 0])
    assert report.balance.reason == "not applicable: a rank has no device work"
    assert report.balance.imbalance is None
    assert "NaN" not in msgspec.json.encode(report).decode()


def test_traces_without_collectives() -> None:
    empty = [finish(TimelineBuilder().build(rank=rank)) for rank in range(2)]
    report = explain_ranks(empty)
    assert report.notes[0] == "no collective was found"
    assert (report.table, report.groups) == ([], [])
    assert report.stragglers.note == "not applicable: no synchronising collective was matched"


def test_a_kernel_known_by_name_alone_is_pointed_out() -> None:
    builder = TimelineBuilder()
    builder.add(KERNEL, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x*)", 0, 10, device=0, stream=1)
    report = explain_ranks([finish(builder.build())])
    assert "1 calls are known by their SendRecv kernel alone: they may be all-to-alls" in report.notes


def test_bad_requests() -> None:
    with pytest.raises(UsageError, match="there is no trace"):
        explain_ranks([])
    with pytest.raises(UsageError, match="no way to compare clocks"):
        explain_ranks(simulate(Plan(2, [[Call()]])), clocks="somehow")  # type: ignore[arg-type]


# Real traces


def test_eight_real_ranks() -> None:
    report = explain_ranks(real_timelines("param/dlrm8_kineto"))
    assert report.ranks == list(range(8))
    assert report.matching.matched_calls == 64
    waits = [round((entry.wait_s or 0) * 1e6) for entry in report.waiting]
    assert waits == [5580, 11125, 3280, 9571, 6370, 6041, 3342, 1534]
    by_durations = [(entry.wait_by_durations_s or 0) * 1e6 for entry in report.waiting]
    assert by_durations == pytest.approx(waits, abs=15), "starts and durations agree to a few units of the clock"
    # Rank 7 spends least time in NCCL kernels because it comes last: most of the skew is due to it.
    assert min(report.waiting, key=lambda entry: entry.collective_s).rank == 7
    assert max(report.stragglers.ranks, key=lambda entry: entry.last_share or 0).rank == 7
    assert report.stragglers.ranks[7].last_calls == 5
    assert report.stragglers.note is not None
    largest = next(row for row in report.table if row.size_bytes == 1576964)
    assert largest.transfer_s == pytest.approx(85e-6)
    assert largest.busbw_bytes_per_s == pytest.approx(1576964 * 1.75 / 85e-6, rel=1e-6)
    assert (largest.group_size, largest.group_assumed) == (8, True)
    assert report.balance.imbalance == pytest.approx(1.123, abs=1e-3)


def test_one_real_rank_of_two() -> None:
    timeline = real_timeline("hta/nccl_parser_config/nccl_data.json.gz")
    report = explain_ranks([timeline])
    assert report.notes == ["one rank of 2: waiting cannot be told from moving data, and rates are lower bounds"]
    reduced = {row.size_bytes: row.count for row in report.table if row.collective == "all_reduce"}
    assert reduced == {8196000: 3, 9724160: 3, 26255360: 3, 26550272: 3, 31502336: 3}
    assert all(row.includes_waiting and not row.matched for row in report.table)
    assert report.left_out == {"record of wait": 6}
    assert [entry.calls for entry in report.steps] == [7, 7, 7]


def test_a_real_rank_and_its_late_double() -> None:
    """The same trace as rank 1, its clock ahead, its all-reduces begun later: both come out again."""
    first = real_timeline("hta/nccl_parser_config/nccl_data.json.gz")
    names = np.array(["AllReduce" in text for text in first.texts])
    kernels = names[first.core["name"]] & (first.core["kind"] == KERNEL)
    start = np.where(kernels, first.core["start_ns"] + MS, first.core["start_ns"])
    second = shift(replace(first, rank=1, core={**first.core, "start_ns": start}), -250 * MS)
    report = explain_ranks([first, second], clocks="aligned")
    assert report.clock_offsets.offsets[1].offset_s == pytest.approx(0.25)
    assert report.waiting[0].wait_s == pytest.approx(15e-3)
    assert report.waiting[1].wait_s == pytest.approx(0)
    assert report.stragglers.stragglers == [1]
    assert report.stragglers.ranks[1].median_s == pytest.approx(0.5e-3)
    slowest = max(report.table, key=lambda row: row.slowest_s)
    assert slowest.transfer_s is not None
    assert not slowest.includes_waiting
