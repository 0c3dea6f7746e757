"""Ranks whose clocks, lateness and links are known: what an analysis must find again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from stepscope.analyze.ranks.collectives import CALL_FIELDS
from stepscope.analyze.ranks.digest import RankDigest, StepDigest
from stepscope.analyze.ranks.groups import TracedGroup, format_members
from stepscope.formats.timeline import ANNOTATION, KERNEL, OPERATOR, RUNTIME, Span, Timeline, TimelineBuilder
from stepscope.traces.finish import finish
from stepscope.traces.read import read_timeline

PUBLIC = Path(__file__).parents[3].parent / "shared" / "data" / "traces" / "public"

US = 1_000
MS = 1_000_000


class Call(NamedTuple):
    """One collective of the program that all ranks run."""

    collective: str = "allreduce"
    members: tuple[int, ...] = (0, 1)
    elements: int = 1000
    transfer_ns: int = 50 * US
    name: str = "0"
    description: str = "default_pg"
    dtype: str = "Float"


class Plan(NamedTuple):
    """What is planted."""

    ranks: int
    steps: Sequence[Sequence[Call]]
    compute_ns: int = 200 * US
    """Before each call, on every rank."""
    late_ns: Callable[[int, int, int], int] = lambda rank, step, call: 0
    """Extra computing before one call of one rank."""
    offset_ns: Callable[[int], int] = lambda rank: 0
    end_noise_ns: Callable[[int, int, int], int] = lambda rank, step, call: 0
    metadata: bool = True
    recorded_ranks: bool = True


def simulate(plan: Plan) -> list[Timeline]:
    """Timelines of all ranks. A collective ends on all members at one moment: the last arrival plus its transfer."""
    ready = [1_700_000_000_000_000_000 + 3 * MS] * plan.ranks
    events: list[list[tuple[int, Call, int, int, int]]] = [[] for _ in range(plan.ranks)]
    for step, calls in enumerate(plan.steps):
        for number, call in enumerate(calls):
            begun = {rank: ready[rank] + plan.compute_ns + plan.late_ns(rank, step, number) for rank in call.members}
            end = max(begun.values()) + call.transfer_ns
            for rank in call.members:
                own_end = end + plan.end_noise_ns(rank, step, number)
                events[rank].append((step, call, ready[rank], begun[rank], own_end))
                ready[rank] = own_end
    return [_timeline(plan, rank, events[rank]) for rank in range(plan.ranks)]


def _timeline(plan: Plan, rank: int, events: Sequence[tuple[int, Call, int, int, int]]) -> Timeline:
    builder, shift = TimelineBuilder(), plan.offset_ns(rank)
    for step in range(len(plan.steps)):
        own = [event for event in events if event[0] == step]
        if own:
            start, end = own[0][2] + shift, own[-1][4] + shift
            builder.add(ANNOTATION, f"ProfilerStep#{step + 1}", start, end, thread=(1, 1))
    for number, (_, call, free, start, end) in enumerate(events):
        _add_call(builder, plan, call, number, (free + shift, start + shift, end + shift))
    return finish(builder.build(rank=rank, world_size=plan.ranks, metadata={"source": f"rank{rank}.json"}))


def _add_call(builder: TimelineBuilder, plan: Plan, call: Call, number: int, times: tuple[int, int, int]) -> None:
    free, start, end = times
    fields = collective_fields(call) if plan.metadata else {}
    builder.add(RUNTIME, "cudaLaunchKernel", free + 1, free + 2, thread=(1, 1), correlation=1_000_000 + number)
    builder.add(KERNEL, "gemm_kernel", free + 3, start - 1, device=0, stream=7, correlation=1_000_000 + number)
    builder.add(OPERATOR, "record_param_comms", free + 10, free + 20, thread=(1, 1), **fields)
    shapes = {"shapes": f"[[{call.elements}]]", "types": '["float"]'}
    builder.add(ANNOTATION, f"nccl:{call.collective}", free + 11, free + 19, thread=(1, 1), **shapes)
    builder.add(RUNTIME, "cudaLaunchKernel", free + 12, free + 14, thread=(1, 1), correlation=number + 1)
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    if "all_to_all" in call.collective:
        kernel = "ncclDevKernel_SendRecv(ncclDevComm*)"
    builder.add(KERNEL, kernel, start, end, device=0, stream=20, correlation=number + 1)


def collective_fields(call: Call) -> dict[str, object]:
    """As PyTorch's profiler writes them."""
    n = len(call.members)
    bigger_out, bigger_in = "gather" in call.collective, "scatter" in call.collective
    return {
        "collective": call.collective,
        "group": call.name,
        "group_description": call.description,
        "group_ranks": str(list(call.members)),
        "group_size": n,
        "in_elements": call.elements * (n if bigger_in else 1),
        "out_elements": call.elements * (n if bigger_out else 1),
        "dtype": call.dtype,
        "in_splits": "[]",
        "out_splits": "[]",
    }


