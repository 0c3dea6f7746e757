"""Jobs made by hand: a few events on one or more ranks, and the report that their traces would give."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analyze.analyses import compute_more
from stepscope.analyze.critical.path import critical_path
from stepscope.analyze.job import JobReport, JobStep, RankSummary
from stepscope.analyze.ranks.digest import digest
from stepscope.analyze.ranks.ranks_report import explain_ranks
from stepscope.analyze.step.report import StepReport, explain_step
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    KERNEL,
    MEMORY,
    OPERATOR,
    RUNTIME,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.finish import finish

US = 1000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


class TraceDraft:
    """One rank's trace; times in microseconds."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.builder = TimelineBuilder()
        self.rank, self.ranks = rank, ranks
        self._next = 1

    def step(self, start: int, end: int, number: int = 1) -> None:
        self.host(ANNOTATION, f"ProfilerStep#{number}", start, end)

    def host(self, kind: int, name: str, start: int, end: int, **values: object) -> None:
        self.builder.add(kind, name, start * US, end * US, thread=(1, 1), **values)

    def operator(self, name: str, start: int, end: int, **values: object) -> None:
        self.host(OPERATOR, name, start, end, **values)

    def call(self, name: str, start: int, end: int, **values: object) -> None:
        self.host(RUNTIME, name, start, end, **values)

    def work(
        self, name: str, start: int, end: int, *, at: int, kind: int = KERNEL, stream: int = 7, **values: object
    ) -> None:
        """Device work with a launch of two microseconds."""
        launcher = "cudaMemcpyAsync" if kind == COPY else "cudaLaunchKernel"
        self.call(launcher, at, at + 2, correlation=self._next)
        self.builder.add(kind, name, start * US, end * US, device=0, stream=stream, correlation=self._next, **values)
        self._next += 1

    def memory(self, time: int, size: int, address: int, total: int) -> None:
        values = {"bytes": size, "address": address, "total_allocated": total, "total_reserved": 1 << 30, "device": 0}
        self.builder.add(MEMORY, "[memory]", time * US, time * US, thread=(1, 1), **values)

    def build(self) -> Timeline:
        metadata = {"format": "drawn", "source": f"rank{self.rank}.json"}
        return finish(self.builder.build(rank=self.rank, world_size=self.ranks, metadata=metadata))


def report_job(timelines: Sequence[Timeline], devices: Sequence[str] = ("NVIDIA H200",)) -> JobReport:
    details = [explain_step(timeline) for timeline in timelines]
    telling = max(details, key=lambda one: one.breakdown.step_s)
    place = details.index(telling)
    return JobReport(
        limits=[],
        source="traces/rank0.json" if len(timelines) == 1 else "traces",
        format="drawn",
        devices=list(devices),
        world_size=len(timelines),
        steps=[
            JobStep(step=span.number, step_s=(span.end_ns - span.start_ns) / 1e9, slowest_rank=telling.rank or 0)
            for span in timelines[place].steps
        ],
        step=telling.step,
        chosen="named by the user",
        ranks=[summarise(detail, timeline) for detail, timeline in zip(details, timelines, strict=True)],
        telling_rank=telling.rank or 0,
        detail=telling,
        details=details,
        across=explain_ranks([digest(timeline) for timeline in timelines]),
        critical=critical_path(timelines[place], telling.step),
        notes=[],
        more=compute_more(timelines[place], telling.step),
    )


def summarise(detail: StepReport, timeline: Timeline) -> RankSummary:
    breakdown = detail.breakdown
    return RankSummary(
        rank=detail.rank or 0,
        source=f"rank{detail.rank}.json",
        step=detail.step,
        step_s=breakdown.step_s,
        breakdown_s=breakdown.breakdown_s,
        device_busy_s=breakdown.device_busy_s,
        kernels=breakdown.kernels,
        copies=breakdown.copies,
        device=breakdown.device,
        hidden_comm_share=breakdown.overlap.hidden_share,
        repairs=dict(timeline.repairs),
    )


