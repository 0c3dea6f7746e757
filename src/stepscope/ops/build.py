"""From an operator and a shape to calls that can be timed: several sets of inputs, one pass, compiled or not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.ops.inputs import Arenas, Maker
from stepscope.ops.operator import DTYPE_BYTES, Call, Operator, Shape
from stepscope.ops.reference import differentiable_outputs

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
    check: Call
    """Raises WrongResultError."""
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
    maker = Maker(dtype, device, arenas)
    inputs = [operator.make_inputs(shape, maker) for _ in range(sets)]
    start = time.perf_counter()
    binds = [_bind(operator, shape, one, maker, direction, compiled=compiled) for one in inputs]
    compile_s = None
    if compiled:
        _call_each(binds, device)
        compile_s = time.perf_counter() - start
    calls = binds if sets == 1 else [_keeping(call) for call in binds]
    return Built(inputs[0], calls, lambda: operator.check(shape, inputs[0], dtype, direction), compile_s)


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
    upstream = [torch.randn(one.shape, device=one.device, generator=maker.generator).to(one.dtype) for one in outputs]
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
    own = sets * footprint * (2 if direction == "backward" else 1) + operator.scratch_bytes(shape, dtype, direction)
    if not check:
        return own
    # The reference widens inputs, outputs and gradients, and the check computes the result once more.
    widened = footprint * REFERENCE_BYTES // DTYPE_BYTES.get(dtype, 1)
    return own + (widened + footprint) * (2 if direction == "backward" else 1)
