"""Checking a call of which nothing is known but that it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.measure import WrongResultError
from stepscope.ops.operator import Operator, Shape
from stepscope.ops.reference import RELATIVE_TOLERANCE, as_tensors, check_close, differentiable_outputs, widen

if TYPE_CHECKING:
    import torch

_RULES = {"float8_e5m2": "float8_e4m3fn"}
"""Dtypes without a tolerance of their own."""


def check_call(
    operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str
) -> None:
    """Raises WrongResultError; passes what is random or what torch lacks in float64."""
    import torch

    if "empty" in str(shape["target"]):
        return
    rule = _loosest([dtype, *(_name(one) for one in inputs.values() if one.is_floating_point())])
    with torch.no_grad():
        results = _tensors(operator.bind(shape, _copy(inputs))())
        if _differ(results, _tensors(operator.bind(shape, _copy(inputs))()), rule):
            return
        try:
            references = _tensors(operator.bind(shape, widen(_copy(inputs)))())
        except (RuntimeError, NotImplementedError):
            return
    if direction == "forward":
        floats = any(one.is_floating_point() for one in inputs.values())
        _compare(operator.name, results, references, rule, floats_only=floats)
        return
    names = operator.gradient_names(shape)
    gradients, upstream = _gradients(operator, shape, _copy(inputs), names, None)
    expected, _ = _gradients(operator, shape, widen(_copy(inputs)), names, upstream)
    _compare(f"{operator.name} backward", gradients, expected, rule, floats_only=True)


def _copy(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in inputs.items()}


def _tensors(result: Any) -> list[torch.Tensor]:
    """Calls may return plain numbers too."""
    import torch

    if isinstance(result, bool | int | float | complex):
        return [torch.tensor(result)]
    return as_tensors(result)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _loosest(names: Sequence[str]) -> str:
    rules = [_RULES.get(name, name) for name in names]
    return max((rule for rule in rules if rule in RELATIVE_TOLERANCE), key=RELATIVE_TOLERANCE.__getitem__)


def _differ(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], rule: str) -> bool:
    """Beyond what the order of additions explains: the call draws random numbers."""
    try:
        _compare("", first, [one.double() for one in second], rule, floats_only=False)
    except WrongResultError:
        return True
    return False


def _compare(
    name: str,
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    rule: str,
    *,
    floats_only: bool,
) -> None:
    if len(results) != len(references):
        raise WrongResultError(f"{name} gives {len(results)} results, not {len(references)}")
    for result, reference in zip(results, references, strict=True):
        if result.is_floating_point():
            check_close(name, *_drop_endless(result.double(), reference.double()), rule)
        elif not floats_only:
            check_close(name, result.double(), reference.double(), "int64")


def _drop_endless(result: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A logarithm of a negative number is no number in float64 either."""
    import torch

    if result.shape != reference.shape:
        return result, reference
    endless = ~(torch.isfinite(result) | torch.isfinite(reference))
    return result.masked_fill(endless, 0), reference.masked_fill(endless, 0)


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
            generator = torch.Generator(outputs[0].device).manual_seed(1)
            upstream = [torch.randn(one.shape, device=one.device, generator=generator).to(one.dtype) for one in outputs]
        pushed = [one.to(output.dtype) for one, output in zip(upstream, outputs, strict=True)]
        found = torch.autograd.grad(outputs, tuple(leaves.values()), pushed)
    return [one.detach().to_dense() for one in found], list(upstream)
