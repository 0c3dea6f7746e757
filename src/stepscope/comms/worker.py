"""One rank of a communication benchmark; rank 0 also decides and writes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.comms.collectives import DTYPE_BYTES, Collective, find_collective
from stepscope.comms.group import Group, TorchGroup
from stepscope.launch import Heartbeat, RankSession
from stepscope.measure import (
    CpuUse,
    Device,
    Measurement,
    MeasureSettings,
    Neighbours,
    WallClock,
    find_neighbours,
    free_memory_bytes,
    measure,
    open_device,
    read_cpu_use,
)
from stepscope.records import Case, CaseResult, Failure, RankSamples, Reading, Score, System
from stepscope.store import RunWriter, utc_now
from stepscope.system import collect_system, merge_systems, open_telemetry
from stepscope.units import format_bytes

if TYPE_CHECKING:
    import torch

GROUP_EXTRA_S = 30.0
"""The group's own time-out is the last resort: the watchdogs, which know more, ring first."""
MEMORY_SHARE = 0.8
COPIES = 4
"""Buffer, input, expected result and one temporary of the comparison."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others: everybody measures the same cases in the same way."""

    cases: list[Case]
    settings: MeasureSettings


class RankMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank hands to rank 0."""

    rank: int
    measurement: Measurement | None
    wrong: int
    failure: Failure | None = None
    host: str = ""
    cpu_before: CpuUse | None = None
    cpu_after: CpuUse | None = None


def run(session: RankSession) -> None:
    """The worker function of the contract. Rank 0 must know the run folder; it tells the others."""
    context, heartbeat = session.context, session.heartbeat
    heartbeat.beat("joining")
    device_name = session.request["device"]
    group = TorchGroup(context, session.request["backend"], session.hang_limit_s + GROUP_EXTRA_S)
    folder = Path(group.broadcast_value(str(session.folder.resolve()) if session.folder else None))
    if session.folder is None:
        session.adopt_folder(folder)
    device = open_device(device_name if device_name != "cuda" else f"cuda:{context.local_rank}")
    systems = group.gather_values(collect_system() if context.local_rank == 0 else None)
    if systems is not None:
        _lead(folder, group, device, heartbeat, [system for system in systems if system is not None])
    else:
        _follow(group, device, heartbeat)
    heartbeat.beat("leaving")
    group.close()


def _lead(folder: Path, group: Group, device: Device, heartbeat: Heartbeat, systems: Sequence[System]) -> None:
    with RunWriter(folder) as writer:
        writer.write_system(merge_systems(list(systems)))
        settings = msgspec.convert(writer.plan.request["settings"], MeasureSettings)
        remaining = writer.remaining()
        assignment = Assignment(cases=remaining, settings=settings)
        group.broadcast_value(msgspec.json.encode(assignment))
        telemetry = open_telemetry(device.name)
        for case in remaining:
            started_at, start = utc_now(), time.monotonic()
            readings = telemetry.read("start")
            gathered = group.gather_values(_measure_case(case, group, device, heartbeat, settings)) or []
            readings += telemetry.read("end")
            result, samples = _fold(case, gathered, started_at, time.monotonic() - start, readings)
            writer.append(result, samples)
        writer.finish()


def _follow(group: Group, device: Device, heartbeat: Heartbeat) -> None:
    assignment = msgspec.json.decode(group.broadcast_value(None), type=Assignment)
    for case in assignment.cases:
        group.gather_values(_measure_case(case, group, device, heartbeat, assignment.settings))


def _measure_case(
    case: Case, group: Group, device: Device, heartbeat: Heartbeat, settings: MeasureSettings
) -> RankMeasurement:
    heartbeat.beat("preparing", case.key)
    size_bytes = int(str(case.parameters["size_bytes"]))
    refusal = _find_refusal(size_bytes, device.name)
    # Every rank must take part or none: one that cannot would leave the others waiting.
    refusals = group.gather_values(refusal)
    refusal = group.broadcast_value(next((r for r in refusals if r), Failure(kind="none", message=""))
                                    if refusals is not None else None)  # fmt: skip
    if refusal.kind != "none":
        return RankMeasurement(rank=group.rank, measurement=None, wrong=0, failure=refusal)
    trial = Trial(case, find_collective(case.benchmark.model), group, device, heartbeat)
    before = read_cpu_use()
    measurement = measure(trial.body, settings=settings, clock=WallClock(), device=device, peers=trial)
    return RankMeasurement(
        rank=group.rank,
        measurement=measurement,
        wrong=trial.count_wrong(),
        host=socket.gethostname(),
        cpu_before=before,
        cpu_after=read_cpu_use(),
    )


def _find_refusal(size_bytes: int, device: str) -> Failure | None:
    free_bytes = free_memory_bytes(device)
    if COPIES * size_bytes <= MEMORY_SHARE * free_bytes:
        return None
    return Failure(
        kind="does_not_fit",
        message=f"{COPIES} buffers of {format_bytes(size_bytes)} do not fit into {format_bytes(free_bytes)} free "
        f"on {device}",
        hint="use smaller sizes",
    )


class Trial:
    """One case on one rank: its buffers, and how the ranks walk through the loop together."""

    def __init__(self, case: Case, collective: Collective, group: Group, device: Device, heartbeat: Heartbeat) -> None:
        import torch

        dtype_name = str(case.parameters["dtype"])
        dtype: torch.dtype = getattr(torch, dtype_name)
        elements = int(str(case.parameters["size_bytes"])) // DTYPE_BYTES[dtype_name]
        self._case, self._collective, self._group, self._heartbeat = case, collective, group, heartbeat
        self._input = collective.make_input(group.rank, elements, dtype, device.name)
        self._expected = collective.make_expected(group.world_size, elements, dtype, device.name)
        self._buffer = self._input.clone()
        self._taken = 0
        self._wrong = 0

    def body(self) -> None:
        self._collective.call(self._group, self._buffer)

    def agree(self, value: int) -> int:
        self._heartbeat.beat("measuring", self._case.key)
        return self._group.broadcast_value(value if self._group.rank == 0 else None)

    def align(self) -> None:
        """Before each sample: look at what the last one left (at the 1st, 2nd, 4th … sample), put fresh data in."""
        if self._taken and self._taken & (self._taken - 1) == 0:
            self._compare()
        self._buffer.copy_(self._input)
        self._taken += 1
        self._group.barrier()

    def _compare(self) -> None:
        self._wrong += int((self._buffer != self._expected).sum())

    def count_wrong(self) -> int:
        """Wrong elements over all samples that were looked at, the last one included."""
        self._compare()
        return self._wrong


def _fold(
    case: Case, ranks: Sequence[RankMeasurement], started_at: str, elapsed_s: float, readings: list[Reading]
) -> tuple[CaseResult, list[RankSamples]]:
    """All ranks' samples and one result; the time of a sample is that of its slowest rank."""
    refusal = next((rank.failure for rank in ranks if rank.failure is not None), None)
    if refusal is not None:
        return CaseResult(case=case, status="skipped", started_at=started_at, elapsed_s=elapsed_s, failure=refusal), []
    wrong = sum(rank.wrong for rank in ranks)
    size_bytes = int(str(case.parameters["size_bytes"]))
    factor = find_collective(case.benchmark.model).bus_factor(case.world_size)
    measured = [(rank, rank.measurement) for rank in ranks if rank.measurement is not None]
    neighbours = _find_neighbours(ranks)
    crowded = next((notice for one in neighbours.values() if one and (notice := one.as_notice())), None)
    failure = None
    if wrong:
        failure = Failure(
            kind="wrong_result",
            message=f"{wrong} elements are not what {case.benchmark.model} must give",
            hint="the communication library or the network corrupts data: repeat with another backend",
        )
    result = CaseResult(
        case=case,
        status="failed" if failure else "ok",
        failure=failure,
        started_at=started_at,
        elapsed_s=elapsed_s,
        score=Score(unit="GB/s", work=size_bytes * factor),
        timing="slowest_rank",
        observed={"size_bytes": size_bytes, "bus_factor": factor, "wrong": wrong},
        readings=readings,
        notices=[*measured[0][1].notices, *([crowded] if crowded else [])],
    )
    samples = []
    for rank, measurement in measured:
        around = neighbours.get(rank.host)
        share = around.share if around else None
        samples.append(measurement.as_samples(case.key, rank=rank.rank, other_share=share))
    return result, samples


def _find_neighbours(ranks: Sequence[RankMeasurement]) -> dict[str, Neighbours | None]:
    """By host: what others took there; the ranks of this run are not others."""
    found: dict[str, Neighbours | None] = {}
    for host in {rank.host for rank in ranks}:
        uses = [(r.cpu_before, r.cpu_after) for r in ranks if r.host == host and r.cpu_before and r.cpu_after]
        if uses:
            own_s = sum(after.own_s - before.own_s for before, after in uses)
            found[host] = find_neighbours(*uses[0], os.cpu_count() or 1, own_s=own_s)
    return found
