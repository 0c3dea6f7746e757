"""Whole training steps of small stacks, as PARAM's and Proxy Workloads' linear micro-benchmarks time them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from stepscope.measure import WrongResultError
from stepscope.ops.gemm import Mlp
from stepscope.ops.operator import DTYPE_BYTES, MATRIX_FLOATS, Call, Operator, Shape, Work
from stepscope.ops.reference import check_close, widen

if TYPE_CHECKING:
    import torch

    from stepscope.ops.inputs import Maker

LEARNING_RATE = 0.01


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

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        inputs = {name: maker.own(tensor) for name, tensor in Mlp().make_inputs(shape, maker).items()}
        return {**inputs, "target": maker.indices(Mlp.widths(shape)[-1], shape["batch"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        import torch
        from torch.nn.functional import cross_entropy

        target = inputs["target"]
        weights = [
            tensor.detach().requires_grad_() for name, tensor in inputs.items() if name.startswith(("weight", "bias"))
        ]
        names = [name for name in inputs if name.startswith(("weight", "bias"))]
        stack = Mlp().bind(shape, {**inputs, **dict(zip(names, weights, strict=True))})
        optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)

        def step() -> torch.Tensor:
            with torch.enable_grad():
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(stack(), target)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        """One more step from where the timing ended, in this dtype and in float64: every weight must end alike."""
        copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        wide = widen(inputs)
        before = {name: tensor.clone() for name, tensor in wide.items()}
        self.bind(shape, copies)()
        self.bind(shape, wide)()
        for name, reference in wide.items():
            if name.startswith(("weight", "bias")):
                check_close(f"{self.name} {name}", copies[name], reference, dtype)
        if all(bool((wide[name] == before[name]).all()) for name in before):
            raise WrongResultError(f"{self.name}: a step moved no weight")


OPERATORS: tuple[type[Operator], ...] = (MlpTrain,)
