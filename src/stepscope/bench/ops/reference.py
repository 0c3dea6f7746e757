"""Comparing a result with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stepscope.core.lazy_torch import torch
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    from stepscope.bench.ops.operator import Operator, Shape

RELATIVE_TOLERANCE = {
    "float64": 1e-12,
    "float32": 1e-5,
    "tf32": 2e-3,
    "bfloat16": 1e-2,
    "float16": 2e-3,
    "float8_e4m3fn": 2e-2,
    "int64": 0.0,
    "int32": 0.0,
    "int8": 0.0,
    "int4": 1e-5,
}
"""Largest allowed ‖out − ref‖ / ‖ref‖. Rounding of float32 lands under 1e-6 here, a wrong element far above 1e-5;
tf32 near 3e-4; float8 inputs are exact in the reference, so only the bfloat16 output is rounded. Integers are exact."""


WRONG_LIBRARY = "report this with the system record: a library returns wrong numbers"
"""The hint of a WrongResultError."""

ELEMENT_FACTOR = 8
"""No single element may be off by more than this many tolerances of its own size and the average one: a row that was
never written hides in the norm of four thousand others."""


def seeded_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Normal numbers in each tensor's shape, dtype and place: the upstream of a backward check."""
    generator = torch.Generator(tensors[0].device).manual_seed(1)
    return [torch.randn(one.shape, device=one.device, generator=generator).to(one.dtype) for one in tensors]


def check_close(
    name: str, result: torch.Tensor, reference: torch.Tensor, dtype: str | None = None, *, terms: int = 1
) -> None:
    """`dtype` names the rule where the result's own dtype does not (tf32). NaN never passes.

    Long sums in float32 round by more than single products: `terms` of them are allowed a step times their root.
    """
    rule = dtype or str(result.dtype).removeprefix("torch.")
    if result.shape != reference.shape:
        raise WrongResultError(f"{name} has the shape {tuple(result.shape)}, not {tuple(reference.shape)}")
    wide, exact = result.detach().double(), reference.detach().double()
    size, off = float(exact.norm()), float((wide - exact).norm())
    scale = size or 1.0  # a reference of nothing but zeros is compared absolutely
    tolerance = RELATIVE_TOLERANCE[rule]
    if rule == "float32":
        tolerance = max(tolerance, torch.finfo(torch.float32).eps * terms**0.5)
    if not off <= tolerance * scale + _underflow(result):
        raise WrongResultError(
            f"{name} in {rule} is off by {off / scale:.2e} relative to float64; {tolerance:.0e} is allowed",
            hint=WRONG_LIBRARY,
        )
    if reference.numel():
        average = size / reference.numel() ** 0.5
        allowed = (exact.abs() + (average or 1.0)) * (ELEMENT_FACTOR * tolerance) + _underflow(result)
        check_elements(name, wide, exact, allowed)


def check_elements(
    name: str,
    result: torch.Tensor,
    reference: torch.Tensor,
    allowed: torch.Tensor,
    says: str = "are off by more than rounding",
) -> None:
    """One by one: a single wrong element is small beside the norm of many. NaN never passes."""
    wrong = ~((result.detach().double() - reference).abs() <= allowed)
    count = int(wrong.sum())
    if count:
        place = tuple(int(index) for index in wrong.nonzero()[0])
        raise WrongResultError(
            f"{name}: {count} of {reference.numel()} elements {says}, the first at {place}: "
            f"{float(result[place]):.6g} instead of {float(reference[place]):.6g}",
            hint=WRONG_LIBRARY,
        )


def check_compiled(
    operator: Operator, compiled: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], dtype: str
) -> None:
    """The compiled call's results against the eager ones, which are checked by themselves."""
    if len(compiled) != len(eager) or not same_tensors(compiled, eager):
        _compare(f"{operator.name} compiled", compiled, [one.double() for one in eager], dtype)


