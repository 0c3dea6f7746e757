"""Nsight Systems: exported databases of several schemas, and the tables that `nsys stats` prints."""

from __future__ import annotations

import gzip
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import BadInputError
from stepscope.formats.classify import CATEGORIES
from stepscope.formats.readers import nsys_sqlite, nsys_stats
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    INSTANT,
    KERNEL,
    MEMORY,
    OPERATOR,
    OTHER,
    RUNTIME,
    SET,
    SYNC,
    Thread,
)
from stepscope.traces.finish import finish
from stepscope.traces.read import require_format

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "public" / "nsys"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public tables are not beside the checkout")

# Columns as the exporter's schema 3.16 (Nsight Systems 2024.6) names them.
DEVICE = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
SHAPE = "gridX, gridY, gridZ, blockX, blockY, blockZ, staticSharedMemory, dynamicSharedMemory"
SCHEMA = {
    "StringIds": "id, value",
    "ThreadNames": "nameId, priority, globalTid",
    "PROCESSES": "globalPid, pid, name",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs, utcTime, localTime",
    "TARGET_INFO_GPU": "id, name, totalMemory, smCount, computeMajor, computeMinor",
    "META_DATA_EXPORT": "name, value",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, eventClass, globalTid, correlationId, nameId, returnValue",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{DEVICE}, demangledName, shortName, registersPerThread, {SHAPE}, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{DEVICE}, bytes, copyKind, srcKind, dstKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{DEVICE}, value, bytes, memKind",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{DEVICE}, syncType, eventId, eventSyncId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": f"{DEVICE}, eventId, eventSyncId",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "start, globalPid, deviceId, address, bytes, memoryOperationType, correlationId",
    "NVTX_EVENTS": "start, end, eventType, text, globalTid, textId, domainId",
    "OSRT_API": "start, end, eventClass, globalTid, nameId",
}
MACHINE = 1 << 48


def process(pid: int) -> int:
    return MACHINE | pid << 24


def thread(pid: int, tid: int) -> int:
    return process(pid) | tid


STRINGS = [
    (1, "void at::native::reduce_kernel<(int)512, (int)1>(T1)"),
    (2, "reduce_kernel"),
    (3, "cudaLaunchKernel_v7000"),
    (4, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"),
    (5, "registered range"),
    (6, "pt_main_thread"),
    (7, "cudaMemcpyAsync"),
    (8, "pthread_cond_wait"),
]


def rows_of(pid: int) -> dict[str, list[tuple[Any, ...]]]:
    """What one rank did: a kernel, an all-reduce on another stream, a copy, a fill, waits, ranges."""
    where, host = process(pid), thread(pid, pid + 1)
    return {
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            (100, 110, 0, host, 11, 3, 0),
            (120, 130, 0, host, 12, 3, 0),
            (140, 150, 0, host, 13, 7, 0),
        ],
        "CUPTI_ACTIVITY_KIND_KERNEL": [
            (200, 300, 0, 1, 7, 11, where, 1, 2, 32, 264, 1, 1, 128, 1, 1, 0, 48, (5 << 32) | 9),
            (250, 400, 0, 1, 20, 12, where, 4, 4, 96, 24, 1, 1, 512, 1, 1, 16, 0, None),
        ],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [(310, 330, 0, 1, 7, 13, where, 4096, 1, 1, 2)],
        "CUPTI_ACTIVITY_KIND_MEMSET": [(340, 345, 0, 1, 7, None, where, 0, 64, 2)],
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": [
            (500, 520, 0, 1, 7, 14, where, 3, 0, 0),
            (530, 531, 0, 1, 4294967295, 15, where, 2, 3, 77),
        ],
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT": [(490, 490, 0, 1, 20, 99, where, 3, 77)],
        "CUDA_GPU_MEMORY_USAGE_EVENTS": [(90, where, 0, 4096, 1024, 0, 3), (600, where, 0, 4096, 1024, 1, 4)],
        "NVTX_EVENTS": [
            (95, 600, 59, "ProfilerStep#4", host, None, 0),
            (
                98,
                135,
                59,
                "aten::sum, op_id = 3, seq = 21, sizes = [[4, 5], []], input_op_ids = [[1,0]]",
                host,
                None,
                0,
            ),
            (97, 700, 60, None, host, 5, 0),
            (99, None, 34, "mark", host, None, 0),
            (0, None, 75, "NCCL", host, None, 1),
            (700, None, 59, "open", host, None, 0),
        ],
        "OSRT_API": [(10, 20, 0, host, 8)],
    }


