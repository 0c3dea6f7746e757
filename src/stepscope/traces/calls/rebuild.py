"""An operator's call as a trace recorded it, made into arguments with which it can be called again.

What matters of whole numbers is which ones an operator may be given: indices have bounds, and what lies beyond them
ends the process. A GPU that is handed an index out of bounds can do nothing more in this process, so an operator that
is not listed here is not called with whole numbers that nobody has recorded.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from stepscope.formats.tensors import SchemaArgument
from stepscope.traces.calls.arguments import ELEMENT_BYTES, LARGEST_WHOLE
from stepscope.traces.calls.traced import BoundCall, CannotRebuildError, Traced, TracedTensor, take_apart_type

Named = Mapping[str, Traced]
Bound = Callable[[Named], Any]
"""How many different indices there are (for lists of indices one for each), a Ramp, or a constant."""


class Ramp(NamedTuple):
    """The i-th number is factor · (i // divisor)."""

    factor: int
    divisor: int


class Constant(NamedTuple):
    value: int


def _size(name: str, dimension: int | str) -> Bound:
    """Size of a tensor's dimension, given by number or by the name of the argument that says it."""

    def find(named: Named) -> int | None:
        tensor, place = named.get(name), named.get(dimension) if isinstance(dimension, str) else dimension
        if not isinstance(tensor, TracedTensor) or not isinstance(place, int):
            return None
        if not tensor.size:
            return 1
        return tensor.size[place] if -len(tensor.size) <= place < len(tensor.size) else None

    return find


def _number(name: str) -> Bound:
    return lambda named: named[name] if isinstance(named.get(name), int) else None


def _elements(name: str, last: int = 0) -> Bound:
    """Of a tensor, or of its last dimensions: two of them are the places of a picture."""
    return lambda named: math.prod(named[name].size[-last:]) if isinstance(named.get(name), TracedTensor) else None


def _each_dimension(named: Named) -> list[int | None]:
    """Each index runs over a dimension of its own; a mask takes as many as it has itself."""
    tensor, indices = named.get("self"), named.get("indices")
    if not isinstance(tensor, TracedTensor) or not isinstance(indices, list):
        return []
    bounds: list[int | None] = []
    dimension = 0
    for index in indices:
        is_mask = isinstance(index, TracedTensor) and index.dtype in ("bool", "uint8")
        bounds.append(tensor.size[dimension] if dimension < len(tensor.size) else None)
        dimension += len(index.size) if is_mask else 1
    return bounds


def _of_bags(make: Callable[[int], Any]) -> Bound:
    """For tables whose bags all have one length, which is what sizes alone can tell."""

    def find(named: Named) -> Any:
        indices, gradient, offsets = (named.get(name) for name in ("indices", "grad", "offsets"))
        if not isinstance(indices, TracedTensor) or len(indices.size) != 1:
            return None
        if isinstance(gradient, TracedTensor):
            bags = gradient.size[0]
        elif isinstance(offsets, TracedTensor):
            bags = math.prod(offsets.size) - int(bool(named.get("include_last_offset")))
        else:
            return None
        lookups = indices.size[0]
        return make(lookups // bags) if bags > 0 and lookups and lookups % bags == 0 else None

    return find


def _alike(operators: str, bounds: dict[str, Bound]) -> dict[str, dict[str, Bound]]:
    return dict.fromkeys(operators.split(), bounds)


_INDEXED: dict[str, dict[str, Bound]] = {
    **_alike(
        "_embedding_bag _embedding_bag_forward_only embedding_bag",
        {"indices": _size("weight", 0), "offsets": _of_bags(lambda length: Ramp(length, 1))},
    ),
    **_alike(
        "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_sparse_backward",
        {
            "offsets": _of_bags(lambda length: Ramp(length, 1)),
            "indices": _number("num_weights"),
            "offset2bag": _of_bags(lambda length: Ramp(1, length)),
            "bag_size": _of_bags(Constant),
            "maximum_indices": _number("num_weights"),
        },
    ),
    "embedding": {"indices": _size("weight", 0)},
    **_alike("embedding_dense_backward embedding_backward", {"indices": _number("num_weights")}),
    "index_select_backward": {"index": lambda named: (named.get("self_sizes") or [None])[0]},
    **_alike(
        "index_select gather gather_backward scatter scatter_add scatter_reduce index_add index_copy index_fill",
        {"index": _size("self", "dim")},
    ),
    **_alike("index index_put _index_put_impl _unsafe_index _unsafe_index_put", {"indices": _each_dimension}),
    **_alike("take put", {"index": _elements("self")}),
    "take_along_dim": {"indices": _size("self", "dim")},
    "one_hot": {"self": _number("num_classes")},
    **_alike(
        "nll_loss nll_loss_nd nll_loss_forward nll_loss_backward nll_loss2d nll_loss2d_forward nll_loss2d_backward "
        "cross_entropy_loss",
        {"target": _size("self", 1)},
    ),
    "max_pool2d_with_indices_backward": {"indices": _elements("self", 2)},
}
"""Operator → input that holds indices → how many there are."""

_WHOLE_NUMBERS: dict[str, list[str]] = tomllib.loads(
    resources.files(__package__).joinpath("whole_numbers.toml").read_text(encoding="utf-8")
)
"""Operators by what their whole numbers mean."""


def find_bounds(call: BoundCall) -> dict[str, Any]:
    """Input → how many different indices it may hold; of a list of indices a list."""
    named = {argument.name: value for argument, value in call.arguments}
    rules = _INDEXED.get(call.name, {})
    return {name: found for name, rule in rules.items() if (found := rule(named)) is not None}


def require_any_will_do(call: BoundCall, name: str) -> None:
    """Raises CannotRebuildError where the whole numbers in an input without bounds matter."""
    is_index = name in _INDEXED.get(call.name, {})
    if is_index or call.name in _WHOLE_NUMBERS["related"]:
        raise CannotRebuildError(
            f"the whole numbers in {name} steer what it does, and were not recorded: record with --ranges"
        )
    if call.name not in _INDEXED and call.name not in _WHOLE_NUMBERS["any"]:
        raise CannotRebuildError(f"nothing tells which whole numbers {name} may hold: record with --ranges")


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