def host_bound(kernels: int = 40) -> TraceDraft:
    """Every kernel is launched long after the last one ended."""
    draft = TraceDraft()
    draft.step(0, kernels * 50)
    for number in range(kernels):
        at = number * 50
        draft.operator("aten::add", at + 5, at + 48)
        draft.work("void at::native::vectorized_elementwise_kernel<4, AddFunctor>(int)", at + 46, at + 49, at=at + 40)
    return draft


def compute_bound() -> TraceDraft:
    """All is launched at once; the device is busy to the end."""
    draft = TraceDraft()
    draft.step(0, 1000)
    for number in range(9):
        draft.operator("aten::mm", 10 + number * 10, 18 + number * 10, shapes="[[512, 512], [512, 512]]",
                       types='["float", "float"]')  # fmt: skip
        draft.work("ampere_sgemm_128x64_nn", 20 + number * 108, 128 + number * 108, at=11 + number * 10)
    draft.call("cudaDeviceSynchronize", 110, 994)
    return draft


def communication_bound() -> TraceDraft:
    """A long all-reduce with little compute before it."""
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.operator("aten::mm", 5, 20)
    draft.work("ampere_sgemm_128x64_nn", 15, 115, at=10)
    draft.operator("c10d::allreduce_", 22, 40)
    draft.work(ALL_REDUCE, 116, 990, at=30, stream=20, collective="allreduce", group="0", group_size=8, dtype="Float",
               in_elements=1 << 24, out_elements=1 << 24)  # fmt: skip
    draft.call("cudaDeviceSynchronize", 50, 995)
    return draft


def copy_bound() -> TraceDraft:
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.operator("aten::copy_", 2, 20)
    draft.work(PAGEABLE, 10, 890, at=5, kind=COPY, bytes=8 << 20)
    draft.operator("aten::mm", 30, 50)
    draft.work("ampere_sgemm_128x64_nn", 892, 980, at=35)
    draft.call("cudaDeviceSynchronize", 60, 985)
    return draft


def sync_bound() -> TraceDraft:
    """The host hangs in a blocking call long after the device is done."""
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.operator("aten::mm", 1, 9)
    draft.work("ampere_sgemm_128x64_nn", 10, 60, at=4)
    draft.operator("aten::item", 12, 880)
    draft.call("cudaStreamSynchronize", 14, 878)
    draft.operator("aten::mm", 882, 890)
    draft.work("ampere_sgemm_128x64_nn", 891, 990, at=884)
    return draft


def straggling(ranks: int = 4, calls: int = 8, late: int = 3) -> list[TraceDraft]:
    """One rank computes longer before every all-reduce; the others wait for it there."""
    drafts = []
    for rank in range(ranks):
        draft = TraceDraft(rank, ranks)
        length = 500
        draft.step(0, calls * length)
        for number in range(calls):
            begin = number * length
            busy = 400 if rank == late else 60 + rank
            draft.operator("aten::mm", begin + 2, begin + 9)
            draft.work("ampere_sgemm_128x64_nn", begin + 10, begin + 10 + busy, at=begin + 4)
            draft.operator("c10d::allreduce_", begin + 10, begin + 20)
            draft.work(ALL_REDUCE, begin + 12 + busy, begin + 480, at=begin + 14, stream=20, collective="allreduce",
                       group="0", group_size=ranks, group_ranks=str(list(range(ranks))), dtype="Float",
                       in_elements=1 << 20, out_elements=1 << 20, collective_sequence=number)  # fmt: skip
            draft.call("cudaDeviceSynchronize", begin + 24, begin + 484)
        drafts.append(draft)
    return drafts


def on_cpu() -> TraceDraft:
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.operator("aten::addmm", 10, 700)
    draft.operator("aten::relu", 710, 800)
    return draft
