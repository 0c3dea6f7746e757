"""Whether an optimized implementation computes what the plain one does: outputs, loss, gradients, and how the loss
falls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.bench.workloads.findings import (
    HIGHEST,
    TOLERANCES,
    CheckReport,
    Finding,
    as_order,
    buffers_of,
    compare_differences,
    example_error,
    gradients_of,
    loss_error,
    named_errors,
    relative_error,
    size_error,
    update_errors,
)
from stepscope.bench.workloads.precision import math_of, matmul_rounding, shape_module, to_device
from stepscope.bench.workloads.protocol import (
    EAGER,
    Batch,
    Change,
    Engine,
    Mode,
    Optimized,
    Outputs,
    Precision,
    Setting,
    Task,
)
from stepscope.bench.workloads.request import SEED
from stepscope.bench.workloads.steps import CAPTURE_WARMUPS, InferStep, TrainStep, compile_pass
from stepscope.core.lazy_torch import torch

LossOf = Callable[[Any], Any]

ORDER = (0, 0, 0, 1, 0, 1)
"""Which of two batches each step of the convergence run takes; in longer ones rounding grows into another path."""
STEPS = len(ORDER)
PERTURBED_BY = 0.1
"""Spread of what is added to biases and norms, which begin as zeros and ones: there, a lost one would not show."""
NOISE = 1.5
"""How many times as far from the ootb implementation in fp32 an optimized implementation may be as rounding alone takes
the plain one."""
PERTURBATIONS = 8
"""Times that the ootb implementation is run in fp32 with weights that differ in their last bit, to see what rounding
does. Single activations that change their sign decide it: of fewer runs, often none has the one that matters."""
MOST_SIZE = 0.4
"""Up to which rounding may change the part of all gradients, or of what tells outputs apart, that points along the
right one; halves are off by 0.5."""
MOST_DIFFERENCE = 0.8
"""The same limit where rounding may make more of the difference: answers of other examples are off by 1 and more."""
MOST_EXAMPLE = 0.5
"""Up to which one example's outputs may be off where all together are right; one of zeros is off by 1."""
DOUBLE = 1e-5
"""Largest relative error of loss and gradients in fp64, where rounding changes no sign; models have fp32 parts."""
DOUBLE_BATCH = 16
"""Examples of that comparison: nothing has to average out."""
UPDATE = 1e-4
"""Largest relative error of how far one step moves a weight, by the same gradients and beyond its last bit."""


def check_optimized(
    plain: Task,
    fast: Optimized,
    setting: Setting,
    *,
    batch_size: int,
    at_once: int = 1,
    strict: Sequence[Finding] = (),
) -> CheckReport:
    """Against the ootb implementation in fp32 on the same weights and data: in fp32, where only the order of sums
    differs, and in the precision that is scored. `plain` and `fast` must be made from deterministic sizes. `at_once`:
    batches whose gradients are added up for a step. `strict`: what was found in fp32, where that is known from another
    precision."""
    reference = build_perturbed(plain, device=setting.device, seed=SEED)
    findings = list(strict)
    for one in dict.fromkeys(("fp32", setting.precision)):
        if strict and one == "fp32":
            continue
        side = _Side(plain, fast, reference, setting._replace(precision=one), batch_size, at_once)
        findings += side.compare_training() if setting.mode == "train" else side.compare_outputs()
    return CheckReport(findings=findings)


