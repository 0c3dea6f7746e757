"""One step of an optimizer over a list of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, Call, Operator, Parameter, Shape, Work
from stepscope.bench.ops.reference import check_close, widen
from stepscope.core.lazy_torch import torch

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
"""Decay of adamw, as language models are trained; the others have none."""


class _Algorithm(NamedTuple):
    flops: int
    """An element."""
    states: int
    """Tensors kept for each parameter: read and written every step."""


_ALGORITHMS = {
    "sgd": _Algorithm(flops=2, states=0),
    "momentum": _Algorithm(flops=4, states=1),
    "adam": _Algorithm(flops=13, states=2),
    "adamw": _Algorithm(flops=14, states=2),
}
"""p − lr·g: 2. m = β·m + g, p − lr·m: 4. Adam: m 3, v 4, root, scale and epsilon 3, quotient, step size and
subtraction 3; with decoupled decay one product more."""
_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "forloop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
_CHECK_SCALES = (1.0, LEARNING_RATE)
"""The check steps parameters of ordinary size, where decay shows, and such of a step's size, where a step that was left
out cannot hide in the rounding of 16 bits."""


class OptimizerStep(Operator):
    """Parameters and states read and written, gradients read: 3 passes for sgd, 5 with momentum, 7 for adam.

    The state is made by a first step before anything is timed; every timed step moves the parameters on, with the
    same gradients.
    """

    name = "optimizer_step"
    summary = "step() of torch.optim.SGD, Adam or AdamW over tensors of equal size, state included"
    parameters = (
        Parameter("tensors", "tensors", 64, "parameter tensors"),
        Parameter("elements", "elements", 1 << 20, "elements of each"),
        Parameter("algorithm", "", "adam", "momentum is sgd with momentum 0.9", tuple(_ALGORITHMS)),
        Parameter(
            "implementation", "", "foreach",
            "forloop: kernels for each tensor; foreach: kernels over lists of tensors; fused: one kernel over lists",
            tuple(_IMPLEMENTATIONS),
        ),
    )  # fmt: skip
    passes = ("forward",)
    tiny = {"tensors": 3, "elements": 70}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        algorithm, elements = _ALGORITHMS[shape["algorithm"]], shape["tensors"] * shape["elements"]
        return Work(algorithm.flops * elements, DTYPE_BYTES[dtype] * (3 + 2 * algorithm.states) * elements)

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        copies = 2 + _ALGORITHMS[shape["algorithm"]].states
        return int(copies * shape["tensors"] * shape["elements"] * DTYPE_BYTES[dtype])

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The values that parameters and gradients were made of, and the denominator of adam where it is written."""
        tensor = int(shape["elements"]) * DTYPE_BYTES[dtype]
        made_of = 2 * int(shape["tensors"]) * tensor
        written = {"forloop": 1, "foreach": int(shape["tensors"]), "fused": 0}[shape["implementation"]]
        return made_of + tensor * (written if shape["algorithm"].startswith("adam") else 0)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        inputs = {}
        for i in range(shape["tensors"]):
            inputs[f"parameter{i}"] = maker.own(maker.values(shape["elements"]))
            gradient = maker.values(shape["elements"])
            # Away from zero: squares of small gradients vanish in float16, and adam divides by their root.
            inputs[f"gradient{i}"] = torch.where(gradient < 0, gradient - 0.5, gradient + 0.5)
        return inputs

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensors = []
        for i in range(shape["tensors"]):
            parameter = inputs[f"parameter{i}"].detach().requires_grad_()
            parameter.grad = inputs[f"gradient{i}"]
            tensors.append(parameter)
        optimizer = _make_optimizer(shape, tensors)
        optimizer.step()
        return optimizer.step

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        """Two steps from the state of zero, the one of `bind` and a timed one, against the formulas in float64."""
        for scale in _CHECK_SCALES:
            fresh = {
                name: tensor.detach() * scale if name.startswith("parameter") else tensor
                for name, tensor in inputs.items()
            }
            wide = widen(fresh)
            expected = {
                f"parameter{i}": _two_steps(shape["algorithm"], wide[f"parameter{i}"], wide[f"gradient{i}"])
                for i in range(shape["tensors"])
            }
            self.bind(shape, fresh)()
            for name, parameter in expected.items():
                check_close(f"{self.name} {shape['algorithm']}", fresh[name], parameter, dtype)


def _make_optimizer(shape: Shape, tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    algorithm = shape["algorithm"]
    options: dict[str, Any] = {"lr": LEARNING_RATE, **_IMPLEMENTATIONS[shape["implementation"]]}
    if algorithm in ("sgd", "momentum"):
        return torch.optim.SGD(tensors, momentum=MOMENTUM if algorithm == "momentum" else 0.0, **options)
    # A graph can be captured only where the count of steps lies on the device; there it is float32, too short for
    # float64 parameters.
    capturable = tensors[0].is_cuda and tensors[0].dtype.itemsize < 8
    options |= {"betas": BETAS, "eps": EPSILON, "capturable": capturable}
    decay = WEIGHT_DECAY if algorithm == "adamw" else 0.0
    return (torch.optim.AdamW if decay else torch.optim.Adam)(tensors, weight_decay=decay, **options)


def _two_steps(algorithm: str, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    mean, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step in (1, 2):
        if algorithm == "sgd":
            parameter = parameter - LEARNING_RATE * gradient
        elif algorithm == "momentum":
            mean = MOMENTUM * mean + gradient
            parameter = parameter - LEARNING_RATE * mean
        else:
            mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
            square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
            unbiased = mean / (1 - BETAS[0] ** step)
            spread = (square / (1 - BETAS[1] ** step)).sqrt()
            if algorithm == "adamw":
                parameter = parameter * (1 - LEARNING_RATE * WEIGHT_DECAY)
            parameter = parameter - LEARNING_RATE * unbiased / (spread + EPSILON)
    return parameter
