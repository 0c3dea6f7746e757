from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from op_checks import count_by_hand, full_shape, kinds_of, moved_by_hand, run_and_check

from stepscope.bench.ops import Work
from stepscope.bench.ops.families.convolution import Conv1d, Conv2d, Conv3d
from stepscope.bench.ops.inputs import Maker
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

LINE = {"batch": 2, "in": 4, "out": 6, "length": 11, "kernel": 3, "stride": 2, "padding": 1, "groups": 2}
IMAGE = {"batch": 2, "in": 3, "out": 5, "height": 8, "width": 7, "kernel": 3, "padding": 0, "bias": "yes"}
VOLUME = {"batch": 1, "in": 2, "out": 3, "depth": 4, "height": 5, "width": 6, "kernel": 2, "padding": 0}

HAND_COUNTED: list[tuple[Any, dict[str, Any], str, str, Work]] = [
    # length out (11 + 2 − 3)/2 + 1 = 6; each output has 3 taps over 4/2 channels; weight 6 × 2 × 3
    (Conv1d, LINE, "float32", "forward", Work(2 * (2 * 6 * 6) * 3 * 2, 4 * (2 * 4 * 11 + 6 * 2 * 3 + 2 * 6 * 6))),
    (Conv1d, LINE, "float32", "backward", Work(4 * (2 * 6 * 6) * 3 * 2, 4 * (2 * 88 + 2 * 36 + 72))),
    # 6 × 5 outputs, 9 taps over 3 channels; a bias is added to each output, and its gradient sums the upstream
    (Conv2d, IMAGE, "bfloat16", "forward",
     Work(2 * (2 * 5 * 30) * 9 * 3 + 300, 2 * (2 * 3 * 56 + 5 * 3 * 9 + 5 + 300))),
    (Conv2d, IMAGE, "bfloat16", "backward", Work(4 * 300 * 27 + 300, 2 * (300 + 2 * 336 + 2 * 135 + 5))),
    # 3 × 4 × 5 outputs, 8 taps over 2 channels
    (Conv3d, VOLUME, "float64", "forward", Work(2 * (3 * 60) * 8 * 2, 8 * (2 * 120 + 3 * 2 * 8 + 180))),
    (Conv3d, VOLUME, "float64", "backward", Work(4 * 180 * 16, 8 * (180 + 2 * 240 + 2 * 48))),
]  # fmt: skip

CVT = {
    # id: channels in, size, channels out, kernel, stride, padding, depthwise, size out, GFLOP
    "V1": (64, 56, 64, 3, 1, 1, True, 56, 0.116),
    "V2": (64, 56, 64, 3, 2, 1, True, 28, 0.029),
    "V3": (192, 28, 192, 3, 1, 1, True, 28, 0.087),
    "V4": (192, 28, 192, 3, 2, 1, True, 14, 0.022),
    "V5": (192, 28, 192, 3, 1, 1, True, 28, 0.087),
    "V6": (192, 28, 192, 3, 2, 1, True, 14, 0.022),
    "V7": (384, 14, 384, 3, 1, 1, True, 14, 0.043),
    "V8": (384, 14, 384, 3, 2, 1, True, 7, 0.011),
    "V9": (3, 224, 64, 7, 4, 2, False, 56, 1.888),
    "V10": (64, 56, 192, 3, 2, 1, False, 28, 5.549),
    "V11": (192, 28, 384, 3, 2, 1, False, 14, 8.324),
}