def common() -> dict[str, list[tuple[Any, ...]]]:
    return {
        "StringIds": STRINGS,
        "ThreadNames": [(6, 0, thread(100, 101))],
        "PROCESSES": [(process(100), 100, "python train.py")],
        "TARGET_INFO_SESSION_START_TIME": [(1_700_000_000_000_000_000, "", "")],
        "TARGET_INFO_GPU": [(0, "NVIDIA H100", 80 << 30, 132, 9, 0)],
        "META_DATA_EXPORT": [("EXPORT_SCHEMA_VERSION", "3.16.1"), ("OTHER", "x")],
    }


def write(path: Path, *tables: dict[str, list[tuple[Any, ...]]], schema: dict[str, str] | None = None) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for table, columns in (schema or SCHEMA).items():
            names = [f'"{column.strip()}"' for column in columns.split(",")]
            connection.execute(f'CREATE TABLE "{table}" ({", ".join(names)})')
            for content in tables:
                rows = content.get(table, [])
                connection.executemany(f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(names))})', rows)
        connection.commit()
    return path


def test_one_process(tmp_path: Path) -> None:
    path = write(tmp_path / "report_rank3.sqlite", common(), rows_of(100))
    assert nsys_sqlite.sniff(path.read_bytes()[:1024], path)
    assert require_format(path).name == "nsys_sqlite"
    (timeline,) = nsys_sqlite.read(path)
    timeline = finish(timeline)
    assert timeline.rank == 3
    base = 1_700_000_000_000_000_000
    kernels = timeline.rows(KERNEL)
    assert [timeline.texts[timeline.core["name"][row]] for row in kernels] == [STRINGS[0][1], STRINGS[3][1]]
    assert (timeline.core["start_ns"][kernels] - base).tolist() == [200, 250]
    assert timeline.core["stream"][kernels].tolist() == [7, 20]
    assert [CATEGORIES[timeline.core["category"][row]] for row in kernels] == ["reduction", "communication"]
    first = int(kernels[0])
    assert timeline.text("grid", first) == "[264, 1, 1]"
    assert timeline.text("block", first) == "[128, 1, 1]"
    assert timeline.at("blocks_per_sm", first) == 2.0
    assert timeline.at("warps_per_sm", first) == 8.0
    assert timeline.at("shared_memory", first) == 48
    assert (timeline.at("graph", first), timeline.at("graph_node", first)) == (5, (5 << 32) | 9)
    call = int(timeline.core["parent"][first])
    assert timeline.text("name", call) == "cudaLaunchKernel", "without the version of the interface"
    assert timeline.threads[timeline.core["thread"][call]] == Thread("100", "101", "pt_main_thread")


def test_the_other_tables(tmp_path: Path) -> None:
    (timeline,) = nsys_sqlite.read(write(tmp_path / "report.sqlite", common(), rows_of(100)))
    (copy,) = timeline.rows(COPY)
    assert timeline.text("name", copy) == "Memcpy HtoD (Pinned -> Device)"
    assert timeline.at("bytes", copy) == 4096
    (fill,) = timeline.rows(SET)
    assert timeline.text("name", fill) == "Memset (Device)"
    record, stream_sync, wait = timeline.rows(SYNC)
    assert [timeline.text("sync_kind", row) for row in (record, stream_sync, wait)] == [
        "Event Record", "Stream Sync", "Stream Wait Event",
    ]  # fmt: skip
    assert timeline.at("wait_stream", stream_sync) == 7
    assert timeline.at("wait_correlation", wait) == 99
    assert timeline.at("stream", wait) is None
    allocated, freed = timeline.rows(MEMORY)
    assert (timeline.at("bytes", allocated), timeline.at("bytes", freed)) == (1024, -1024)
    assert timeline.metadata["devices"][0]["numSms"] == 132
    assert timeline.metadata["versions"] == {"EXPORT_SCHEMA_VERSION": "3.16.1"}
    assert timeline.metadata["process_name"] == "python train.py"
    assert timeline.metadata["left_out"] == {"OSRT_API": 1}
    assert not len(timeline.rows(OTHER))
    assert timeline.repairs == {"NVTX ranges without an end were read as instants": 1}


