"""Convolutions over one, two and three spatial dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, MATRIX_FLOATS, Call, Operator, Parameter, Shape, Work
from stepscope.core.lazy_torch import functional, torch

_KERNEL = Parameter("kernel", "elements", 3, "extent of the kernel along every spatial dimension")
_STRIDE = Parameter("stride", "elements", 1, "step of the kernel")
_PADDING = Parameter("padding", "elements", 1, "zeros added at every border", least=0)
_DILATION = Parameter("dilation", "elements", 1, "distance between neighbouring taps of the kernel")
_GROUPS = Parameter("groups", "groups", 1, "channels are split into this many; as many as `in`: depthwise")
_BIAS = Parameter("bias", "", "no", "whether a bias for each output channel is added", ("yes", "no"))


def _channels(default: int) -> tuple[Parameter, Parameter]:
    return (
        Parameter("in", "channels", default, "input channels"),
        Parameter("out", "channels", default, "output channels"),
    )


class _Convolution(Operator):
    """What the three have in common.

    A multiplication and an addition for each output and each tap of its kernel, taps in the padding included; with
    bias one addition more an output. Backward computes the gradients of input and weight: twice the products, and one
    addition an output for the bias.
    """

    dtypes = MATRIX_FLOATS
    unit = "TFLOP/s"
    spatial: ClassVar[tuple[str, ...]]
    """The parameters that are spatial extents, outermost first."""

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        return ("input", "weight", "bias") if shape["bias"] == "yes" else ("input", "weight")

    def output_extents(self, shape: Shape) -> tuple[int, ...]:
        reach = shape["dilation"] * (shape["kernel"] - 1) + 1
        return tuple((shape[name] + 2 * shape["padding"] - reach) // shape["stride"] + 1 for name in self.spatial)

    def check_shape(self, shape: Shape) -> None:
        if shape["in"] % shape["groups"] or shape["out"] % shape["groups"]:
            raise ValueError(f"groups={shape['groups']} must divide both in={shape['in']} and out={shape['out']}")
        for name, extent in zip(self.spatial, self.output_extents(shape), strict=True):
            if extent < 1:
                raise ValueError(
                    f"{name}={shape[name]} leaves no output: {name} + 2·padding must be at least "
                    f"dilation·(kernel − 1) + 1"
                )

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, wide, out, size = shape["batch"], shape["in"], shape["out"], DTYPE_BYTES[dtype]
        given = batch * wide * math.prod(shape[name] for name in self.spatial)
        taps = wide // shape["groups"] * shape["kernel"] ** len(self.spatial)
        weight, bias = out * taps, out if shape["bias"] == "yes" else 0
        output = batch * out * math.prod(self.output_extents(shape))
        products, added = 2 * output * taps, output if bias else 0
        if direction == "forward":
            return Work(products + added, size * (given + weight + bias + output))
        # Upstream, input and weight read; the gradients of input, weight and bias written.
        return Work(2 * products + added, size * (output + 2 * given + 2 * weight + bias))

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        kernel = [shape["kernel"]] * len(self.spatial)
        inputs = {
            "input": self._laid(shape, maker, shape["batch"], shape["in"], [shape[name] for name in self.spatial]),
            "weight": self._laid(shape, maker, shape["out"], shape["in"] // shape["groups"], kernel),
        }
        if shape["bias"] == "yes":
            inputs["bias"] = maker.values(shape["out"])
        return inputs

    def _laid(self, shape: Shape, maker: Maker, outer: int, channels: int, extents: list[int]) -> torch.Tensor:
        return maker.values(outer, channels, *extents)

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        convolve = getattr(functional, self.name)
        tensor, weight, bias = inputs["input"], inputs["weight"], inputs.get("bias")
        stride, padding, dilation, groups = (shape[name] for name in ("stride", "padding", "dilation", "groups"))
        return lambda: convolve(tensor, weight, bias, stride, padding, dilation, groups)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """torch's float64 kernels, always on packed channels: written out by taps it would need memory for each tap."""
        return self.bind(shape, {name: tensor.contiguous() for name, tensor in inputs.items()})


class Conv1d(_Convolution):
    name = "conv1d"
    summary = "torch.nn.functional.conv1d: (batch, in, length) → (batch, out, length out)"
    parameters = (
        Parameter("batch", "sequences", 32, "sequences in one call"),
        *_channels(256),
        Parameter("length", "elements", 1024, "length of a sequence"),
        _KERNEL, _STRIDE, _PADDING, _DILATION, _GROUPS, _BIAS,
    )  # fmt: skip
    spatial = ("length",)
    tiny = {"batch": 2, "in": 4, "out": 6, "length": 11}


class Conv2d(_Convolution):
    name = "conv2d"
    summary = "torch.nn.functional.conv2d: (batch, in, height, width) → (batch, out, height out, width out)"
    parameters = (
        Parameter("batch", "images", 32, "images in one call"),
        *_channels(64),
        Parameter("height", "pixels", 56, "height of an image"),
        Parameter("width", "pixels", 56, "width of an image"),
        _KERNEL, _STRIDE, _PADDING, _DILATION, _GROUPS, _BIAS,
        Parameter(
            "memory", "", "contiguous",
            "how input and weight lie: contiguous: channel by channel; channels_last: pixel by pixel",
            ("contiguous", "channels_last"),
        ),
    )  # fmt: skip
    spatial = ("height", "width")
    tiny = {"batch": 2, "in": 4, "out": 6, "height": 9, "width": 7}

    def _laid(self, shape: Shape, maker: Maker, outer: int, channels: int, extents: list[int]) -> torch.Tensor:
        if shape["memory"] == "channels_last":
            return maker.values(outer, *extents, channels).permute(0, 3, 1, 2)
        return super()._laid(shape, maker, outer, channels, extents)


class Conv3d(_Convolution):
    name = "conv3d"
    summary = "torch.nn.functional.conv3d: (batch, in, depth, height, width) → (batch, out, and the three outputs)"
    parameters = (
        Parameter("batch", "volumes", 4, "volumes in one call"),
        *_channels(64),
        Parameter("depth", "voxels", 16, "depth of a volume, or its frames"),
        Parameter("height", "voxels", 56, "height of a volume"),
        Parameter("width", "voxels", 56, "width of a volume"),
        _KERNEL, _STRIDE, _PADDING, _DILATION, _GROUPS, _BIAS,
    )  # fmt: skip
    spatial = ("depth", "height", "width")
    tiny = {"batch": 2, "in": 2, "out": 4, "depth": 5, "height": 6, "width": 7}
