"""Files, folders and patterns; ranks; steps and parents; the table; the cache."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepscope
from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.nesting import fill_parents
from stepscope.formats.source import cache_folders
from stepscope.formats.timeline import ANNOTATION, KERNEL, OPERATOR, RUNTIME, Timeline, TimelineBuilder
from stepscope.traces import load_timeline, make_table, read_timeline, read_traces
from stepscope.traces.finish import finish
from stepscope.traces.read import verify_cache


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Caches where users have them."""
    monkeypatch.delenv("STEPSCOPE_TRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def write_rank(path: Path, rank: int | None, world: int = 2, events: int = 3) -> Path:
    header: dict[str, Any] = (
        {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    )
    rows = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": f"aten::op{i}",
            "pid": 1,
            "tid": 2,
            "ts": i * 10,
            "dur": 5,
            "args": {"Ev Idx": i},
        }
        for i in range(events)
    ]
    path.write_text(json.dumps({**header, "traceEvents": rows}))
    return path


def test_ranks_come_from_content_before_names(tmp_path: Path) -> None:
    write_rank(tmp_path / "rank0.json", 1)
    write_rank(tmp_path / "rank1.json", 0)
    traces = read_traces(tmp_path)
    assert list(traces.ranks) == [0, 1]
    assert [path.name for path in traces.paths] == ["rank1.json", "rank0.json"]
    assert traces.timeline(0).world_size == 2


def test_a_rank_after_the_events_or_behind_groups_is_found(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "x" * 100, "pid": 1, "tid": 2, "ts": 1, "dur": 1}
    late = {"traceEvents": [event] * 4000, "distributedInfo": {"pg_config": [{"ranks": [0, 3]}], "rank": 3}}
    (tmp_path / "trace_rank5.json").write_text(json.dumps(late))
    assert list(read_traces(tmp_path).ranks) == [3]
    assert read_traces(tmp_path).timeline().rank == 3


def test_content_and_name_that_contradict_are_told(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "x" * 100, "pid": 1, "tid": 2, "ts": 1, "dur": 1}
    late = {"traceEvents": [event] * 4000, "distributedInfo": {"rank": 3}}
    (tmp_path / "trace_rank5.json.gz").write_bytes(gzip.compress(json.dumps(late).encode()))
    write_rank(tmp_path / "trace_rank0.json", 0)
    with pytest.raises(BadInputError, match="says it is rank 3, but its name says 5"):
        read_traces(tmp_path).timeline(5)


def test_a_compact_file_without_blanks_keeps_its_rank(tmp_path: Path) -> None:
    path = write_rank(tmp_path / "x.json", 5)
    path.write_text(path.read_text().replace(" ", ""))
    assert list(read_traces(path).ranks) == [5]


def test_patterns_and_names_where_the_content_says_nothing(tmp_path: Path) -> None:
    for rank in range(12):
        write_rank(tmp_path / f"trace_rank{rank}.json", None)
    assert list(read_traces(str(tmp_path / "trace_rank*.json")).ranks) == list(range(12))
    assert list(stepscope.read_traces(tmp_path).ranks) == list(range(12))


def test_two_files_of_one_rank_are_named(tmp_path: Path) -> None:
    write_rank(tmp_path / "a.json", 0)
    write_rank(tmp_path / "b.json", 0)
    with pytest.raises(BadInputError, match=r"rank 0, and so has a\.json") as caught:
        read_traces(tmp_path)
    assert caught.value.where == str(tmp_path / "b.json")


def test_what_is_no_trace_is_left_out_of_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    write_rank(tmp_path / "rank0.json", 0)
    (tmp_path / "measured.json").write_text('{"sync_ms": 3}')
    assert read_traces(tmp_path).left_out == {"measured.json": "no trace of a known format"}
    with pytest.raises(BadInputError, match="no trace of a known format"):
        read_traces(tmp_path / "measured.json")
    with pytest.raises(BadInputError, match="no such file"):
        read_traces(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match="no trace of rank 7"):
        read_traces(tmp_path).timeline(7)