def test_ranges(tmp_path: Path) -> None:
    (timeline,) = nsys_sqlite.read(write(tmp_path / "report.sqlite", common(), rows_of(100)))
    timeline = finish(timeline)
    names = {timeline.text("name", row): int(row) for row in timeline.rows(ANNOTATION)}
    assert set(names) == {"ProfilerStep#4", "registered range", "open"}
    (mark,) = timeline.rows(INSTANT)
    assert timeline.text("name", mark) == "mark"
    (operator,) = timeline.rows(OPERATOR)
    assert timeline.text("name", operator) == "aten::sum"
    assert timeline.text("shapes", operator) == "[[4, 5], []]"
    assert timeline.at("sequence", operator) == 21
    assert timeline.core["parent"][operator] == names["ProfilerStep#4"], "a free range encloses nothing"
    assert timeline.step_marker == "profiler"
    assert [span.number for span in timeline.steps] == [4]
    assert timeline.threads[timeline.core["thread"][names["registered range"]]].name == "NVTX ranges"


def test_system_calls_are_read_when_asked_for(tmp_path: Path) -> None:
    (timeline,) = nsys_sqlite.read(write(tmp_path / "report.sqlite", common(), rows_of(100)), system_calls=True)
    (call,) = timeline.rows(OTHER)
    assert timeline.text("name", call) == "pthread_cond_wait"
    assert timeline.metadata["left_out"] == {}


def test_a_timeline_for_every_process(tmp_path: Path) -> None:
    path = write(
        tmp_path / "report.sqlite", common(), rows_of(100), rows_of(200), {"OSRT_API": [(1, 2, 0, thread(50, 50), 8)]}
    )
    timelines = nsys_sqlite.read(path)
    assert [(timeline.rank, timeline.world_size) for timeline in timelines] == [(0, 2), (1, 2)]
    assert [timeline.metadata["process"] for timeline in timelines] == ["100", "200"]
    assert timelines[0].metadata["rank_from"] == "order of processes"
    assert len(timelines[0]) == len(timelines[1])


def test_ranks_that_mpi_told(tmp_path: Path) -> None:
    schema = SCHEMA | {"MPI_RANKS": "globalPid, rank"}
    told = {"MPI_RANKS": [(process(100), 1), (process(200), 0)]}
    timelines = nsys_sqlite.read(
        write(tmp_path / "r.sqlite", common(), rows_of(100), rows_of(200), told, schema=schema)
    )
    assert [(timeline.rank, timeline.metadata["process"]) for timeline in timelines] == [(0, "200"), (1, "100")]
    assert timelines[0].metadata["rank_from"] == "content"


