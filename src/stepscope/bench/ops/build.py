"""From a stored case to calls that can be timed: several sets of inputs, one pass, compiled or not.

Cold caches: enough sets of inputs that a call never finds the last one's data, or a flush where that would be many. A
lap is one call on each set. Where all sets together exceed four times the last-level cache, each call evicts what a
later one needs: rotation alone keeps the cache cold. Small inputs would need thousands of sets; they get a few, and the
cache is overwritten before each lap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from stepscope.bench.ops.catalogue import find_operator
from stepscope.bench.ops.inputs import Arenas, Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, Call, Operator, Shape, Work
from stepscope.bench.ops.reference import as_tensors, check_compiled, differentiable_outputs, same_tensors, seeded_like
from stepscope.core.lazy_torch import torch
from stepscope.measure import open_device
from stepscope.records import Case
from stepscope.records.kinds import CallSpec, OperatorSpec
from stepscope.run.ranks import CaseSkipped
from stepscope.system import bfloat16_works

CACHES = ("warm", "cold")
EVICTION_FACTOR = 4
"""Caches hash addresses and do not evict strictly by age: on an H200, of a stream of twice the cache's size that comes
round again an eighth is still found; of four times nothing that could be measured."""
MAX_SETS = 4
MAX_SETS_BYTES = 1 << 30
"""Beyond this, a flush is cheaper than more sets."""


class BufferRotation(NamedTuple):
    sets: int
    flush: bool


WARM = BufferRotation(sets=1, flush=False)


def plan_rotation(touched_bytes: int, footprint_bytes: int, cache_bytes: int) -> BufferRotation:
    """`touched_bytes` are those one call reads and writes, `footprint_bytes` those a set occupies."""
    wanted = -(-EVICTION_FACTOR * cache_bytes // max(touched_bytes, 1))
    affordable = max(1, MAX_SETS_BYTES // max(footprint_bytes, 1))
    sets = max(1, min(wanted, affordable, MAX_SETS))
    return BufferRotation(sets=sets, flush=sets < wanted)


class CacheFlush:
    """Overwrites the last-level cache of a device; on a GPU the work is queued like any other."""

    def __init__(self, device: str, cache_bytes: int) -> None:
        self._buffer: torch.Tensor = torch.empty(EVICTION_FACTOR * cache_bytes, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()


TF32_CAPABILITY = (8, 0)


class OperatorCase(NamedTuple):
    operator: Operator
    shape: Shape
    dtype: str
    direction: str
    cold: bool = False
    compiled: bool = False
    measures_peak: bool = False

    @property
    def work(self) -> Work:
        return self.operator.work(self.shape, self.dtype, self.direction)

    def require(self, device: str) -> None:
        """Raises CaseSkipped for what the operator, or the device, is known not to have before anything is built."""
        name, kind = self.operator.name, device.partition(":")[0]
        if self.dtype not in self.operator.dtypes:
            raise CaseSkipped("unsupported_dtype", f"{name} has no {self.dtype} form")
        if self.direction not in self.operator.passes:
            raise CaseSkipped("unsupported_pass", f"{name} has no {self.direction} pass")
        if self.dtype == "tf32" and (kind != "cuda" or torch.cuda.get_device_capability(device) < TF32_CAPABILITY):
            raise CaseSkipped("unsupported_dtype", f"{device} has no tf32 mode", "ask for float32")
        if self.dtype == "bfloat16" and kind == "cpu" and not bfloat16_works():
            raise CaseSkipped(
                "unsupported_dtype",
                "bfloat16 ends the process here: this CPU advertises instructions that it does not run",
                "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and run again; `stepscope doctor` tells more",
            )
        try:
            self.operator.work(self.shape, self.dtype, self.direction)
        except NotImplementedError as error:
            raise CaseSkipped("unsupported", str(error)) from error

    def rotation(self, cache_bytes: int) -> BufferRotation:
        """How its inputs rotate; by the pass that touches least of them."""
        if not self.cold:
            return WARM
        touched = min(self.operator.work(self.shape, self.dtype, "forward").bytes, self.work.bytes)
        planned = plan_rotation(touched, self.operator.footprint_bytes(self.shape, self.dtype), cache_bytes)
        # Where what is looked up repeats, how much of the traffic evicts anything is known only to the indices.
        repeats = type(self.operator).repeated_bytes is not Operator.repeated_bytes
        return planned._replace(flush=planned.flush or repeats)

    def memory_bytes(self, sets: int = 1, *, check: bool) -> int:
        """What the case allocates in all; decides whether it is tried."""
        footprint = self.operator.footprint_bytes(self.shape, self.dtype)
        passes = 2 if self.direction == "backward" else 1
        own = sets * (footprint * passes + self.operator.scratch_bytes(self.shape, self.dtype, self.direction))
        if not check or self.measures_peak:
            return own
        # The reference widens inputs, outputs and gradients, and the check computes the result once more.
        widened = footprint * REFERENCE_BYTES // DTYPE_BYTES.get(self.dtype, 1)
        return own + (widened + footprint) * passes


def read_case(case: Case) -> OperatorCase:
    spec = case.spec
    assert isinstance(spec, OperatorSpec | CallSpec)
    return OperatorCase(
        operator=find_operator(spec.op),
        shape=spec.shape,
        dtype=str(spec.dtype),
        direction=spec.direction,
        cold=spec.cache == "cold",
        compiled=spec.compile,
        measures_peak=spec.is_measured_peak,
    )


@contextmanager
def math_mode(dtype: str, direction: str) -> Iterator[None]:
    """float32 is float32: matrix units round to tf32 only in cases that ask for tf32. Only backward needs gradients."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype == "tf32"
    try:
        with torch.set_grad_enabled(direction == "backward"):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


