"""The path as a record, its overlay, its edges between rows, and the language of edits."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import Costs, Op, ordinary_program, random_program, run

from stepscope.analyze.critical.kinds import COSTS
from stepscope.analyze.critical.model import build_graph, build_graph_of_ranks, row_edges
from stepscope.analyze.critical.path import (
    CriticalPath,
    critical_path,
    describe_path,
    path_columns,
    path_events,
)
from stepscope.analyze.critical.schedule import order_edges, path_edges, retime, slack_of_rows
from stepscope.analyze.critical.what_if import (
    TARGETS,
    apply_edits,
    find_limits,
    parse_what_if,
    what_if,
)
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import DEVICE_KINDS, EDGE_KINDS, Timeline

FEW = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 10**6)


def a_timeline(seed: int = 3) -> Timeline:
    return run([ordinary_program(seed)], Costs(jitter_ns=3_000), sync_rows=False).timelines[0]


@FEW
@given(seed=SEEDS, factor=st.sampled_from((0, 0.3, 0.5, 1, 1.7)))
def test_kinds_sum_to_the_length_exactly(seed: int, factor: float) -> None:
    graph = build_graph(a_timeline(seed))
    schedule, _ = apply_edits(graph, parse_what_if(f"device={factor}, host={factor}"))
    columns = path_columns(graph, schedule, path_edges(graph, schedule))
    totals = describe_path(graph, schedule).by_kind_s
    assert tuple(totals) == COSTS
    assert sum(round(spent_s * 1e9) for spent_s in totals.values()) == columns.length.sum() == schedule.length_ns
    assert (columns.start[1:] == (columns.start + columns.length)[:-1]).all()


@FEW
@given(seed=SEEDS)
def test_a_factor_of_one_changes_nothing(seed: int) -> None:
    graph = build_graph(a_timeline(seed))
    for target in TARGETS:
        if TARGETS[target].needs:
            continue
        schedule, _ = apply_edits(graph, parse_what_if(f"{target}=1"), strict=False)
        assert (schedule.time == graph.node_time).all(), target


@FEW
@given(seed=SEEDS, target=st.sampled_from(["kernels", "host", "launches", "copies", "gaps", "unexplained", "sync"]))
def test_less_time_never_makes_the_step_longer(seed: int, target: str) -> None:
    graph = build_graph(a_timeline(seed))
    lengths = [
        apply_edits(graph, parse_what_if(f"{target}={factor}"), strict=False)[0].length_ns for factor in (2, 1, 0.5, 0)
    ]
    assert lengths == sorted(lengths, reverse=True)


@FEW
@given(seed=SEEDS)
def test_slack_is_never_negative_and_nothing_on_the_path(seed: int) -> None:
    timeline = a_timeline(seed)
    graph = build_graph(timeline)
    schedule = retime(graph)
    slack = slack_of_rows(graph, schedule)
    assert (slack[np.isin(timeline.core["kind"], DEVICE_KINDS)] >= 0).all()
    path = critical_path(timeline)
    on_path = [segment.row for segment in path.segments if segment.kind == "compute"]
    assert (slack[on_path] == 0).all()


def test_the_record_says_what_the_path_is() -> None:
    timeline = a_timeline()
    path = critical_path(timeline)
    assert path.length_s == pytest.approx(sum(path.by_kind_s.values()))
    assert path.window_end_ns - path.window_start_ns == pytest.approx(path.length_s * 1e9)
    assert all(one.end_ns == other.start_ns for one, other in pairwise(path.segments))
    assert path.segments[0].start_ns == path.window_start_ns
    assert path.segments[-1].end_ns == path.window_end_ns
    assert all(
        segment.name == timeline.text("name", segment.row) for segment in path.segments if segment.row is not None
    )
    assert sum(share.share for share in path.by_name) == pytest.approx(1)
    assert [share.time_s for share in path.by_name] == sorted((s.time_s for s in path.by_name), reverse=True)
    assert path.by_rank_s == [pytest.approx(path.length_s)]
    assert {entry.name for entry in path.slack} >= {"kernel_a", "gemm_c"}
    assert msgspec.json.decode(msgspec.json.encode(path), type=CriticalPath) == path


def test_the_path_changes_rank_where_a_rank_was_waited_for() -> None:
    """Rank 1 computes for long before the collective; rank 0 has something to do after it."""
    meet = Op("collective", host_ns=4_000, stream=22, work_ns=50_000, group=0)
    tail = [Op("device_sync"), Op("host", host_ns=400_000)]
    late = [Op("host", host_ns=900_000), meet, Op("device_sync")]
    outcome = run([[meet, *tail], late])
    path = describe_path(build_graph_of_ranks(outcome.timelines, outcome.matches))
    assert [segment.rank for segment in path.segments if segment.kind == "communication"] == [0]
    assert path.by_rank_s[1] == pytest.approx(0.9e-3, rel=0.05)
    assert path.by_kind_s["communication"] == pytest.approx(50e-6)
    alone = critical_path(outcome.timelines[0])
    assert [(entry.name, entry.count) for entry in path.slack] == [("ncclDevKernel_AllReduce", 2)]
    assert alone.by_kind_s["communication"] > 0.9e-3  # seen from one rank, waiting looks like communication


def test_clock_offsets_bring_ranks_together_and_wrong_ones_are_noticed() -> None:
    meet = Op("collective", host_ns=4_000, stream=22, work_ns=50_000, group=0)
    outcome = run([[meet, Op("device_sync"), Op("host", host_ns=4_000)]] * 2)
    shifted = outcome.timelines[1]
    for name in ("start_ns", "end_ns"):
        shifted.core[name][:] += 10**9  # type: ignore[operator]
    path = describe_path(build_graph_of_ranks(outcome.timelines, outcome.matches, offsets_ns=[0, -(10**9)]))
    assert path.length_s == pytest.approx(outcome.length_ns / 1e9)
    assert path.checks.meetings_skipped == 0
    wrong = describe_path(build_graph_of_ranks(outcome.timelines, outcome.matches))
    assert wrong.checks.meetings_skipped == 1
    assert any("do not overlap" in note for note in wrong.notes)
    with pytest.raises(UsageError, match="2 traces and 1 clock offsets"):
        describe_path(build_graph_of_ranks(outcome.timelines, outcome.matches, offsets_ns=[0]))


def test_the_overlay_is_a_track_with_arrows() -> None:
    path = critical_path(a_timeline())
    events = json.loads(json.dumps(path_events(path, base_ns=path.window_start_ns)))
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["dur"] for event in slices) == pytest.approx(path.length_s * 1e6)
    assert slices[0]["ts"] == 0
    assert {event["pid"] for event in events} == {"Critical path"}
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(tracks.values()) == {"host", "delays", "device"}
    starts, ends = ({event["id"] for event in events if event["ph"] == phase} for phase in "sf")
    assert starts == ends
    assert starts


def with_parents(timeline: Timeline, before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    children = np.flatnonzero(timeline.core["parent"] >= 0)  # type: ignore[operator]
    parents = timeline.core["parent"][children]
    return np.concatenate((before, parents)), np.concatenate((after, children))


@FEW
@given(seed=SEEDS, sync_rows=st.booleans())
def test_edges_between_rows_have_no_cycle_and_reach_all_work(seed: int, sync_rows: bool) -> None:
    timeline = run([random_program(seed)], sync_rows=sync_rows).timelines[0]
    found = row_edges(timeline)
    order, _ = order_edges(*with_parents(timeline, found.before, found.after), len(timeline))
    assert order is not None
    device = np.flatnonzero(np.isin(timeline.core["kind"], DEVICE_KINDS))
    assert np.isin(device, found.after).all()
    last = {int(device[timeline.core["stream"][device] == s][-1]) for s in np.unique(timeline.core["stream"][device])}
    assert set(device.tolist()) - set(found.before.tolist()) <= last
    assert found.kind.max() < len(EDGE_KINDS)


def test_edits_are_parsed() -> None:
    edits = parse_what_if("kernels:void at::native<float, 4>(int)=0.5, host@3=80%; launches=0")
    assert [(edit.target, edit.pattern, edit.rank, edit.factor) for edit in edits] == [
        ("kernels", "void at::native<float, 4>(int)", None, 0.5),
        ("host", None, 3, 0.8),
        ("launches", None, None, 0.0),
    ]
    assert parse_what_if("operator:aten::mm=1e-1")[0].factor == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("kernels", "has no factor"),
        ("kernels=", "is not a factor"),
        ("kernels=-1", "is not a factor"),
        ("kernels=fast", "is not a factor"),
        ("kernls=0.5", "no what-if target 'kernls'"),
        ("category=0.5", "does not say which category"),
        ("category:gem=0.5", "no category 'gem'"),
        ("stream=0.5", "does not say which stream"),
        ("kernels:=0.5", "does not say which kernel"),
        ("stream_gaps:a=0.5", "takes no pattern"),
        ("blocking=0.5", "either wait or do not"),
        ("@1=0.5", "names a rank but no target"),
    ],
)
def test_wrong_edits_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_what_if(text)
    assert caught.value.hint


@given(text=st.text(max_size=40))
def test_any_text_is_an_edit_or_a_usage_error(text: str) -> None:
    try:
        parse_what_if(text)
    except UsageError:
        return


def test_edits_that_name_nothing_say_what_there_is() -> None:
    graph = build_graph(a_timeline())
    with pytest.raises(UsageError, match="no name fits 'flash'") as caught:
        what_if(graph, "kernels:flash=0.5")
    assert "kernel_a" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="has no such time"):
        what_if(graph, "communication=0")
    with pytest.raises(UsageError, match="there is no rank 4"):
        what_if(graph, "host@4=0")
    with pytest.raises(UsageError, match="is not a stream"):
        what_if(graph, "stream:default=0")


def test_patterns_name_whole_names_with_stars_and_parts_without() -> None:
    graph = build_graph(a_timeline())
    count = {
        edit: what_if(graph, f"kernels:{edit}=0").edits[0].events for edit in ("KERNEL_*", "kernel", "*_a", "nel_a")
    }
    assert count["KERNEL_*"] == count["kernel"] > count["*_a"] == count["nel_a"] > 0


def test_work_is_found_by_its_operator_stream_and_category() -> None:
    graph = build_graph(a_timeline())
    everything = what_if(graph, "device=0")
    assert what_if(graph, "operator:aten::op=0").edits[0].events < everything.edits[0].events
    assert what_if(graph, "stream:0/20=0").edits[0].events == what_if(graph, "stream:20=0").edits[0].events
    assert what_if(graph, "category:gemm=0").edits[0].events == what_if(graph, "kernels:gemm_c=0").edits[0].events


def test_limits_bound_every_improvement_of_their_kind() -> None:
    graph = build_graph(a_timeline())
    limits = {limit.name: limit for limit in find_limits(graph)}
    assert set(limits) >= {"host-bound", "device-bound", "no launches", "no gaps", "no blocking"}
    assert limits["host-bound"].step_s <= what_if(graph, "kernels=0.01").after_s
    assert limits["device-bound"].step_s <= what_if(graph, "host=0.01").after_s
    assert all(limit.saved_s >= 0 for limit in limits.values())
