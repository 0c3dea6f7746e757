"""Both readers of Chrome traces: what they make of each kind of event, and that they agree on real traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from same_rows import rows_of

from stepscope.formats.readers.kineto.scanner import scan_kineto
from stepscope.formats.readers.kineto.tolerant import COLUMN_OF_ARGUMENT, parse_microseconds, read_kineto
from stepscope.formats.timeline import (
    ANNOTATION,
    COLUMN,
    COPY,
    COUNTER,
    DEVICE_ANNOTATION,
    INSTANT,
    KERNEL,
    KINDS,
    MEMORY,
    OPERATOR,
    PYTHON,
    RUNTIME,
    SET,
    SYNC,
    Timeline,
)
from stepscope.traces.chakra_convert import convert
from stepscope.traces.finish import finish
from stepscope.traces.read import read_timeline

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
DATA = Path(__file__).parent / "data"
READERS = (read_kineto, scan_kineto)


def write(path: Path, events: list[dict[str, Any]], *, indent: int | None = None, **header: Any) -> Path:
    path.write_text(json.dumps({**header, "traceEvents": events}, indent=indent))
    return path


def event(name: str, cat: str, ts: float, dur: float = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": args}


def only_row(timeline: Timeline) -> dict[str, Any]:
    assert len(timeline) == 1
    names = ("start_ns", "end_ns", "kind", "device", "stream", "correlation", "bytes")
    return {name: timeline.at(name, 0) for name in names}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", OPERATOR), ("Operator", OPERATOR), ("cuda_runtime", RUNTIME), ("cuda_driver", RUNTIME),
        ("Runtime", RUNTIME), ("hip_runtime", RUNTIME), ("mtia_runtime", RUNTIME), ("xpu_runtime", RUNTIME),
        ("privateuse1_driver", RUNTIME), ("kernel", KERNEL), ("Kernel", KERNEL), ("mtia_ccp_events", KERNEL),
        ("gpu_memcpy", COPY), ("Memcpy", COPY), ("gpu_memset", SET), ("cuda_sync", SYNC),
        ("user_annotation", ANNOTATION), ("gpu_user_annotation", DEVICE_ANNOTATION), ("python_function", PYTHON),
        ("cuda_profiler_range", COUNTER), ("some_vendors_own", ANNOTATION),
    ],
)  # fmt: skip
def test_kinds(reader: Any, category: str, kind: int, tmp_path: Path) -> None:
    timeline = reader(write(tmp_path / "t.json", [event("x", category, 5, 2)]))
    assert KINDS[timeline.core["kind"][0]] == KINDS[kind]


@pytest.mark.parametrize("reader", READERS)
def test_device_and_stream_come_from_arguments_before_ids(reader: Any, tmp_path: Path) -> None:
    timeline = reader(write(tmp_path / "a.json", [event("k", "kernel", 1, device=3, stream=7, correlation=11)]))
    assert only_row(timeline) | {"bytes": None} == {
        "start_ns": 1000, "end_ns": 2000, "kind": KERNEL, "device": 3, "stream": 7, "correlation": 11, "bytes": None,
    }  # fmt: skip
    without = only_row(reader(write(tmp_path / "b.json", [event("k", "kernel", 1)])))
    assert (without["device"], without["stream"]) == (1, 2)


@pytest.mark.parametrize("reader", READERS)
def test_both_spellings_of_no_stream_are_none(reader: Any, tmp_path: Path) -> None:
    events = [
        event("Context Sync", "cuda_sync", 1, stream=4294967295, device=0, cuda_sync_kind="Context Sync"),
        event("Event Sync", "cuda_sync", 3, stream=-1, device=0, wait_on_stream=4294967295),
    ]
    timeline = reader(write(tmp_path / "t.json", events))
    assert timeline.core["stream"].tolist() == [-1, -1]
    assert timeline.column("wait_stream").tolist() == [-1, -1]
    assert timeline.text("sync_kind", 0) == "Context Sync"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("indent", [None, 2])
def test_nanoseconds_are_exact(reader: Any, indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write(
        path, [event("a", "cpu_op", 0), event("b", "cpu_op", 0)], indent=indent, baseTimeNanoseconds=1790857026000000000
    )
    text = (
        path.read_text()
        .replace('"ts": 0', '"ts": 3865631203872.708', 1)
        .replace('"ts": 0', '"ts": 1682725898236567.001', 1)
    )
    path.write_text(text)
    timeline = reader(path)
    assert timeline.core["start_ns"].tolist() == [
        1790857026000000000 + 3865631203872708,
        1790857026000000000 + 1682725898236567001,
    ]


@given(st.integers(-(10**15), 10**15))
def test_microseconds_keep_every_nanosecond(number: int) -> None:
    sign, size = "-" if number < 0 else "", abs(number)
    assert parse_microseconds(f"{sign}{size // 1000}.{size % 1000:03d}".encode()) == number
    assert parse_microseconds(f"{number}".encode()) == number * 1000


@pytest.mark.parametrize("reader", READERS)
def test_collective_arguments(reader: Any, tmp_path: Path) -> None:
    arguments = {
        "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 8,
        "dtype": "Float",
        "In split size": "[]", "Out split size": "[]", "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1, 2, ..., 7]", "Global rank start": 0, "Global rank stride": 1, "Seq": 12,
    }  # fmt: skip
    timeline = reader(write(tmp_path / "t.json", [event("ncclDevKernel", "kernel", 1, **arguments)]))
    assert timeline.text("collective", 0) == "allreduce"
    assert timeline.text("group_ranks", 0) == "[0, 1, 2, ..., 7]"
    assert [timeline.at(name, 0) for name in ("in_elements", "group_size", "collective_sequence")] == [1024, 8, 12]


@pytest.mark.parametrize("reader", READERS)
def test_memory_instants_counters_and_halves(reader: Any, tmp_path: Path) -> None:
    memory = {
        "Device Type": 1,
        "Device Id": 0,
        "Addr": 140,
        "Bytes": 512,
        "Total Allocated": 512,
        "Total Reserved": 1024,
    }
    events = [
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 1,
            "tid": 2,
            "ts": 5,
            "s": "t",
            "args": memory,
        },
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9, "s": "g"},
        {"ph": "C", "name": "power", "pid": 1, "tid": 0, "ts": 6, "args": {"watts": 250.5}},
        {"ph": "B", "cat": "user_annotation", "name": "outer", "pid": 1, "tid": 2, "ts": 1},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 4},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 5},
    ]
    timeline = reader(write(tmp_path / "t.json", events))
    kinds = [KINDS[kind] for kind in timeline.core["kind"]]
    assert sorted(kinds) == sorted(KINDS[kind] for kind in (MEMORY, INSTANT, COUNTER, ANNOTATION))
    row = kinds.index("memory")
    assert [timeline.at(n, row) for n in ("bytes", "total_allocated", "total_reserved", "device")] == [
        512,
        512,
        1024,
        0,
    ]
    assert timeline.at("value", kinds.index("counter")) == 250.5
    annotation = kinds.index("annotation")
    assert (timeline.core["start_ns"][annotation], timeline.core["end_ns"][annotation]) == (1000, 4000)
    assert timeline.repairs == {"ends without a begin were left out": 1}


@pytest.mark.parametrize("reader", READERS)
def test_unknown_arguments_are_kept_whole(reader: Any, tmp_path: Path) -> None:
    timeline = reader(
        write(tmp_path / "t.json", [event("m", "cpu_op", 1, **{"Ev Idx": 4, "smsp__inst.sum": [1, {"a": "}"}]})])
    )
    kept = timeline.text("arguments", 0)
    assert kept is not None
    assert json.loads(kept) == {"Ev Idx": 4, "smsp__inst.sum": [1, {"a": "}"}]}
    assert timeline.at("event_index", 0) == 4


@pytest.mark.parametrize("reader", READERS)
def test_names_with_brackets_quotes_and_escapes(reader: Any, tmp_path: Path) -> None:
    names = ['void k<{1, 2}, "x">(float*)', "back\\slash", "über\u2028", "}, {", '"}, {"', "[[", "tab\there"]
    timeline = reader(write(tmp_path / "t.json", [event(name, "kernel", i) for i, name in enumerate(names)]))
    assert [timeline.texts[code] for code in timeline.core["name"]] == names
    assert not timeline.repairs


@pytest.mark.parametrize("reader", READERS)
def test_a_bare_list_of_events_is_a_trace_too(reader: Any, tmp_path: Path) -> None:
    path = tmp_path / "rank-3.json"
    path.write_text(json.dumps([event("a", "cpu_op", 1), event("b", "cpu_op", 2)]))
    timeline = reader(path)
    assert (len(timeline), timeline.rank) == (2, 3)


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".json.zst"])
def test_packed_files_are_told_by_their_first_bytes(suffix: str, tmp_path: Path) -> None:
    import zstandard

    text = gzip.decompress((DATA / "event_sync_multi_stream.json.gz").read_bytes())
    pack = {".json": bytes, ".json.gz": gzip.compress, ".json.zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / "trace.data"
    path.write_bytes(pack(text))
    assert rows_of(read_kineto(path)) == rows_of(read_kineto(DATA / "event_sync_multi_stream.json.gz"))


def test_columns_in_files_are_the_same(tmp_path: Path) -> None:
    path = DATA / "event_sync_multi_stream.json.gz"
    assert rows_of(scan_kineto(path, folder=tmp_path)) == rows_of(scan_kineto(path))
    assert not list(tmp_path.iterdir())


def test_small_pieces_give_the_same_rows() -> None:
    path = DATA / "event_sync_multi_stream.json.gz"
    assert rows_of(scan_kineto(path, piece_bytes=700)) == rows_of(read_kineto(path))


def test_two_spellings_of_one_text_are_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    odd = {"ph": "i", "name": "instant", "pid": "x", "tid": "y", "ts": 3, "s": "g"}
    events = [event("slash/ed", "cpu_op", 1), event("other", "cpu_op", 2), odd, event("slash/ed", "cpu_op", 4)]
    path.write_text(json.dumps({"traceEvents": events}).replace("slash/ed", "slash\\/ed", 1))
    timeline = scan_kineto(path)
    assert [timeline.texts[code] for code in timeline.core["name"]] == ["slash/ed", "other", "instant", "slash/ed"]
    assert len(set(timeline.texts)) == len(timeline.texts)


AWKWARD = [
    "foo::{lambda(float)#1}, {lambda(int)#2}>", "},{", "}, {", '"},{"', "},\r\n{", "replica_groups={{0,1},{2,3}}", "]",
    "\\\\", '\\"',
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}])
def test_pieces_may_end_anywhere(reader: Any, layout: dict[str, Any], tmp_path: Path) -> None:
    """In names that look like borders, in nested arguments, in the header behind the events."""
    events = [event(name, "cpu_op", i, nested=[{"a": 1}, {"b": name}]) for i in range(6) for name in AWKWARD]
    document = {"traceEvents": events, "baseTimeNanoseconds": 10**9, "distributedInfo": {"rank": 3, "world_size": 8},
                "deviceProperties": [{"id": i, "name": "},{"} for i in range(8)]}  # fmt: skip
    path = tmp_path / "t.json"
    text = json.dumps(document, **layout)
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    for piece in (64, 177, 1000, 1 << 22):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stepscope.formats.readers.kineto.text.ChromeText.__init__.__defaults__", (piece,))
            timeline = reader(path, piece_bytes=piece) if reader is scan_kineto else reader(path)
        assert [timeline.texts[code] for code in timeline.core["name"]] == AWKWARD * 6
        assert timeline.core["start_ns"].min() == 10**9
        assert (timeline.rank, timeline.world_size, len(timeline.metadata["devices"])) == (3, 8, 8)
        assert not timeline.repairs


@pytest.mark.parametrize("reader", READERS)
def test_odd_ids_are_the_same_for_both(reader: Any, tmp_path: Path) -> None:
    events = [
        event("a", "kernel", 1, device=70000, stream=-1),
        event("b", "kernel", 2, device=-1, stream=7),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory)", "pid": 1.0, "tid": 2, "ts": 3, "s": "t"},
        {**event("c", "cpu_op", 4), "pid": 1.0},
    ]
    timeline = reader(write(tmp_path / "t.json", events))
    assert timeline.core["device"].tolist() == [70000, 1, -1, -1]
    assert timeline.core["stream"].tolist() == [2, 7, -1, -1]
    assert [KINDS[kind] for kind in timeline.core["kind"]] == ["kernel", "kernel", "instant", "operator"]
    assert {tuple(thread) for thread in timeline.threads} == {("1", "2", "")}


def test_a_string_without_an_end_is_read_in_no_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    sound = json.dumps(event("a", "cpu_op", 1))
    path.write_text('{"traceEvents": [' + sound + ', {"ph": "X", "name": "' + '\\"' * 200_000)
    for reader in READERS:
        assert len(reader(path)) == 1


def real_traces() -> list[Path]:
    return sorted(
        p for p in SHARED.rglob("*.json.gz") if "_et" not in str(p) and p.name != "et.json.gz" and p.parent.name != "et"
    )


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
def test_both_readers_agree_on_every_real_trace() -> None:
    paths = real_traces()
    assert len(paths) > 20
    for path in paths:
        tolerant = read_kineto(path)
        compiled = scan_kineto(path)
        assert rows_of(compiled) == rows_of(tolerant), path
        assert compiled.core["start_ns"].tolist() == tolerant.core["start_ns"].tolist(), (
            "rows stand in the order of the file"
        )
        assert not tolerant.repairs, path


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
@pytest.mark.parametrize(
    ("name", "marker", "steps", "rows"),
    [
        ("public/hta/nccl_parser_config/nccl_data.json.gz", "profiler", 3, 26_935),
        ("public/param/resnet_kineto.json.gz", "optimizer", 30, 75_550),
        ("public/param/linear_kineto.json.gz", "optimizer", 40, 61_952),
        ("h200/gpt2_bf16_b8_s1024/kineto.json.gz", "profiler", 1, 7_466),
        ("public/hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz", "none", 1, 870),
    ],
)
def test_steps_of_real_traces(name: str, marker: str, steps: int, rows: int) -> None:
    timeline = read_timeline(SHARED / name)
    assert (timeline.step_marker, len(timeline.steps), len(timeline)) == (marker, steps, rows)


@pytest.mark.parametrize(
    "more",
    [
        '"ts": 5',
        '"name": "b", "pid": 3',
        '"ph": "s", "ph": "X", "cat": "gpu_memcpy"',
        '"cat": "unknown"',
        '"args": {"device": 1}, "args": {"stream": 3}',
        '"args": {"correlation": 1, "device": 2, "correlation": 9, "grid": [1], "grid": [2]}',
        '"args": {"External id": -1, "External Id": 4, "bytes": 3, "Bytes": 5}',
    ],
)
def test_of_repeated_keys_the_last_counts_in_both_readers(more: str, tmp_path: Path) -> None:
    """As for Python's json; of two spellings of one argument the first counts."""
    path = tmp_path / "t.json"
    record = '"ph": "X", "cat": "kernel", "name": "a", "pid": 0, "tid": 7, "ts": 1, "dur": 1, ' + more
    path.write_text(f'{{"traceEvents": [{{{record}}}]}}')
    compiled, tolerant = scan_kineto(path), read_kineto(path)
    assert rows_of(compiled) == rows_of(tolerant)
    last = json.loads(f"{{{record}}}")
    assert tolerant.texts[tolerant.core["name"][0]] == last["name"]
    assert tolerant.core["start_ns"][0] == last["ts"] * 1000
    assert tolerant.core["correlation"][0] == last.get("args", {}).get("correlation", -1)


@pytest.mark.parametrize("reader", [read_kineto, scan_kineto])
@pytest.mark.parametrize("key", sorted(COLUMN_OF_ARGUMENT))
def test_each_argument_may_stand_alone(reader: Callable[[Path], Timeline], key: str, tmp_path: Path) -> None:
    """An element type without a collective, members without a group: a column of a block may be there alone."""
    value = '"[0, 1]"' if COLUMN[COLUMN_OF_ARGUMENT[key]].form == "text" else "3"
    record = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2, "args": {"%s": %s}}'
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + record % (key, value) + "]}")
    timeline = finish(reader(path))
    assert timeline.at(COLUMN_OF_ARGUMENT[key], 0) is not None
    convert(timeline, minimum_share=0).trace()
