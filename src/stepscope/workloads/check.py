"""Whether a fast form computes what the plain one does: outputs, loss, gradients, and how the loss falls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.workloads.feed import to_device
from stepscope.workloads.precision import cast_module, math_of, products_of
from stepscope.workloads.protocol import EAGER, Change, Engine, Mode, Optimized, Precision, Task
from stepscope.workloads.steps import CAPTURE_WARMUPS, InferStep, TrainStep, compile_loss

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.workloads.protocol import Outputs

    LossOf = Callable[[Any], Any]

SEED = 727
ORDER = (0, 0, 0, 1, 0, 1)
"""Which of two batches each step of the convergence run takes; in longer ones rounding grows into another path."""
STEPS = len(ORDER)
STIR = 0.1
"""Spread of what is added to biases and norms, which begin as zeros and ones: there, a lost one would not show."""
NOISE = 1.5
FAINT = 1e-3
"""A gradient counts with at least this share of all gradients together: rounding is most of a smaller one."""


class Tolerance(NamedTuple):
    """Largest |a - b| / |b|, by Euclidean norm; of gradients, of any one parameter."""

    outputs: float
    loss: float
    gradients: float
    band: float
    """Of the convergence run: largest distance of the losses, as a share of how far the loss moved in all."""


TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(1e-4, 1e-4, 2e-3, 0.05),
    "tf32": Tolerance(5e-3, 5e-3, 5e-2, 0.10),
    "fp16": Tolerance(1e-2, 1e-2, 1e-1, 0.15),
    "bf16": Tolerance(3e-2, 2e-2, 2e-1, 0.20),
    "fp8": Tolerance(2e-1, 1e-1, 5e-1, 0.30),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    what: str
    """`outputs`, `loss`, `gradients` or `convergence`."""
    precision: Precision
    error: float
    limit: float
    where: str = ""
    """The parameter or step with the largest error."""

    @property
    def passed(self) -> bool:
        """False for errors that are no number, too."""
        return self.error <= self.limit


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(one.passed for one in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [one for one in self.findings if not one.passed]


def check_optimized(
    plain: Task,
    fast: Optimized,
    *,
    mode: Mode,
    precision: Precision,
    device: str,
    batch_size: int,
    backend: str = "inductor",
    seed: int = SEED,
    strict: Sequence[Finding] = (),
) -> CheckReport:
    """Against the plain form in fp32 on the same weights and data: in fp32, where only the order of sums differs, and
    in the precision that is scored. `plain` and `fast` must be made from calm sizes. `strict`: what was found in fp32,
    where that is known from another precision of the same case."""
    reference = build_stirred(plain, device=device, seed=seed)
    findings = list(strict)
    for one in dict.fromkeys(("fp32", precision)):
        if strict and one == "fp32":
            continue
        side = _Side(plain, fast, reference, mode, one, device, batch_size, backend, seed)
        findings += side.compare_training() if mode == "train" else side.compare_outputs()
    return CheckReport(findings=findings)


def build_stirred(task: Task, *, device: str, seed: int) -> nn.Module:
    """The plain module, with noise on everything that begins as a constant: biases, norms, their statistics."""
    import torch

    torch.manual_seed(seed)
    with torch.device(device):
        module = task.build()
    generator = torch.Generator(device).manual_seed(seed)

    def noise_like(one: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(one.shape, generator=generator, device=one.device)
        return (STIR * drawn).to(one.dtype)

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
    """The plain form in the place of a fast one: how far rounding alone takes it."""

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        return []


class _Side(NamedTuple):
    """The comparison at one precision."""

    plain: Task
    fast: Optimized
    reference: nn.Module
    mode: Mode
    precision: Precision
    device: str
    batch_size: int
    backend: str
    seed: int

    def compare_outputs(self) -> list[Finding]:
        module = copy.deepcopy(self.reference).eval()
        candidate = self._adopt(module)
        plain_batch, fast_batch = self._batches(self.seed)
        with math_of("fp32", mode="infer", device=self.device):
            expected = self.plain.infer(copy.deepcopy(self.reference).eval(), plain_batch)
        got = self.fast.restore(self._run_captured(candidate, fast_batch), fast_batch)
        return [self._finding("outputs", relative_error(got, expected), TOLERANCES[self.precision].outputs)]

    def _run_captured(self, candidate: nn.Module, batch: dict[str, torch.Tensor]) -> Outputs:
        """As it is timed: where a graph is captured, on another batch than this one."""
        engine = self._engine()
        feed = [batch]
        if engine.graph and self.device.startswith("cuda"):
            feed = [self._batches(self.seed + 1)[1], batch]
        how: dict[str, Any] = {"precision": self.precision, "device": self.device, "engine": engine}
        step = InferStep(self.fast, candidate, feed, backend=self.backend, **how)
        step()
        assert step.outputs is not None
        return step.outputs

    def compare_training(self) -> list[Finding]:
        """Where rounding alone moves the plain form further than the table allows (deep networks with batch norms),
        the fast form may be up to NOISE times as far from fp32 as the plain one in the same precision."""
        findings = self._compare_training()
        if self.precision == "fp32" or all(one.passed for one in findings):
            return findings
        alone = msgspec.structs.asdict
        plain_noise = {one.what: one.error for one in self._replace(fast=_Unchanged(self.plain))._compare_training()}
        return [Finding(**{**alone(one), "limit": max(one.limit, NOISE * plain_noise[one.what])}) for one in findings]

    def _compare_training(self) -> list[Finding]:
        limits = TOLERANCES[self.precision]
        expected_loss, expected = self._plain_gradients()
        candidate = self._adopt(copy.deepcopy(self.reference).train())
        loss_of = compile_loss(self.fast, candidate, self._engine(), self.backend)
        loss, got = self._fast_gradients(candidate, loss_of)
        error, worst = worst_gradient(got, expected)
        del expected, got
        apart = abs(loss - expected_loss) / max(abs(expected_loss), 1e-12)
        return [
            self._finding("loss", apart, limits.loss),
            self._finding("gradients", error, limits.gradients, worst),
            self._compare_convergence(candidate, loss_of),
        ]

    def _plain_gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        module = copy.deepcopy(self.reference).train()
        batch, _ = self._batches(self.seed)
        with products_of("fp32"):
            with math_of("fp32", mode="train", device=self.device):
                loss = self.plain.loss(module, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    def _fast_gradients(self, candidate: nn.Module, loss_of: LossOf) -> tuple[float, dict[str, torch.Tensor]]:
        _, batch = self._batches(self.seed)
        with products_of(self.precision):
            with math_of(self.precision, mode="train", device=self.device):
                loss = loss_of(batch)
            loss.backward()
        return float(loss.detach()), self.fast.gradients(candidate)

    def _compare_convergence(self, candidate: nn.Module, loss_of: LossOf) -> Finding:
        """From the same weights over the same batches, through the very step that is timed.

        How far the loss moved is told batch by batch: two batches differ by more than training moves them.
        """
        expected = [loss or 0.0 for loss in self._losses(self.plain, copy.deepcopy(self.reference).train(), 0, "fp32")]
        got = self._losses(self.fast, candidate, 1, self.precision, loss_of)
        one, other = ([expected[i] for i in range(STEPS) if ORDER[i] == batch] for batch in (0, 1))
        limits = TOLERANCES[self.precision]
        # A loss that hardly moves says nothing below its own rounding.
        moved = max(max(one) - min(one), max(other) - min(other), 2 * limits.loss * abs(expected[0]))
        distances = {i: abs(found - expected[i]) / moved for i, found in enumerate(got) if found is not None}
        worst = max(distances, key=lambda i: _ordered(distances[i]))
        return self._finding("convergence", distances[worst], limits.band, f"step {worst} of {STEPS}")

    def _losses(
        self, task: Task, module: nn.Module, side: int, precision: Precision, loss_of: LossOf | None = None
    ) -> list[float | None]:
        """Of each step; None for those that a capture makes for itself before it."""
        batches = [self._batches(self.seed + i)[side] for i in range(2)]
        feed = [batches[i] for i in ORDER]
        engine, unseen = EAGER, 0
        if loss_of is not None and self._engine().graph and self.device.startswith("cuda"):
            # The capture trains on its first batch a few times; then it is replayed on what follows.
            engine, unseen = Engine(graph=True), CAPTURE_WARMUPS
            feed = [feed[0], *feed[CAPTURE_WARMUPS:]]
        step = TrainStep(task, module, feed, precision=precision, device=self.device, engine=engine, loss_of=loss_of)
        losses: list[float | None] = [None] * unseen
        for _ in range(STEPS - unseen):
            step()
            assert step.loss is not None
            losses.append(float(step.loss))
        return losses

    def _adopt(self, module: nn.Module) -> nn.Module:
        adopted = self.fast.adopt(module, mode=self.mode, precision=self.precision)
        return cast_module(adopted, self.precision, self.mode)

    def _batches(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """For the plain form in fp32, and for the fast one in its precision."""
        plain = self.plain.make_batch(self.batch_size, seed=seed, mode=self.mode)
        fast = self.fast.make_batch(self.batch_size, seed=seed, mode=self.mode)
        where: dict[str, Any] = {"device": self.device, "mode": self.mode}
        return to_device(plain, precision="fp32", **where), to_device(fast, precision=self.precision, **where)

    def _engine(self) -> Engine:
        return self.fast.engine(self.mode)

    def _finding(self, what: str, error: float, limit: float, where: str = "") -> Finding:
        return Finding(what=what, precision=self.precision, error=error, limit=limit, where=where)


def relative_error(got: Outputs, expected: Outputs) -> float:
    """The largest of all outputs; infinite where shapes differ."""
    ours, theirs = _listed(got), _listed(expected)
    if len(ours) != len(theirs):
        return float("inf")
    return max((_distance(a, b) for a, b in zip(ours, theirs, strict=True)), key=_ordered, default=float("inf"))


def _listed(outputs: Outputs) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    norm = float(expected.norm())
    return float((got.double() - expected).norm()) / max(norm, 1e-30)


def worst_gradient(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any parameter's gradient; a missing one is infinitely wrong."""
    whole = sum(float(_dense(one).double().norm()) ** 2 for one in expected.values()) ** 0.5
    worst, where = 0.0, ""
    for name, theirs in expected.items():
        ours = got.get(name)
        if ours is None or ours.shape != theirs.shape:
            return float("inf"), name
        right = _dense(theirs).double()
        scale = max(float(right.norm()), FAINT * whole, 1e-30)
        error = float((_dense(ours).double() - right).norm()) / scale
        if _ordered(error) > _ordered(worst):
            worst, where = error, name
    return worst, where


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _ordered(error: float) -> float:
    """What is no number is worse than everything."""
    return float("inf") if math.isnan(error) else error
