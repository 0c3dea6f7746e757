"""Measures workload cases: the side that knows torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stepscope.bench.workloads.facts import EnergyMeter, PeakMemory, count_flops, find_peak
from stepscope.bench.workloads.feed import Loader, count_round, make_batches, read_batches, to_device
from stepscope.bench.workloads.generation import Decoder, DecoderRunner, GenerationStep, serve_requests
from stepscope.bench.workloads.precision import build_module
from stepscope.bench.workloads.protocol import EAGER, Optimized, Task
from stepscope.bench.workloads.request import (
    LOADER_STEPS,
    LOADER_TIME_S,
    SEED,
    TRAIN_SAMPLE_S,
    ParsedCase,
    choose_settings,
    count_accumulated,
    read_case,
    require_samples,
)
from stepscope.bench.workloads.search import next_cases
from stepscope.bench.workloads.shared import fold_shared, is_shared, prepare_shared
from stepscope.bench.workloads.steps import (
    InferStep,
    TrainStep,
    clear_up,
    forget_compiled,
    name_early_updates,
    require_sound,
)
from stepscope.bench.workloads.user import require_unchanged
from stepscope.bench.workloads.verify import UNCHECKED, Verifier, describe_changes
from stepscope.core.errors import first_line
from stepscope.launch.worker import Session
from stepscope.measure import (
    CudaDevice,
    Device,
    Measurement,
    MeasureSettings,
    give_back_memory,
    no_garbage_collection,
    open_device,
)
from stepscope.records import Case, Notice, Score, WorkloadRequest, describe_exception, is_out_of_memory
from stepscope.records.kinds import Serving, UserModelSpec, WorkloadObserved
from stepscope.run.control import Alone, Control, TorchControl
from stepscope.run.producer import ExtraMeasurements, Folded, Prepared, Producer, RankOutcome
from stepscope.run.ranks import CaseSkipped
from stepscope.run.recorded import record_steps
from stepscope.store import TPOT, TTFT, MeasuredCase, StoredRun
from stepscope.store.view import LOADER

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


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
    producer.open()
    return producer.build(read_case(case))


Step = TrainStep | InferStep | GenerationStep


class Running:
    """A model ready to be stepped. Counts its steps; holds the only references to its memory."""

    def __init__(self, step: Step, *, round_steps: int = 1) -> None:
        self.step: Step | None = step
        self.round_steps = round_steps
        """Above 1: batches differ in shape, and only so many steps together stand for all."""
        self.calls = 0
        self.sampled = 0
        """How many of the last calls became samples; the others warmed up."""

    def __call__(self) -> None:
        assert self.step is not None
        self.step()
        self.calls += 1

    def keep_measured(self, measurement: Measurement) -> None:
        self.sampled = measurement.sampled_iterations

    def release(self) -> None:
        self.step = None


class StepEnergy:
    """From the first step that warms up to the last that is timed: nothing before or after is in it."""

    def __init__(self, device: str, running: Running) -> None:
        self._device = device
        self._running = running
        self._meter: EnergyMeter | None = None
        self._before = 0
        self.is_counted = EnergyMeter(device).read_j() is not None
        self.j_per_step: float | None = None

    def begin(self) -> None:
        """Only the first time."""
        if self._meter is None:
            self._meter, self._before = EnergyMeter(self._device), self._running.calls

    def end(self) -> None:
        joules = self._meter.read_j() if self._meter is not None else None
        steps = self._running.calls - self._before
        if joules is not None and steps:
            self.j_per_step = joules / steps


def _try(lost: str, body: Callable[[], T], notices: list[Notice], *, hint: str | None = None) -> T | None:
    """What stands beside a score must not cost it; why it is not there is a notice."""
    try:
        return body()
    except Exception as error:  # noqa: BLE001 - of whatever kind: the score stands
        failure = describe_exception(error)
        notices.append(Notice(kind="incomplete", message=f"{lost}: {failure.message}", hint=failure.hint or hint))
        return None


class WorkloadProducer(Producer):
    """Prepares cases one after the other: on one device, or with a model that the ranks share."""

    device: Device

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        assert isinstance(session.request, WorkloadRequest)
        self._request = session.request
        self._running: Running | None = None
        self._compiled_for: tuple[str, int] | None = None

    @property
    def settings(self) -> MeasureSettings:
        return self._request.settings

    @property
    def _folder(self) -> Path:
        return self.session.folder or Path()

    def join(self) -> Control:
        backend = self._request.backend
        return Alone() if backend is None else TorchControl(self.session, backend)

    def open(self) -> Device:
        if self.session.folder is not None and self.session.context.rank == 0:
            _require_same_files(self.session.folder, self._request)
        name, context = self._request.device, self.session.context
        device = self.device = open_device(
            f"cuda:{context.local_rank}" if name == "cuda" and context.world_size > 1 else name
        )
        self._verifier = Verifier(device, self._request.compile_backend)
        if isinstance(device, CudaDevice) and context.world_size == 1:
            device.use_own_stream()
        return device

    def next_cases(self, measured: Callable[[], list[MeasuredCase]]) -> list[Case]:
        return next_cases(self._request.find_batch, measured()) if self._request.find_batch else []

    def fold(self, case: Case, ranks: Sequence[RankOutcome], clock_error_s: float | None) -> Folded:
        return fold_shared(case, ranks) if is_shared(case) else super().fold(case, ranks, clock_error_s)

    def prepare(self, case: Case) -> Prepared:
        """Raises CaseSkipped for what does not fit or cannot run here."""
        if isinstance(case.spec, UserModelSpec):
            from stepscope.bench.workloads.user import prepare_user_model

            is_watched = math.isfinite(self.session.hang_limit_s)
            prepared = prepare_user_model(
                case,
                self.device,
                beat=self.session.heartbeat.tick if is_watched else None,
                record_in=self._folder if self._request.trace else None,
            )
            self.session.heartbeat.beat("measuring", case.key)
            return prepared
        parsed = read_case(case)
        if is_shared(case):
            return prepare_shared(parsed, self.ranks, self._request, self.device)
        task = parsed.workload.make_task(parsed.scale)
        if self._request.data is not None:
            require_unchanged(Path(self._request.data), str(parsed.spec.data))
        batches = self._guarded(lambda: self._host_batches(task, parsed))
        self._release()
        self._forget_others(parsed)
        memory = PeakMemory(self.device.name)
        start = time.perf_counter()
        running = self.build(parsed, task, batches)
        for _ in range(running.round_steps):  # what is new for a shape is compiled here
            self._guarded(running)
        self.device.synchronize()
        setup_s = time.perf_counter() - start
        settings = self._keep_rounds(parsed, running, choose_settings(parsed, self._request.settings, self.device))
        energy = StepEnergy(self.device.name, running)

        def keep_measured(measurement: Measurement) -> None:
            energy.end()
            running.keep_measured(measurement)

        score = Score(unit="ex/s", work=float(parsed.batch_size * count_accumulated(parsed)))
        return Prepared(
            body=running,
            score=None if self._is_unchecked(parsed) else score,
            latency_target=parsed.workload.declared.latency_target,
            observed=WorkloadObserved(setup_s=setup_s) | self._describe(task, parsed, running),
            settings=settings,
            before_sample=energy.begin if energy.is_counted else None,
            on_measured=keep_measured,
            finish=lambda measurement: (measurement, self._measure_extra(parsed, batches, memory, energy)),
        )

    def _is_unchecked(self, parsed: ParsedCase) -> bool:
        """And so without a score. Tries are never checked; they have one for their search alone."""
        is_fast = parsed.workload.implementation == "optimized"
        return is_fast and not self._request.check and not parsed.spec.is_try

    def build(
        self, parsed: ParsedCase, task: Task | None = None, batches: Sequence[dict[str, torch.Tensor]] | None = None
    ) -> Running:
        """The model with its batches on the device; the one before is given up."""
        self._release()
        chosen = task or parsed.workload.make_task(parsed.scale)
        given = batches or self._host_batches(chosen, parsed)
        round_steps = count_round(given, at_once=count_accumulated(parsed) if parsed.mode == "train" else 1)
        running: Running = self._guarded(lambda: Running(self._build(chosen, parsed, given), round_steps=round_steps))
        self._running = running
        return running

    def _release(self) -> None:
        if self._running is not None:
            self._running.release()
        self._running = None
        clear_up(self.device.name)

    def _forget_others(self, parsed: ParsedCase) -> None:
        """What was compiled for a benchmark and batch size serves its other precisions and its check, nothing else."""
        wanted = (parsed.case.benchmark.id, parsed.batch_size)
        if self._compiled_for != wanted:
            forget_compiled()
        self._compiled_for = wanted

    def _host_batches(self, task: Task, parsed: ParsedCase) -> list[dict[str, torch.Tensor]]:
        if self._request.data is not None:
            path = Path(self._request.data)
            writes = parsed.mode == "infer" and isinstance(task, Decoder)
            return read_batches(path, task, batch_size=parsed.batch_size, mode=parsed.mode, any_shape=writes)
        return make_batches(task, batch_size=parsed.batch_size, mode=parsed.mode, seed=SEED)

    def _build(self, task: Task, parsed: ParsedCase, batches: Sequence[dict[str, torch.Tensor]]) -> Step:
        kind: dict[str, Any] = {"mode": parsed.mode, "precision": parsed.precision, "device": self.device.name}
        module = build_module(task, seed=SEED, **kind)
        ready = [to_device(one, **kind) for one in batches]
        how: dict[str, Any] = {
            "precision": parsed.precision,
            "device": self.device.name,
            "engine": task.engine(parsed.mode) if isinstance(task, Optimized) else EAGER,
            "backend": self._request.compile_backend,
        }
        if parsed.mode == "train":
            return TrainStep(task, module, ready, accumulate=count_accumulated(parsed), **how)
        if isinstance(task, Decoder):
            tokens = int(task.sizes["new_tokens"])
            runner = DecoderRunner(task, module, new_tokens=tokens, **how)
            return GenerationStep(runner, ready, new_tokens=tokens, device=self.device)
        return InferStep(task, module, ready, **how)

    def _guarded(self, body: Callable[[], Any]) -> Any:
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

    def _keep_rounds(self, parsed: ParsedCase, running: Running, settings: MeasureSettings) -> MeasureSettings:
        """Where batches differ in shape, a sample of training is whole rounds of them; of latencies there is at least
        one round."""
        if running.round_steps == 1:
            return settings
        if parsed.mode == "train":
            steps: int = self._guarded(lambda: self._count_whole_rounds(running, settings.min_sample_s))
            return msgspec.structs.replace(settings, iterations=steps)
        return require_samples(settings, running.round_steps)

    def _count_whole_rounds(self, running: Running, least_s: float) -> int:
        """Steps of so many rounds as take this long."""
        start = time.perf_counter()
        for _ in range(running.round_steps):
            running()
        self.device.synchronize()
        return running.round_steps * max(1, math.ceil(least_s / (time.perf_counter() - start)))

    def _describe(self, task: Task, parsed: ParsedCase, running: Running) -> WorkloadObserved:
        facts = WorkloadObserved(
            round_steps=None if running.round_steps == 1 else running.round_steps,
            porting=parsed.workload.make_ootb(parsed.scale).ported(self.device.name) or None,
        )
        if isinstance(task, Optimized):
            facts |= describe_changes(task, parsed, self.device, self._request.compile_backend)
            unused = name_early_updates(task, mode=parsed.mode, precision=parsed.precision)
            if unused and count_accumulated(parsed) > 1:
                changes = f"{facts.changes}; not used with accumulated gradients: {unused}"
                facts |= WorkloadObserved(changes=changes)
        return facts

    # --- beside the score ------------------------------------------------------------------------------------------

    def _measure_extra(
        self,
        parsed: ParsedCase,
        batches: list[dict[str, torch.Tensor]],
        memory: PeakMemory,
        energy: StepEnergy,
    ) -> ExtraMeasurements:
        running = self._running
        assert running is not None
        require_sound(running.step)
        facts = WorkloadObserved(peak_memory_bytes=memory.read_bytes())
        extra: dict[str, list[float]] = {}
        notices = self._doubt_percentile(parsed, running)
        if isinstance(running.step, GenerationStep):
            written = running.step.times[-running.sampled :]
            extra |= {TTFT: [one.ttft_s for one in written], TPOT: [s for one in written for s in one.token_s]}
            if not self._is_unchecked(parsed):
                tokens = len(written) * parsed.batch_size * running.step.new_tokens
                facts |= WorkloadObserved(tokens_per_s=tokens / sum(one.duration_s for one in written))
        if parsed.spec.is_try:
            if parsed.workload.implementation == "optimized":
                facts |= WorkloadObserved(check="not made: a try")
            return ExtraMeasurements(extra_s=extra, observed=facts, notices=notices)
        if energy.j_per_step is not None:
            per_example = energy.j_per_step / (parsed.batch_size * count_accumulated(parsed))
            facts |= WorkloadObserved(energy_j_per_example=per_example)
        rate_per_s, step = self._request.rate_per_s, running.step
        if isinstance(step, GenerationStep) and rate_per_s is not None:
            served = _try("requests were not served", lambda: self._serve(step, parsed, rate_per_s), notices)
            if served is not None:
                facts |= WorkloadObserved(serving=served[0])
                notices += served[1]
        if self._request.loader_workers is not None:
            loaded = _try(
                "there is no score with a loader", lambda: self._time_with_loader(running, parsed, batches), notices,
                hint="--no-loader, or fewer --loader-workers",
            )  # fmt: skip
            extra |= {LOADER: loaded} if loaded else {}
        if self._request.trace:
            place = _try("no steps were recorded", lambda: record_steps(running, self._folder, parsed.case), notices)
            facts |= WorkloadObserved(trace=place)
        self._release()
        facts |= self._count(parsed, batches)
        if parsed.workload.implementation == "optimized":
            facts |= self._check(parsed)
        return ExtraMeasurements(extra_s=extra, observed=facts, notices=notices)

    def _doubt_percentile(self, parsed: ParsedCase, running: Running) -> list[Notice]:
        """A percentile of fewer samples than it divides is the largest of them."""
        target = parsed.workload.declared.latency_target
        if target is None or running.sampled >= 100 / (100 - target.percentile):
            return []
        message = f"p{target.percentile:g} of {running.sampled} batches is the slowest of them, or nearly so"
        return [Notice(kind="few_for_percentile", message=message, hint="raise --max-time and --min-samples")]

    def _serve(self, step: GenerationStep, parsed: ParsedCase, rate_per_s: float) -> tuple[Serving, list[Notice]]:
        """With a batch ready for every power of two up to the case's."""
        task = parsed.workload.make_task(parsed.scale)
        sizes = {min(1 << power, parsed.batch_size) for power in range(parsed.batch_size.bit_length() + 1)}
        batches = {
            size: to_device(
                task.make_batch(size, seed=SEED, mode="infer"), device=self.device.name, precision=parsed.precision,
                mode="infer",
            )
            for size in sizes
        }  # fmt: skip
        return serve_requests(
            step, batches, rate_per_s=rate_per_s, requests=self._request.requests, device=self.device, seed=SEED,
            target=parsed.workload.declared.latency_target,
        )  # fmt: skip

    def _time_with_loader(
        self, running: Running, parsed: ParsedCase, batches: list[dict[str, torch.Tensor]]
    ) -> list[float]:
        """Seconds a step when every batch comes through worker processes and is sent to the device."""
        step = running.step
        assert step is not None
        assert self._request.loader_workers is not None
        loader = Loader(
            batches, device=self.device.name, precision=parsed.precision, mode=parsed.mode,
            workers=self._request.loader_workers,
        )  # fmt: skip
        with step.feed.of(loader), no_garbage_collection():
            return self._time_steps(running, parsed)

    def _time_steps(self, running: Running, parsed: ParsedCase) -> list[float]:
        running()
        self.device.synchronize()
        # As without a loader: in training on a GPU nobody waits for the device between two steps.
        window_s = TRAIN_SAMPLE_S if parsed.mode == "train" and self.device.has_events else 0.0
        limit_s = min(LOADER_TIME_S, self._request.settings.max_time_s)
        times: list[float] = []
        begin = start = time.perf_counter()
        while len(times) < LOADER_STEPS and (len(times) < 2 or start - begin < limit_s):
            steps = 0
            while not steps or steps % running.round_steps or time.perf_counter() - start < window_s:
                running()
                steps += 1
                if not window_s:
                    self.device.synchronize()
            self.device.synchronize()
            now = time.perf_counter()
            times.append((now - start) / steps)
            start = now
        return times

    def _count(self, parsed: ParsedCase, batches: list[dict[str, torch.Tensor]]) -> WorkloadObserved:
        plain = parsed.workload.make_ootb(parsed.scale)
        timed = batches if parsed.workload.implementation == "ootb" else self._host_batches(plain, parsed)
        flops = count_flops(plain, timed, mode=parsed.mode, device=self.device.name)
        if flops is None:
            return WorkloadObserved()
        facts = WorkloadObserved(model_flops=flops * count_accumulated(parsed))
        peak = find_peak(self.device.name, parsed.precision)
        if peak is not None:
            facts |= WorkloadObserved(peak_flops=peak.flops, peak_source=peak.source)
        return facts

    def _check(self, parsed: ParsedCase) -> WorkloadObserved:
        if not self._request.check:
            return WorkloadObserved(check=UNCHECKED)
        start = time.perf_counter()
        facts = self._verifier.check(parsed)
        give_back_memory(self.device.name)
        return facts | WorkloadObserved(check_s=time.perf_counter() - start)
