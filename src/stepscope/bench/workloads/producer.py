"""Measures workload cases: on one device, or with a model that the ranks share."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from stepscope.bench.workloads.facts import EnergyMeter, Peak, PeakMemory, count_flops, find_peak
from stepscope.bench.workloads.feed import Loader, count_round, make_batches, read_batches
from stepscope.bench.workloads.generation import Decoder, DecoderRunner, GenerationStep
from stepscope.bench.workloads.precision import build_module, to_device
from stepscope.bench.workloads.protocol import EAGER, Batches, Optimized, Setting, Task
from stepscope.bench.workloads.request import (
    LOADER_STEPS,
    LOADER_TIME_S,
    SEED,
    ParsedCase,
    choose_settings,
    count_accumulated,
    read_case,
    require_samples,
)
from stepscope.bench.workloads.search import next_cases
from stepscope.bench.workloads.serving import DecoderServer, make_arrivals, serve
from stepscope.bench.workloads.shared import count_share, name_unused, open_share, shard
from stepscope.bench.workloads.steps import InferStep, TrainStep, clear_up, forget_compiled, require_sound
from stepscope.bench.workloads.user import prepare_user_model, require_unchanged
from stepscope.bench.workloads.verify import UNCHECKED, Verifier, describe_changes
from stepscope.core.errors import first_line
from stepscope.launch.worker import Session
from stepscope.measure import (
    CudaDevice,
    Device,
    Measurement,
    MeasureSettings,
    WallClock,
    freeze_new_libraries,
    measure,
    no_garbage_collection,
    open_device,
)
from stepscope.records import Case, Notice, Score, WorkloadRequest, describe_exception, is_out_of_memory
from stepscope.records.kinds import Serving, UserModelSpec, WorkloadObserved
from stepscope.run.control import Alone, Control, TorchControl
from stepscope.run.producer import ExtraMeasurements, Folded, Prepared, Producer, RankOutcome
from stepscope.run.rank import merge_observed
from stepscope.run.ranks import BarrierPeers, CaseSkipped, Ranks
from stepscope.run.recorded import record_steps
from stepscope.store import TPOT, TTFT, MeasuredCase, StoredRun
from stepscope.store.view import LOADER

T = TypeVar("T")
Step = TrainStep | InferStep | GenerationStep


def _require_same_files(folder: Path, request: WorkloadRequest) -> None:
    """Before anything is measured: a run that goes on with other files is left as it is."""
    stored = StoredRun(folder)
    done = {one.case.key for one in stored.results}
    for case in (one for one in stored.plan.cases if one.key not in done):
        if isinstance(case.spec, UserModelSpec):
            require_unchanged(Path(case.spec.file), case.spec.sha256)
        elif request.data is not None:
            require_unchanged(Path(request.data), str(read_case(case).spec.data))


def open_step(case: Case) -> Callable[[], None]:
    """The step of a case, ready to be made again and again, on its device."""
    producer = WorkloadProducer(Session(verb="workload", request=WorkloadRequest(device=str(case.spec.device))))
    producer.ranks = Ranks(producer.session, Alone())
    producer.open()
    model = ModelCase(read_case(case), producer)
    model.load()
    return model


class WorkloadProducer(Producer):
    """Prepares cases one after the other."""

    device: Device

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        assert isinstance(session.request, WorkloadRequest)
        self.request = session.request
        self._compiled_for: tuple[str, int] | None = None

    @property
    def settings(self) -> MeasureSettings:
        return self.request.settings

    def join(self) -> Control:
        backend = self.request.backend
        return Alone() if backend is None else TorchControl(self.session, backend)

    def open(self) -> Device:
        if self.session.folder is not None and self.session.context.rank == 0:
            _require_same_files(self.session.folder, self.request)
        name, context = self.request.device, self.session.context
        device = self.device = open_device(
            f"cuda:{context.local_rank}" if name == "cuda" and context.world_size > 1 else name
        )
        if isinstance(device, CudaDevice) and context.world_size == 1:
            device.use_own_stream()
        self.verifier = Verifier(device, self.request.compile_backend)
        return device

    def next_cases(self, measured: Callable[[], list[MeasuredCase]]) -> list[Case]:
        return next_cases(self.request.find_batch, measured()) if self.request.find_batch else []

    def prepare(self, case: Case) -> Prepared:
        """Raises CaseSkipped for what does not fit or cannot run here."""
        if not isinstance(case.spec, UserModelSpec):
            parsed = read_case(case)
            self._forget_others(parsed)
            return ModelCase(parsed, self).prepare()
        prepared = prepare_user_model(
            case,
            self.device,
            beat=self.session.heartbeat.tick if math.isfinite(self.session.hang_limit_s) else None,
            record_in=(self.session.folder or Path()) if self.request.trace else None,
        )
        self.session.heartbeat.beat("measuring", case.key)
        return prepared

    def _forget_others(self, parsed: ParsedCase) -> None:
        """What was compiled for a benchmark and batch size serves its other precisions and its check, nothing else.
        Models that wait for the garbage collector, as FSDP's do, would count as memory of the next case."""
        wanted = (parsed.case.benchmark.id, parsed.batch_size)
        nothing_stays = self._compiled_for != wanted or parsed.spec.parallel is not None
        if nothing_stays:
            forget_compiled()
        self._compiled_for = wanted
        clear_up(self.device.name)
        if nothing_stays:
            freeze_new_libraries()

    def fold(self, case: Case, ranks: Sequence[RankOutcome], clock_error_s: float | None) -> Folded:
        """Rank 0's facts are those of the case; memory of the rank that needs most; energy and peaks of all devices
        together, where each reports them."""
        folded = super().fold(case, ranks, clock_error_s)
        if isinstance(case.spec, UserModelSpec):
            return folded
        parsed, found = read_case(case), [one.extra.facts for one in ranks]
        loader_s = [max(row) for row in zip(*(one.loader_s for one in found), strict=True)]
        if loader_s:
            ranks[0].extra.extra_s[LOADER] = loader_s
        folded.observed = merge_observed(folded.observed, _fold_facts(found, parsed))
        return folded


