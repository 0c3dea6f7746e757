"""Checking a call of which nothing is known but that it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stepscope.bench.ops.call_targets import base_name
from stepscope.bench.ops.operator import Operator, Shape
from stepscope.bench.ops.reference import (
    RELATIVE_TOLERANCE,
    as_tensors,
    check_close,
    differentiable_outputs,
    seeded_like,
    widen,
)
from stepscope.core.errors import first_line
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

_RULES = {"float8_e5m2": "float8_e4m3fn"}
"""Dtypes without a tolerance of their own."""


def check_call(
    operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str
) -> str | None:
    """Raises WrongResultError. The reason why nothing could be compared; None: it was."""
    import torch

    reason = _why_incomparable(shape, inputs)
    if reason is not None:
        return reason
    with torch.no_grad():
        results = _call(operator, shape, _copy(inputs))
        rule = _loosest([dtype, *(_name(one) for one in (*inputs.values(), *results) if one.is_floating_point())])
        if _differ(results, _call(operator, shape, _copy(inputs)), rule):
            return "two calls on the same inputs differ: its result is random or not deterministic"
    try:
        if direction == "forward":
            return _check_forward(operator, shape, inputs, results, rule)
        _check_backward(operator, shape, inputs, rule)
    except _NoFloat64Error as error:
        return str(error)
    return None


class _NoFloat64Error(Exception):
    def __init__(self, error: RuntimeError) -> None:
        super().__init__(f"torch does not make the same call in float64: {first_line(error)}")


def _check_forward(
    operator: Operator,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    results: Sequence[torch.Tensor],
    rule: str,
) -> str | None:
    import torch

    if not any(one.is_floating_point() for one in results):
        return "it gives no floats: whole numbers that come from floats may differ where there are ties"
    with torch.no_grad(), _in_float64():
        references = _call(operator, shape, widen(_copy(inputs)))
    _compare(operator.name, results, references, rule)
    return None


def _check_backward(operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], rule: str) -> None:
    names = operator.gradient_names(shape)
    gradients, upstream = _gradients(operator, shape, _copy(inputs), names, None)
    with _in_float64():
        expected, _ = _gradients(operator, shape, widen(_copy(inputs)), names, upstream)
    _compare(f"{operator.name} backward", gradients, expected, rule)


@contextmanager
def _in_float64() -> Iterator[None]:
    """What torch cannot do here is a reason; that memory is short is none."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _NoFloat64Error(error) from error


def _why_incomparable(shape: Shape, inputs: Mapping[str, torch.Tensor]) -> str | None:
    """What can be told before the call is made."""
    import torch

    if "empty" in base_name(str(shape["target"])):
        return "its result is memory that nobody has written to"
    floats = [one.dtype for one in inputs.values() if one.is_floating_point()]
    if not floats:
        return "none of its tensors are floats: it has no float64 form"
    if set(floats) == {torch.float64}:
        return "its tensors are float64 themselves: there is nothing wider to compare with"
    return None


def _copy(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in inputs.items()}


def _call(operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What it returns, or what it was given where it works in place and returns nothing."""
    returned = _tensors(operator.bind(shape, inputs)())
    if not returned and base_name(str(shape["target"])).endswith("_"):
        return list(inputs.values())
    return returned


def _tensors(result: Any) -> list[torch.Tensor]:
    """Calls may return plain numbers too. Complex numbers become pairs of floats."""
    import torch

    if isinstance(result, bool | int | float | complex):
        result = torch.tensor(result)
    dense = [one.to_dense() if one.layout != torch.strided else one for one in as_tensors(result)]
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in dense]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _loosest(names: Sequence[str]) -> str:
    rules = [_RULES.get(name, name) for name in names]
    return max((rule for rule in rules if rule in RELATIVE_TOLERANCE), key=RELATIVE_TOLERANCE.__getitem__)


def _differ(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], rule: str) -> bool:
    """Beyond what the order of additions explains."""
    import torch

    wholes = [(one, two) for one, two in zip(first, second, strict=False) if not one.is_floating_point()]
    try:
        _compare("", first, second, rule)
    except WrongResultError:
        return True
    return not all(torch.equal(one, two) for one, two in wholes)


def _compare(name: str, results: Sequence[torch.Tensor], references: Sequence[torch.Tensor], rule: str) -> None:
    """Floats alone."""
    if len(results) != len(references):
        raise WrongResultError(f"{name} gives {len(results)} results, not {len(references)}")
    for result, reference in zip(results, references, strict=True):
        if result.is_floating_point():
            check_close(name, *_take_finite(name, result, reference.double()), rule)


def _take_finite(name: str, result: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without the places where they are endless or no numbers alike.

    The logarithm of a negative number is no number in float64 either, and what float64 still holds may be endless in a
    shorter dtype. Everywhere else, what is not finite is wrong.
    """
    import torch

    if result.shape != reference.shape:
        return result, reference
    wide, shown = result.double(), result if result.dtype.itemsize > 1 else result.float()
    endless = ~(torch.isfinite(wide) & torch.isfinite(reference))
    if not bool(endless.any()):
        return shown, reference
    rounded = reference.to(result.dtype).double()
    alike = (wide == rounded) | (wide.isnan() & rounded.isnan())
    if bool((endless & ~alike).any()):
        count = int((endless & ~alike).sum())
        raise WrongResultError(f"{name} is endless or no number in {count:,} places, but not as in float64")
    return shown[~endless], reference[~endless]


def _gradients(
    operator: Operator,
    shape: Shape,
    inputs: dict[str, torch.Tensor],
    names: Sequence[str],
    upstream: Sequence[torch.Tensor] | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    import torch

    leaves = {name: inputs[name].requires_grad_() for name in names}
    with torch.enable_grad():
        outputs = differentiable_outputs(operator.bind(shape, inputs)())
        if upstream is None:
            upstream = seeded_like(outputs)
        pushed = [one.to(output.dtype) for one, output in zip(upstream, outputs, strict=True)]
        found = torch.autograd.grad(outputs, tuple(leaves.values()), pushed)
    return [one.detach().to_dense() for one in found], list(upstream)
