"""Comparing a result with a float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.measure import WrongResultError
from stepscope.ops.operator import Operator, Shape

if TYPE_CHECKING:
    import torch

RELATIVE_TOLERANCE = {
    "float64": 1e-12,
    "float32": 1e-5,
    "tf32": 2e-3,
    "bfloat16": 2e-2,
    "float16": 5e-3,
    "float8_e4m3fn": 2e-2,
    "int64": 0.0,
    "int32": 0.0,
    "int8": 0.0,
    "int4": 1e-5,
}
"""Largest allowed ‖out − ref‖ / ‖ref‖. Rounding of float32 lands under 1e-6 here, a wrong element far above 1e-5;
tf32 near 3e-4; float8 inputs are exact in the reference, so only the bfloat16 output is rounded. Integers are exact."""


def check_close(
    name: str, result: torch.Tensor, reference: torch.Tensor, dtype: str | None = None, *, terms: int = 1
) -> None:
    """`dtype` names the rule where the result's own dtype does not (tf32). NaN never passes.

    Long sums in float32 round by more than single products: `terms` of them are allowed a step times their root.
    """
    import torch

    rule = dtype or str(result.dtype).removeprefix("torch.")
    if result.shape != reference.shape:
        raise WrongResultError(f"{name} has the shape {tuple(result.shape)}, not {tuple(reference.shape)}")
    wide = result.detach().to(torch.float64)
    size = float(reference.detach().to(torch.float64).norm())
    off = float((wide - reference.detach()).norm())
    scale = size or 1.0  # a reference of nothing but zeros is compared absolutely
    tolerance = RELATIVE_TOLERANCE[rule]
    if rule == "float32":
        tolerance = max(tolerance, torch.finfo(torch.float32).eps * terms**0.5)
    if not off <= tolerance * scale + _underflow(result):
        raise WrongResultError(
            f"{name} in {rule} is off by {off / scale:.2e} relative to float64; {tolerance:.0e} is allowed",
            hint="report this with the system record: a library returns wrong numbers",
        )


def _underflow(result: torch.Tensor) -> float:
    """What rounding costs where values are so small that a dtype has no relative accuracy: half a step an element."""
    import torch

    if not result.is_floating_point() or result.dtype.itemsize == 1:
        return 0.0
    limits = torch.finfo(result.dtype)
    return float(limits.smallest_normal * limits.eps / 2 * result.numel() ** 0.5)


def check_forward(operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str) -> None:
    import torch

    with torch.no_grad():
        results = as_tensors(operator.bind(shape, inputs)())
        references = as_tensors(operator.bind_reference(shape, widen(inputs))())
    _compare(operator.name, results, references, dtype, terms=operator.added_terms(shape))


def check_backward(operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Gradients of a seeded upstream against those of the reference."""
    import torch

    names = operator.gradient_names(shape)
    plain = {name: tensor.detach() for name, tensor in inputs.items()}
    leaves = {name: plain[name].requires_grad_() for name in names}
    wide = widen(plain)
    wide_leaves = {name: wide[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        outputs = differentiable_outputs(operator.bind(shape, {**plain, **leaves})())
        references = differentiable_outputs(operator.bind_reference(shape, {**wide, **wide_leaves})())
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    upstream = [torch.randn(one.shape, device=one.device, generator=generator).to(one.dtype) for one in outputs]
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), upstream)
    expected = torch.autograd.grad(references, tuple(wide_leaves.values()), [one.double() for one in upstream])
    _compare(f"{operator.name} backward", [one.to_dense() if one.is_sparse else one for one in gradients],
             [one.to_dense() if one.is_sparse else one for one in expected], dtype,
             terms=operator.added_terms(shape))  # fmt: skip


def _compare(
    name: str, results: Sequence[torch.Tensor], references: Sequence[torch.Tensor], dtype: str, *, terms: int
) -> None:
    if len(results) != len(references):
        raise WrongResultError(f"{name} gives {len(results)} results, not {len(references)}")
    for i, (result, reference) in enumerate(zip(results, references, strict=True)):
        place = f"{name} ({i + 1} of {len(results)})" if len(results) > 1 else name
        check_close(place, result, reference, dtype, terms=terms)


def widen(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in float64; integers stay what they are."""
    return {name: tensor.detach().double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def as_tensors(result: Any) -> list[torch.Tensor]:
    """A call's result as a flat list."""
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result or () for tensor in as_tensors(part)]


def differentiable_outputs(result: Any) -> list[torch.Tensor]:
    return [tensor for tensor in as_tensors(result) if tensor.requires_grad]
