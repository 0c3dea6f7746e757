"""The answer: the right class, the right advice and the right numbers for steps whose reason is known."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from trace_samples import timelines

from stepscope.analyze.answers.compose import CLASSES, answer
from stepscope.analyze.answers.facts import class_times, collective_times, spell_communication
from stepscope.analyze.critical.model import build_graph
from stepscope.analyze.critical.what_if import find_limits
from stepscope.analyze.job import JobReport
from stepscope.core.units import format_duration
from stepscope.formats.timeline import ANNOTATION, Timeline
from stepscope.report.trace_page import render_page
from stepscope.report.trace_text import format_job
from trace_jobs import (
    ALL_REDUCE,
    TraceDraft,
    communication_bound,
    compute_bound,
    copy_bound,
    host_bound,
    on_cpu,
    report_job,
    straggling,
    sync_bound,
)


def job_of(*drafts: TraceDraft) -> JobReport:
    return report_job([draft.build() for draft in drafts])


@pytest.mark.parametrize(
    ("draft", "bound_by", "advised", "number"),
    [
        (host_bound(), "host", "CUDA graphs", "40 launches"),
        (compute_bound(), "compute", "TF32", "972.0 µs"),
        (communication_bound(), "communication", "bucket_cap_mb", "874.0 µs"),
        (copy_bound(), "copies", "pin_memory", "880.0 µs for 8 MiB"),
        (sync_bound(), "synchronisation", "aten::item (cudaStreamSynchronize)", "818.0 µs"),
        (on_cpu(), "compute", "aten::addmm", "690.0 µs"),
    ],
    ids=["host", "compute", "communication", "copies", "synchronisation", "cpu"],
)
def test_each_class_is_found_and_gets_its_advice(draft: TraceDraft, bound_by: str, advised: str, number: str) -> None:
    found = answer(job_of(draft))
    assert found.bound_by == bound_by
    assert advised in found.try_first.action
    assert number in found.try_first.because
    assert found.sentence.startswith("Profiled step 1 takes ")
    assert {one.name for one in found.classes} == set(CLASSES)
    assert 1 <= len(found.points) <= 6
    assert [point.time_s for point in found.points] == sorted((point.time_s for point in found.points), reverse=True)


def test_a_straggler_is_named_with_its_lateness() -> None:
    found = answer(job_of(*straggling()))
    assert found.bound_by == "stragglers"
    assert "rank 3" in found.try_first.action
    assert "more to compute" in found.try_first.action
    assert "rank 3 comes last to 8 collectives" in found.try_first.because
    assert "rank 0, and about as long on all 4 ranks" in found.sentence
    assert "exposed all-reduce" in found.sentence


def test_a_rank_that_begins_late_is_told_from_a_slow_one() -> None:
    """The same work everywhere; one rank begins each step, and so its first all-reduce, 700 µs after the others."""
    drafts = []
    for rank in range(4):
        draft = TraceDraft(rank, 4)
        late = 700 if rank == 2 else rank
        for step in range(4):
            draft.step(2000 * step + late, 2000 * step + 1000, step)
        for number in range(24):
            begin, place = 2000 * (number // 6), number % 6
            at, end = (late + 10, 760) if place == 0 else (760 + place * 30, 780 + place * 30)
            at, end = begin + at, begin + end
            draft.operator("c10d::allreduce_", at, at + 8)
            draft.work(ALL_REDUCE, at + 10, end, at=at + 2, stream=20, collective="allreduce", group="0", group_size=4,
                       group_ranks="[0, 1, 2, 3]", dtype="Float", in_elements=64, out_elements=64,
                       collective_sequence=number)  # fmt: skip
            draft.call("cudaDeviceSynchronize", at + 9, end + 2)
        drafts.append(draft)
    found = answer(job_of(*drafts))
    assert found.bound_by == "stragglers"
    assert found.try_first.action.startswith("look at what rank 2 does before the step")
    assert "begins the step 698.0 µs after the median rank" in found.try_first.because


def test_nobody_is_named_for_noise() -> None:
    """Late once in six calls of one step: somebody always comes last."""
    drafts = []
    for rank in range(4):
        draft = TraceDraft(rank, 4)
        draft.step(0, 1000)
        for number in range(6):
            late = 700 if (rank, number) == (2, 0) else rank
            at, end = (late + 10, 760) if number == 0 else (760 + number * 30 + rank % 2, 780 + number * 30)
            draft.operator("c10d::allreduce_", at, at + 8)
            draft.work(ALL_REDUCE, at + 10, end, at=at + 2, stream=20, collective="allreduce", group="0", group_size=4,
                       group_ranks="[0, 1, 2, 3]", dtype="Float", in_elements=64, out_elements=64,
                       collective_sequence=number)  # fmt: skip
            draft.call("cudaDeviceSynchronize", at + 9, end + 2)
        drafts.append(draft)
    job = job_of(*drafts)
    assert job.across is not None
    assert job.across.stragglers.stragglers == []
    found = answer(job)
    told = " ".join([found.try_first.action, *(point.text for point in found.points)])
    assert "which one is late cannot be told" in found.try_first.action
    assert "rank 2" not in told
    assert "now and then" not in told


def test_the_slowest_rank_is_called_so_beyond_noise_only() -> None:
    job = job_of(*straggling())
    first = job.ranks[0]

    def sentence(*steps_s: float) -> str:
        ranks = [msgspec.structs.replace(first, rank=rank, step_s=step_s) for rank, step_s in enumerate(steps_s)]
        return answer(msgspec.structs.replace(job, ranks=ranks)).sentence

    assert "rank 0, the slowest of 3" in sentence(4e-3, 3.9e-3, 3e-3)
    assert "rank 0, among the slowest of 3" in sentence(4e-3, 3.99e-3, 3e-3)
    assert "rank 0, and about as long on all 3 ranks" in sentence(4e-3, 3.99e-3, 3.98e-3)


def test_a_late_rank_that_the_answer_is_about_is_the_advice() -> None:
    """Asked about the rank that computes longest, the answer is not faster kernels but evener work."""
    timelines = [draft.build() for draft in straggling()]
    job = report_job(timelines)
    about_late = msgspec.structs.replace(job, telling_rank=3, detail=job.details[3], critical=None)
    found = answer(about_late)
    assert found.bound_by == "compute"
    assert found.try_first.action == "look at rank 3: it has more to compute; share the work out more evenly"
    assert not any("straggler" in point.text for point in found.points), "said once"


def test_what_if_makes_the_bound_exact() -> None:
    timeline = host_bound().build()
    job = report_job([timeline])
    limits = find_limits(build_graph(timeline, job.step))
    found = answer(job, limits=limits)
    device = next(limit for limit in limits if limit.name == "device-bound")
    assert found.try_first.limit_s == device.step_s
    assert f"costs nothing a step takes {format_duration(device.step_s)} instead of" in found.try_first.because
    assert "× faster" in found.try_first.because
    assert answer(job).try_first.limit_s is None


def test_host_time_comes_with_a_warning_about_the_profiler() -> None:
    caution = answer(job_of(host_bound())).caution
    assert caution is not None
    assert "2.6 to 5.7 times" in caution
    assert answer(job_of(compute_bound())).caution is None


def test_loading_data_is_named() -> None:
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.host(ANNOTATION, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 700)
    draft.operator("aten::mm", 710, 730)
    draft.work("ampere_sgemm_128x64_nn", 725, 990, at=715)
    found = answer(job_of(draft))
    assert found.bound_by == "host"
    assert "num_workers" in found.try_first.action


def test_a_long_runtime_call_is_start_up_or_named() -> None:
    draft = TraceDraft()
    draft.step(0, 1_000_000)
    draft.operator("aten::empty", 10, 800_000)
    draft.call("cudaMalloc", 20, 799_000)
    draft.operator("aten::mm", 800_010, 800_030)
    draft.work("ampere_sgemm_128x64_nn", 800_025, 900_000, at=800_015)
    found = answer(job_of(draft))
    assert found.bound_by == "host"
    assert found.try_first.action.startswith("record steps after a warm-up: cudaMalloc")


def test_one_long_gap_is_not_blamed_on_launching() -> None:
    draft = TraceDraft()
    draft.step(0, 10_000)
    draft.operator("aten::mm", 1, 9)
    draft.work("ampere_sgemm_128x64_nn", 10, 60, at=4)
    draft.operator("aten::mm", 9000, 9010)
    draft.work("ampere_sgemm_128x64_nn", 9011, 9990, at=9004)
    found = answer(job_of(draft))
    assert found.bound_by == "host"
    assert "with_stack=True" in found.try_first.action
    assert "2 gaps there" in found.try_first.because


def test_many_small_collectives_should_be_joined() -> None:
    draft = TraceDraft()
    draft.step(0, 1000)
    for number in range(8):
        draft.operator("c10d::allreduce_", number * 10 + 1, number * 10 + 9)
        draft.work(ALL_REDUCE, 20 + number * 120, 138 + number * 120, at=number * 10 + 3,
                   stream=20, collective="allreduce", group="0", group_size=8, dtype="Float", in_elements=256,
                   out_elements=256)  # fmt: skip
    draft.call("cudaDeviceSynchronize", 90, 990)
    found = answer(job_of(draft))
    assert found.bound_by == "communication"
    assert found.try_first.action.startswith("join small all-reduce calls")


def test_what_neither_view_shows_cannot_bind() -> None:
    """A device half busy behind a host that never rests: the host binds it, though compute has the larger share."""
    job = job_of(host_bound())
    shares = job.detail.breakdown.breakdown_s
    busy = msgspec.structs.replace(shares, compute=shares.host_idle + shares.compute - 0.0009, host_idle=0.0009)
    detail = msgspec.structs.replace(
        job.detail, breakdown=msgspec.structs.replace(job.detail.breakdown, breakdown_s=busy)
    )
    found = class_times(msgspec.structs.replace(job, detail=detail))
    assert found[0].name == "host"
    assert next(one for one in found if one.name == "compute").time_s < 0.0002
    without_path = msgspec.structs.replace(job, detail=detail, critical=None)
    assert class_times(without_path)[0].name == "compute"


def test_a_trace_that_tells_nothing_stays_open() -> None:
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.builder.add(2, "some_kernel", 10_000, 20_000, device=0, stream=7)
    draft.builder.add(2, "some_kernel", 900_000, 990_000, device=0, stream=7)
    found = answer(job_of(draft))
    assert found.bound_by is None
    assert found.evidence.startswith("Bottleneck unknown: ")
    assert "record the step again" in found.try_first.action


def test_collectives_are_named_exactly() -> None:
    job = job_of(communication_bound())
    assert spell_communication(job) == "all-reduce"
    assert job.across is not None
    row = job.across.table[0]
    several = [
        msgspec.structs.replace(row, collective="all_to_all", total_s=3.0),
        msgspec.structs.replace(row, total_s=1.0),
    ]
    recorded = msgspec.structs.replace(job, across=msgspec.structs.replace(job.across, table=several))
    assert list(collective_times(recorded)) == ["all_reduce"], "the rank's own kernels say it"
    vague = _rename_kernels(recorded, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)")
    assert spell_communication(vague) == "communication (75 % all-to-all, 25 % all-reduce)"


def test_annotations_name_what_kernels_do_not() -> None:
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.host(ANNOTATION, "nccl:all_to_all", 10, 40)
    draft.work("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", 30, 900, at=20, stream=20)
    assert spell_communication(job_of(draft)) == "all-to-all"


def _rename_kernels(job: JobReport, name: str) -> JobReport:
    kernels = job.detail.kernels
    rows = [
        msgspec.structs.replace(row, name=name) if kernels.names[row.name].category == "communication" else row
        for row in kernels.by_name.rows
    ]
    names = {
        **kernels.names,
        name: msgspec.structs.replace(next(iter(kernels.names.values())), category="communication"),
    }
    changed = msgspec.structs.replace(kernels, by_name=msgspec.structs.replace(kernels.by_name, rows=rows), names=names)
    return msgspec.structs.replace(job, detail=msgspec.structs.replace(job.detail, kernels=changed))


def test_answers_become_json() -> None:
    found = answer(job_of(host_bound()))
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


@settings(max_examples=20, deadline=None)
@given(timelines())
def test_any_trace_gets_an_answer_and_views(timeline: Timeline) -> None:
    job = report_job([replace(timeline, rank=0)])
    found = answer(job)
    assert found.try_first.action
    text = format_job(job, found)
    assert len(text.splitlines()) <= 60
    assert "nan" not in text.split()
    assert render_page(job, found, lambda _rank: timeline)
