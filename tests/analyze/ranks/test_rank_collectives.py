"""Calls of one rank, from hand-made timelines and from real traces."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated_ranks import US, Call, collective_fields, real_timeline

from stepscope.analyze.ranks.collective_table import list_collectives
from stepscope.analyze.ranks.collectives import collective_calls
from stepscope.analyze.ranks.digest import RankDigest, digest
from stepscope.formats.timeline import ANNOTATION, COPY, KERNEL, OPERATOR, PYTHON, RUNTIME, Timeline, TimelineBuilder
from stepscope.traces.finish import finish

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevComm*)"
GENERIC = "ncclDevKernel_Generic(ncclDevComm*)"


def _finish(builder: TimelineBuilder, *, rank: int = 0, world_size: int | None = 2) -> Timeline:
    return finish(builder.build(rank=rank, world_size=world_size))


def _launch(builder: TimelineBuilder, kernel: str, start: int, end: int, number: int, **fields: object) -> None:
    builder.add(RUNTIME, "cudaLaunchKernel", start - 5, start - 4, thread=(1, 1), correlation=number)
    builder.add(KERNEL, kernel, start, end, device=0, stream=20, correlation=number, **fields)


def test_the_host_record_gives_what_the_kernel_lacks() -> None:
    builder = TimelineBuilder()
    call = Call("_allgather_base", (0, 1, 2, 3), 1000, name="5", description="tp", dtype="BFloat16")
    record = {**collective_fields(call), "collective_sequence": 77}
    builder.add(OPERATOR, "record_param_comms", 0, 100, thread=(1, 1), **record)
    builder.add(PYTHON, "inner", 10, 90, thread=(1, 1))
    _launch(builder, GENERIC, 50, 2050, 1)
    (found,) = list_collectives(_finish(builder, world_size=4))
    assert (found.collective, found.named_by, found.place) == ("all_gather", "arguments", "device")
    assert (found.dtype, found.size_bytes, found.size_unknown) == ("bfloat16", 8000, None)
    assert (found.group.name, found.group.description, found.group.members) == ("5", "tp", "0-3")
    assert (found.call, found.sequence, found.stream, found.pieces) == (1, 77, 20, 1)
    assert found.duration_s == pytest.approx(2e-6)
    assert found.algbw_bytes_per_s == pytest.approx(4e9)
    assert found.busbw_bytes_per_s == pytest.approx(3e9)


def test_fields_on_the_kernel_come_first() -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "record_param_comms", 0, 100, thread=(1, 1), **collective_fields(Call("allreduce")))
    _launch(builder, GENERIC, 50, 60, 1, **collective_fields(Call("broadcast", elements=7, dtype="Long")))
    (found,) = list_collectives(_finish(builder))
    assert (found.collective, found.size_bytes, found.dtype) == ("broadcast", 56, "int64")


def test_kernels_of_one_record_are_one_call() -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "record_param_comms", 0, 100, thread=(1, 1), **collective_fields(Call("all_to_all")))
    for number, start in enumerate((50, 70, 90)):
        _launch(builder, SEND_RECV, start, start + 10, number + 1)
    builder.add(OPERATOR, "record_param_comms", 200, 300, thread=(1, 1), **collective_fields(Call("all_to_all")))
    _launch(builder, SEND_RECV, 250, 260, 9)
    first, second = list_collectives(_finish(builder))
    assert (first.pieces, first.start_ns, first.end_ns, first.call) == (3, 50, 100, 1)
    assert (second.pieces, second.call) == (1, 2)


def test_an_annotation_names_what_has_no_record() -> None:
    builder = TimelineBuilder()
    shapes = {"shapes": "[[6144]]", "types": '["float"]'}
    builder.add(ANNOTATION, "nccl:all_to_all", 0, 100, thread=(1, 1), **shapes)
    _launch(builder, SEND_RECV, 50, 60, 1)
    builder.add(ANNOTATION, "nccl:_all_gather_base", 200, 300, thread=(1, 1), **shapes)
    _launch(builder, GENERIC, 250, 260, 2)
    first, second = list_collectives(_finish(builder))
    assert (first.collective, first.named_by, first.size_bytes, first.note) == ("all_to_all", "annotation", 24576, None)
    assert first.busbw_bytes_per_s is None, "the group is not known"
    assert first.group.stand_in == "communication stream 1"
    assert (second.collective, second.size_bytes) == ("all_gather", None)
    assert second.size_unknown == "the group's size is not recorded, and this size is a multiple of it"


def test_a_kernel_alone_says_little_and_that_is_said() -> None:
    builder = TimelineBuilder()
    builder.add(KERNEL, SEND_RECV, 50, 60, device=0, stream=20)
    builder.add(KERNEL, "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", 70, 80, device=0, stream=21)
    first, second = list_collectives(_finish(builder))
    assert (first.collective, first.named_by, first.size_bytes) == ("send_recv", "kernel name", None)
    assert first.note is not None
    assert "all_to_all looks the same" in first.note
    assert first.size_unknown == "no collective record: only the kernel's name is known"
    assert (second.collective, second.note) == ("all_reduce", None)
    assert [call.group.stand_in for call in (first, second)] == ["communication stream 1", "communication stream 2"]


def test_reasons_for_unknown_sizes() -> None:
    builder = TimelineBuilder()
    for number, fields in enumerate(
        (
            {"collective": "barrier", "group": "0"},
            {"collective": "allreduce", "group": "0", "dtype": "Float"},
            {"collective": "allreduce", "group": "0", "in_elements": 5, "dtype": "Opaque"},
            {"collective": "allreduce", "group": "0", "in_elements": 0, "dtype": "Float"},
        )
    ):
        _launch(builder, GENERIC, 100 * number, 100 * number + 10, number + 1, **fields)
    found = list_collectives(_finish(builder))
    assert [(call.size_bytes, call.size_unknown) for call in found] == [
        (None, "a barrier moves no data"),
        (None, "the number of elements is not recorded"),
        (None, "the element type is not recorded or not known"),
        (0, None),
    ]


def test_an_uneven_all_to_all_counts_what_leaves_the_rank() -> None:
    builder = TimelineBuilder()
    fields = collective_fields(Call("all_to_allv", (4, 5, 6)))
    fields |= {"in_elements": 60, "out_elements": 90, "in_splits": "[1, 2, 3]", "out_splits": "[4, 2, 3]"}
    _launch(builder, SEND_RECV, 0, 280, 1, **fields)
    (found,) = list_collectives(_finish(builder, rank=5))
    assert found.size_bytes == 240
    assert found.busbw_bytes_per_s == pytest.approx(70 * 4 / 280e-9)


def test_waits_are_counted_and_are_no_calls() -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "record_param_comms", 0, 100, thread=(1, 1), **collective_fields(Call()))
    _launch(builder, GENERIC, 50, 60, 1)
    builder.add(OPERATOR, "record_param_comms", 200, 210, thread=(1, 1), collective="wait", group_size=1, dtype="Byte")
    builder.add(OPERATOR, "record_param_comms", 300, 310, thread=(1, 1), **collective_fields(Call("barrier")))
    found = collective_calls(_finish(builder))
    assert len(found.calls) == 1
    assert found.left_out == {"record of wait": 1, "record without device work of its own": 1}


def test_collectives_of_the_host() -> None:
    builder = TimelineBuilder()
    shapes = {"shapes": "[[1000]]", "types": '["float"]'}
    builder.add(ANNOTATION, "gloo:all_reduce", 100, 1100, thread=(1, 2), **shapes)
    builder.add(ANNOTATION, "gloo:barrier", 2000, 2100, thread=(1, 3))
    builder.add(ANNOTATION, "gloo:send", 3000, 3100, thread=(1, 3), **shapes)
    builder.add(ANNOTATION, "gloo:all_reduce", 4000, 4100, thread=(1, 3), **shapes)
    found = list_collectives(_finish(builder))
    assert [(call.collective, call.call, call.size_bytes) for call in found] == [
        ("all_reduce", 1, 4000),
        ("barrier", 2, None),
        ("send", 1, 4000),
        ("all_reduce", 3, 4000),
    ]
    assert {call.place for call in found} == {"host"}
    assert {call.stream for call in found} == {None}


def test_a_recorded_call_of_the_host_without_anything_else() -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "record_param_comms", 0, 100, thread=(1, 1), **collective_fields(Call()))
    builder.add(OPERATOR, "record_param_comms", 200, 210, thread=(1, 1), collective="wait")
    (found,) = list_collectives(_finish(builder))
    assert (found.place, found.collective, found.size_bytes) == ("host call", "all_reduce", 4000)


def test_messages_are_counted_by_peer() -> None:
    builder = TimelineBuilder()
    for number, (name, peer) in enumerate((("send", 1), ("send", 2), ("recv", 1), ("send", 1), ("allreduce", None))):
        fields = {**collective_fields(Call(name, (0, 1, 2))), "peer": peer}
        _launch(builder, SEND_RECV, 100 * number, 100 * number + 10, number + 1, **fields)
    found = list_collectives(_finish(builder, world_size=3))
    assert [(call.collective, call.peer, call.call) for call in found] == [
        ("send", 1, 1),
        ("send", 2, 1),
        ("recv", 1, 1),
        ("send", 1, 2),
        ("all_reduce", None, 1),
    ]


def test_one_step_of_several() -> None:
    builder = TimelineBuilder()
    for step in range(3):
        builder.add(ANNOTATION, f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900, thread=(1, 1))
        builder.add(
            OPERATOR,
            "record_param_comms",
            1000 * step + 10,
            1000 * step + 90,
            thread=(1, 1),
            **collective_fields(Call()),
        )
        _launch(builder, GENERIC, 1000 * step + 50, 1000 * step + 1950, step + 1)
    timeline = _finish(builder)
    assert [(call.step, call.call) for call in list_collectives(timeline)] == [(0, 1), (1, 2), (2, 3)]
    (found,) = list_collectives(timeline, step=1)
    assert (found.step, found.call) == (1, 2), "the number is that of the whole trace"


def test_a_timeline_without_anything() -> None:
    empty = finish(TimelineBuilder().build())
    assert list_collectives(empty) == []
    assert digest(empty).calls == b""


def test_a_digest_counts_work_by_step() -> None:
    builder = TimelineBuilder()
    builder.add(ANNOTATION, "ProfilerStep#4", 0, 100 * US, thread=(1, 1))
    for number, (start, end) in enumerate(((10, 30), (20, 50), (120, 140))):
        builder.add(RUNTIME, "cudaLaunchKernel", number + 1, number + 2, thread=(1, 1), correlation=number + 1)
        builder.add(KERNEL, "gemm", start * US, end * US, device=0, stream=7, correlation=number + 1)
    builder.add(RUNTIME, "cudaMemcpyAsync", 8, 9, thread=(1, 1), correlation=8)
    builder.add(COPY, "Memcpy HtoD", 40 * US, 60 * US, device=0, stream=8, correlation=8)
    builder.add(OPERATOR, "record_param_comms", 10, 12, thread=(1, 1), **collective_fields(Call()))
    builder.add(RUNTIME, "cudaLaunchKernel", 11, 12, thread=(1, 1), correlation=9)
    builder.add(KERNEL, GENERIC, 50 * US, 90 * US, device=0, stream=20, correlation=9)
    found: RankDigest = digest(_finish(builder))
    (step,) = found.steps
    assert (step.number, step.start_ns, step.end_ns) == (4, 0, 140 * US)
    assert step.busy_ns == (60 - 10 + 20) * US
    assert step.communication_ns == 40 * US


# Real traces


def test_a_trace_with_full_records() -> None:
    timeline = real_timeline("hta/nccl_parser_config/nccl_data.json.gz")
    found = list_collectives(timeline)
    assert Counter(call.collective for call in found) == {"all_reduce": 15, "broadcast": 6}
    assert Counter(call.step for call in found) == {4: 7, 5: 7, 6: 7}
    assert {call.named_by for call in found} == {"arguments"}
    assert {(call.group.members, call.group.size, call.group.description) for call in found} == {
        ("0-1", 2, "default_pg")
    }
    assert [call.call for call in found] == list(range(1, 22))
    sizes = [call.size_bytes for call in found if call.step == 4]
    assert sizes == [212480, 424, 8196000, 31502336, 26255360, 26550272, 9724160]
    assert [call.dtype for call in found[:2]] == ["float32", "int64"], "the kernel's name says int8_t"
    largest = found[3]
    assert largest.duration_s == pytest.approx(2.424415e-3)
    assert largest.busbw_bytes_per_s == pytest.approx(31502336 / 2.424415e-3)
    assert collective_calls(timeline).left_out == {"record of wait": 6}


def test_a_trace_without_records() -> None:
    found = list_collectives(real_timeline("param/dlrm8_kineto/worker0_step_12.1694128201545.pt.trace.json.gz"))
    assert [call.collective for call in found] == [
        "all_to_all", "all_to_all", "all_to_all", "all_to_all", "all_reduce", "all_to_all", "all_reduce", "all_reduce",
    ]  # fmt: skip
    assert {call.named_by for call in found} == {"annotation"}
    assert [call.size_bytes for call in found] == [24576, 192, 1536, 13568, 1576964, 24576, 448, 907840]
    assert {call.busbw_bytes_per_s for call in found} == {None}


def test_a_sampled_trace_of_two_communicators() -> None:
    found = list_collectives(real_timeline("hta/timeline_analysis/sampled_rank-0.json.gz"))
    assert Counter(call.group.stand_in for call in found) == {"communication stream 1": 8, "communication stream 2": 2}
    # All kernels are called SendRecv there; the annotations know better.
    assert Counter(call.collective for call in found) == {"all_to_all": 4, "all_reduce": 4, "all_gather": 2}


@pytest.mark.parametrize("name", ["h200/resnet50_b64/kineto.json.gz", "public/hta/critical_path/alexnet"])
def test_traces_without_communication(name: str) -> None:
    timeline = real_timeline(f"../{name}")
    assert list_collectives(timeline) == []
    assert digest(timeline).steps[0].busy_ns