class WorkloadRankFacts(msgspec.Struct, kw_only=True):
    """What one rank knows beside its samples."""

    peak_memory_bytes: int | None = None
    energy_j: float | None = None
    """Used by this rank's device for one step."""
    peak: Peak | None = None
    """What this rank's device can do at most."""
    loader_s: list[float] = []
    """Seconds per step with batches from a loader."""
    trace: str | None = None
    """Where this rank's steps were recorded."""


def _fold_facts(found: list[WorkloadRankFacts], parsed: ParsedCase) -> WorkloadObserved:
    traced = [rank for rank, one in enumerate(found) if one.trace is not None]
    held = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
    joules = [one.energy_j for one in found if one.energy_j is not None]
    peaks = [one.peak for one in found if one.peak is not None]
    sources = Counter(one.source for one in peaks) if len(peaks) == len(found) else Counter()
    told = sources if parsed.spec.parallel is None else (f"{count} × {one}" for one, count in sources.items())
    return WorkloadObserved(
        trace=found[traced[0]].trace if traced else None,
        traced_ranks=", ".join(str(rank) for rank in traced) if traced and len(traced) < len(found) else None,
        peak_memory_bytes=max(held, default=None),
        energy_j_per_example=sum(joules) / _count_examples(parsed) if len(joules) == len(found) else None,
        peak_flops=sum(one.flops for one in peaks) if sources else None,
        peak_source="; ".join(told) or None,
    )


def _count_examples(parsed: ParsedCase) -> int:
    """Examples per step, over all ranks."""
    return parsed.batch_size * count_accumulated(parsed)


