"""From inputs as a trace recorded them to the arguments of the operator `call`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.bench.ops.arguments import ELEMENT_BYTES, LARGEST_WHOLE
from stepscope.bench.ops.traced_arguments import BoundCall, CannotRebuildError, Traced, TracedTensor, take_apart_type
from stepscope.bench.ops.whole_numbers import Constant, Ramp, find_bounds, require_any_will_do
from stepscope.formats.tensors import SchemaArgument

HALF, TWO = 0.5, 2
"""For numbers that stand beside tensors and whose value was not recorded; neither 0 nor 1, which are short cuts."""
NUMBERS_AS_TENSORS = frozenset({"add", "sub", "mul", "div", "floor_divide", "true_divide", "copy"})
"""Operators to which torch hands plain numbers as tensors without dimensions, which live on the host."""


PERHAPS_ON_HOST = frozenset({"philox_seed", "philox_offset", "rng_state"})
"""State of random numbers: on the host or on the device, by the kernel that was chosen. Elsewhere it crashes."""


class CallArguments(NamedTuple):
    args: list[Any]
    kwargs: dict[str, Any]


def make_call_arguments(
    call: BoundCall, device: str, ranges: Mapping[int, tuple[int, int]] | None = None
) -> CallArguments:
    """As the operator `call` takes them. `ranges`: smallest and largest value by input, where they were recorded.

    Raises CannotRebuildError for what would not be the call that was traced.
    """
    maker = _Maker(call, device)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, (argument, value) in enumerate(call.arguments):
        made = maker.make(argument, value, (ranges or {}).get(place))
        if not argument.keyword_only:
            args.append(made)
        elif made is not None:
            kwargs[argument.name] = made
    return CallArguments(args, kwargs)


class _Maker:
    def __init__(self, call: BoundCall, device: str) -> None:
        self._call = call
        self._device = device
        self._bounds = find_bounds(call)
        tensors = list(call.tensors())
        if not tensors:
            raise CannotRebuildError("it takes no tensor: nothing says where it ran")
        places = {tensor.device.partition(":")[0] for tensor in tensors if tensor.device is not None}
        self._accelerators = places - {"cpu", ""}
        if "cpu" in places and self._accelerators and any(t.device == "cpu" and t.size for t in tensors):
            raise CannotRebuildError("it moves data between host and device")
        if places == {"cpu"} and not device.startswith("cpu"):
            raise CannotRebuildError("it ran on the host")
        self._dtypes = {tensor.dtype for tensor in tensors if tensor.size}

    def make(self, argument: SchemaArgument, value: Traced, span: tuple[int, int] | None) -> Any:
        kind, _, _ = take_apart_type(argument.type)
        if isinstance(value, TracedTensor):
            if self._is_number(value):
                return HALF if "float" in str(value.dtype) else TWO
            return self._tensor(value, self._bound(argument.name, span), argument.name)
        if isinstance(value, list) and kind in ("Tensor", "Tensor?"):
            return self._tensors(value, argument.name, span)
        if kind == "Device":
            return {"device": self._device} if value is not None else None
        return _plain(value)

    def _bound(self, name: str, span: tuple[int, int] | None) -> Any:
        """Numbers that depend on each other go before those that were recorded: a range says nothing of their order."""
        found = self._bounds.get(name)
        return found if isinstance(found, Ramp | Constant) else span or found

    def _is_number(self, tensor: TracedTensor) -> bool:
        """A plain number that torch has wrapped: without dimensions, of the widest dtype, on the host."""
        if self._call.name not in NUMBERS_AS_TENSORS or tensor.size or tensor.dtype not in ("float64", "int64"):
            return False
        if tensor.device is None:
            return bool(self._dtypes) and tensor.dtype not in self._dtypes
        return tensor.device == "cpu" and bool(self._accelerators)

    def _tensors(self, values: Sequence[Traced], name: str, span: tuple[int, int] | None) -> list[Any]:
        bounds = self._bounds.get(name)
        made = []
        for i, value in enumerate(values):
            bound = bounds[i] if isinstance(bounds, list) and i < len(bounds) else None
            made.append(None if value is None else self._tensor(value, span or bound, name))
        return made

    def _tensor(self, tensor: TracedTensor, bound: Any, name: str) -> dict[str, Any]:
        if tensor.dtype is None:
            raise CannotRebuildError("a timeline does not say the dtypes of a list: record an execution trace too")
        if tensor.dtype not in ELEMENT_BYTES:
            raise CannotRebuildError(f"its input {name} is {tensor.dtype}, which cannot be made here")
        made: dict[str, Any] = {"tensor": list(tensor.size), "dtype": tensor.dtype}
        if tensor.device is None and name in PERHAPS_ON_HOST and not self._device.startswith("cpu"):
            raise CannotRebuildError(f"no timeline says where its input {name} was: record an execution trace too")
        if tensor.device == "cpu" and self._accelerators:
            made["host"] = True
        if tensor.strides is not None and not is_contiguous(tensor.size, tensor.strides):
            made["strides"] = list(tensor.strides)
        if tensor.dtype.startswith(("int", "uint")):
            made |= self._whole_numbers(tensor, bound, name)
        return made

    def _whole_numbers(self, tensor: TracedTensor, bound: Any, name: str) -> dict[str, Any]:
        if isinstance(bound, Ramp):
            return {"ramp": list(bound)}
        if isinstance(bound, Constant):
            return {"low": bound.value, "high": bound.value + 1}
        if isinstance(bound, tuple):
            low, high = bound[0], bound[1] + 1
            least, most = _limits(str(tensor.dtype))
            return {"low": max(low, least), "high": min(max(high, low + 1), most)}
        if isinstance(bound, int):
            return {"high": max(bound, 1)}
        if tensor.dtype != "uint8":
            require_any_will_do(self._call, name)
        return {}


def _limits(dtype: str) -> tuple[int, int]:
    if dtype == "uint8":
        return 0, 256
    bits = 8 * ELEMENT_BYTES[dtype]
    return -(2 ** (bits - 1)), min(2 ** (bits - 1), LARGEST_WHOLE - 1)


def _plain(value: Traced) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CannotRebuildError(f"one of its inputs is {type(value).__name__}, which cannot be made here")


def is_contiguous(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Row by row; strides of dimensions of size 1 mean nothing."""
    expected = 1
    for one, stride in zip(reversed(size), reversed(strides), strict=True):
        if one > 1 and stride != expected:
            return 0 in size
        expected *= one
    return True