def test_the_least_a_file_can_hold(tmp_path: Path) -> None:
    """Old and reduced exports: no process, no correlation, no shapes, ranges without a kind."""
    schema = {
        "StringIds": "id, value",
        "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, shortName",
        "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, copyKind, bytes",
        "NVTX_EVENTS": "start, end, text",
    }
    rows = {
        "StringIds": STRINGS,
        "CUPTI_ACTIVITY_KIND_KERNEL": [(5, 9, 2), (10, 12, 999)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [(13, 14, 8, 16)],
        "NVTX_EVENTS": [(0, 20, "step")],
    }
    (timeline,) = nsys_sqlite.read(write(tmp_path / "report.sqlite", rows, schema=schema))
    timeline = finish(timeline)
    assert [timeline.text("name", row) for row in timeline.rows(KERNEL)] == ["reduce_kernel", "unnamed 999"]
    assert timeline.repairs == {"names that the table of texts does not hold": 1}
    assert timeline.text("name", timeline.rows(COPY)[0]) == "Memcpy DtoD (Unknown -> Unknown)"
    assert len(timeline.rows(ANNOTATION)) == 1


def test_graphs_recorded_as_a_whole_keep_the_device_busy(tmp_path: Path) -> None:
    schema = SCHEMA | {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{DEVICE}, graphId"}
    rows = {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [(5, 50, 0, 1, 7, 11, process(100), 3)]}
    (timeline,) = nsys_sqlite.read(write(tmp_path / "report.sqlite", common(), rows, schema=schema))
    (graph,) = timeline.rows(KERNEL)
    assert timeline.text("name", graph) == "CUDA graph 3"
    assert timeline.repairs == {"CUDA graphs recorded as a whole: the kernels inside are unknown": 1}


def test_only_ranges(tmp_path: Path) -> None:
    (timeline,) = nsys_sqlite.read(write(tmp_path / "r.sqlite", common(), {"NVTX_EVENTS": rows_of(100)["NVTX_EVENTS"]}))
    assert not len(timeline.rows(KERNEL, RUNTIME))
    assert len(finish(timeline)) == 5


def test_cells_of_wrong_types_are_mended(tmp_path: Path) -> None:
    rows = rows_of(100)
    rows["CUPTI_ACTIVITY_KIND_RUNTIME"] += [
        ("soon", b"later", 0, None, "x", None, 0),
        (900, 800, 0, thread(100, 101), 5, 3, 0),
    ]
    rows["CUPTI_ACTIVITY_KIND_KERNEL"] += [
        (2**62, 2**62 + 5, 0, 1, 7, 1, process(100), 1, 2, 1, 2**62, 2**62, -3, 1, 1, 1, 0, 0, 0)
    ]
    rows["NVTX_EVENTS"] += [(1, 2, 59, b"\xff", thread(100, 101), None, 0), (1, 2, 59, None, None, 999, 0)]
    (timeline,) = nsys_sqlite.read(write(tmp_path / "report.sqlite", common(), rows))
    finish(timeline)
    assert timeline.repairs["cells of CUPTI_ACTIVITY_KIND_RUNTIME that are no whole numbers were left out"] == 3
    assert timeline.repairs["rows of CUPTI_ACTIVITY_KIND_RUNTIME that end before they start were read as instants"] == 1
    assert timeline.repairs["rows of CUPTI_ACTIVITY_KIND_KERNEL with an impossible time were put at zero"] == 1
    assert (timeline.core["end_ns"] >= timeline.core["start_ns"]).all()


def test_views_are_not_run(tmp_path: Path) -> None:
    """A view is code of the writer's choice: this one would never end."""
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS "
            "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n"
        )
    with pytest.raises(BadInputError, match="no CUDA or NVTX event"):
        nsys_sqlite.read(path)


def test_a_cut_database_gives_what_is_left_or_says_so(tmp_path: Path) -> None:
    rows = rows_of(100)
    kernel = rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]
    rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [(200 + n, 201 + n, *kernel[2:]) for n in range(20_000)]
    whole = write(tmp_path / "whole.sqlite", common(), rows).read_bytes()
    outcomes = []
    for share in (0.0005, 0.05, 0.5, 0.95):
        path = tmp_path / "cut.sqlite"
        path.write_bytes(whole[: int(len(whole) * share)])
        try:
            (timeline,) = nsys_sqlite.read(path)
        except BadInputError as error:
            outcomes.append(error.where == str(path))
        else:
            finish(timeline)
            outcomes.append(any("damaged" in what for what in timeline.repairs))
    assert outcomes == [True] * 4


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    path.write_bytes(b"\x1f\x8b packed")
    assert not nsys_sqlite.sniff(path.read_bytes(), path)
    with pytest.raises(BadInputError, match="is not an SQLite file"):
        nsys_sqlite.read(path)
    with pytest.raises(BadInputError, match="cannot be read"):
        nsys_sqlite.read(tmp_path / "absent.sqlite")
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    assert not nsys_sqlite.sniff(other.read_bytes()[:100], other)
    with pytest.raises(BadInputError, match="no CUDA or NVTX event"):
        nsys_sqlite.read(other)


