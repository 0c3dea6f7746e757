"""Normalisations, softmax, the loss built on it, and dropout.

Operations are counted one for each addition, multiplication, division, comparison or function (exp, log) of an
element, by the formulas in the comments; what is done once a row, channel or group is left out unless it is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import ClassVar

from stepscope.bench.ops.families.pointwise import COLS, ROWS, RowOperator
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, INDEX_BYTES, Call, Operator, Parameter, Shape, Sizes, Work
from stepscope.bench.ops.reference import RELATIVE_TOLERANCE, check_elements, seeded_like
from stepscope.core.lazy_torch import functional, torch
from stepscope.run.producer import WrongResultError

EPSILON = 1e-5
"""Added to every variance before its root."""
DROPOUT_SIGMAS = 6
"""How far the share of kept elements may lie from its expectation: wrong once in 500 million correct runs."""

_IMAGES = (
    Parameter("batch", "images", 32, "images in one call"),
    Parameter("channels", "channels", 64, "channels of an image"),
    Parameter("height", "pixels", 56, "height of an image"),
    Parameter("width", "pixels", 56, "width of an image"),
)


def _standardised(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Minus the mean, over the root of the biased variance."""
    centred = tensor - tensor.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + EPSILON).sqrt()


class _Affine(Operator):
    """A normalisation with a weight and a bias for each channel or column.

    Forward, 8 an element: mean 1, variance 3 (subtract, square, add), standardise 2, weight and bias 2.
    """

    differentiable: ClassVar[tuple[str, ...]] = ("input", "weight", "bias")
    forward_flops: ClassVar[int] = 8
    backward_flops: ClassVar[int]

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        sizes, size = self.sizes(shape), DTYPE_BYTES[dtype]
        elements, weights = prod(sizes["input"]), prod(sizes["weight"])
        vectors = len(self.differentiable) - 1
        if direction == "forward":
            return Work(self.forward_flops * elements, size * (2 * elements + vectors * weights))
        # Upstream, input and weight read; the gradients of all inputs written. Kept statistics are not counted.
        return Work(self.backward_flops * elements, size * (3 * elements + (1 + vectors) * weights))


class _ImageNorm(_Affine):
    """Backward, 9 an element: standardised input 2, sums of the upstream 1 and of its product with it 2, and the input
    gradient w·r·(dy − mean(dy) − x̂·mean(dy·x̂)) 4: the weight is one number for a channel's elements."""

    backward_flops = 9

    def sizes(self, shape: Shape) -> Sizes:
        channels = shape["channels"]
        images = (shape["batch"], channels, shape["height"], shape["width"])
        return {"input": images, "weight": (channels,), "bias": (channels,)}


class BatchNorm(_ImageNorm):
    name = "batch_norm"
    summary = "torch.nn.functional.batch_norm in training, over (batch, channels, height, width); no running statistics"
    parameters = _IMAGES
    tiny = {"batch": 3, "channels": 4, "height": 5, "width": 6}

    def check_shape(self, shape: Shape) -> None:
        if shape["batch"] * shape["height"] * shape["width"] < 2:
            raise ValueError("batch_norm in training needs at least 2 values a channel: batch·height·width is 1")

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, weight, bias = inputs["input"], inputs["weight"], inputs["bias"]
        return partial(functional.batch_norm, tensor, None, None, weight, bias, training=True, eps=EPSILON)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        weight, bias = (inputs[name].view(1, -1, 1, 1) for name in ("weight", "bias"))
        return lambda: _standardised(inputs["input"], (0, 2, 3)) * weight + bias