@pytest.mark.parametrize(("kind", "shape", "dtype", "direction", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(kind: Any, shape: Any, dtype: str, direction: str, work: Work) -> None:
    count_by_hand(kind, shape, dtype, direction, work)


@pytest.mark.parametrize("name", CVT)
def test_layers_of_cvt_have_the_published_gflop(name: str) -> None:
    wide, size, out, kernel, stride, padding, depthwise, size_out, gflop = CVT[name]
    operator = Conv2d()
    changes = {
        "batch": 32, "in": wide, "out": out, "height": size, "width": size, "kernel": kernel, "stride": stride,
        "padding": padding, "groups": wide if depthwise else 1,
    }  # fmt: skip
    shape = full_shape(operator, **changes)
    operator.check_shape(shape)
    assert operator.output_extents(shape) == (size_out, size_out)
    assert operator.work(shape, "float32", "forward").flops / 1e9 == pytest.approx(gflop, abs=5e-4)


@pytest.mark.parametrize("kind", kinds_of("convolution"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", ["yes", "no"])
def test_declared_traffic_is_that_of_the_tensors(kind: Any, dtype: str, bias: str) -> None:
    operator = kind()
    changes = {"bias": bias, "stride": 2, "groups": 2}
    work = operator.work(full_shape(operator, **changes), dtype, "forward")
    assert moved_by_hand(operator, dtype, **changes) == work.bytes


@pytest.mark.parametrize("kind", kinds_of("convolution"))
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_agrees_with_float64(kind: Any, direction: str, dtype: str) -> None:
    for bias in ("yes", "no"):
        run_and_check(kind(), direction, dtype, bias=bias)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
def test_memory_of_images(direction: str, memory: str) -> None:
    run_and_check(Conv2d(), direction, memory=memory, bias="yes", stride=2, dilation=2, padding=2, groups=2)


def test_channels_last_is_what_it_says() -> None:
    import torch

    operator = Conv2d()
    for memory, wanted in (("channels_last", torch.channels_last), ("contiguous", torch.contiguous_format)):
        inputs = operator.make_inputs(full_shape(operator, memory=memory), Maker("float32", "cpu"))
        assert inputs["input"].shape == (2, 4, 9, 7)
        assert inputs["weight"].shape == (6, 4, 3, 3)
        assert all(tensor.is_contiguous(memory_format=wanted) for tensor in inputs.values())


def by_taps(shape: dict[str, Any], inputs: dict[str, torch.Tensor], extents: tuple[int, ...]) -> torch.Tensor:
    """The sum over taps and channels, written out."""
    import torch

    tensor, weight = inputs["input"], inputs["weight"]
    padded = torch.nn.functional.pad(tensor, [shape["padding"]] * 2 * len(extents))
    result = torch.zeros(shape["batch"], shape["out"], *extents, dtype=tensor.dtype)
    channels_in, channels_out = shape["in"] // shape["groups"], shape["out"] // shape["groups"]
    for tap in product(range(shape["kernel"]), repeat=len(extents)):
        window = padded[
            (..., *(slice(at * shape["dilation"], at * shape["dilation"] + (extent - 1) * shape["stride"] + 1,
                          shape["stride"]) for at, extent in zip(tap, extents, strict=True)))
        ]  # fmt: skip
        for out, channel in product(range(shape["out"]), range(channels_in)):
            group = out // channels_out
            result[:, out] += window[:, group * channels_in + channel] * weight[(out, channel, *tap)]
    return result + inputs["bias"].view(-1, *[1] * len(extents))


@pytest.mark.parametrize("kind", kinds_of("convolution"))
def test_the_formula_by_taps(kind: Any) -> None:
    """The reference is torch's too: both are compared with the sum written out."""
    import torch

    operator = kind()
    shape = full_shape(operator, kernel=2, stride=2, dilation=2, padding=1, groups=2, bias="yes")
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    expected = by_taps(shape, inputs, operator.output_extents(shape))
    for bind in (operator.bind, operator.bind_reference):
        torch.testing.assert_close(bind(shape, inputs)(), expected)


def test_a_spoiled_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = torch.nn.functional.conv2d

    def spoiled(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = right(tensor, *rest)
        if result.dtype == torch.float32:
            result.view(-1)[3] += 0.01
        return result

    monkeypatch.setattr(torch.nn.functional, "conv2d", spoiled)
    with pytest.raises(WrongResultError):
        run_and_check(Conv2d())


@pytest.mark.parametrize("kind", kinds_of("convolution"))
def test_shapes_that_cannot_be(kind: Any) -> None:
    operator = kind()
    for changes in ({"in": 6, "out": 4, "groups": 4}, {"in": 4, "out": 6, "groups": 4}):
        with pytest.raises(ValueError, match="must divide both"):
            operator.check_shape(full_shape(operator, **changes))
    smallest = min(full_shape(operator)[name] for name in operator.spatial)
    operator.check_shape(full_shape(operator, kernel=smallest, padding=0))
    with pytest.raises(ValueError, match="leaves no output"):
        operator.check_shape(full_shape(operator, kernel=smallest + 1, padding=0))
    with pytest.raises(ValueError, match="leaves no output"):
        operator.check_shape(full_shape(operator, dilation=smallest, padding=0))
