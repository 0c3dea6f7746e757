"""Launch-free time: the calls of a lap captured once as a CUDA graph and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stepscope.bench.ops.operator import Call
from stepscope.measure import Device

if TYPE_CHECKING:
    import torch

MIN_CAPTURED_CALLS = 8
REPLAYS = 7
HOLD_S = 50e-6


LONGEST_HOLD_S = 0.02


class CaptureError(Exception):
    """The calls cannot be captured; says why."""


def time_replays(
    calls: Sequence[Call], device: Device, *, before_sample: Callable[[], object] | None = None, replays: int = REPLAYS
) -> list[float]:
    """Seconds per call of each replay. The current stream must not be the default one: that one cannot be captured."""
    import torch

    lap = list(calls)
    if before_sample is None:
        lap = lap * -(-MIN_CAPTURED_CALLS // len(lap))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in lap:
                    call()
            finally:
                graph.capture_end()
    except (RuntimeError, UserWarning) as error:
        raise CaptureError(str(error).splitlines()[0]) from error
    times = []
    for _ in range(replays + 1):
        times.append(_time_replay(graph, device, before_sample) / len(lap))
    graph.reset()
    return times[1:]


def _time_replay(graph: torch.cuda.CUDAGraph, device: Device, before_sample: Callable[[], object] | None) -> float:
    """Behind a hold that is long enough for the host to have launched the graph; a large one takes a while."""
    hold_s = HOLD_S
    while True:
        if before_sample is not None:
            before_sample()
        device.hold(hold_s)
        began = device.mark()
        graph.replay()
        ended = device.mark()
        ran_dry = device.has_reached(began)
        device.synchronize()
        if not ran_dry or hold_s > LONGEST_HOLD_S:
            return device.elapsed_s(began, ended)
        hold_s *= 4
