"""Parts of a timeline: launches stay with their work, nothing is clipped, references still point where they did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from same_timeline import GPT2, NCCL, assert_same, dlrm_ranks, real_trace, values

from stepscope.core.errors import UsageError
from stepscope.formats.timeline import ANNOTATION, DEVICE_KINDS, KERNEL, OPERATOR, RUNTIME, Timeline, TimelineBuilder
from stepscope.traces.cut import cut, cut_all, take_rows
from stepscope.traces.finish import finish


def two_steps() -> Timeline:
    """Step 1 launches at 20 a kernel that runs from 95 to 130, into step 2; step 2 launches one that runs at once."""
    builder = TimelineBuilder()
    main, queue = (1, 1), {"device": 0, "stream": 7}
    builder.add(ANNOTATION, "ProfilerStep#1", 0, 100, thread=main)
    builder.add(OPERATOR, "aten::mm", 10, 40, thread=main)
    builder.add(RUNTIME, "cudaLaunchKernel", 20, 25, thread=main, correlation=1)
    builder.add(KERNEL, "late", 95, 130, correlation=1, **queue)
    builder.add(ANNOTATION, "ProfilerStep#2", 100, 200, thread=main)
    builder.add(OPERATOR, "aten::add", 110, 150, thread=main)
    builder.add(RUNTIME, "cudaLaunchKernel", 120, 125, thread=main, correlation=2)
    builder.add(KERNEL, "soon", 131, 140, correlation=2, bytes=12, **queue)
    builder.add(OPERATOR, "aten::end", 199, 220, thread=(1, 2))
    return finish(builder.build(rank=4))


def names(timeline: Timeline) -> list[object]:
    return values(timeline, "name")


def test_a_step_has_its_device_work_wherever_that_ran() -> None:
    part = cut(two_steps(), steps=[1])
    assert names(part) == ["ProfilerStep#1", "aten::mm", "cudaLaunchKernel", "late"]
    assert part.core["parent"].tolist() == [-1, 0, 1, 2]
    assert (part.core["start_ns"][3], part.core["end_ns"][3]) == (95, 130)
    assert [span.number for span in part.steps] == [1]
    assert len(part.threads) == 1
    assert sorted(part.texts) == ["ProfilerStep#1", "aten::mm", "cudaLaunchKernel", "late"]


def test_time_keeps_whole_events_and_both_ends_of_a_launch() -> None:
    part = cut(two_steps(), start_ns=126, end_ns=131)
    # "late" runs in it, so its call at 20 is there; "soon" begins with the end, and its call returned before.
    assert names(part) == ["cudaLaunchKernel", "late", "ProfilerStep#2", "aten::add"]
    part = cut(two_steps(), start_ns=121, end_ns=122)
    assert "soon" in names(part), "the call is there, and so is what it launched"
    assert names(cut(two_steps(), end_ns=5)) == ["ProfilerStep#1"]
    assert names(cut(two_steps(), start_ns=215)) == ["aten::end"]


def test_parents_that_are_gone_give_way_to_the_next_one_kept() -> None:
    part = cut(two_steps(), kinds=["annotation", "runtime", "kernel"])
    assert names(part)[:3] == ["ProfilerStep#1", "cudaLaunchKernel", "late"]
    assert part.core["parent"].tolist()[:3] == [-1, 0, 1]
    part = cut(two_steps(), kinds=["kernel", "operator"])
    assert part.core["parent"][np.isin(part.core["kind"], DEVICE_KINDS)].tolist() == [-1, -1]


def test_blocks_follow_their_rows() -> None:
    part = cut(two_steps(), steps=[2], kinds=["kernel"])
    assert names(part) == ["soon"]
    assert part.column("bytes").tolist() == [12]
    assert part.blocks["transfer"].rows.tolist() == [0]
    assert cut(two_steps(), steps=[1]).blocks == {}


def test_conditions_add_up() -> None:
    assert names(cut(two_steps(), steps=[2], start_ns=199)) == ["ProfilerStep#2", "aten::end"]
    assert len(cut(two_steps(), ranks=[3])) == 0
    assert len(cut(two_steps(), ranks=[4])) == len(two_steps())


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no step 7") as caught:
        cut(two_steps(), steps=[7])
    assert caught.value.hint == "its steps are 1, 2"
    with pytest.raises(UsageError, match="kernell") as caught:
        cut(two_steps(), kinds=["kernell"])
    assert caught.value.hint == "did you mean kernel?"
    with pytest.raises(UsageError, match="not after its start"):
        cut(two_steps(), start_ns=5, end_ns=5)
    with pytest.raises(UsageError, match="none of the ranks 9") as caught:
        cut_all([two_steps()], ranks=[9])
    assert caught.value.hint == "the traces are of ranks 4"


def test_ranks_are_chosen() -> None:
    ranks = dlrm_ranks(3)
    chosen = cut_all(ranks, ranks=[2, 0], kinds=["kernel"])
    assert [timeline.rank for timeline in chosen] == [0, 2]


def test_everything_is_everything() -> None:
    trace = real_trace(NCCL)
    assert_same(trace, cut(trace))
    assert_same(trace, cut(trace, steps=None, start_ns=int(trace.core["start_ns"].min())))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_keep_their_values(data: st.DataObject) -> None:
    trace = real_trace(GPT2)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(trace) - 1), max_size=40))), np.int64)
    part = take_rows(trace, rows)
    for column in ("name", "shapes", "grid", "thread", "start_ns", "correlation", "strides"):
        before = values(trace, column)
        assert values(part, column) == [before[row] for row in rows]
    kept = set(rows.tolist())
    for place, row in enumerate(rows.tolist()):
        above = int(trace.core["parent"][row])
        if trace.core["kind"][row] not in DEVICE_KINDS:
            while above >= 0 and above not in kept:
                above = int(trace.core["parent"][above])
        expected = rows.tolist().index(above) if above in kept else -1
        assert part.core["parent"][place] == expected


def test_steps_of_a_real_trace_add_up() -> None:
    trace = real_trace(NCCL)
    parts = [cut(trace, steps=[span.number]) for span in trace.steps]
    assert sum(map(len, parts)) == int((trace.core["step"] >= 0).sum())
    for part in parts:
        device = np.isin(part.core["kind"], DEVICE_KINDS)
        assert device.any()
        assert (part.core["parent"][device] >= 0).all()
