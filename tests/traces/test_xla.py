"""Traces of XLA programs: what occupies a device, what only lies over it, and pairs of starts and dones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import BadInputError
from stepscope.formats import classify as classes
from stepscope.formats.readers import xla
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    DEVICE_ANNOTATION,
    KERNEL,
    OPERATOR,
    PYTHON,
    SET,
    Timeline,
)
from stepscope.traces.finish import finish
from stepscope.traces.read import require_format


def process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def line(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def event(pid: int, tid: int, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}


def tpu(pid: int = 3, device: str = "/device:TPU:0") -> list[dict[str, Any]]:
    return [process(pid, device), line(pid, 1, "Steps"), line(pid, 2, "XLA Modules"), line(pid, 3, "XLA Ops")]


START = "%all-gather-start.7 = (bf16[128,8]{1,0}, bf16[512,8]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3}}"
DONE = "%all-gather-done.7 = bf16[512,8] all-gather-done(%all-gather-start.7)"
REDUCE = "%all-reduce.1 = f32[1024]{0:T(1024)} all-reduce(%fusion.2), channel_id=1, replica_groups=[2,4]<=[8]"
COPY_START = "%copy-start.2 = (f32[64]{0:S(1)}, f32[64]{0}, u32[]) copy-start(f32[64] %x)"
COPY_DONE = "%copy-done.2 = f32[64]{0:S(1)} copy-done(%copy-start.2)"
KERNEL_DETAILS = "regs:32 static_shared:0 grid:8,1,1 block:128,1,1 occ_pct:87.5"
COPY_DETAILS = "kind_src:pinned kind_dst:device size:64 dest:0 async:1"

TRAINING = [
    *tpu(),
    process(701, "/host:CPU"),
    line(701, 9, "python"),
    event(701, 9, "$train.py:12 step", 90, 30),
    event(701, 9, "PjitFunction(step)", 95, 20),
    event(3, 1, "4", 100, 50),
    event(3, 1, "5", 150, 50),
    event(3, 2, "jit_step(123)", 100, 50),
    event(3, 3, "while.1", 100, 45, hlo_category="while"),
    event(3, 3, "fusion.2", 100, 20, hlo_category="convolution fusion", tf_op="jit(f)/dot_general:", model_flops="128"),
    event(3, 3, "all-gather-start.7", 120, 1, hlo_category="all-gather", long_name=START),
    event(3, 3, "fusion.3", 121, 9.5, hlo_category="loop fusion", bytes_accessed="4096"),
    event(3, 3, "all-gather-done.7", 130.5, 4.5, hlo_category="all-gather", long_name=DONE),
    event(3, 3, "all-reduce.1", 140, 5, hlo_category="all-reduce", long_name=REDUCE),
    event(3, 3, "copy-start.2", 150, 1, long_name=COPY_START),
    event(3, 3, "copy-done.2", 160, 1, long_name=COPY_DONE),
    event(3, 3, "convolution.9", 165, 5, hlo_category="convolution", tf_op="jit(step)/conv_general_dilated"),
    {},
]  # fmt: skip


def read(tmp_path: Path, events: list[Any]) -> list[Timeline]:
    path = tmp_path / "host.trace.json"
    path.write_text(json.dumps({"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events}))
    assert require_format(path).name == "xla"
    return xla.read(path)


def named(timeline: Timeline, kind: int) -> dict[str, int]:
    return {str(timeline.text("name", row)): int(row) for row in timeline.rows(kind)}


def test_sniffing() -> None:
    text = json.dumps({"metadata": {"highres-ticks": True}, "traceEvents": TRAINING}).encode()
    assert xla.sniff(text, Path("x"))
    assert not xla.sniff(b'{"schemaVersion": 1, "traceEvents": [{"name": "/device:TPU:0"}]}', Path("x"))
    assert not xla.sniff(b'{"nodes": ["XLA Ops"]}', Path("x"))


def test_operations_are_work_and_the_rest_lies_over_them(tmp_path: Path) -> None:
    (timeline,) = read(tmp_path, TRAINING)
    assert timeline.rank == 0
    kernels = named(timeline, KERNEL)
    assert set(kernels) == {"fusion.2", "fusion.3", "all-gather.7", "all-reduce.1", "convolution.9"}
    over = named(timeline, DEVICE_ANNOTATION)
    assert {"4", "5", "jit_step(123)", "while.1", "all-gather-start.7", "all-gather-done.7"} <= set(over)
    assert named(timeline, PYTHON).keys() == {"$train.py:12 step"}
    assert named(timeline, ANNOTATION).keys() == {"PjitFunction(step)"}
    arguments = json.loads(timeline.text("arguments", kernels["fusion.2"]) or "")
    assert arguments["model_flops"] == "128"
    assert timeline.metadata["device_type"] == "TPU"
    assert not timeline.repairs


def test_a_start_and_its_done_are_one_operation(tmp_path: Path) -> None:
    (timeline,) = read(tmp_path, TRAINING)
    row = named(timeline, KERNEL)["all-gather.7"]
    assert (timeline.at("start_ns", row), timeline.at("end_ns", row)) == (120_000, 135_000)
    assert timeline.text("collective", row) == "all-gather"
    assert timeline.at("group_size", row) == 4
    assert timeline.text("group_ranks", row) == "[0, 1, 2, 3]"
    assert timeline.text("dtype", row) == "bfloat16"
    assert (timeline.at("in_elements", row), timeline.at("out_elements", row)) == (1024, 4096)
    (copy,) = named(timeline, COPY).items()
    assert copy[0] == "copy.2"
    assert timeline.at("bytes", copy[1]) == 256
    assert (timeline.at("start_ns", copy[1]), timeline.at("end_ns", copy[1])) == (150_000, 161_000)
    assert timeline.metadata["joined_pairs"] == 2


def test_finished_timelines(tmp_path: Path) -> None:
    (timeline,) = (finish(one) for one in read(tmp_path, TRAINING))
    kernels = named(timeline, KERNEL)
    for name in ("all-gather.7", "all-reduce.1"):
        assert timeline.core["category"][kernels[name]] == classes.COMMUNICATION
    assert [(span.number, span.start_ns, span.end_ns) for span in timeline.steps] == [
        (4, 100_000, 150_000),
        (5, 150_000, 200_000),
    ]
    assert timeline.step_marker == "annotation Steps"
    assert timeline.core["step"][kernels["fusion.2"]] == 4
    assert timeline.core["step"][kernels["convolution.9"]] == 5


def test_the_category_of_the_compiler_is_handed_on(tmp_path: Path) -> None:
    (timeline,) = read(tmp_path, TRAINING)
    kernels = named(timeline, KERNEL)
    found = {name: timeline.core["category"][kernels[name]] for name in ("fusion.2", "fusion.3", "convolution.9")}
    assert found == {"fusion.2": classes.GEMM, "fusion.3": classes.ELEMENTWISE, "convolution.9": classes.CONVOLUTION}


def test_a_timeline_for_every_device(tmp_path: Path) -> None:
    events = [
        *tpu(3, "/device:TPU:0"),
        *tpu(4, "host-1 /device:TPU:1"),
        process(701, "/host:CPU"),
        event(701, 1, "host", 0, 5),
        event(3, 3, "fusion", 0, 5),
        event(4, 3, "fusion", 1, 5),
    ]
    first, second = read(tmp_path, events)
    assert (first.rank, second.rank) == (0, 1)
    assert (len(first), len(second)) == (2, 1)
    assert first.metadata["host_rows"] == "here"
    assert second.metadata["host_rows"] == "with the first device"
    assert second.at("device", 0) == 1


def test_pairs_are_found_by_number_and_by_order(tmp_path: Path) -> None:
    events = [
        *tpu(),
        event(3, 3, "all-reduce-start.1", 0, 1),
        event(3, 3, "all-reduce-start.2", 1, 1),
        event(3, 3, "all-reduce-done.2", 5, 1),
        event(3, 3, "all-reduce-done", 7, 1),
        event(3, 3, "send.3", 10, 1),
        event(3, 3, "send-done.3", 20, 1),
        event(3, 3, "recv-done.9", 30, 1),
        event(3, 3, "collective-permute-start.4", 40, 1),
    ]
    (timeline,) = read(tmp_path, events)
    rows = named(timeline, KERNEL)
    spans = {name: (timeline.at("start_ns", row), timeline.at("end_ns", row)) for name, row in rows.items()}
    assert spans == {
        "all-reduce.1": (0, 8000),
        "all-reduce.2": (1000, 6000),
        "send.3": (10_000, 21_000),
        "recv-done.9": (30_000, 31_000),
        "collective-permute-start.4": (40_000, 41_000),
    }
    assert timeline.repairs == {
        "asynchronous operations without a start were read as they stand": 1,
        "asynchronous operations without an end were read as they stand": 1,
    }


def test_repeated_steps_pair_their_own(tmp_path: Path) -> None:
    events = tpu()
    for step in range(3):
        at = step * 100
        events += [event(3, 3, "all-reduce-start.1", at, 1), event(3, 3, "all-reduce-done.1", at + 50, 5)]
    (timeline,) = read(tmp_path, events)
    rows = timeline.rows(KERNEL)
    assert (timeline.core["end_ns"][rows] - timeline.core["start_ns"][rows]).tolist() == [55_000] * 3


def test_devices_with_streams(tmp_path: Path) -> None:
    events = [
        process(1, "/device:GPU:0"),
        line(1, 13, "Stream #13(Kernel,MemcpyH2D)"),
        line(1, 20, "XLA Ops"),
        event(1, 20, "fusion.1", 0, 10),
        event(1, 13, "loop_add_fusion", 0, 10, kernel_details=KERNEL_DETAILS),
        event(1, 13, "MemcpyH2D", 12, 2, memcpy_details=COPY_DETAILS, correlation_id="5"),
        event(1, 13, "Memset", 15, 1),
        event(1, 13, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 16, 4),
    ]  # fmt: skip
    (timeline,) = (finish(one) for one in read(tmp_path, events))
    kernels = named(timeline, KERNEL)
    assert set(kernels) == {"loop_add_fusion", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"}, (
        "operations repeat the streams"
    )
    assert timeline.text("grid", kernels["loop_add_fusion"]) == "[8, 1, 1]"
    assert timeline.at("occupancy", kernels["loop_add_fusion"]) == 87.5
    ((name, copy),) = named(timeline, COPY).items()
    assert name == "Memcpy HtoD (Pinned -> Device)"
    assert (timeline.at("bytes", copy), timeline.at("correlation", copy), timeline.at("stream", copy)) == (64, 5, 13)
    assert len(timeline.rows(SET)) == 1


def test_modules_are_steps_where_there_are_no_others(tmp_path: Path) -> None:
    events = [*tpu(), *(event(3, 2, "jit_step(1)", at, 8) for at in (0, 10, 20)), event(3, 2, "jit_init(2)", 30, 1)]
    (timeline,) = read(tmp_path, [*events, event(3, 3, "fusion", 0, 1)])
    assert [span.number for span in timeline.steps] == [0, 1, 2]
    assert timeline.step_marker == "annotation jit_step(1)"


def test_a_file_without_devices(tmp_path: Path) -> None:
    events = [process(1, "/host:CPU"), event(1, 2, "dot.3", 0, 4, hlo_op="dot.3"), event(1, 2, "ExecuteHelper", 0, 9)]
    (timeline,) = read(tmp_path, events)
    assert timeline.rank is None
    assert named(timeline, OPERATOR).keys() == {"dot.3"}
    assert not len(finish(timeline).rows(KERNEL))


def test_neighbours_do_not_overlap_by_rounding(tmp_path: Path) -> None:
    events = [*tpu(), event(3, 3, "a", 0.0005, 0.0009), event(3, 3, "b", 0.0014, 0.0009)]
    (timeline,) = read(tmp_path, events)
    a, b = (named(timeline, KERNEL)[name] for name in "ab")
    assert (timeline.at("end_ns", a) or 0) <= (timeline.at("start_ns", b) or 0)


def test_odd_events_are_left_out_and_counted(tmp_path: Path) -> None:
    events = [
        *tpu(),
        event(3, 3, "good", 0, 1),
        {"ph": "X", "pid": 3, "tid": 3, "name": "no time"},
        {"ph": "X", "pid": 3, "tid": 3, "name": "bad time", "ts": "soon", "dur": 1},
        {"ph": "X", "pid": 3, "tid": 3, "name": "no length", "ts": 5, "dur": "x"},
        {"ph": "X", "pid": 3, "tid": 3, "name": "negative", "ts": 6, "dur": -5},
        {"ph": "X", "pid": 3, "tid": 3, "name": "odd arguments", "ts": 7, "dur": 1, "args": [1]},
        {"ph": "X", "pid": [1], "tid": 3, "name": "odd process", "ts": 8, "dur": 1},
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": 5}},
    ]
    (timeline,) = read(tmp_path, events)
    assert set(named(timeline, KERNEL)) == {"good", "no length", "negative", "odd arguments"}
    counted = {what: count for what, count in timeline.repairs.items() if not what.startswith("(")}
    assert sum(counted.values()) == 6


def test_a_cut_file_keeps_its_beginning(tmp_path: Path) -> None:
    whole = json.dumps({"metadata": {"highres-ticks": True}, "traceEvents": TRAINING})
    path = tmp_path / "cut.trace.json"
    path.write_text(whole[: whole.index("convolution.9")])
    (timeline,) = xla.read(path)
    assert "fusion.3" in named(timeline, KERNEL)
    assert any("ends too early" in what for what in timeline.repairs)


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}', '{"traceEvents": [{}]}', "nothing"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.trace.json"
    path.write_text(text)
    with pytest.raises(BadInputError) as caught:
        xla.read(path)
    assert str(path) in (caught.value.where or "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"1.5", 1_500_000),
        (b"-1.5", -1_500_000),
        (b"0.000001", 1),
        (b"1e-3", 1000),
        (b'"7"', 7_000_000),
        (b"", None),
        (b"x", None),
    ],
)
def test_picoseconds(text: bytes, value: int | None) -> None:
    assert xla.parse_picoseconds(text) == value


def test_operations_in_words() -> None:
    assert xla.parse_operation("all-reduce-scatter.4") == ("reduce-scatter", "")
    assert xla.parse_operation("fusion.4", "all-gather fusion") == ("all-gather", "")
    assert xla.parse_operation("copy.4") is None, "a copy in place is a kernel"
    assert xla.parse_operation("all-reduced_sum") is None
    assert xla.parse_groups("replica_groups=[4,2]<=[2,4]T(1,0)") == (2, None)
    assert xla.parse_groups("replica_groups={}") == (None, None)
    assert xla.parse_shapes("(f32[2,3], s8[], f8e4m3fn[4])") == [("f32", 6), ("s8", 1), ("f8e4m3fn", 4)]
    assert xla.array_bytes("f8e4m3fn", 4) == 4
    scatter = "%reduce-scatter.1 = f32[16]{0} reduce-scatter(f32[64] %x), replica_groups={{0,1,2,3}}"
    columns = xla.collective_columns(xla.DataMovement("reduce-scatter", ""), scatter)
    assert (columns["in_elements"], columns["out_elements"], columns["dtype"]) == (64, 16, "float32")


@given(st.text(max_size=200))
def test_any_text_is_read(text: str) -> None:
    xla.parse_operation(text, text)
    xla.parse_groups(f"replica_groups={text}")
    xla.collective_columns(xla.DataMovement("all-gather", "start"), f"%x = {text} all-gather(")
    xla.started_by(text)


def write_with(tmp_path: Path, more: str) -> tuple[Path, int]:
    """A trace with more text at the end of its list, and where that begins."""
    text = json.dumps({"metadata": {"highres-ticks": True}, "traceEvents": [*tpu(), event(3, 3, "good", 0, 1)]})
    path = tmp_path / "odd.trace.json"
    path.write_text(f"{text[:-2]}, {more}]}}")
    return path, len(text)


@pytest.mark.parametrize("depth", [300, 900, 5_000, 100_000])
@pytest.mark.parametrize("key", ["args", "name"])
def test_deep_events_cost_only_themselves(tmp_path: Path, depth: int, key: str) -> None:
    deep = '{"long_name":' * depth + "1" + "}" * depth
    path, _ = write_with(tmp_path, f'{{"ph":"X","pid":3,"tid":3,"ts":9,"dur":1,"{key}":{deep}}}')
    (timeline,) = xla.read(path)
    assert "good" in named(timeline, KERNEL)


def test_damage_is_counted_with_its_place(tmp_path: Path) -> None:
    path, place = write_with(tmp_path, '{"ph":"X","pid":3,"tid":3,"ts":no}, 5, {"ph":"X","pid":[1],"ts":1}')
    (timeline,) = xla.read(path)
    assert timeline.repairs["events that are no valid JSON were left out"] == 2
    assert timeline.repairs["sections between events that are no JSON were left out"] == 1
    assert timeline.repairs[f"(the first damage is at byte {place})"] == 1