def same_tensors(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Bit by bit; what is not a number equals itself."""
    return all(
        torch.equal(one.nan_to_num(0.0) if one.is_floating_point() else one,
                    other.nan_to_num(0.0) if other.is_floating_point() else other)
        and bool((one.isnan() == other.isnan()).all())
        for one, other in zip(map(_dense, first), map(_dense, second), strict=True)
    )  # fmt: skip


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _underflow(result: torch.Tensor) -> float:
    """What rounding costs where values are so small that a dtype has no relative accuracy: half a step an element."""
    if not result.is_floating_point() or result.dtype.itemsize == 1:
        return 0.0
    limits = torch.finfo(result.dtype)
    return float(limits.smallest_normal * limits.eps / 2 * result.numel() ** 0.5)


def check_forward(operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str) -> None:
    with torch.no_grad():
        results = as_tensors(operator.bind(shape, inputs)())
        references = as_tensors(operator.bind_reference(shape, widen(inputs))())
    _compare(operator.name, results, references, dtype, terms=operator.added_terms(shape))


def check_backward(operator: Operator, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Gradients of a seeded upstream against those of the reference."""
    by = operator.adds_gradients_by
    make_upstream = seeded_like if by is None else partial(_make_signs, by_rows=by == "row")
    gradients, upstream = take_gradients(operator, operator.bind, shape, inputs, make_upstream)
    expected, _ = take_gradients(operator, operator.bind_reference, shape, widen(inputs), lambda _: upstream)
    for name, gradient, right in zip(operator.gradient_names(shape), gradients, expected, strict=True):
        check_close(f"{operator.name} backward ({name})", gradient, right, dtype, terms=operator.added_terms(shape))


def _make_signs(outputs: Sequence[torch.Tensor], *, by_rows: bool) -> list[torch.Tensor]:
    """The upstream where gradients are sums over repeated indices: −1 or 1, so that sums are exact in every dtype.

    Thousands of additions to one row round in a short float by more than its tolerance, though nothing is wrong.
    `by_rows`: a row goes to one place as a whole, so that one number in it is enough and the others are 0, which keeps
    the sums small.
    """
    (output,) = outputs
    generator = torch.Generator(output.device).manual_seed(1)
    upstream = torch.randint(2, output.shape, device=output.device, generator=generator) * 2 - 1
    if by_rows:
        column = torch.randint(output.shape[1], (len(output), 1), device=output.device, generator=generator)
        upstream *= torch.zeros_like(upstream).scatter_(1, column, 1)
    return [upstream]


def take_gradients(
    operator: Operator,
    bind: Callable[[Shape, Mapping[str, torch.Tensor]], Callable[[], Any]],
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    make_upstream: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = seeded_like,
) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
    """The gradients that an operator has, dense, and the upstream they come from: by default seeded_like its outputs.

    `bind` is the operator's own, or that of its reference.
    """
    given = {name: tensor.detach() for name, tensor in inputs.items()}
    leaves = [given[name].requires_grad_() for name in operator.gradient_names(shape)]
    with torch.enable_grad():
        outputs = differentiable_outputs(bind(shape, given)())
    upstream = make_upstream(outputs)
    pushed = [one.to(output.dtype) for one, output in zip(upstream, outputs, strict=True)]
    found = torch.autograd.grad(outputs, leaves, pushed)
    return [one.double().to_dense() if one.is_sparse else one.detach() for one in found], upstream


def _compare(
    name: str, results: Sequence[torch.Tensor], references: Sequence[torch.Tensor], dtype: str, terms: int = 1
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
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result or () for tensor in as_tensors(part)]


def differentiable_outputs(result: Any) -> list[torch.Tensor]:
    return [tensor for tensor in as_tensors(result) if tensor.requires_grad]


def count_repeats(index: torch.Tensor) -> int:
    """How many of the indices name a place that another one named before."""
    return index.numel() - int(torch.unique(index).numel())