def test_an_empty_file_and_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_bytes(b"")
    with pytest.raises(BadInputError, match="no trace"):
        read_traces(tmp_path / "rank0.json")
    with pytest.raises(BadInputError, match="holds no trace"):
        read_traces(tmp_path)


def test_the_cache_is_used_until_the_file_changes(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rank(beside / "rank0.json", 0)
    first = load_timeline(path)
    assert (beside / ".stepscope" / "rank0.json.cache" / "events.columns").exists()
    monkeypatch.setattr("stepscope.traces.read.read_timelines", lambda *_, **__: pytest.fail("was read again"))
    again = load_timeline(path)
    assert same(first, again)
    monkeypatch.undo()
    monkeypatch.delenv("STEPSCOPE_TRACE_CACHE", raising=False)
    write_rank(path, 0, events=9)
    assert len(load_timeline(path)) == 9


def same(one: Timeline, other: Timeline) -> bool:
    return (
        all((one.core[name] == other.core[name]).all() for name in one.core)
        and list(one.texts) == list(other.texts)
        and tuple(one.steps) == tuple(other.steps)
        and [tuple(thread) for thread in one.threads] == [tuple(thread) for thread in other.threads]
        and (one.rank, one.world_size, one.repairs) == (other.rank, other.world_size, other.repairs)
    )


def test_a_damaged_cache_is_made_anew(beside: Path) -> None:
    path = write_rank(beside / "rank0.json", 0)
    load_timeline(path)
    events = cache_folders(path)[0] / "events.columns"
    events.write_bytes(events.read_bytes()[:100])
    assert len(load_timeline(path)) == 3
    assert len(load_timeline(path)) == 3


def test_the_users_cache_folder_where_the_source_cannot_be_written(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rank(beside / "rank0.json", 0)
    (beside / ".stepscope").write_text("a file in the way, since root may write everywhere")
    load_timeline(path)
    folder = cache_folders(path)[1]
    assert (folder / "events.columns").exists()
    assert "user-cache" in str(folder)


def test_verify_looks_at_the_content(beside: Path) -> None:
    path = write_rank(beside / "rank0.json", 0)
    assert verify_cache(path)[0] == "absent"
    load_timeline(path)
    assert verify_cache(path)[0] == "fresh"
    status = path.stat()
    path.write_text(path.read_text().replace("op1", "opX"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert verify_cache(path)[0] == "stale"
    assert load_timeline(path).texts[1] == "aten::opX"
    os.utime(path)
    assert verify_cache(path)[0] == "outdated"


def test_a_full_disk_costs_only_the_cache(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepscope.traces.read._write_columns", refuse)
    assert len(load_timeline(write_rank(beside / "rank0.json", 0))) == 3
    assert not list(beside.rglob("*.part"))


def test_steps_parents_and_launches() -> None:
    build = TimelineBuilder()
    host = ("1", "2")
    first = build.add(ANNOTATION, "ProfilerStep#7", 0, 100, thread=host)
    second = build.add(ANNOTATION, "ProfilerStep#8", 100, 200, thread=host)
    outer = build.add(OPERATOR, "aten::linear", 10, 60, thread=host)
    inner = build.add(OPERATOR, "aten::addmm", 20, 50, thread=host)
    call = build.add(RUNTIME, "cudaLaunchKernel", 30, 35, thread=host, correlation=9)
    other = build.add(OPERATOR, "aten::add", 30, 40, thread=("1", "3"))
    kernel = build.add(KERNEL, "ampere_sgemm", 120, 180, device=0, stream=7, correlation=9)
    orphan = build.add(KERNEL, "ampere_sgemm", 130, 140, device=0, stream=8, correlation=77)
    outside = build.add(OPERATOR, "aten::zero_", 300, 310, thread=host)
    timeline = finish(build.build())
    parent, step = timeline.core["parent"].tolist(), timeline.core["step"].tolist()
    assert (parent[outer], parent[inner], parent[call], parent[other]) == (first, outer, inner, -1)
    assert (parent[kernel], parent[orphan]) == (call, -1)
    assert (step[kernel], step[orphan], step[outside], step[second]) == (7, 8, -1, 8)
    assert [span.number for span in timeline.steps] == [7, 8]


def test_a_marker_of_the_users_choice() -> None:
    build = TimelineBuilder()
    for start in (0, 50):
        build.add(ANNOTATION, "my step", start, start + 40, thread=("1", "2"))
    build.add(ANNOTATION, "my step, evaluated", 95, 99, thread=("1", "2"))
    timeline = finish(build.build(), step_marker="my step")
    assert [tuple(span) for span in timeline.steps] == [(0, 0, 40), (1, 50, 90)]
    with pytest.raises(UsageError, match="no annotation is called 'step'") as caught:
        finish(build.build(), step_marker="step")
    assert "my step" in (caught.value.hint or "")


def test_steps_that_repeat_or_overlap_are_told() -> None:
    build = TimelineBuilder()
    for start, end in ((0, 40), (20, 60), (70, 90)):
        build.add(ANNOTATION, "ProfilerStep#7", start, end, thread=("1", "2"))
    timeline = finish(build.build())
    assert [tuple(span) for span in timeline.steps] == [(7, 0, 40), (8, 70, 90)]
    assert timeline.repairs == {
        "steps that began inside another were left out": 1,
        "steps with a number that was there already were counted on": 1,
        "host events that end after the event they began in": 1,
    }


def test_a_step_number_beyond_every_column_is_no_step() -> None:
    build = TimelineBuilder()
    build.add(ANNOTATION, "ProfilerStep#99999999999", 0, 40, thread=("1", "2"))
    build.add(ANNOTATION, "ProfilerStep#" + "9" * 5000, 0, 40, thread=("1", "2"))
    assert finish(build.build()).step_marker == "none"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=40))
def test_the_compiled_walk_finds_the_same_parents(spans: list[tuple[int, int, int]]) -> None:
    import numpy as np

    from stepscope.formats import nesting

    thread, start, length = (
        np.array(column, np.int64) for column in (zip(*spans, strict=True) if spans else ([], [], []))
    )
    found = []
    for limit in (0, 1 << 30):
        parent = np.full(len(spans), -1, np.int32)
        before, nesting.COMPILED_FROM = nesting.COMPILED_FROM, limit
        try:
            fill_parents(
                np.arange(len(spans), dtype=np.int32),
                thread=thread,
                start=start,
                end=start + length,
                index=np.arange(len(spans)),
                parent=parent,
            )
        finally:
            nesting.COMPILED_FROM = before
        found.append(parent.tolist())
    assert found[0] == found[1]
    for row, enclosing in enumerate(found[0]):
        if enclosing >= 0:
            assert thread[enclosing] == thread[row]
            assert start[enclosing] <= start[row] <= start[enclosing] + length[enclosing]


def test_the_table_has_words_and_nulls(tmp_path: Path) -> None:
    path = Path(__file__).parent / "data" / "event_sync_multi_stream.json.gz"
    table = make_table(read_timeline(path))
    kernels = table.filter(table["kind"] == "kernel")
    assert kernels["name"].to_list() == ["ampere_sgemm_128x64_nn"] * 3
    assert kernels["category"].to_list() == ["gemm"] * 3
    assert kernels["thread"].to_list() == [None] * 3
    assert set(table.filter(table["kind"] == "sync")["sync_kind"].to_list()) <= {
        "Event Sync",
        "Stream Wait Event",
        "Context Sync",
    }
    assert table.filter(table["kind"] == "operator")["device"].null_count() == 6
    assert make_table(read_timeline(path), ["name", "start_ns"]).columns == ["name", "start_ns"]


def test_all_ranks_in_one_table(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank(tmp_path / f"rank{rank}.json", rank, events=rank + 1)
    table = read_traces(tmp_path).table(["rank", "name"])
    assert table["rank"].to_list() == [0, 1, 1, 2, 2, 2]


def test_cache_files_have_usual_rights(beside: Path) -> None:
    path = write_rank(beside / "rank0.json", 0)
    load_timeline(path)
    assert stat.S_IMODE((cache_folders(path)[0] / "key.json").stat().st_mode) & 0o400