# --- nsys stats ----------------------------------------------------------------------------------------------------

SUMMARY = """\
NOTICE: Existing SQLite export found: report.sqlite

Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
60.0,"1,200,000",4,300000.0,290000.0,250000,400000,1000.5,"void f<int, (int)4>(int, float *)"
40.0,800000,2,400000.0,400000.0,300000,500000,0.0,ncclDevKernel_AllReduce_Sum_f32_RING_LL
bad,,,,,,,,
"""
TRACE = """\
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),\
Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name
1000,500,123,,,,,,,,,,4.194,6337.593,Pinned,Device,NVIDIA H100 (1),1,,13,[CUDA memcpy Host-to-Device]
2000,7072,128,4096,1,1,256,1,1,16,0.000,0.001,,,,,NVIDIA H100 (1),1,,7,"void saxpy<float>(float, const float *)"
9500,10,129,,,,,,,,,,0.001,1.0,Device,,NVIDIA H100 (1),1,,7,[CUDA memset]
,,,,,,,,,,,,,,,,,,,,broken
"""


def test_a_summary(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(SUMMARY)
    assert nsys_stats.sniff_summary(path.read_bytes(), path)
    assert not nsys_stats.sniff(path.read_bytes(), path)
    summary = nsys_stats.read_summary(path)
    assert summary.report == "kernels"
    assert [(row.count, row.name) for row in summary.rows] == [
        (4, "void f<int, (int)4>(int, float *)"),
        (2, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    ]
    first = summary.rows[0]
    assert (first.total_s, first.median_s, first.std_s) == pytest.approx((1.2e-3, 2.9e-4, 1.0005e-6))
    assert summary.seconds_by_category() == pytest.approx({"communication": 8e-4, "other": 1.2e-3})
    assert summary.repairs == {"rows without a usable name, count or time were left out": 1}
    with pytest.raises(BadInputError, match="no header line") as caught:
        nsys_stats.read(path)
    assert "no timeline" in (caught.value.hint or "")


def test_calls_and_several_tables_in_one_file(tmp_path: Path) -> None:
    calls = (
        "Time (%),Total Time (ns),Num Calls,Avg (ns),Min (ns),Max (ns),Name\n100,1000,8,125,1,200,cudaLaunchKernel\n\n"
    )
    path = tmp_path / "stats.csv"
    path.write_text(calls)
    assert nsys_stats.read_summary(path).report == "calls"
    path.write_text(calls + SUMMARY)
    assert len(nsys_stats.read_summary(path).rows) == 2, "kernels are preferred"


def test_the_trace_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "rank2_gpu_trace.csv"
    path.write_text("Processing...\n" + TRACE)
    assert require_format(path).name == "nsys_stats"
    (timeline,) = nsys_stats.read(path)
    timeline = finish(timeline)
    assert timeline.rank == 2
    copy, kernel, fill = range(3)
    assert timeline.core["kind"].tolist() == [COPY, KERNEL, SET]
    assert timeline.text("name", copy) == "Memcpy HtoD (Pinned -> Device)"
    assert timeline.at("bytes", copy) == 4_194_000
    assert timeline.text("name", fill) == "Memset (Device)"
    assert (timeline.at("start_ns", kernel), timeline.at("end_ns", kernel)) == (2000, 9072)
    assert timeline.text("grid", kernel) == "[4096, 1, 1]"
    assert timeline.at("shared_memory", kernel) == 1000
    assert (timeline.at("device", kernel), timeline.at("stream", kernel), timeline.at("correlation", kernel)) == (
        1,
        7,
        128,
    )
    assert timeline.metadata["devices"] == [{"id": 1, "name": "NVIDIA H100"}]
    assert timeline.repairs == {"rows without a usable time or name were left out": 1}


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("94.645 ms", None, 94.645e-3),
        ("1,234.5 μs", None, 1.2345e-3),
        ("845 ns", None, 845e-9),
        ("2 s", "ns", 2.0),
        ("12", "us", 12e-6),
        ("3.1e+02", "ms", 0.31),
        ("-5", "s", -5.0),
        ("", "s", None),
        ("N/A", "s", None),
        ("5 parsec", "s", None),
        ("1" * 500, "s", None),
    ],
)
def test_quantities(text: str, unit: str | None, value: float | None) -> None:
    found = nsys_stats.parse_quantity(text, unit, nsys_stats._SECONDS)
    assert found == (None if value is None else pytest.approx(value))


