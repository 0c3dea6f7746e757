"""Launch-free time: the calls of a lap captured once as a CUDA graph and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from stepscope.measure import Device
from stepscope.ops.operator import Call

MIN_CAPTURED_CALLS = 8
REPLAYS = 7
HOLD_S = 50e-6


class CaptureError(Exception):
    """The calls cannot be captured; says why."""


def time_replays(
    calls: Sequence[Call], device: Device, *, freshen: Callable[[], object] | None = None, replays: int = REPLAYS
) -> list[float]:
    """Seconds per call of each replay. The current stream must not be the default one: that one cannot be captured."""
    import torch

    lap = list(calls)
    if freshen is None:
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
        if freshen is not None:
            freshen()
        device.hold(HOLD_S)
        began = device.mark()
        graph.replay()
        ended = device.mark()
        device.synchronize()
        times.append(device.elapsed_s(began, ended) / len(lap))
    graph.reset()
    return times[1:]
