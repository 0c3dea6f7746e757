"""Streams, threads and waits of all kinds at once: which launches follow a wait, and which copies block."""

from __future__ import annotations

from trace_samples import Sketch

from stepscope.analyze.step.host_waits import host_waits
from stepscope.analyze.step.view import view


def sketch_waits() -> Sketch:
    """Streams, threads and waits of all kinds at once: rows out of order, a graph, copies that block."""
    sketch = Sketch()
    sketch.step(1, 0, 400)
    sketch.kernel("gemm", 130, 140, call=(120, 126), thread=2, stream=9)
    sketch.kernel("gemm", 20, 40, call=(10, 15))
    sketch.copy(50, 60, name="Memcpy DtoH (Device -> Pageable)", call=(45, 55))
    sketch.copy(65, 70, call=(61, 72), stream=9)
    sketch.call("cudaEventSynchronize", 80, 118, thread=2)
    sketch.call("cudaStreamWaitEvent", 141, 142)
    sketch.call("cudaStreamWaitEvent", 143, 144, thread=2)
    sketch.kernel("gemm", 150, 190, call=(145, 148), thread=2, stream=9)
    sketch.kernel("gemm", 210, 240, call=(150, 152), stream=7)
    sketch.kernel("orphan", 250, 260)
    sketch.call("cudaDeviceSynchronize", 262, 300)
    sketch.kernel("gemm", 320, 330, call=(310, 312), stream=11)
    return sketch


def test_a_trace_with_waits() -> None:
    waits = host_waits(view(sketch_waits().build()))
    held = {thread: sorted(set(times.tolist())) for thread, times in waits.held.items() if len(times)}
    assert held == {0: [150], 1: [145]}
    assert len(waits.blocking_copies) == 2
