"""The inputs of an operator's call as a trace recorded them, by the names of its schema.

Timelines say sizes, dtypes, strides and scalars, but no overload and neither the dtypes of lists nor words; execution
traces say those, but round scalars to six digits. Whatever neither says is a reason not to make the call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from stepscope.core.dtypes import DTYPE_BYTES, dtype_name
from stepscope.formats.tensors import Opaque, Schema, SchemaArgument, Tensor, Undefined, flatten


class CannotRebuildError(Exception):
    """What the trace holds is not enough to make this call again; its text is the reason."""


class TracedTensor(NamedTuple):
    size: tuple[int, ...]
    dtype: str | None
    """None: a timeline's list of tensors, which does not say it."""
    strides: tuple[int, ...] | None = None
    device: str | None = None
    """Where the trace says so."""


class _NotRecorded:
    """An input of which a timeline says nothing: None, a word, a generator or a device."""

    def __repr__(self) -> str:
        return "NOT_RECORDED"


NOT_RECORDED = _NotRecorded()
Traced = Any
"""TracedTensor, list, bool, int, float, str, None, Opaque or NOT_RECORDED."""


class BoundCall(NamedTuple):
    """Arguments of a call by the names of its schema."""

    target: str
    """Name and overload: `aten::add.Tensor`."""
    arguments: tuple[tuple[SchemaArgument, Traced], ...]
    assumed: tuple[str, ...] = ()
    """What was not recorded and was taken from the schema."""

    @property
    def name(self) -> str:
        """`add` of `aten::add_.Tensor`."""
        return self.target.partition("::")[2].partition(".")[0].rstrip("_")

    def tensors(self) -> Iterator[TracedTensor]:
        """All of them, those inside lists included."""
        return flatten((value for _, value in self.arguments), TracedTensor)


def read_timeline_inputs(
    shapes: Sequence[Any], types: Sequence[str], strides: Sequence[Any] | None, values: Sequence[str] | None
) -> list[Traced]:
    """One value for each input. `strides` and `values` are None where the profiler was too old to record them."""
    found = []
    for i, kind in enumerate(types):
        layout = strides[i] if strides is not None and i < len(strides) else None
        text = values[i] if values is not None and i < len(values) else None
        found.append(_read_input(kind, shapes[i] if i < len(shapes) else [], layout, text))
    return found


def _read_input(kind: str, shape: Any, strides: Any, text: str | None) -> Traced:
    dtype = dtype_name(kind)
    if dtype in DTYPE_BYTES:
        return TracedTensor(tuple(shape), dtype, _as_strides(shape, strides))
    if kind == "TensorList":
        if not shape:
            raise CannotRebuildError("a timeline does not hold long lists of tensors: record an execution trace too")
        layouts = strides if isinstance(strides, list) and len(strides) == len(shape) else [None] * len(shape)
        pairs = zip(shape, layouts, strict=True)
        return [TracedTensor(tuple(one), None, _as_strides(one, layout)) for one, layout in pairs]
    if kind in ("Scalar", "ScalarList") and text:
        return parse_number(text)
    return NOT_RECORDED


def _as_strides(shape: Sequence[int], strides: Any) -> tuple[int, ...] | None:
    return tuple(strides) if isinstance(strides, list | tuple) and len(strides) == len(shape) else None


def parse_number(text: str) -> Traced:
    """`2.`, `True`, `-inf`, `[1, 1]`; NOT_RECORDED for what is none of these."""
    stripped = text.strip()
    if stripped.lstrip("-") in ("inf", "nan"):
        return float(stripped)
    try:
        value = ast.literal_eval(stripped)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return NOT_RECORDED
    numbers = value if isinstance(value, list) else [value]
    return value if all(isinstance(one, int | float) for one in numbers) else NOT_RECORDED


def choose_schema(schemas: Sequence[Schema], inputs: Sequence[Traced]) -> Schema:
    """The overload that these inputs were given to: as many arguments, each of a type that fits."""
    if not schemas:
        raise CannotRebuildError("this torch has no such operator")
    for schema in schemas:
        arguments = schema.arguments
        if len(arguments) == len(inputs) and all(map(_fits, arguments, inputs)):
            return schema
    raise CannotRebuildError("no overload of this torch takes the inputs that were recorded")


def _fits(argument: SchemaArgument, value: Traced) -> bool:
    kind, is_list, is_optional = take_apart_type(argument.type)
    if value is NOT_RECORDED or value is None:
        # A word or a generator is not recorded either; numbers and tensors are, where the profiler is new enough.
        return is_optional or argument.default is not None or kind not in ("Tensor", "Dimname")
    if isinstance(value, list):
        return is_list and all(_element_fits(kind, one) for one in value)
    return not is_list and _element_fits(kind, value)


_NUMBERS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("int", "SymInt", "ScalarType", "Layout", "MemoryFormat"), (int,)),
    "float": (int, float),
    "Scalar": (int, float),
}


def _element_fits(kind: str, value: Traced) -> bool:
    if isinstance(value, TracedTensor):
        return kind in ("Tensor", "Tensor?")
    if isinstance(value, bool):
        return kind in ("bool", "Scalar")
    return isinstance(value, _NUMBERS.get(kind, ()))


def take_apart_type(text: str) -> tuple[str, bool, bool]:
    """The element's type of `int[2]?`, whether it is a list, whether it may be None."""
    is_optional = text.endswith("?")
    bare = text.removesuffix("?")
    if not bare.endswith("]"):
        return bare, False, is_optional
    return bare[: bare.rindex("[")], True, is_optional


def read_graph_inputs(values: Sequence[Any], timeline_inputs: Sequence[Traced] | None = None) -> list[Traced]:
    """Values of a node; numbers from the timeline where there is one, which has more digits."""
    found = [_from_graph(value) for value in values]
    if timeline_inputs is not None and len(timeline_inputs) == len(found):
        found = [
            other if _is_number(one) and _is_number(other) else one
            for one, other in zip(found, timeline_inputs, strict=True)
        ]
    return found


def _from_graph(value: Any) -> Traced:
    if isinstance(value, Tensor):
        return TracedTensor(value.shape, value.dtype, value.strides, value.device or None)
    if isinstance(value, tuple | list):
        return [_from_graph(one) for one in value]
    return None if isinstance(value, Undefined) else value


def _is_number(value: Traced) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bind_inputs(schema: Schema, inputs: Sequence[Traced]) -> BoundCall:
    """Raises CannotRebuildError where an input that the call needs is not known."""
    if len(inputs) != len(schema.arguments):
        raise CannotRebuildError(f"{len(inputs)} inputs were recorded, its schema has {len(schema.arguments)}")
    bound, assumed = [], []
    for argument, value in zip(schema.arguments, inputs, strict=True):
        if value is not NOT_RECORDED and not isinstance(value, Opaque):
            bound.append((argument, value))
            continue
        if argument.default is None and not argument.type.endswith("?"):
            raise CannotRebuildError(f"its input {argument.name} ({argument.type}) was not recorded")
        usual = _read_default(argument)
        if usual is not None:
            assumed.append(f"{argument.name}={usual}")
        bound.append((argument, usual))
    name = f"{schema.name}.{schema.overload}" if schema.overload else schema.name
    return BoundCall(name, tuple(bound), tuple(assumed))


def _read_default(argument: SchemaArgument) -> Traced:
    text = argument.default
    if text is None or text == "None":
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str | list) else None