def build_perturbed(task: Task, *, device: str, seed: int) -> torch.nn.Module:
    """The plain module, with noise on everything that begins as a constant: biases, norms, their statistics."""
    torch.manual_seed(seed)
    with torch.device(device):
        module = task.build()
    generator = torch.Generator(device).manual_seed(seed)

    def noise_like(one: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(one.shape, generator=generator, device=one.device)
        return (PERTURBED_BY * drawn).to(one.dtype)

    kept = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() <= 1 and parameter.is_floating_point():
                parameter.add_(noise_like(parameter))
        for name, buffer in module.named_buffers():
            if name in kept and buffer.is_floating_point():
                buffer.mul_(1 + noise_like(buffer))
                if name.endswith("mean"):
                    buffer.add_(noise_like(buffer))
    return module


class _Unchanged(Optimized):
    """The ootb implementation in the place of a fast one: how far rounding alone takes it."""

    def list_changes(self, mode: Mode) -> list[Change]:
        return []


class _Perturbed(_Unchanged):
    """The ootb implementation with weights that are rounded otherwise."""

    def __init__(self, plain: Task, seed: int) -> None:
        super().__init__(plain)
        self._seed = seed

    def convert(self, module: torch.nn.Module, *, mode: Mode, precision: Precision) -> torch.nn.Module:
        for parameter in module.parameters():
            generator = torch.Generator(parameter.device).manual_seed(self._seed)
            up = torch.rand(parameter.shape, generator=generator, device=parameter.device) < 0.5
            beyond = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.data = torch.nextafter(parameter.data, beyond)
        return module


class _Training(NamedTuple):
    """What a form computes from the same weights and batches."""

    loss: float
    gradients: dict[str, torch.Tensor]
    statistics: dict[str, torch.Tensor]
    """By how much one batch moves what norms remember."""
    losses: list[float | None]
    """Losses of the steps of the convergence run, where it was made; None for steps that a capture makes for itself."""


class _Distance(NamedTuple):
    """How far a form is from the expected one; errors of gradients and statistics by name."""

    loss: float
    gradients: dict[str, float]
    statistics: dict[str, float]
    size: float
    convergence: tuple[float, int] | None
    """The error, and the step that has it."""


class _Side(NamedTuple):
    """The comparison at one precision."""

    plain: Task
    fast: Optimized
    reference: torch.nn.Module
    setting: Setting
    batch_size: int
    at_once: int = 1

    @property
    def precision(self) -> Precision:
        return self.setting.precision

    @property
    def exact(self) -> Setting:
        """That of the ootb implementation."""
        return self.setting._replace(precision="fp32")

    def compare_outputs(self) -> list[Finding]:
        plain_batch, fast_batch = self._batches(SEED)
        with math_of(self.exact):
            expected = self.plain.infer(self.reference.eval(), plain_batch)
        got = self.fast.unpack(self._run_captured(self._convert(), fast_batch), fast_batch)
        apart = compare_differences(got, expected, self.batch_size)
        return [
            self._find("outputs", relative_error(got, expected), TOLERANCES[self.precision].outputs),
            self._find("one example", example_error(got, expected, self.batch_size), MOST_EXAMPLE),
            self._find("differences of examples", apart.error, MOST_SIZE, [apart.chance], MOST_DIFFERENCE),
        ]

    def _run_captured(self, candidate: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Outputs:
        """As it is timed: where a graph is captured, on another batch than this one."""
        engine = self._engine()
        feed = [batch]
        if engine.graph and self.setting.device.startswith("cuda"):
            feed = [self._batches(SEED + 1)[1], batch]
        step = InferStep(self.fast, candidate, feed, self.setting, engine=engine)
        step()
        assert step.outputs is not None
        return step.outputs

    def compare_training(self) -> list[Finding]:
        """Where rounding alone moves the ootb implementation further than the table allows, the optimized
        implementation may be up to NOISE times as far: deep networks with batch norms amplify it, and single
        activations change their sign. In fp32 that is granted to what is the same function beyond doubt: the two
        must agree in fp64."""
        expected = self._train_plain()
        got = self._distance(self._train_fast(), expected)
        findings = self._judge(got)
        if not all(one.passed for one in findings):
            converged = next(one.passed for one in findings if one.what == "convergence")
            rounded = [self._distance(one, expected) for one in self._train_rounded(converge=not converged)]
            findings = self._judge(got, rounded)
            if self.precision == "fp32" and all(one.passed for one in findings):
                findings += self._compare_in_double()
        # Weights in halves move by less than their last bit, and whoever keeps them otherwise updates those.
        return [*findings, self._compare_update()] if self.precision == "fp32" else findings

    def _train_rounded(self, *, converge: bool) -> Iterator[_Training]:
        """The ootb implementation with nothing but other rounding."""
        if self.precision != "fp32":
            yield self._replace(fast=_Unchanged(self.plain))._train_fast(converge=converge)
            return
        for number in range(PERTURBATIONS):
            yield self._replace(fast=_Perturbed(self.plain, SEED + number))._train_fast(converge=converge)

    def _compare_in_double(self) -> list[Finding]:
        """Not compiled: what compilers and kernels make of the same function is compared in fp32."""
        side = self._replace(batch_size=min(self.batch_size, DOUBLE_BATCH))
        plain_batch, fast_batch = side._batches(SEED)
        modules = copy.deepcopy(self.reference).train(), self._convert()
        found: list[tuple[float, dict[str, torch.Tensor]]] = []
        # Timing cuDNN's algorithms for every shape would take far longer than this one step.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            for task, module, batch in zip((self.plain, self.fast), modules, (plain_batch, fast_batch), strict=True):
                wide = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}
                loss = task.loss(module.double(), wide)
                loss.backward()  # type: ignore[no-untyped-call]
                own = self.fast.gradients(module) if task is self.fast else gradients_of(module)
                found.append((float(loss.detach()), own))
        (expected_loss, expected), (got_loss, got) = found
        errors = named_errors(got, expected)
        worst = max(errors, key=lambda name: as_order(errors[name]))
        return [
            Finding(what="loss", precision="fp64", error=loss_error(got_loss, expected_loss), limit=DOUBLE),
            Finding(what="gradients", precision="fp64", error=errors[worst], limit=DOUBLE, where=worst),
        ]

    def _compare_update(self) -> Finding:
        """One step, not captured. The plain optimizer is given the optimized implementation's own gradients: what is
        left to differ is the update itself."""
        candidate = self._convert()
        loss_of = compile_pass(self.fast, candidate, self.setting, self._engine())
        _, batch = self._batches(SEED)
        self._backward(loss_of, batch)
        gradients = {name: one.clone() for name, one in self.fast.gradients(candidate).items()}
        batches = [self._batches(SEED + i)[1] for i in range(self.at_once)]
        TrainStep(self.fast, candidate, batches, self.setting, accumulate=self.at_once, loss_of=loss_of)()
        # Those that the step has used, but for weights that a backward pass updates itself and leaves without any.
        gradients |= self.fast.gradients(candidate)
        plain = copy.deepcopy(self.reference).train()
        optimizer = self.plain.make_optimizer(plain)
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients.get(name)
        optimizer.step()
        added = self.fast.added_rows(self.batch_size)
        errors = update_errors(self._weights(candidate), plain, self.reference, added)
        worst = max(errors, key=lambda name: as_order(errors[name]))
        return self._find("update", errors[worst], UPDATE, where=worst)

    def _weights(self, candidate: torch.nn.Module) -> dict[str, torch.Tensor]:
        """By the plain module's names: they lie as their gradients do."""
        for parameter in candidate.parameters():
            parameter.grad = parameter.detach().clone()
        return self.fast.gradients(candidate)

    def _distance(self, got: _Training, expected: _Training) -> _Distance:
        return _Distance(
            loss_error(got.loss, expected.loss),
            named_errors(got.gradients, expected.gradients),
            named_errors(got.statistics, expected.statistics),
            size_error(got.gradients, expected.gradients),
            self._convergence_error(got, expected) if got.losses else None,
        )

    def _judge(self, got: _Distance, rounded: Sequence[_Distance] = ()) -> list[Finding]:
        """`rounded`: the ootb implementation with nothing but other rounding."""
        table, ceiling = TOLERANCES[self.precision], HIGHEST[self.precision]
        assert got.convergence is not None
        apart, step = got.convergence
        strays = [one.convergence[0] for one in rounded if one.convergence is not None]
        found = [
            self._find("loss", got.loss, table.loss, [one.loss for one in rounded], ceiling.loss),
            self._find_worst("gradients", got.gradients, [one.gradients for one in rounded]),
            self._find("convergence", apart, table.band, strays, ceiling.band, f"step {step} of {STEPS}"),
        ]
        if got.statistics:
            found.append(self._find_worst("statistics", got.statistics, [one.statistics for one in rounded]))
        if rounded:
            # Noise points everywhere, a fault points somewhere: along the right gradient only a fault can be far off.
            sizes = [one.size for one in rounded]
            found.append(self._find("size of gradients", got.size, table.gradients, sizes, MOST_SIZE))
        return found

    def _find_worst(self, what: str, errors: Mapping[str, float], rounded: Sequence[Mapping[str, float]]) -> Finding:
        """The parameter or norm that is furthest beyond its limit, or nearest to it."""
        table, ceiling = TOLERANCES[self.precision].gradients, HIGHEST[self.precision].gradients
        if self.precision == "fp32":
            # Which one is hit by the few signs that change is chance; below fp32 so many change that all are.
            rounded = [dict.fromkeys(one, max(map(as_order, one.values()))) for one in rounded]
        found = (
            self._find(what, error, table, [one[name] for one in rounded], ceiling, name)
            for name, error in errors.items()
        )
        return max(found, key=lambda one: as_order(one.error) / one.limit)

    def _train_plain(self) -> _Training:
        module = copy.deepcopy(self.reference).train()
        batch, _ = self._batches(SEED)
        with matmul_rounding("fp32"):
            with math_of(self.exact):
                loss = self.plain.loss(module, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        statistics = {name: one for name, one in self._moved(buffers_of(module)).items() if bool(one.any())}
        losses = self._losses(self.plain, copy.deepcopy(self.reference).train(), 0, self.exact)
        return _Training(float(loss.detach()), gradients_of(module), statistics, losses)

    def _train_fast(self, *, converge: bool = True) -> _Training:
        """The convergence run goes on with the very step that is timed."""
        module = copy.deepcopy(self.reference)
        # Optimized implementations use the plain one's norms as they are.
        buffers = buffers_of(module)
        candidate = shape_module(self.fast, module, self.setting)
        del module
        loss_of = compile_pass(self.fast, candidate, self.setting, self._engine())
        _, batch = self._batches(SEED)
        loss = self._backward(loss_of, batch)
        gradients = {name: one.clone() for name, one in self.fast.gradients(candidate).items()}
        statistics = self._moved(buffers)
        losses = self._losses(self.fast, candidate, 1, self.setting, loss_of) if converge else []
        return _Training(loss, gradients, statistics, losses)

    def _backward(self, loss_of: LossOf, batch: dict[str, torch.Tensor]) -> float:
        with matmul_rounding(self.precision):
            with math_of(self.setting):
                loss = loss_of(batch)
            loss.backward()
        return float(loss.detach())

    def _moved(self, buffers: Batch) -> dict[str, torch.Tensor]:
        before = buffers_of(self.reference)
        return {name: one.detach() - before[name] for name, one in buffers.items()}

    def _convergence_error(self, got: _Training, plain: _Training) -> tuple[float, int]:
        """How far the loss moved is told batch by batch: two batches differ by more than training moves them."""
        expected = [loss or 0.0 for loss in plain.losses]
        one, other = ([expected[i] for i in range(STEPS) if ORDER[i] == batch] for batch in (0, 1))
        # A loss that hardly moves says nothing below its own rounding.
        least = 2 * TOLERANCES[self.precision].loss * abs(expected[0])
        moved = max(max(one) - min(one), max(other) - min(other), least)
        distances = {i: abs(found - expected[i]) / moved for i, found in enumerate(got.losses) if found is not None}
        worst = max(distances, key=lambda i: as_order(distances[i]))
        return distances[worst], worst

    def _losses(
        self, task: Task, module: torch.nn.Module, side: int, setting: Setting, loss_of: LossOf | None = None
    ) -> list[float | None]:
        """The loss of each step; None for those that a capture makes for itself before it."""
        batches = [self._batches(SEED + i)[side] for i in range(2)]
        # A step's loss is that of its last batch.
        feed = [[*[batches[1 - i]] * (self.at_once - 1), batches[i]] for i in ORDER]
        engine, unseen = EAGER, 0
        if loss_of is not None and self._engine().graph and setting.device.startswith("cuda"):
            # The capture trains on its first batch a few times; then it is replayed on what follows.
            engine, unseen = Engine(graph=True), CAPTURE_WARMUPS
            feed = [feed[0], *feed[CAPTURE_WARMUPS:]]
        given = [batch for batches in feed for batch in batches]
        step = TrainStep(task, module, given, setting, engine=engine, accumulate=self.at_once, loss_of=loss_of)
        losses: list[float | None] = [None] * unseen
        for _ in range(STEPS - unseen):
            step()
            assert step.loss is not None
            losses.append(float(step.loss))
        return losses

    def _convert(self) -> torch.nn.Module:
        """The optimized implementation of the reference, with weights of its own."""
        return shape_module(self.fast, copy.deepcopy(self.reference), self.setting)

    def _batches(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """For the ootb implementation in fp32, and for the fast one in its precision."""
        plain, fast = (
            task.make_batch(self.batch_size, seed=seed, mode=self.setting.mode) for task in (self.plain, self.fast)
        )
        return to_device(plain, self.exact), to_device(fast, self.setting)

    def _engine(self) -> Engine:
        return self.fast.engine(self.setting.mode)

    def _find(  # noqa: PLR0917 - read as a row
        self, what: str, error: float, limit: float, noises: Sequence[float] = (), highest: float = 0.0, where: str = ""
    ) -> Finding:
        """`noises`: what rounding alone does, which may raise the limit up to the highest."""
        noise = max(map(as_order, noises), default=None)
        # Noise that is no number says that there is nothing to compare with, not that everything is allowed.
        if noise is not None and not math.isinf(noise):
            limit = max(limit, min(NOISE * noise, highest))
        return Finding(what=what, precision=self.precision, error=error, limit=limit, where=where, noise=noise)
