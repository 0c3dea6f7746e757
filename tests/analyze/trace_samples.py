"""Small timelines made by hand, random ones, and the public traces, for the tests of trace analyses."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import strategies as st

from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    KERNEL,
    MEMORY,
    OPERATOR,
    PYTHON,
    RUNTIME,
    SET,
    SYNC,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.finish import finish

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
H200 = (
    "dlrm_26t_b2048",
    "dlrm_8t_pool32_b4096",
    "resnet50_b64",
    "bert_base_b16_s128",
    "gpt2_bf16_b8_s1024",
    "vit_b_16_b32",
)
NCCL_DATA = "public/hta/nccl_parser_config/nccl_data.json.gz"
COMMUNICATION_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@lru_cache(32)
def read_public(name: str) -> Timeline:
    """A trace of the shared folder, or a skip with the reason."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is not here: public traces are kept outside the project")
    from stepscope.traces.read import read_timeline

    return read_timeline(path)


class Sketch:
    """A trace drawn by hand; times in nanoseconds."""

    def __init__(self) -> None:
        self.builder = TimelineBuilder()
        self._next = 1

    def step(self, number: int, start: int, end: int, thread: int = 1) -> None:
        self.annotation(f"ProfilerStep#{number}", start, end, thread)

    def annotation(self, name: str, start: int, end: int, thread: int = 1) -> int:
        return self.builder.add(ANNOTATION, name, start, end, thread=(0, thread))

    def operator(self, name: str, start: int, end: int, thread: int = 1, **values: object) -> int:
        return self.builder.add(OPERATOR, name, start, end, thread=(0, thread), **values)

    def python(self, name: str, start: int, end: int, thread: int = 1) -> int:
        return self.builder.add(PYTHON, name, start, end, thread=(0, thread))

    def call(self, name: str, start: int, end: int, thread: int = 1, correlation: int | None = None) -> int:
        return self.builder.add(RUNTIME, name, start, end, thread=(0, thread), correlation=correlation)

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        call: tuple[int, int] | None = None,
        thread: int = 1,
        stream: int = 7,
        device: int = 0,
        kind: int = KERNEL,
        launcher: str = "cudaLaunchKernel",
        **values: object,
    ) -> int:
        """Device work, with the call that launched it where its times are given. Returns its correlation."""
        correlation = self._next
        self._next += 1
        if call is not None:
            self.call(launcher, *call, thread=thread, correlation=correlation)
        self.builder.add(kind, name, start, end, device=device, stream=stream, correlation=correlation, **values)
        return correlation

    def communication(self, start: int, end: int, **values: object) -> int:
        return self.kernel(COMMUNICATION_KERNEL, start, end, **values)  # type: ignore[arg-type]

    def copy(self, start: int, end: int, name: str = "Memcpy DtoD (Device -> Device)", **values: object) -> int:
        return self.kernel(name, start, end, kind=COPY, launcher="cudaMemcpyAsync", **values)  # type: ignore[arg-type]

    def fill(self, start: int, end: int, **values: object) -> int:
        return self.kernel("Memset (Device)", start, end, kind=SET, launcher="cudaMemsetAsync", **values)  # type: ignore[arg-type]

    def sync(self, kind: str, start: int, end: int, *, stream: int = 7, **values: object) -> int:
        return self.builder.add(SYNC, kind, start, end, device=0, stream=stream, sync_kind=kind, **values)

    def memory(self, time: int, size: int, address: int, *, total: int | None = None, device: int | None = 0) -> int:
        values = {"bytes": size, "address": address, "total_allocated": total, "device": device}
        return self.builder.add(MEMORY, "[memory]", time, time, thread=(0, 1), **values)

    def build(self) -> Timeline:
        return finish(self.builder.build())


_TIMES = st.integers(0, 60)
_SPANS = st.tuples(_TIMES, st.integers(0, 25)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any few events on two threads and two devices: launched, not launched, without length, in steps or not."""
    sketch = Sketch()
    for span in draw(st.lists(_SPANS, max_size=4)):
        sketch.operator(draw(st.sampled_from(["aten::mm", "aten::add"])), *span, thread=draw(st.integers(1, 2)))
    for span in draw(st.lists(_SPANS, max_size=2)):
        sketch.call(draw(st.sampled_from(["cudaDeviceSynchronize", "cudaStreamWaitEvent"])), *span)
    for span in draw(st.lists(_SPANS, max_size=2)):
        sketch.sync("Stream Wait Event", *span, stream=draw(st.sampled_from([7, 20])))
    for _ in range(draw(st.integers(0, 10))):
        start, end = draw(_SPANS)
        called = draw(st.none() | st.integers(0, start))
        values: dict[str, object] = {
            "call": None if called is None else (called, called + draw(st.integers(0, 9))),
            "thread": draw(st.integers(1, 2)),
            "stream": draw(st.sampled_from([7, 20])),
            "device": draw(st.sampled_from([0, 0, 0, 1])),
        }
        add = draw(st.sampled_from([sketch.communication, sketch.copy, sketch.fill, _plain_kernel(sketch)]))
        add(start, end, **values)
    steps = draw(st.integers(0, 3))
    for number in range(steps):
        sketch.step(number, number * 20, number * 20 + draw(st.integers(1, 20)))
    if not len(sketch.builder):
        sketch.operator("aten::mm", 0, 10)
    return sketch.build()


def _plain_kernel(sketch: Sketch):  # type: ignore[no-untyped-def]
    return lambda start, end, **values: sketch.kernel("gemm", start, end, **values)