REFERENCE_BYTES = 8
"""The reference is float64."""


class Built(NamedTuple):
    """Ready to be timed."""

    inputs: Mapping[str, torch.Tensor]
    """The first set."""
    calls: list[Call]
    """One for each set of inputs; each keeps its last output, so that outputs rotate as inputs do."""
    check: Callable[[], str | None]
    """Raises WrongResultError; returns why nothing could be compared, if so."""
    compile_s: float | None
    """What the compiler took; None where nothing was compiled."""


def build(
    operator: Operator,
    shape: Shape,
    *,
    dtype: str,
    device: str,
    direction: str,
    sets: int = 1,
    compiled: bool = False,
    arenas: Arenas | None = None,
) -> Built:
    """Make `sets` sets of inputs and the call on each; nothing is timed but compilation."""
    if compiled:
        # The compiler keeps what it made for a line of code, at most eight times: a sweep compiles it for every shape.
        torch._dynamo.reset()
    maker = Maker(dtype, device, arenas)
    inputs = [operator.make_inputs(shape, maker) for _ in range(sets)]
    start = time.perf_counter()
    binds = [_bind(operator, shape, one, maker, direction, compiled=compiled) for one in inputs]
    compile_s = None
    if compiled:
        for call in binds:  # the first one compiles; later sets only where the compiler specialises on something new
            call()
        open_device(device).synchronize()
        compile_s = time.perf_counter() - start
    calls = binds if sets == 1 else [_keeping(call) for call in binds]

    def check() -> str | None:
        unchecked = operator.check(shape, inputs[0], dtype, direction)
        if not compiled:
            return unchecked

        def run(*, compiled: bool) -> list[torch.Tensor]:
            """From inputs made anew: those that were timed may have been written to."""
            maker = Maker(dtype, device)
            fresh = operator.make_inputs(shape, maker)
            return as_tensors(_bind(operator, shape, fresh, maker, direction, compiled=compiled)())

        eager = run(compiled=False)
        if not same_tensors(eager, run(compiled=False)):
            return unchecked or "two runs differ: it draws random numbers"
        check_compiled(operator, run(compiled=True), eager, dtype)
        return unchecked

    return Built(inputs[0], calls, check, compile_s)


def _bind(
    operator: Operator,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    maker: Maker,
    direction: str,
    *,
    compiled: bool,
) -> Call:
    if direction == "forward":
        call = operator.bind(shape, inputs)
        return _compile(call) if compiled else call
    leaves = {name: inputs[name].detach().requires_grad_() for name in operator.gradient_names(shape)}
    with torch.enable_grad():
        call = operator.bind(shape, {**inputs, **leaves})
        outputs = differentiable_outputs((_compile(call) if compiled else call)())
    upstream = seeded_like(outputs)
    wanted = tuple(leaves.values())
    return partial(torch.autograd.grad, outputs, wanted, upstream, retain_graph=True)


def _compile(call: Call) -> Call:
    """`fullgraph`: what cannot be compiled whole fails instead of running eagerly under the compiler's name."""
    compiled: Call = torch.compile(call, fullgraph=True, dynamic=False)
    return compiled


def _keeping(call: Call) -> Call:
    kept: list[Any] = [None]

    def keep() -> None:
        kept[0] = call()

    return keep
