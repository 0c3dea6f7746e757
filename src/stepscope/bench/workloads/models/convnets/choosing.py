"""Which way of computing each grouped convolution is fastest here: timed once a process, never while measuring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from stepscope.bench.workloads.findings import relative_error
from stepscope.bench.workloads.models.convnets.grouped import NATIVE, Way, list_ways
from stepscope.bench.workloads.models.convnets.layers import LAST, GroupedConv
from stepscope.bench.workloads.precision import math_of, matmul_rounding, storage_dtype
from stepscope.bench.workloads.protocol import Mode, Setting
from stepscope.bench.workloads.steps import capture

Conv = nn.Conv2d | nn.Conv3d

TRIAL_BATCH: dict[Mode, int] = {"train": 32, "infer": 8}
"""Pictures in a trial: the batch that will be measured is not known yet, and the order of the ways hardly needs it."""
TRIAL_REPEATS = 10
HOPELESS, HOPELESS_S = 3.0, 1e-3
"""A way that takes so many times the best one's time in its second run, and longer than launching can take, is not
timed any further."""
WRONG = 2e-2
"""Largest relative error of a way's outputs and gradients: one layer in bf16 is several times closer to fp32."""


class Layer(NamedTuple):
    """What tells one grouped convolution from another."""

    shape: tuple[int, ...]
    """Shape of the input, with the batch of a trial."""
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int

    def describe(self) -> str:
        extent = "×".join(str(side) for side in self.shape[2:])
        step = f" stride {self.stride[-1]}" if self.stride[-1] > 1 else ""
        return f"{self.shape[1]} channels in {self.groups} groups at {extent}{step}"


class WayTimes(NamedTuple):
    """Seconds of each way, the chosen first; None: it did not run here."""

    way: Way
    seconds: dict[Way, float | None]


TRIALS: dict[tuple[Layer, Setting], WayTimes] = {}
"""Made in this process: later conversions choose the same."""


def find_grouped(shadow: nn.Module, example: torch.Tensor) -> dict[str, Layer]:
    """Grouped convolutions by name, with the shapes that `example` gives them; both arguments are on the meta device,
    where nothing is computed."""
    found: dict[str, Layer] = {}

    def watch(name: str, conv: Conv) -> None:
        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            shape = tuple(inputs[0].shape)
            found[name] = Layer(shape, tuple(conv.weight.shape), tuple(conv.stride), conv.groups)

        conv.register_forward_pre_hook(note)

    for name, layer in shadow.named_modules():
        if isinstance(layer, Conv) and layer.groups > 1:
            watch(name, layer)
    with torch.no_grad():
        shadow.eval()(example)
    return found


def choose_way(layer: Layer, conv: Conv, setting: Setting) -> Way:
    """The library's own on devices where there is nothing to choose from."""
    if not conv.weight.is_cuda:
        return NATIVE
    if (layer, setting) not in TRIALS:
        TRIALS[layer, setting] = try_ways(layer, conv, setting)
    return TRIALS[layer, setting].way


def try_ways(layer: Layer, conv: Conv, setting: Setting) -> WayTimes:
    width = max(layer.weight[1], layer.weight[0] // layer.groups)
    axes = len(layer.stride)
    ways = list_ways(layer.groups, width, axes=axes, kernels=_kernels_available())
    if setting.precision == "fp32":
        # Without matrix units dense ways and our own kernels only lose, and compiling the latter takes minutes.
        ways = [way for way in ways if way.kind in ("native", "planar")]
    seconds: dict[Way, float | None] = {}
    best = float("inf")
    # Our own kernels first: where the library's are slow they are so by far, and are given up at once.
    for way in reversed(ways):
        seconds[way] = taken = time_way(way, layer, conv, setting, give_up_s=HOPELESS * best)
        best = min(best, taken or best)
    ran = {way: taken for way in ways if (taken := seconds[way]) is not None}
    fastest_first = sorted(ran, key=lambda way: ran[way])
    # Checks of the whole network cannot tell a slight fault of one layer from rounding that all of them amplify.
    right = (way for way in fastest_first if is_right(way, layer, conv, setting))
    return WayTimes(next(right, NATIVE), seconds)


def time_way(way: Way, layer: Layer, conv: Conv, setting: Setting, *, give_up_s: float) -> float | None:
    """Seconds of one pass, in training with its backward, as a replayed CUDA graph; None where it does not run."""
    run = _make_pass(way, layer, conv, setting)
    refusals: tuple[type[Exception], ...] = (RuntimeError, *_kernel_errors())
    try:
        with _without_search():
            run()
            once = _time_on_device(run)
            if once > max(give_up_s, HOPELESS_S):
                return once
            replay = capture(run)
            replay()
            return _time_on_device(replay, TRIAL_REPEATS)
    except refusals:
        return None


def is_right(way: Way, layer: Layer, conv: Conv, setting: Setting) -> bool:
    """Outputs, and in training gradients, are those of the library's convolution in float32."""
    with _without_search():
        expected = _make_pass(NATIVE, layer, conv, setting._replace(precision="fp32"))()
        found = _make_pass(way, layer, conv, setting)()
    return relative_error(tuple(found), tuple(expected)) <= WRONG


def _make_pass(way: Way, layer: Layer, conv: Conv, setting: Setting) -> Callable[[], list[torch.Tensor]]:
    """One pass over the same numbers each time: outputs, and in training gradients of input and weight."""
    dtype, device, trains = storage_dtype(setting), conv.weight.device, setting.mode == "train"
    half = trains and setting.precision == "bf16"
    module = GroupedConv(copy.deepcopy(conv).to(dtype), way, in_bf16=half, tf32=setting.precision != "fp32")
    entering = torch.bfloat16 if half else dtype
    drawn = torch.randn(layer.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    x = drawn.to(entering).contiguous(memory_format=LAST[len(layer.shape)]).requires_grad_(trains)
    slopes: list[torch.Tensor] = []

    def slope_of(y: torch.Tensor) -> torch.Tensor:
        """Not ones: those would not tell a gradient from one that mixes up places, groups or examples. Drawn in the
        first run, as later ones may be captured."""
        if not slopes:
            drawn = torch.randn(y.shape, generator=torch.Generator(device).manual_seed(2), device=device)
            # Rounded, so that all precisions have the same.
            slopes.append(drawn.bfloat16().to(y.dtype).contiguous(memory_format=LAST[y.dim()]))
        return slopes[0]

    def run() -> list[torch.Tensor]:
        module.weight.grad = x.grad = None
        with matmul_rounding(setting.precision):
            with math_of(setting):
                y = module(x)
            if trains:
                y.backward(slope_of(y))
        return [one for one in (y.detach(), x.grad, module.weight.grad) if one is not None]

    return run


@contextmanager
def _without_search() -> Iterator[None]:
    """cuDNN takes the algorithm that it expects most of: timing all of them for every way would take minutes."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _time_on_device(run: Callable[[], object], repeats: int = 1) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / repeats


def _kernels_available() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def _kernel_errors() -> tuple[type[Exception], ...]:
    """What Triton raises when a kernel does not fit the device."""
    if not _kernels_available():
        return ()
    from triton.errors import TritonError

    return (TritonError,)