class GroupNorm(_ImageNorm):
    name = "group_norm"
    summary = "torch.nn.functional.group_norm over (batch, channels, height, width)"
    parameters = (*_IMAGES, Parameter("groups", "groups", 32, "groups of channels that are normalised together"))
    tiny = {"batch": 2, "channels": 6, "height": 4, "width": 5, "groups": 3}

    def check_shape(self, shape: Shape) -> None:
        channels, groups = shape["channels"], shape["groups"]
        if channels % groups:
            raise ValueError(f"groups={groups} must divide channels={channels}")
        if channels // groups * shape["height"] * shape["width"] < 2:
            raise ValueError("group_norm needs at least 2 values a group: channels/groups·height·width is 1")

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, weight, bias, groups = inputs["input"], inputs["weight"], inputs["bias"], shape["groups"]
        return partial(functional.group_norm, tensor, groups, weight, bias, EPSILON)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor = inputs["input"]
        weight, bias = (inputs[name].view(1, -1, 1, 1) for name in ("weight", "bias"))
        grouped = tensor.view(shape["batch"], shape["groups"], -1)
        return lambda: _standardised(grouped, (2,)).view(tensor.shape) * weight + bias


class _RowNorm(_Affine):
    parameters = (ROWS, COLS)
    tiny = {"rows": 7, "cols": 24}

    def sizes(self, shape: Shape) -> Sizes:
        vectors = dict.fromkeys(self.differentiable[1:], (shape["cols"],))
        return {"input": (shape["rows"], shape["cols"]), **vectors}


class LayerNorm(_RowNorm):
    """Backward, 13 an element: standardised input 2, upstream times weight 1, gradients of weight and bias 3, sums of
    g = w·dy and of g·x̂ 3, and the input gradient r·(g − mean(g) − x̂·mean(g·x̂)) 4."""

    name = "layer_norm"
    summary = "torch.nn.functional.layer_norm over the columns of (rows, cols)"
    backward_flops = 13

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, weight, bias, over = inputs["input"], inputs["weight"], inputs["bias"], (shape["cols"],)
        return partial(functional.layer_norm, tensor, over, weight, bias, EPSILON)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return lambda: _standardised(inputs["input"], (1,)) * inputs["weight"] + inputs["bias"]


