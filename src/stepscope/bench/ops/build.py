"""From an operator and a shape to calls that can be timed: several sets of inputs, one pass, compiled or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.bench.ops.inputs import Arenas, Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, Call, Operator, Shape
from stepscope.bench.ops.reference import as_tensors, check_compiled, differentiable_outputs, same_tensors, seeded_like

if TYPE_CHECKING:
    import torch

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
        _forget_compiled()
    maker = Maker(dtype, device, arenas)
    inputs = [operator.make_inputs(shape, maker) for _ in range(sets)]
    start = time.perf_counter()
    binds = [_bind(operator, shape, one, maker, direction, compiled=compiled) for one in inputs]
    compile_s = None
    if compiled:
        _call_each(binds, device)
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


def _forget_compiled() -> None:
    """The compiler keeps what it made for a line of code, at most eight times: a sweep compiles it for every shape."""
    import torch

    torch._dynamo.reset()


def _bind(
    operator: Operator,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    maker: Maker,
    direction: str,
    *,
    compiled: bool,
) -> Call:
    import torch

    if direction == "forward":
        call = operator.bind(shape, inputs)
        return _compile(call) if compiled else call
    leaves = {name: inputs[name].detach().requires_grad_() for name in operator.gradient_names(shape)}
    with torch.enable_grad():
        call = operator.bind(shape, {**inputs, **leaves})
        outputs = differentiable_outputs((_compile(call) if compiled else call)())
    upstream = seeded_like(outputs)
    wanted = tuple(leaves.values())
    return lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)


def _compile(call: Call) -> Call:
    """`fullgraph`: what cannot be compiled whole fails instead of running eagerly under the compiler's name."""
    import torch

    compiled: Call = torch.compile(call, fullgraph=True, dynamic=False)
    return compiled


def _call_each(calls: list[Call], device: str) -> None:
    """The first call compiles; later sets only where the compiler specialises on something new."""
    for call in calls:
        call()
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def _keeping(call: Call) -> Call:
    kept: list[Any] = [None]

    def keep() -> None:
        kept[0] = call()

    return keep


def memory_bytes(
    operator: Operator, shape: Shape, *, dtype: str, direction: str, sets: int = 1, check: bool = True
) -> int:
    """What a case allocates in all; decides whether it is tried."""
    footprint = operator.footprint_bytes(shape, dtype)
    passes = 2 if direction == "backward" else 1
    own = sets * (footprint * passes + operator.scratch_bytes(shape, dtype, direction))
    if not check:
        return own
    # The reference widens inputs, outputs and gradients, and the check computes the result once more.
    widened = footprint * REFERENCE_BYTES // DTYPE_BYTES.get(dtype, 1)
    return own + (widened + footprint) * passes