@given(st.text(max_size=80), st.sampled_from([None, "ns", "s"]))
def test_any_text_is_a_quantity_or_none(text: str, unit: str | None) -> None:
    found = nsys_stats.parse_quantity(text, unit, nsys_stats._SECONDS)
    assert found is None or isinstance(found, float)


@pytest.mark.parametrize(
    "content", ["", "a,b\n1,2\n", "Start,Duration,Strm,Name\n", 'Start,Duration,Strm,Name\n1,2,3,"' + "x" * 200_000]
)
def test_what_is_no_trace_table_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(BadInputError) as caught:
        nsys_stats.read(path)
    assert str(path) in (caught.value.where or "")


@needs_shared
@pytest.mark.parametrize(
    ("file", "total_s", "nccl", "moe"), [("EPLB_off.csv", 212.53, 40.45, 49.12), ("EPLB_on.csv", 224.51, 41.22, 49.08)]
)
def test_public_summaries(file: str, total_s: float, nccl: float, moe: float) -> None:
    path = SHARED / file
    assert nsys_stats.sniff_summary(path.read_bytes()[: 1 << 16], path)
    summary = nsys_stats.read_summary(path)
    assert len(summary.rows) == 94
    assert summary.total_s == pytest.approx(total_s, abs=0.01)
    shares = {name: 100 * seconds / summary.total_s for name, seconds in summary.seconds_by_category().items()}
    assert shares["communication"] == pytest.approx(nccl, abs=0.005)
    assert shares["moe"] == pytest.approx(moe, abs=0.005)
    assert shares.get("other", 0) < 0.1
    assert all(row.mean_s * row.count == pytest.approx(row.total_s, rel=7e-4) for row in summary.rows)


def test_a_cut_packed_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cuda_gpu_trace.csv.gz"
    head = "Start (ns),Duration (ns),CorrId,Device,Strm,Name\n"
    numbers = random.Random(5)
    rows = [f"{at * 100},{numbers.randint(10, 99)},{at},H (0),7,k{numbers.random()}\n" for at in range(5_000)]
    packed = gzip.compress((head + "".join(rows)).encode())
    path.write_bytes(packed)
    (timeline,) = nsys_stats.read(path)
    assert (len(timeline), timeline.repairs) == (5_000, {})
    path.write_bytes(packed[: len(packed) // 2])
    (timeline,) = nsys_stats.read(path)
    assert 1_000 < len(timeline) < 4_000
    assert any("the packed file ends too early" in what for what in timeline.repairs)
    last = len(timeline) - 1
    assert rows[last].strip().endswith(str(timeline.text("name", last)))


def test_cut_packed_sums_are_told(tmp_path: Path) -> None:
    path = tmp_path / "cuda_gpu_kern_sum.csv.gz"
    table = "Time (%),Total Time (ns),Instances,Name\n" + "".join(
        f"1.0,{n}00,{n + 1},kernel{n}\n" for n in range(1, 99)
    )
    path.write_bytes(gzip.compress(table.encode())[:-12])
    found = nsys_stats.read_summary(path)
    assert any("the packed file ends too early" in what for what in found.repairs)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Opened, it would wait for a writer for ever."""
    pipe = tmp_path / "report.sqlite"
    os.mkfifo(pipe)
    with pytest.raises(BadInputError, match="is a pipe"):
        nsys_sqlite.read(pipe)