class RmsNorm(_RowNorm):
    """Forward, 4 an element: mean square 2, times its inverse root 1, weight 1. Backward, 9: normalised input 1,
    g = w·dy 1, gradient of the weight 2, sum of g·x̂ 2, and the input gradient r·(g − x̂·mean(g·x̂)) 3."""

    name = "rms_norm"
    summary = "torch.nn.functional.rms_norm over the columns of (rows, cols)"
    differentiable = ("input", "weight")
    forward_flops = 4
    backward_flops = 9

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The normalised input; where torch has no fused kernel it is written, and backward keeps it."""
        return int(shape["rows"] * shape["cols"] * DTYPE_BYTES[dtype])

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, weight, over = inputs["input"], inputs["weight"], (shape["cols"],)
        return partial(functional.rms_norm, tensor, over, weight, EPSILON)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, weight = inputs["input"], inputs["weight"]
        return lambda: tensor / (tensor.square().mean(1, keepdim=True) + EPSILON).sqrt() * weight


class Softmax(RowOperator):
    """Forward, 5 an element: maximum, subtract, exp, sum, divide. Backward y·(dy − sum(dy·y)), 4 an element."""

    name = "softmax"
    summary = "torch.softmax over the columns of (rows, cols)"
    parameters = (ROWS, COLS)
    tiny = {"rows": 7, "cols": 24}

    def flops_each(self, shape: Shape) -> tuple[int, int]:
        return 5, 4

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.softmax, inputs["input"], 1)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        # Normal numbers: exp cannot overflow, so the maximum need not be subtracted.
        return lambda: inputs["input"].exp() / inputs["input"].exp().sum(1, keepdim=True)


class CrossEntropy(Operator):
    """Forward, 4 an element (maximum, subtract, exp, sum) and 3 a row (log, subtract, add to the mean). Backward
    (exp(log p) − target)/rows, 2 an element and 1 a row."""

    name = "cross_entropy"
    summary = (
        "torch.nn.functional.cross_entropy of (rows, classes) with one target a row: log-softmax, then the mean loss"
    )
    parameters = (
        Parameter("rows", "rows", 4096, "samples, or tokens"),
        Parameter("classes", "classes", 32000, "classes, or words of the vocabulary"),
    )
    differentiable = ("logits",)
    tiny = {"rows": 7, "classes": 24}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        rows, elements, size = shape["rows"], shape["rows"] * shape["classes"], DTYPE_BYTES[dtype]
        targets, loss = INDEX_BYTES * rows, size
        if direction == "forward":
            # The log-probabilities that torch writes and reads again are no compulsory traffic: only the loss is asked.
            return Work(flops=4 * elements + 3 * rows, bytes=size * elements + targets + loss)
        # Kept log-probabilities, targets and the upstream of the loss read, the gradient written.
        return Work(flops=2 * elements + rows, bytes=size * 2 * elements + targets + loss)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        return int(shape["rows"] * shape["classes"] * DTYPE_BYTES[dtype])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        rows, classes = shape["rows"], shape["classes"]
        return {"logits": maker.values(rows, classes), "targets": maker.indices(classes, rows)}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(functional.cross_entropy, inputs["logits"], inputs["targets"])

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        logits, targets = inputs["logits"], inputs["targets"].unsqueeze(1)

        def formula() -> torch.Tensor:
            losses = logits.exp().sum(1).log() - logits.gather(1, targets).squeeze(1)
            return losses.mean()

        return formula


class Dropout(RowOperator):
    """2 an element each way: the comparison with the drawn number, or the mask, and the scale. Drawing is not counted.

    Its output is random, so that no reference can be computed: the check asks whether about the right share was
    kept, and whether each element is what its keeping or dropping makes it.
    """

    name = "dropout"
    summary = "torch.nn.functional.dropout in training over (rows, cols)"
    parameters = (
        ROWS,
        COLS,
        Parameter("p", "probability", 0.1, "that an element is dropped"),
    )
    tiny = {"rows": 32, "cols": 24}

    def check_shape(self, shape: Shape) -> None:
        if not 0 <= shape["p"] < 1:
            raise ValueError(f"p={shape['p']} must be at least 0 and below 1")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        elements, size = shape["rows"] * shape["cols"], DTYPE_BYTES[dtype]
        # Backward reads the kept mask, one byte an element; forward alone need not write it.
        return Work(flops=2 * elements, bytes=(2 * size + (direction == "backward")) * elements)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The drawn numbers or the mask."""
        return int(shape["rows"] * shape["cols"] * DTYPE_BYTES[dtype])

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, p = inputs["input"], shape["p"]
        return partial(functional.dropout, tensor, p, training=True)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        tensor = inputs["input"].detach()
        with torch.set_grad_enabled(direction == "backward"):
            if direction == "backward":
                tensor.requires_grad_()
            result = self.bind(shape, {"input": tensor})()
        # An element that is 0 does not tell whether it was kept.
        telling = tensor.detach() != 0
        kept = (result.detach() != 0) & telling
        count, p = int(telling.sum()), shape["p"]
        if abs(int(kept.sum()) - count * (1 - p)) > DROPOUT_SIGMAS * (count * p * (1 - p)) ** 0.5:
            raise WrongResultError(f"dropout with p={p} keeps {int(kept.sum())} of {count} elements")
        scaled = {"dropout": (result.detach(), tensor.detach())}
        if direction == "backward":
            (upstream,) = seeded_like([result])
            scaled["dropout backward"] = (torch.autograd.grad(result, tensor, upstream)[0], upstream)
        # Below the smallest normal number rounding is no longer relative; what is dropped is 0 exactly.
        tiny = torch.finfo(tensor.dtype).tiny
        for name, (scaled_result, source) in scaled.items():
            expected = torch.where(kept, source.double() / (1 - p), 0)[telling]
            allowed = RELATIVE_TOLERANCE[dtype] * expected.abs() + torch.where(expected == 0, 0.0, tiny)
            check_elements(
                f"{name} in {dtype}", scaled_result[telling], expected, allowed, f"are not what p={p} makes of them"
            )