def make_digests(ranks: int, calls: int, *, steps: int = 10, seed: int = 1, late_rank: int = 17) -> list[RankDigest]:
    """Many ranks at once: one group of all, equal sizes, random arrivals, one rank late by a millisecond."""
    random = np.random.default_rng(seed)
    arrival = random.normal(0, 20e3, (ranks, calls)).astype(np.int64)
    if ranks > late_rank:
        arrival[late_rank] += 1_000_000
    base = np.arange(calls, dtype=np.int64) * 5_000_000 + 1_700_000_000_000_000_000
    start = base + arrival
    end = start.max(axis=0) + 100_000
    step = np.arange(calls) * steps // calls
    group = TracedGroup(name="0", description="default_pg", members=format_members(range(ranks)), size=ranks)
    digests = []
    for rank in range(ranks):
        rows = np.zeros(calls, np.dtype(list(CALL_FIELDS)))
        rows["start_ns"], rows["end_ns"], rows["step"] = start[rank], end, step
        rows["size_bytes"], rows["bus_bytes"], rows["sequence"] = 4_000_000, 7_992_000, -1
        rows["call"], rows["peer"], rows["piece_bytes"], rows["pieces"] = np.arange(1, calls + 1), -1, -1, 1
        spans = [
            StepDigest(
                number=number,
                start_ns=int(base[step == number][0]) - 100_000,
                end_ns=int(end[step == number][-1]),
                busy_ns=10_000_000,
                communication_ns=1_000_000,
            )
            for number in range(steps)
        ]
        digests.append(
            RankDigest(
                rank=rank,
                world_size=ranks,
                source=f"rank{rank}.json",
                step_marker="profiler",
                resolution_ns=1,
                steps=spans,
                groups=[group],
                dtypes=["float32"],
                calls=rows.tobytes(),
                left_out={},
            )
        )
    return digests


def shift(timeline: Timeline, offset_ns: int) -> Timeline:
    """The timeline as the reference's clock would have shown it.

    `offset_ns` (this clock minus the reference's) is taken off all times, and `metadata["clock_shift_ns"]` says so.
    """
    core = dict(timeline.core)
    for name in ("start_ns", "end_ns"):
        core[name] = timeline.core[name] - offset_ns
    steps: Sequence[Span] = tuple(
        span._replace(start_ns=span.start_ns - offset_ns, end_ns=span.end_ns - offset_ns) for span in timeline.steps
    )
    shifted = -offset_ns + int(timeline.metadata.get("clock_shift_ns", 0))
    return replace(timeline, core=core, steps=steps, metadata={**timeline.metadata, "clock_shift_ns": shifted})


@cache
def real_timeline(name: str) -> Timeline:
    """A public trace; in a folder the first one. Skips the test where it is not there."""
    return _read_real(name)[0]


@cache
def real_timelines(name: str) -> list[Timeline]:
    return _read_real(name)


def _read_real(name: str) -> list[Timeline]:
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return [read_timeline(file) for file in (sorted(path.glob("*.json.gz")) if path.is_dir() else [path])]
