"""Any operator of torch by its name: what is in no list of this package can still be measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import MATRIX_FLOATS, Call, Operator, Parameter, Shape, UnsupportedError, Value, Work
from stepscope.bench.ops.reference import RELATIVE_TOLERANCE, as_tensors, check_close, take_gradients, widen
from stepscope.core.errors import UsageError, first_line
from stepscope.core.lazy_torch import torch
from stepscope.run.producer import WrongResultError
from stepscope.traces.calls.arguments import FLOAT_NAMES, parse_arguments, read_object, write_json
from stepscope.traces.calls.torch_calls import (
    ATEN,
    FUNCTION,
    CallPlan,
    ModuleTensor,
    base_name,
    bind_plan,
    is_module,
    make_module_tensors,
    make_tensor,
    module_layout,
    read_plan,
    require_target,
)

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "Linear"}


class CallAny(Operator):
    name = "call"
    summary = (
        "any operator of torch by name: aten:: (with overload or whole schema), torch.*, torch.nn.functional.*, "
        "Tensor methods in place (torch.add_) and modules of torch.nn; bytes are those of the tensors it is given "
        "and of a module's weights"
    )
    parameters = (
        Parameter("target", "", "aten::mm", "name of the operator"),
        Parameter(
            "args", "", '[{"tensor":[1024,1024]},{"tensor":[1024,1024]}]',
            "its arguments as a JSON list; tensors are normal numbers, whole ones uniform from low to below high",
        ),
        Parameter("kwargs", "", "{}", "its arguments by name as a JSON object"),
        Parameter("build", "", "[]", "what a module of torch.nn is made with, as a JSON list"),
        Parameter("build_kwargs", "", "{}", "the same by name, as a JSON object"),
    )  # fmt: skip
    dtypes = (*MATRIX_FLOATS, "float8_e4m3fn", "int64", "int32", "int8")
    tiny: ClassVar[Mapping[str, Value]] = {"args": '[{"tensor":[48,32]},{"tensor":[32,24]}]'}

    def check_shape(self, shape: Shape) -> None:
        read_plan(self.canonical(shape))

    def canonical(self, shape: Shape) -> dict[str, Any]:
        """The same shape with its texts in canonical form: the short forms of `args` and `build` become JSON."""
        args, kwargs = _join(shape, "args", "kwargs")
        build, build_kwargs = _join(shape, "build", "build_kwargs")
        target = " ".join(str(shape["target"]).split())
        return make_shape(target, args, kwargs, build, build_kwargs)

    def named_dtype(self, shape: Shape) -> str | None:
        """The dtype under which a case runs whose tensors all name theirs; None where the case's is used.

        A module's is that of its weights: named where it is built, else by the floats it is given. Whole numbers say
        nothing about it.
        """
        plan = read_plan(shape)
        tensors = plan.tensors().values()
        named = [spec.dtype for spec in tensors if spec.dtype is not None]
        known = [dtype for dtype in named if dtype in self.dtypes]
        floats = [dtype for dtype in known if dtype in FLOAT_NAMES]
        is_whole = bool(named) and len(named) == len(tensors)
        if is_module(plan.target):
            built = [dtype for dtype in _named_in_build(plan) if dtype in self.dtypes]
            return next(iter([*built, *(floats if is_whole else [])]), None)
        return next(iter([*floats, *known]), None) if is_whole else None

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        """What an unknown operator writes, only torch could tell: bytes are those of its arguments and weights.

        Backward, their gradients are written too. Operations are counted for products alone.
        """
        plan, stored = read_plan(shape), _stored(dtype)
        weights, flops = _weights(plan, stored), _count_flops(plan)
        moved = _given_bytes(plan, stored, weights)
        if direction == "forward":
            return Work(flops=flops, bytes=moved)
        tensors = [spec for spec in plan.tensors().values() if spec.grad and spec.is_float(stored)]
        gradients = sum(spec.bytes_in(stored) for spec in tensors)
        gradients += sum(one.bytes for one in weights if one.takes_gradient)
        return Work(flops=2 * flops, bytes=moved + gradients)

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        """With what it returns, where torch is loaded and can tell without computing; else as much again."""
        plan, stored = read_plan(shape), _stored(dtype)
        weights = _weights(plan, stored)
        given = _given_bytes(plan, stored, weights)
        returned = _returned_bytes(plan, stored, weights) if sys.modules.get("torch") else None
        return given + (given if returned is None else returned)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The check makes its inputs anew, and calls it twice on copies."""
        return 3 * self.footprint_bytes(shape, dtype)

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        plan = read_plan(shape)
        if base_name(plan.target).endswith("_"):
            raise UnsupportedError(f"{plan.target} works in place: it has no backward pass")
        names = [name for name, spec in plan.tensors().items() if spec.grad and spec.dtype in (None, *MATRIX_FLOATS)]
        if is_module(plan.target):
            names += [one.name for one in module_layout(plan, "float32") if one.takes_gradient]
        if not names:
            raise UnsupportedError(f"no tensor of this call of {plan.target} takes a gradient")
        return tuple(names)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        plan = read_plan(shape)
        require_target(plan.target)
        inputs = {name: make_tensor(spec, maker) for name, spec in plan.tensors().items()}
        if is_module(plan.target):
            inputs |= make_module_tensors(plan, maker)
        return inputs

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return bind_plan(read_plan(shape), inputs)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> str | None:
        """Against the same call in float64; where that cannot be, the reason.

        On inputs made anew: what works in place has changed those that were timed. Whole numbers that come from
        floats (positions of maxima) are not compared: ties fall differently.
        """
        device = next((str(one.device) for one in inputs.values() if one.device.type != "cpu"), "cpu")
        inputs = self.make_inputs(shape, Maker(dtype, device))
        reason = _why_incomparable(shape, inputs)
        if reason is not None:
            return reason
        with torch.no_grad():
            results = _call(self, shape, _copy(inputs))
            floats = [one for one in (*inputs.values(), *results) if one.is_floating_point()]
            rule = _loosest([dtype, *(str(one.dtype).removeprefix("torch.") for one in floats)])
            if _differ(results, _call(self, shape, _copy(inputs)), rule):
                return "two calls on the same inputs differ: its result is random or not deterministic"
        upstream: Sequence[torch.Tensor] = ()
        if direction == "backward":
            results, upstream = take_gradients(self, self.bind, shape, _copy(inputs))
        elif not any(one.is_floating_point() for one in results):
            return "it gives no floats: whole numbers that come from floats may differ where there are ties"
        try:
            if direction == "backward":
                expected, _ = take_gradients(self, self.bind, shape, widen(_copy(inputs)), lambda _: upstream)
            else:
                with torch.no_grad():
                    expected = _call(self, shape, widen(_copy(inputs)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return f"torch does not make the same call in float64: {first_line(error)}"
        _compare(self.name if direction == "forward" else f"{self.name} backward", results, expected, rule)
        return None


def _join(shape: Shape, by_place: str, by_name: str) -> tuple[str, str]:
    """The short form may hold arguments by name too."""
    args, kwargs = parse_arguments(str(shape[by_place]))
    given, more = read_object(str(shape[by_name]), by_name), read_object(kwargs, by_place)
    if doubled := given.keys() & more.keys():
        raise ValueError(f"{', '.join(sorted(doubled))} is given twice")
    return args, write_json({**given, **more})


def make_shape(
    target: str, args: str, kwargs: str = "{}", build: str = "[]", build_kwargs: str = "{}"
) -> dict[str, Any]:
    return {"target": target, "args": args, "kwargs": kwargs, "build": build, "build_kwargs": build_kwargs}


def make_call_shape(target: str, arguments: str = "", *, build: str = "", where: str = "--call") -> dict[str, Any]:
    """A case of `call` from what a person writes; both texts in the short form or as JSON."""
    shape = make_shape(target, arguments, build=build)
    try:
        if not target.startswith((ATEN, FUNCTION)):
            raise ValueError(f"{target[:40]!r} begins neither with aten:: nor with torch.")
        made = OPERATOR.canonical(shape)
        read_plan(made)
    except ValueError as error:
        hint = "write for example --call aten::mm --args 'float32[1024,64] float32[64,128]'"
        raise UsageError(str(error), hint=hint, where=where) from None
    return made


def _given_bytes(plan: CallPlan, dtype: str, weights: Sequence[ModuleTensor]) -> int:
    return sum(spec.bytes_in(dtype) for spec in plan.tensors().values()) + sum(one.bytes for one in weights)


def _stored(dtype: str) -> str:
    return "float32" if dtype == "tf32" else dtype


def _count_flops(plan: CallPlan) -> int:
    """Two operations for each multiplication of a matrix product; 0 for what is not known here."""
    name = base_name(plan.target)
    sizes = [spec.size for spec in plan.tensors().values()]
    if name not in _PRODUCTS:
        return 0
    if name == "Linear":
        outputs = [one for one in plan.build_args[1:2] if isinstance(one, int)]
        return 2 * math.prod(sizes[0]) * outputs[0] if sizes and outputs else 0
    if name in {"addmm", "baddbmm"}:
        sizes = sizes[1:]
    if len(sizes) < 2 or not sizes[0] or not sizes[1]:
        return 0
    left, right = sizes[0], sizes[1]
    if name == "linear":
        return 2 * math.prod(left) * (right[0] if len(right) > 1 else 1)
    columns = right[-1] if len(right) > 1 else 1
    rows = left[-2] if len(left) > 1 else 1
    batch = _broadcast(left[:-2], right[:-2])
    return 2 * batch * rows * left[-1] * columns


def _broadcast(left: Sequence[int], right: Sequence[int]) -> int:
    longest = max(len(left), len(right))
    padded = [(1,) * (longest - len(one)) + tuple(one) for one in (left, right)]
    return math.prod(map(max, zip(*padded, strict=True)))


def _named_in_build(plan: CallPlan) -> list[str]:
    return [str(one["dtype"]) for one in plan.built_with() if isinstance(one, dict) and one.keys() == {"dtype"}]


def _weights(plan: CallPlan, dtype: str) -> list[ModuleTensor]:
    """Parameters and buffers of a module. Only torch knows them: where it is not installed, plans are made without."""
    if not is_module(plan.target):
        return []
    try:
        import torch  # noqa: F401
    except ImportError:
        return []
    return module_layout(plan, dtype)


def _returned_bytes(plan: CallPlan, dtype: str, weights: Sequence[ModuleTensor]) -> int | None:
    """By calling it on tensors without memory; None where torch cannot."""
    given = [*((name, spec.size, spec.dtype or dtype) for name, spec in plan.tensors().items()),
             *((one.name, one.size, one.dtype) for one in weights)]  # fmt: skip
    inputs = {name: torch.empty(size, dtype=getattr(torch, named), device="meta") for name, size, named in given}
    try:
        with torch.no_grad():
            returned = as_tensors(bind_plan(plan, inputs)())
    except Exception:  # noqa: BLE001 (whatever torch raises: the call itself will tell)
        return None
    return sum(tensor.numel() * tensor.element_size() for tensor in returned)


OPERATOR = CallAny()


_RULES = {"float8_e5m2": "float8_e4m3fn"}
"""Dtypes without a tolerance of their own."""


def _why_incomparable(shape: Shape, inputs: Mapping[str, torch.Tensor]) -> str | None:
    """The reason that is known before the call is made."""
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
    if isinstance(result, bool | int | float | complex):
        result = torch.tensor(result)
    dense = [one.to_dense() if one.layout != torch.strided else one for one in as_tensors(result)]
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in dense]


def _loosest(names: Sequence[str]) -> str:
    rules = [_RULES.get(name, name) for name in names]
    return max((rule for rule in rules if rule in RELATIVE_TOLERANCE), key=RELATIVE_TOLERANCE.__getitem__)


def _differ(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], rule: str) -> bool:
    """Beyond what the order of additions explains."""
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
