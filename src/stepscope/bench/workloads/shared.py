"""One model on several ranks: every rank steps its part of the batch, and the slowest rank counts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from stepscope.bench.workloads.asked import SEED, Asked, count_accumulated, read_case
from stepscope.bench.workloads.facts import EnergyMeter, Peak, PeakMemory, count_flops, find_peak
from stepscope.bench.workloads.feed import Loader, count_round, make_batches
from stepscope.bench.workloads.protocol import Optimized
from stepscope.bench.workloads.request import (
    LOADER_STEPS,
    LOADER_TIME_S,
    WorkloadRequest,
    choose_settings,
    require_samples,
)
from stepscope.bench.workloads.sharing import SharedStep, count_share, open_share, shard
from stepscope.bench.workloads.steps import (
    InferStep,
    clear_up,
    forget_compiled,
    name_early_updates,
    require_sound,
)
from stepscope.bench.workloads.verify import UNCHECKED, Verifier, describe_changes
from stepscope.measure import Device, Measurement, MeasureSettings, WallClock, give_back_memory, measure
from stepscope.records import Case, Score
from stepscope.records.kinds import WorkloadObserved, WorkloadSpec
from stepscope.run.producer import ExtraMeasurements, Folded, Prepared, RankOutcome
from stepscope.run.rank import merge_observed
from stepscope.run.ranks import BarrierPeers, Ranks
from stepscope.run.recorded import record_steps
from stepscope.store.view import LOADER

UNUSED = {
    "ddp": "not used on several ranks: the CUDA graph",
    "sharded": "not used on several ranks: the CUDA graph",
    "fsdp": "not used on several ranks: the CUDA graph, fused optimizers, weights stored channels last",
}


class RankFacts(msgspec.Struct, kw_only=True):
    """What one rank knows beside its samples."""

    peak_memory_bytes: int | None = None
    energy_j: float | None = None
    """Used by this rank's device, from the first warm-up step to the last timed one."""
    peak: Peak | None = None
    """Of this rank's device."""
    loader_s: list[float] = []
    """Seconds per step with batches from a loader."""
    trace: str | None = None
    """Where this rank's steps were recorded."""


def prepare_shared(asked: Asked, ranks: Ranks, request: WorkloadRequest, device: Device) -> Prepared:
    """Every rank takes part in every step of this, or the case ends on all of them."""
    return _SharedCase(asked, ranks, request, device).prepare()