class ModelCase:
    """One case on this rank, from its model to what stands beside its times. Each call is a step. A process has the
    whole model, or ranks share it: then every rank takes part in all of this, or the case ends on all of them."""

    def __init__(self, parsed: ParsedCase, producer: WorkloadProducer) -> None:
        self._parsed, self._ranks, self._request = parsed, producer.ranks, producer.request
        self._device, self._producer = producer.device, producer
        self._setting = Setting(parsed.mode, parsed.precision, self._device.name, self._request.compile_backend)
        self._parallel = parsed.spec.parallel
        self._peers = BarrierPeers(producer.ranks, parsed.case) if self._parallel else None
        self._batches: Batches = []
        self._step: Step | None = None
        self._round_steps = 1
        """Above 1: batches differ in shape, and only so many steps together stand for all."""
        self._calls = 0
        self._j_per_step: float | None = None
        """From the first step that warms up to the last that is timed: nothing before or after is in it."""

    def __call__(self) -> None:
        """Through here, so that the model can be given up while the case still has its body."""
        assert self._step is not None
        self._step()
        self._calls += 1

    def prepare(self) -> Prepared:
        parsed, device = self._parsed, self._device
        if self._request.data is not None:
            require_unchanged(Path(self._request.data), str(parsed.spec.data))
        if not self._parallel:  # these are no part of making the model ready
            self._batches = self._guarded(lambda: self._make_batches(parsed.workload.make_task(parsed.scale)))
        self._memory, start = PeakMemory(device.name), time.perf_counter()
        self.load()
        self._together(self._step_once_round)  # what a way of sharing cannot do, or is compiled for a shape, shows here
        setup_s = time.perf_counter() - start
        self._settings = self._keep_rounds(choose_settings(parsed, self._request.settings, device))
        energy = EnergyMeter(device.name)

        def read_energy(_: Measurement) -> None:
            self._j_per_step = energy.read_j_per_step(self._calls)

        return Prepared(
            body=self,
            score=None if self._is_unchecked else Score(unit="ex/s", work=float(_count_examples(parsed))),
            latency_target=parsed.workload.declared.latency_target,
            observed=WorkloadObserved(setup_s=setup_s) | self._describe(),
            settings=self._settings,
            peers=self._peers,
            before_sample=(lambda: energy.begin(self._calls)) if energy.is_counted else None,
            on_measured=read_energy,
            finish=self._finish,
            close=self._release,
        )

    @property
    def _is_unchecked(self) -> bool:
        """And so without a score. Tries are never checked; they have one for their search alone."""
        return self._is_fast and not self._request.check and not self._parsed.spec.is_try

    @property
    def _is_fast(self) -> bool:
        return self._parsed.workload.implementation == "optimized"

    def load(self) -> None:
        """The model, with its batches on the device."""
        self._step = self._together(self._open)
        at_once = count_accumulated(self._parsed) if self._parsed.mode == "train" else 1
        self._round_steps = max(self._ranks.share(count_round(self._batches, at_once=at_once)))

    def _make_batches(self, task: Task) -> Batches:
        """This rank's, on the host."""
        parsed = self._parsed
        if self._request.data is not None:
            writes = parsed.mode == "infer" and isinstance(task, Decoder)
            path = Path(self._request.data)
            return read_batches(path, task, batch_size=parsed.batch_size, mode=parsed.mode, any_shape=writes)
        return make_batches(task, batch_size=self._count_share(), mode=parsed.mode, seed=SEED)

    def _count_share(self) -> int:
        return count_share(self._parsed) if self._parallel else self._parsed.batch_size

    def _open(self) -> Step:
        parsed, device = self._parsed, self._device
        if self._parallel:
            step, self._batches = open_share(parsed, self._parallel, self._setting)
            return step
        task = parsed.workload.make_task(parsed.scale)
        self._batches = self._batches or self._make_batches(task)
        setting, engine = self._setting, task.engine(parsed.mode) if isinstance(task, Optimized) else EAGER
        module = build_module(task, setting, seed=SEED)
        ready = [to_device(one, setting) for one in self._batches]
        if parsed.mode == "train":
            return TrainStep(task, module, ready, setting, engine=engine, accumulate=count_accumulated(parsed))
        if isinstance(task, Decoder):
            tokens = int(task.sizes["new_tokens"])
            runner = DecoderRunner(task, module, setting, new_tokens=tokens, engine=engine)
            return GenerationStep(runner, ready, new_tokens=tokens, device=device)
        return InferStep(task, module, ready, setting, engine=engine)

    def _together(self, body: Callable[[], T]) -> T:
        return self._ranks.together(partial(self._guarded, body), exchanges=self._parallel is not None)

    def _guarded(self, body: Callable[[], T]) -> T:
        """In a process that has the whole model, what does not fit or cannot run here is a skip."""
        if self._parallel:
            return body()
        try:
            return body()
        except NotImplementedError as error:
            raise CaseSkipped("unsupported", first_line(error)) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._release()
            smaller = "use a smaller --batch-size, or --find-batch"
            hint = smaller if self._request.data is None else "give fewer or smaller batches: all lie on the device"
            raise CaseSkipped("does_not_fit", first_line(error), hint) from error

    def _release(self) -> None:
        """Here are the only references to the memory of the model."""
        self._step = None

    def _step_once_round(self) -> None:
        for _ in range(self._round_steps):
            self()
        self._device.synchronize()

    def _keep_rounds(self, settings: MeasureSettings) -> MeasureSettings:
        """Where batches differ in shape, a sample of training is whole rounds of them on every rank; of latencies there
        is at least one round."""
        if self._round_steps == 1:
            return settings
        if self._parsed.mode == "infer":
            return require_samples(settings, self._round_steps)
        if self._peers is not None:
            self._peers.align()
        start = time.perf_counter()
        self._together(self._step_once_round)
        rounds = self._ranks.broadcast(max(1, math.ceil(settings.min_sample_s / (time.perf_counter() - start))))
        return msgspec.structs.replace(settings, iterations=rounds * self._round_steps)

    def _describe(self) -> WorkloadObserved:
        parsed, plain = self._parsed, self._parsed.workload.make_ootb(self._parsed.scale)
        is_dense = self._parallel == "fsdp" and plain.dense() != plain.sizes
        facts = WorkloadObserved(
            round_steps=None if self._round_steps == 1 else self._round_steps,
            porting="gradients of tables are dense: FSDP takes no sparse ones" if is_dense else None,
        )
        if not self._is_fast or self._ranks.rank:
            return facts
        task = parsed.workload.make_task(parsed.scale)
        fast = shard(task) if self._parallel == "sharded" else task
        assert isinstance(fast, Optimized)
        facts |= describe_changes(fast, parsed, self._device, self._request.compile_backend)
        unused = name_unused(fast, parsed)
        return facts | WorkloadObserved(changes=f"{facts.changes}; {unused}" if unused else facts.changes)

    # --- beside the score ------------------------------------------------------------------------------------------

    def _finish(self, measurement: Measurement) -> tuple[Measurement, ExtraMeasurements]:
        """The model is given up before operations are counted and its results are checked: both may not fit."""
        parsed, ranks, request = self._parsed, self._ranks, self._request
        ranks.together(lambda: require_sound(self._step))
        found = WorkloadRankFacts(peak_memory_bytes=self._memory.read_bytes())
        extra = ExtraMeasurements(notices=self._doubt_percentile(measurement.sampled_iterations), facts=found)
        facts = self._describe_generation(measurement.sampled_iterations, extra)
        if parsed.spec.is_try:
            extra.observed = facts | WorkloadObserved(check="not made: a try") if self._is_fast else facts
            return measurement, extra
        found.energy_j = self._j_per_step
        if isinstance(self._step, GenerationStep) and request.rate_per_s is not None:
            serve = partial(self._serve, self._step, request.rate_per_s)
            if served := self._beside("requests were not served", serve, extra.notices):
                facts |= WorkloadObserved(serving=served[0])
                extra.notices += served[1]
        if request.loader_workers is not None:
            time_it, hint = partial(self._time_with_loader, measurement), "--no-loader, or fewer --loader-workers"
            found.loader_s = self._beside("there is no score with a loader", time_it, extra.notices, hint=hint) or []
        if request.trace:
            ranks.session.heartbeat.beat("recording", parsed.case.key)
            found.trace = self._beside("no steps were recorded", self._record, extra.notices)
        ranks.session.heartbeat.beat("counting", parsed.case.key)
        self._release()
        clear_up(self._device.name)
        found.peak = find_peak(self._device.name, parsed.precision)
        for on_first in (self._count, self._check):
            facts |= ranks.together(on_first if ranks.rank == 0 else WorkloadObserved)
        extra.observed = facts
        return measurement, extra

    def _beside(self, lost: str, body: Callable[[], T], notices: list[Notice], *, hint: str | None = None) -> T | None:
        """What stands beside the score of one process must not cost it; why it is not there is a notice."""
        if self._parallel:
            return self._ranks.together(body, exchanges=True)
        try:
            return body()
        except Exception as error:  # noqa: BLE001 - of whatever kind: the score stands
            failure = describe_exception(error)
            notices.append(Notice(kind="incomplete", message=f"{lost}: {failure.message}", hint=failure.hint or hint))
            return None

    def _describe_generation(self, sampled: int, extra: ExtraMeasurements) -> WorkloadObserved:
        step = self._step
        if not isinstance(step, GenerationStep):
            return WorkloadObserved()
        written = step.times[-sampled:]
        extra.extra_s = {TTFT: [one.ttft_s for one in written], TPOT: [s for one in written for s in one.token_s]}
        if self._is_unchecked:
            return WorkloadObserved()
        tokens = len(written) * self._parsed.batch_size * step.new_tokens
        return WorkloadObserved(tokens_per_s=tokens / sum(one.duration_s for one in written))

    def _doubt_percentile(self, sampled: int) -> list[Notice]:
        """A percentile of fewer samples than it divides is the largest of them."""
        target = self._parsed.workload.declared.latency_target
        if target is None or sampled >= 100 / (100 - target.percentile):
            return []
        message = f"p{target.percentile:g} of {sampled} batches is the slowest of them, or nearly so"
        return [Notice(kind="few_for_percentile", message=message, hint="raise --max-time and --min-samples")]

    def _serve(self, step: GenerationStep, rate_per_s: float) -> tuple[Serving, list[Notice]]:
        """An open loop: arrivals do not wait for answers. There is a batch for every power of two up to the case's, and
        every size is tried once before."""
        parsed, task = self._parsed, self._parsed.workload.make_task(self._parsed.scale)
        sizes = {min(1 << power, parsed.batch_size) for power in range(parsed.batch_size.bit_length() + 1)}
        batches = {size: to_device(task.make_batch(size, seed=SEED, mode="infer"), self._setting) for size in sizes}
        server = DecoderServer(step.runner, batches)
        for size in batches:
            server.begin(range(size))
            server.advance()
        self._device.synchronize()
        with no_garbage_collection():
            result = serve(
                make_arrivals(rate_per_s, self._request.requests, seed=SEED), server, new_tokens=step.new_tokens,
                max_batch=max(batches), clock=WallClock(), synchronise=self._device.synchronize,
            )  # fmt: skip
        notices = [Notice(kind="overloaded", message=result.notice)] if result.notice else []
        return result.describe(parsed.workload.declared.latency_target), notices

    def _time_with_loader(self, measurement: Measurement) -> list[float]:
        """Seconds per step when every batch comes through worker processes and is sent to the device."""
        parsed, step, workers = self._parsed, self._step, self._request.loader_workers
        assert step is not None
        assert workers is not None
        iterations = math.lcm(measurement.iterations[-1], self._round_steps)
        with step.feed.of(Loader(self._batches, self._setting, workers=workers)):
            fed = measure(
                self._step_and_wait if parsed.mode == "infer" else self,
                settings=_shorten(self._settings, iterations),
                clock=WallClock(), device=self._device, peers=self._peers,
            )  # fmt: skip
        return fed.as_samples(parsed.case.key).seconds()

    def _step_and_wait(self) -> None:
        """A latency is that of one batch, also where several make one sample."""
        self()
        self._device.synchronize()

    def _record(self) -> str | None:
        """The folder of the recording, relative to the run; None on a rank that does not see the run's folder. It makes
        the same steps, as the others exchange with it."""
        folder = self._ranks.session.folder
        if folder is not None:
            return record_steps(self, folder, self._parsed.case)
        with TemporaryDirectory() as elsewhere:
            record_steps(self, Path(elsewhere), self._parsed.case, link=False)
        return None

    def _count(self) -> WorkloadObserved:
        """Operations of all ranks' batches; this rank's stand for the others', whose examples are as many."""
        parsed = self._parsed
        plain = parsed.workload.make_ootb(parsed.scale)
        timed = self._make_batches(plain) if self._is_fast else self._batches
        flops = count_flops(plain, timed, mode=parsed.mode, device=self._device.name)
        total = None if flops is None else flops * count_accumulated(parsed) * self._ranks.size
        return WorkloadObserved(model_flops=total)

    def _check(self) -> WorkloadObserved:
        """On one rank alone, on a GPU with its part of the batch: the whole may not fit."""
        if not self._is_fast:
            return WorkloadObserved()
        if not self._request.check:
            return WorkloadObserved(check=UNCHECKED)
        start, parsed = time.perf_counter(), self._parsed
        size = self._count_share() if self._device.has_events else parsed.batch_size
        facts = self._producer.verifier.check(parsed._replace(batch_size=size))
        clear_up(self._device.name)
        return facts | WorkloadObserved(check_s=time.perf_counter() - start)


def _shorten(settings: MeasureSettings, iterations: int) -> MeasureSettings:
    """For the score with a loader, which takes a few seconds."""
    return msgspec.structs.replace(
        settings, iterations=iterations, few_samples=2, min_samples=LOADER_STEPS, max_samples=LOADER_STEPS,
        min_time_s=0.0, max_time_s=min(LOADER_TIME_S, settings.max_time_s), warmup_samples=None, warmup_min_samples=1,
        warmup_min_time_s=0.0, warmup_max_time_s=0.0,
    )  # fmt: skip
