"""Whole training steps of small stacks, as PARAM's and Proxy Workloads' linear micro-benchmarks time them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from stepscope.bench.ops.gemm import Mlp, relu_masks
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, MATRIX_FLOATS, Call, Operator, Shape, Work
from stepscope.bench.ops.reference import RELATIVE_TOLERANCE, widen
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

LEARNING_RATE = 0.01

SHOWN_STEP = 8
"""A step shows where it is at least this many last digits of its weight: rounding then hides little of it."""
STEP_TOLERANCE = 0.15
"""Of a step that shows: half a last digit of eight, and the gradient's own tolerance."""


class MlpTrain(Operator):
    name = "mlp_train"
    summary = (
        "a stack's training step: forward, softmax with cross-entropy, backward, plain SGD; 6 flop a weight and row"
    )
    parameters = Mlp.parameters
    dtypes = MATRIX_FLOATS
    passes = ("forward",)
    unit = "TFLOP/s"
    tiny = Mlp.tiny

    def check_shape(self, shape: Shape) -> None:
        Mlp.widths(shape)

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        """Three products a layer; activations, loss and optimizer are not counted, as those benchmarks do not."""
        widths, batch, size = Mlp.widths(shape), shape["batch"], DTYPE_BYTES[dtype]
        weights = sum(wide * out for wide, out in pairwise(widths))
        # Weights and biases are read and written, the input read, and targets are int64.
        moved = size * (batch * widths[0] + 2 * (weights + sum(widths[1:]))) + 8 * batch
        return Work(flops=6 * batch * weights, bytes=moved)

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        """Weights, their gradients, and what the forward pass keeps."""
        kept = int(shape["batch"]) * sum(Mlp.widths(shape)) * DTYPE_BYTES[dtype]
        return self.work(shape, dtype, "forward").bytes + 3 * kept

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The values that input, weights and biases were copied from."""
        widths = Mlp.widths(shape)
        weights = sum(wide * out for wide, out in pairwise(widths)) + sum(widths[1:])
        return (int(shape["batch"]) * widths[0] + weights) * DTYPE_BYTES[dtype]

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        inputs = {name: maker.own(tensor) for name, tensor in Mlp().make_inputs(shape, maker).items()}
        return {**inputs, "target": maker.indices(Mlp.widths(shape)[-1], shape["batch"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Weights that are leaves already are trained as they are: their gradients can be seen after a step."""
        import torch
        from torch.nn.functional import cross_entropy

        target = inputs["target"]
        weights = {
            name: inputs[name] if inputs[name].requires_grad else inputs[name].detach().requires_grad_()
            for name in _weight_names(inputs)
        }
        stack = Mlp().bind(shape, {**inputs, **weights})
        optimizer = torch.optim.SGD(weights.values(), lr=LEARNING_RATE)

        def step() -> torch.Tensor:
            with torch.enable_grad():
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(stack(), target)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        """One step from fresh weights: its gradients, and that it moved the weights by them.

        The trained ones would not do: where the loss is near zero, gradients are the rounding of others. And weights
        alone would not: in 16 bits most steps are smaller than a weight's rounding.
        """
        fresh = self.make_inputs(shape, Maker(dtype, str(inputs["input"].device)))
        names = _weight_names(fresh)
        for name in names:
            if name.startswith("bias"):
                fresh[name][::2] = 0  # where a step shows whole in every dtype
        before = {name: fresh[name].clone().double() for name in names}
        # Each layer rounds what the one before has rounded.
        tolerance = RELATIVE_TOLERANCE[dtype] * (len(names) / 2) ** 0.5
        gradients = _reference_gradients(fresh, relu_masks(shape, fresh, dtype))
        for name in names:
            fresh[name].requires_grad_()
        self.bind(shape, fresh)()
        for name, expected in gradients.items():
            gradient = fresh[name].grad
            if gradient is None:
                raise WrongResultError(f"{self.name}: a step made no gradient of {name}")
            _require_near(f"{self.name} gradient of {name}", gradient, expected, tolerance)
            _check_moved(f"{self.name} {name}", before[name], fresh[name], expected)


def _weight_names(inputs: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in inputs if name.startswith(("weight", "bias"))]


def _reference_gradients(inputs: Mapping[str, torch.Tensor], masks: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float64, written out, with the hidden elements that pass in the case's own dtype.

    What goes back from layer to layer is rounded to that dtype: over a large batch much of it is too small for
    float16.
    """
    import torch

    wide = widen(inputs)
    layers = range(len(masks) + 1)
    value, given = wide["input"], []
    for layer in layers:
        given.append(value)
        value = value @ wide[f"weight{layer}"].T + wide[f"bias{layer}"]
        if layer < len(masks):
            value = value * masks[layer]
    targets = inputs["target"].unsqueeze(1)
    upstream = (value.softmax(1) - torch.zeros_like(value).scatter_(1, targets, 1.0)) / len(value)
    gradients = {}
    for layer in reversed(layers):
        upstream = upstream.to(inputs["input"].dtype).double()
        gradients[f"weight{layer}"] = upstream.T @ given[layer]
        gradients[f"bias{layer}"] = upstream.sum(0)
        if layer:
            upstream = upstream @ wide[f"weight{layer}"] * masks[layer - 1]
    return gradients


def _require_near(name: str, result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    off, size = float((result.double() - reference).norm()), float(reference.norm())
    if not off <= tolerance * size:
        raise WrongResultError(
            f"{name} is off by {off / (size or 1.0):.2e} relative to float64; {tolerance:.0e} is allowed",
            hint="report this with the system record: a library returns wrong numbers",
        )


def _check_moved(name: str, before: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Compare the step with LEARNING_RATE·gradient where the weight's dtype can show it."""
    import torch

    limits = torch.finfo(weight.dtype)
    step = -LEARNING_RATE * gradient
    shown = step.abs() >= SHOWN_STEP * limits.eps * before.abs().clamp(min=limits.smallest_normal)
    moved = (weight.detach().double() - before)[shown]
    _require_near(f"{name}: the step", moved, step[shown], STEP_TOLERANCE)


OPERATORS: tuple[type[Operator], ...] = (MlpTrain,)