class _SharedCase:
    def __init__(self, asked: Asked, ranks: Ranks, request: WorkloadRequest, device: Device) -> None:
        self._asked, self._ranks, self._request, self._device = asked, ranks, request, device
        self._parallel = str(asked.spec.parallel)
        self._peers = BarrierPeers(ranks, asked.case)
        self._step: SharedStep | None = None

    def prepare(self) -> Prepared:
        asked, ranks, device = self._asked, self._ranks, self._device
        _forget_last_case(device)
        is_checked = ranks.rank == 0 and asked.workload.implementation == "optimized"
        facts = ranks.together(
            lambda: _verify(asked, self._parallel, device, self._request) if is_checked else WorkloadObserved()
        )
        ranks.session.heartbeat.beat("preparing", asked.case.key)
        facts |= _describe_porting(asked, self._parallel, device)
        self._memory, start = PeakMemory(device.name), time.perf_counter()
        step, self._batches = ranks.together(
            lambda: open_share(asked, self._parallel, device.name, self._request.compile_backend), exchanges=True
        )
        self._step = step
        self._round_steps = max(ranks.share(count_round(self._batches, at_once=step.at_once)))
        ranks.together(lambda: _step_once_round(step, self._round_steps, device), exchanges=True)
        facts |= WorkloadObserved(setup_s=time.perf_counter() - start)
        self._settings = choose_settings(asked, self._request.settings, device)
        if self._round_steps > 1:
            facts |= WorkloadObserved(round_steps=self._round_steps)
            self._settings = self._keep_rounds(step)
        self._energy = EnergyMeter(device.name)
        return Prepared(
            body=self._call,
            score=None if facts.check == UNCHECKED else Score(unit="ex/s", work=float(_count_examples(asked))),
            latency_target=asked.workload.declared.latency_target,
            observed=facts,
            settings=self._settings,
            peers=self._peers,
            on_measured=lambda measurement: self._note_energy(),
            finish=self._finish,
            close=self._release,
        )

    def _call(self) -> None:
        """Through here, so that the model can be given up while the case still has its body."""
        assert self._step is not None
        self._step()

    def _note_energy(self) -> None:
        self._joules = self._energy.read_j()

    def _release(self) -> None:
        self._step = None

    def _keep_rounds(self, step: SharedStep) -> MeasureSettings:
        """Batches of a rank differ in shape: a sample of training is whole rounds of them on every rank; of latencies
        there is at least one round."""
        if isinstance(step, InferStep):
            return require_samples(self._settings, self._round_steps)
        self._peers.align()
        start = time.perf_counter()
        _step_once_round(step, self._round_steps, self._device)
        rounds = self._peers.agree(max(1, math.ceil(self._settings.min_sample_s / (time.perf_counter() - start))))
        return msgspec.structs.replace(self._settings, iterations=rounds * self._round_steps)

    def _finish(self, measurement: Measurement) -> tuple[Measurement, ExtraMeasurements]:
        """The model is given up before the operations are counted: both may not fit."""
        asked, ranks, device = self._asked, self._ranks, self._device
        ranks.together(lambda: require_sound(self._step))
        found = RankFacts(peak_memory_bytes=self._memory.read_bytes(), energy_j=self._joules)
        if self._request.loader_workers is not None:
            found.loader_s = self._time_with_loader(measurement)
        if self._request.trace:
            ranks.session.heartbeat.beat("recording", asked.case.key)
            found.trace = ranks.together(self._record, exchanges=True)
        ranks.session.heartbeat.beat("counting", asked.case.key)
        self._release()
        give_back_memory(device.name)
        counted = ranks.together(lambda: _count(asked, device) if ranks.rank == 0 else WorkloadObserved())
        found.peak = find_peak(device.name, asked.precision)
        return measurement, ExtraMeasurements(observed=counted, facts=found)

    def _time_with_loader(self, measurement: Measurement) -> list[float]:
        asked, device, step = self._asked, self._device, self._step
        assert step is not None
        assert self._request.loader_workers is not None
        loader = Loader(
            self._batches, device=device.name, precision=asked.precision, mode=asked.mode,
            workers=self._request.loader_workers,
        )  # fmt: skip
        brief = _shorten(self._settings, math.lcm(measurement.iterations[-1], self._round_steps))
        with step.feed.of(loader):
            fed = measure(
                _wait_after(step, device) if asked.mode == "infer" else step,
                settings=brief, clock=WallClock(), device=device, peers=self._peers,
            )  # fmt: skip
        return fed.as_samples(asked.case.key).seconds()

    def _record(self) -> str | None:
        """The folder of the recording, relative to the run; None on a rank that does not see the run's folder. It makes
        the same steps, as the others exchange with it."""
        folder = self._ranks.session.folder
        if folder is not None:
            return record_steps(self._call, folder, self._asked.case)
        with TemporaryDirectory() as elsewhere:
            record_steps(self._call, Path(elsewhere), self._asked.case, link=False)
        return None


def _forget_last_case(device: Device) -> None:
    """Models that wait for the garbage collector, as FSDP's do, would count as memory of the next case."""
    forget_compiled()
    clear_up(device.name)


def _describe_porting(asked: Asked, parallel: str, device: Device) -> WorkloadObserved:
    plain = asked.workload.make_plain(asked.scale)
    ported = [one] if (one := plain.ported(device.name)) else []
    if parallel == "fsdp" and plain.dense() != plain.sizes:
        ported.append("gradients of tables are dense: FSDP takes no sparse ones")
    return WorkloadObserved(porting="; ".join(ported) or None)


def _wait_after(step: SharedStep, device: Device) -> Callable[[], None]:
    """A latency is that of one batch, also where several make one sample."""

    def step_and_wait() -> None:
        step()
        device.synchronize()

    return step_and_wait


def _step_once_round(step: SharedStep, round_steps: int, device: Device) -> None:
    """What a way of sharing cannot do shows in the first step, and is one case's failure."""
    for _ in range(round_steps):
        step()
    device.synchronize()


def _shorten(settings: MeasureSettings, iterations: int) -> MeasureSettings:
    """As long as one device is timed with a loader."""
    return msgspec.structs.replace(
        settings, iterations=iterations, few_samples=2, min_samples=LOADER_STEPS, max_samples=LOADER_STEPS,
        min_time_s=0.0, max_time_s=min(LOADER_TIME_S, settings.max_time_s), warmup_samples=None, warmup_min_samples=1,
        warmup_min_time_s=0.0, warmup_max_time_s=0.0,
    )  # fmt: skip


