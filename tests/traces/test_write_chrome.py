"""Chrome traces that are written: nothing is lost on the way back, many ranks stay apart, bounds hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_timeline import ALEXNET, GPT2, NCCL, SAMPLED, assert_same, dlrm_ranks, real_trace

from stepscope.core.errors import StoreWriteError, UsageError
from stepscope.formats.chrome import Arrow, arrows_of_edges, write_chrome
from stepscope.formats.readers.kineto import MERGED
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    COUNTER,
    DEVICE_ANNOTATION,
    INSTANT,
    KERNEL,
    MEMORY,
    OPERATOR,
    OTHER,
    OVERHEAD,
    PYTHON,
    RUNTIME,
    SET,
    SYNC,
    RowEdges,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.finish import finish
from stepscope.traces.read import read_timeline


def small(rank: int | None = None, *, start_ns: int = 5_000_000_000) -> Timeline:
    """An operator that launches two kernels, inside a step."""
    builder = TimelineBuilder()
    main, kernel = (77, 77), {"device": 0, "stream": 7}
    builder.name_thread(77, 77, "thread 77 (python)")
    builder.add(ANNOTATION, "ProfilerStep#3", start_ns, start_ns + 9_001, thread=main)
    builder.add(
        OPERATOR, "aten::mm", start_ns + 10, start_ns + 5_000, thread=main, sequence=4, shapes="[[2, 3], [3, 2]]"
    )
    builder.add(RUNTIME, "cudaLaunchKernel", start_ns + 100, start_ns + 1_100, thread=main, correlation=8)
    builder.add(KERNEL, "gemm", start_ns + 2_000, start_ns + 4_321, correlation=8, occupancy=62.5, **kernel)
    builder.add(RUNTIME, "cuLaunchKernelEx", start_ns + 1_200, start_ns + 1_250, thread=main, correlation=9)
    builder.add(KERNEL, "add", start_ns + 4_321, start_ns + 4_400, correlation=9, **kernel)
    builder.add(
        OPERATOR, "MmBackward0", start_ns + 6_000, start_ns + 7_000, thread=(77, 78), sequence=4, forward_thread=1
    )
    return finish(builder.build(rank=rank, world_size=2 if rank is not None else None))


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)["traceEvents"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "suffix"), [(GPT2, ".json"), (NCCL, ".json.gz"), (ALEXNET, ".json.gz"), (SAMPLED, ".json")]
)
def test_real_traces_come_back_the_same(name: str, suffix: str, tmp_path: Path) -> None:
    trace = real_trace(name)
    path = tmp_path / f"out{suffix}"
    written = write_chrome(trace, path)
    assert written.events == len(trace)
    assert written.size_bytes == path.stat().st_size
    assert written.left_out == {}
    assert_same(trace, read_timeline(path))


def test_writing_what_was_written_changes_nothing(tmp_path: Path) -> None:
    trace = real_trace(ALEXNET)
    write_chrome(trace, tmp_path / "one.json.gz")
    write_chrome(read_timeline(tmp_path / "one.json.gz"), tmp_path / "two.json.gz")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


TEXTS = st.text(max_size=12) | st.sampled_from(['%s "%d"', "a\nb}, {", "\\", "é😀"])
NUMBERS = st.integers(0, 2**53)
LISTS = st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2).map(json.dumps)
HOST_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "external_id": NUMBERS,
        "record_function_id": NUMBERS,
        "event_index": NUMBERS,
        "sequence": NUMBERS,
        "forward_thread": NUMBERS,
        "correlation": NUMBERS,
        "shapes": LISTS,
        "types": st.just('["float", ""]'),
        "strides": LISTS,
        "values": st.just('["", "1e-5"]'),
        "collective": st.just("allreduce"),
        "group": st.just("0"),
        "group_ranks": st.sampled_from(["[0, 1]", "[0, 1, ..."]),
        "group_size": NUMBERS,
        "in_elements": NUMBERS,
        "dtype": st.just("Float"),
    },
)
DEVICE_VALUES = st.fixed_dictionaries(
    {"device": st.integers(0, 8), "stream": st.integers(0, 100)},
    optional={
        "correlation": NUMBERS,
        "external_id": NUMBERS,
        "grid": st.just("[1, 2, 3]"),
        "block": st.just("[32, 1, 1]"),
        "registers": NUMBERS,
        "shared_memory": NUMBERS,
        "blocks_per_sm": st.floats(0, 1e6),
        "occupancy": st.floats(0, 100),
        "graph": NUMBERS,
        "bytes": NUMBERS,
    },
)
SYNC_VALUES = st.fixed_dictionaries(
    {"device": st.integers(0, 8), "sync_kind": st.just("Stream Wait Event")},
    optional={"stream": st.integers(0, 9), "wait_stream": st.integers(0, 9), "wait_correlation": NUMBERS},
)
MEMORY_VALUES = st.fixed_dictionaries(
    {"address": NUMBERS, "bytes": st.integers(-(2**40), -2), "device": st.integers(0, 8)},
    optional={"total_allocated": NUMBERS, "total_reserved": NUMBERS},
)
EVENTS = st.one_of(
    st.tuples(st.sampled_from([OPERATOR, RUNTIME, ANNOTATION, PYTHON, OVERHEAD, OTHER]), TEXTS, HOST_VALUES),
    st.tuples(st.sampled_from([KERNEL, COPY, SET, DEVICE_ANNOTATION]), TEXTS, DEVICE_VALUES),
    st.tuples(st.just(SYNC), TEXTS, SYNC_VALUES),
    st.tuples(st.just(MEMORY), st.just("[memory]"), MEMORY_VALUES),
    st.tuples(st.just(INSTANT), TEXTS, st.just({})),
    st.tuples(st.just(COUNTER), TEXTS.filter(bool), st.fixed_dictionaries({"value": st.floats(-1e9, 1e9)})),
)
THREADS = st.tuples(st.integers(-9, 9), st.integers(-9, 9) | st.sampled_from(["PyTorch Profiler", "007"]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(EVENTS, st.integers(0, 10**19 // 8), st.integers(0, 10**12), THREADS), min_size=1, max_size=12
    )
)
def test_any_timeline_comes_back_the_same(rows: list[Any], tmp_path: Path) -> None:
    builder = TimelineBuilder()
    for (kind, name, values), start_ns, duration_ns, thread in rows:
        on_device = kind in (KERNEL, COPY, SET, DEVICE_ANNOTATION, SYNC)
        end_ns = start_ns if kind in (MEMORY, INSTANT, COUNTER) else start_ns + duration_ns
        builder.add(kind, name, start_ns, end_ns, thread=None if on_device else thread, **values)
    trace = finish(builder.build(rank=3, world_size=8))
    write_chrome(trace, tmp_path / "out.json")
    assert_same(trace, read_timeline(tmp_path / "out.json"))


def test_times_are_decimal_microseconds_from_a_whole_second(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    written = write_chrome(small(start_ns=1_790_857_026_123_456_789), path)
    text = path.read_text()
    assert written.base_ns == 1_790_857_026_000_000_000
    assert f'"baseTimeNanoseconds": {written.base_ns}' in text
    assert '"ts":123456.789,"dur":9.001' in text
    assert '"ts":123458.789,"dur":2.321' in text


def test_times_before_zero_keep_their_sign(tmp_path: Path) -> None:
    trace = small(start_ns=-1_500)
    write_chrome(trace, tmp_path / "out.json")
    assert '"ts":-1.500' in (tmp_path / "out.json").read_text()
    assert_same(trace, read_timeline(tmp_path / "out.json"))


def test_arguments_without_a_column_are_kept(tmp_path: Path) -> None:
    builder = TimelineBuilder()
    whole = '{"External id": 5, "note": "50 % }, {", "nested": {"a": [1]}}'
    builder.add(OPERATOR, "x", 0, 5, thread=(1, 1), external_id=5, arguments=whole)
    builder.add(OPERATOR, "y", 6, 9, thread=(1, 1), external_id=6, arguments='{"note": 1}')
    write_chrome(finish(builder.build()), tmp_path / "out.json")
    back = read_timeline(tmp_path / "out.json")
    assert back.text("arguments", 0) == whole
    assert json.loads(back.text("arguments", 1) or "") == {"External id": 6, "note": 1}
    assert back.column("external_id").tolist() == [5, 6]


def test_launches_and_backward_passes_have_arrows(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    written = write_chrome(small(), path, flows=("ac2g", "fwdbwd"))
    assert written.arrows == 3
    flows = [event for event in events_of(path) if event["ph"] in "sf"]
    by_id: dict[int, dict[str, Any]] = {}
    for flow in flows:
        by_id.setdefault(flow["id"], {})[flow["ph"]] = flow
    launch, _, backward = by_id.values()
    assert (launch["s"]["cat"], launch["s"]["pid"], launch["s"]["tid"], launch["s"]["ts"]) == ("ac2g", 77, 77, 0.1)
    assert (launch["f"]["pid"], launch["f"]["tid"], launch["f"]["ts"], launch["f"]["bp"]) == (0, 7, 2.0, "e")
    assert (backward["s"]["cat"], backward["s"]["ts"], backward["f"]["tid"]) == ("fwdbwd", 0.01, 78)
    with pytest.raises(UsageError, match="no arrows called"):
        write_chrome(small(), path, flows=("async",))


def test_ranks_stand_side_by_side(tmp_path: Path) -> None:
    ranks = [small(1), small(0)]
    path = tmp_path / "out.json.gz"
    arrows = [Arrow(0, 3, 1, 3, "collective")]
    edges = RowEdges(before=np.array([2]), after=np.array([3]), kind=np.array([2]), inferred=np.array([0]))
    written = write_chrome(ranks, path, arrows=[*arrows, *arrows_of_edges(1, edges)])
    assert written.ranks == [1, 0]
    assert written.arrows == 4 + 2
    events = events_of(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(names, key=order.__getitem__)] == [
        "rank 0: process 77",
        "rank 0: device 0",
        "rank 1: process 77",
        "rank 1: device 0",
    ]
    assert {e["pid"] for e in events} == set(names)
    begin, end = (next(e for e in events if e["ph"] == phase and e["cat"] == "collective") for phase in "sf")
    assert (names[begin["pid"]], names[end["pid"]]) == ("rank 1: device 0", "rank 0: device 0")
    assert [e["cat"] for e in events if e["ph"] == "s"][-1] == "launch"


def test_ranks_of_one_file_are_told_apart_again(tmp_path: Path) -> None:
    ranks = dlrm_ranks(3)
    path = tmp_path / "ranks.json.gz"
    write_chrome(ranks, path, extra=[{"name": "overlay", "ts_ns": 0, "dur_ns": 5}])
    assert MERGED.sniff(gzip.decompress(path.read_bytes())[:65536], path)
    for trace, back in zip(ranks, MERGED.read(path), strict=True):
        assert_same(trace, finish(back))
    write_chrome(ranks[0], tmp_path / "one.json")
    assert not MERGED.sniff((tmp_path / "one.json").read_bytes()[:65536], path)


def test_extra_events_are_placed_on_the_clock_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    extra = [
        {"name": "critical path", "ts_ns": 5_000_001_500, "dur_ns": 250, "tid": "path"},
        {"name": "queue", "ph": "C", "ts_ns": 5_000_000_000, "pid": 77, "args": {"length": 3}},
    ]
    written = write_chrome(small(), path, extra=iter(extra))
    assert written.extra == 2
    events = {event["name"]: event for event in events_of(path)}
    assert events["critical path"] | {"pid": 0} == {
        "ph": "X", "pid": 0, "tid": "path", "name": "critical path", "ts": 1.5, "dur": 0.25,
    }  # fmt: skip
    assert (events["queue"]["pid"], events["queue"]["ts"]) == (77, 0)


def test_the_shortest_host_events_go_first(tmp_path: Path) -> None:
    trace = real_trace(NCCL)
    device = int(np.isin(trace.core["kind"], (KERNEL, COPY, SET, SYNC, DEVICE_ANNOTATION)).sum())
    path = tmp_path / "out.json.gz"
    bound = 20_000
    written = write_chrome(trace, path, max_events=bound)
    assert written.events + 2 * written.arrows <= bound
    assert written.events + 2 * written.arrows > bound - 4
    assert sum(written.left_out.values()) == len(trace) - written.events
    back = read_timeline(path)
    assert int(np.isin(back.core["kind"], (KERNEL, COPY, SET, SYNC, DEVICE_ANNOTATION)).sum()) == device
    assert [span.number for span in back.steps] == [4, 5, 6]
    assert (back.core["parent"][back.core["kind"] == KERNEL] >= 0).all(), "launch calls stay with their kernels"
    kept = back.core["end_ns"] - back.core["start_ns"]
    dropped_most = np.sort((trace.core["end_ns"] - trace.core["start_ns"])[trace.core["kind"] == OPERATOR])
    assert kept[back.core["kind"] == OPERATOR].min() >= dropped_most[written.left_out["operator"] - 1]
    header = json.loads(gzip.decompress(path.read_bytes()))
    assert header["stepscope"]["left_out"] == written.left_out


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("share", [0.6, 0.05])
def test_a_file_stays_within_its_size(suffix: str, share: float, tmp_path: Path) -> None:
    trace = real_trace(GPT2)
    path = tmp_path / f"out{suffix}"
    whole = write_chrome(trace, path).size_bytes
    bound = int(whole * share)
    written = write_chrome(trace, path, max_bytes=bound)
    assert 0.8 * bound <= path.stat().st_size <= bound
    assert written.events == len(read_timeline(path))
    assert sum(written.left_out.values()) == len(trace) - written.events
    assert write_chrome(trace, path, max_bytes=whole).left_out == {}


def test_a_bound_that_cannot_be_kept_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(UsageError, match="not even an empty trace"):
        write_chrome(small(), path, max_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreWriteError, match="cannot be written"):
        write_chrome(small(), tmp_path / "missing" / "out.json")
    with pytest.raises(UsageError, match="no trace to write"):
        write_chrome([], tmp_path / "out.json")
    with pytest.raises(UsageError, match="rank 2 is there twice"):
        write_chrome([small(2), small(2)], tmp_path / "out.json")
    broken = iter([{"name": "fine"}, {"name": "no time", "ts_ns": "soon"}])
    with pytest.raises(ValueError, match="soon"):
        write_chrome(small(), tmp_path / "out.json", extra=broken)
    assert list(tmp_path.iterdir()) == []


def test_annotations_on_the_device_are_no_kernels_for_other_tools(tmp_path: Path) -> None:
    """Some tools take every event with a stream for device work."""
    builder = TimelineBuilder()
    builder.add(DEVICE_ANNOTATION, "forward", 0, 90, device=1, stream=7, external_id=3)
    builder.add(KERNEL, "gemm", 10, 80, device=1, stream=7)
    apart = finish(builder.build())
    builder.add(OPERATOR, "aten::mm", 0, 5, thread=(1, 1))
    meeting = finish(builder.build())
    write_chrome(apart, tmp_path / "out.json")
    args = {e["name"]: e["args"] for e in events_of(tmp_path / "out.json") if e["ph"] == "X"}
    assert args["forward"] == {"External id": 3}
    assert args["gemm"] == {"device": 1, "stream": 7}
    for trace in (apart, meeting):
        write_chrome(trace, tmp_path / "out.json")
        assert_same(trace, read_timeline(tmp_path / "out.json"))


def test_an_empty_timeline_is_a_valid_file(tmp_path: Path) -> None:
    written = write_chrome(TimelineBuilder().build(), tmp_path / "out.json")
    assert written.events == 0
    assert events_of(tmp_path / "out.json") == []


def test_a_bound_that_cannot_be_kept_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("precious")
    with pytest.raises(UsageError, match="not even an empty trace"):
        write_chrome(small(), path, max_bytes=100)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_tries_for_a_size_replace_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    trace = small()
    whole = write_chrome(trace, path).size_bytes
    replaced: list[int] = []
    replace_file = Path.replace

    def replace(self: Path, target: Path) -> Path:
        replaced.append(self.stat().st_size)
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    written = write_chrome(trace, path, max_bytes=whole - 1)
    assert replaced == [written.size_bytes]
    assert path.stat().st_size == written.size_bytes < whole


def test_half_a_character_does_not_cost_the_event(tmp_path: Path) -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "half \ud800", 0, 5, thread=(1, 2))
    builder.name_thread("1", "2", "main \udc00")
    write_chrome(finish(builder.build(rank=3)), tmp_path / "out.json")
    back = read_timeline(tmp_path / "out.json")
    assert (back.text("name", 0), back.threads[0].name, back.rank) == ("half ?", "main ?", 3)
    assert not back.repairs