def _count(asked: Asked, device: Any) -> WorkloadObserved:
    """Of all ranks' batches; this rank's stand for the others', whose examples are as many."""
    import torch.distributed as dist

    plain = asked.workload.make_plain(asked.scale)
    batches = make_batches(plain, batch_size=count_share(asked), mode=asked.mode, seed=SEED)
    flops = count_flops(plain, batches, mode=asked.mode, device=device.name)
    total = None if flops is None else flops * count_accumulated(asked) * dist.get_world_size()
    return WorkloadObserved(model_flops=total)


def _verify(asked: Asked, parallel: str, device: Any, request: WorkloadRequest) -> WorkloadObserved:
    """Of one rank alone, on a GPU on its share of the batch: the whole may not fit. What sharing takes away from the
    form is told with its changes."""
    import torch.distributed as dist

    task = asked.workload.make_task(asked.scale)
    assert isinstance(task, Optimized)
    facts = WorkloadObserved(check=UNCHECKED)
    if request.check:
        size = max(1, asked.batch_size // dist.get_world_size()) if device.has_events else asked.batch_size
        start = time.perf_counter()
        facts = Verifier(device, request.compile_backend).check(
            asked._replace(batch_size=size), adds_up=_adds_up(asked, parallel)
        )
        facts |= WorkloadObserved(check_s=time.perf_counter() - start)
    shared = shard(task) if parallel == "sharded" else task
    assert isinstance(shared, Optimized)
    facts |= describe_changes(shared, asked, device, request.compile_backend)
    _forget_last_case(device)
    return facts | WorkloadObserved(changes=f"{facts.changes}; {_name_unused(shared, asked, parallel)}")


def _name_unused(task: Optimized, asked: Asked, parallel: str) -> str:
    early = name_early_updates(task, mode=asked.mode, precision=asked.precision)
    return f"{UNUSED[parallel]}, {early}" if early and _adds_up(asked, parallel) else UNUSED[parallel]


def _adds_up(asked: Asked, parallel: str) -> bool:
    """Whether updates wait until gradients are added up. The owner of a table has those of all ranks, and waits for
    those of other batches alone."""
    return parallel != "sharded" or count_accumulated(asked) > 1


def fold_shared(case: Case, ranks: Sequence[RankOutcome]) -> Folded:
    """Rank 0's facts are those of the case; memory of the rank that needs most; energy and peaks of all devices
    together, where each reports them."""
    found = [one.extra.facts for one in ranks]
    first = ranks[0]
    loader = [max(row) for row in zip(*(one.loader_s for one in found), strict=True)]
    if loader:
        first.extra.extra_s[LOADER] = loader
    steps = sum(first.measurement.iterations) if first.measurement is not None else 0
    asked = read_case(case)
    return Folded(
        score=first.score,
        latency_target=first.latency_target,
        observed=merge_observed(first.extra.observed, _fold_facts(found, steps, _count_examples(asked))),
    )


def _count_examples(asked: Asked) -> int:
    """Examples per step, over all ranks."""
    return asked.batch_size * count_accumulated(asked)


def _fold_facts(found: list[RankFacts], steps: int, examples: int) -> WorkloadObserved:
    traced = [rank for rank, one in enumerate(found) if one.trace is not None]
    held = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
    joules = [one.energy_j for one in found if one.energy_j is not None]
    peaks = [one.peak for one in found if one.peak is not None]
    sources = Counter(one.source for one in peaks) if len(peaks) == len(found) else Counter()
    return WorkloadObserved(
        trace=found[traced[0]].trace if traced else None,
        traced_ranks=", ".join(str(rank) for rank in traced) if traced and len(traced) < len(found) else None,
        peak_memory_bytes=max(held, default=None),
        energy_j_per_example=sum(joules) / (steps * examples) if len(joules) == len(found) and steps else None,
        peak_flops=sum(one.flops for one in peaks) if sources else None,
        peak_source="; ".join(f"{count} × {source}" for source, count in sources.items()) or None,
    )


def is_shared(case: Case) -> bool:
    """Whether the ranks share the model."""
    return isinstance(case.spec, WorkloadSpec) and case.spec.parallel is not None
