"""Arguments of a recorded operator: their types by a real grammar, their values kept apart.

A tensor that was recorded, an undefined tensor, a None and an object that could not be written are four different
things; a replay that mixes them up calls the operator with the wrong arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import force_setattr

from stepscope.core.dtypes import dtype_name

T = TypeVar("T")
_HEAD = re.compile(r"\s*([\w:.]+?)(?:\.(\w+))?\s*\(")
_ALIAS = re.compile(r"\(\s*([\w|*\s]+?)(!?)\s*(?:->\s*[\w|*\s]+)?\)")


class SchemaArgument(NamedTuple):
    """One argument or result of a schema."""

    name: str
    type: str
    """Without the alias, e.g. `Tensor?[]`."""
    alias: frozenset[str] = frozenset()
    """Names of the memory it may share with others of the same name."""
    is_written: bool = False
    """An exclamation mark stands in its alias."""
    default: str | None = None
    keyword_only: bool = False


class Schema(NamedTuple):
    """`aten::add.out(Tensor self, …) -> Tensor(a!)` taken apart."""

    name: str
    overload: str
    arguments: tuple[SchemaArgument, ...]
    returns: tuple[SchemaArgument, ...]


@lru_cache(maxsize=1 << 14)
def parse_schema(text: str) -> Schema | None:
    """None where the text is no schema: old traces hold some that were cut."""
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        close = _matching(text, head.end() - 1)
        arguments = _arguments(text[head.end() : close])
        arrow = text.find("->", close)
        returned = text[arrow + 2 :].strip() if arrow >= 0 else ""
        if returned.startswith("(") and _matching(returned, 0) == len(returned) - 1:
            returned = returned[1:-1]
        returns = _arguments(returned, named=False)
    except ValueError:
        return None
    return Schema(head[1], head[2] or "", arguments, returns)


def _arguments(text: str, *, named: bool = True) -> tuple[SchemaArgument, ...]:
    found: list[SchemaArgument] = []
    keyword_only = False
    for part in split_list(text):
        if part.strip() == "*":
            keyword_only = True
        elif part.strip():
            found.append(_argument(part.strip(), keyword_only, named))
    return tuple(found)


def _argument(text: str, keyword_only: bool, named: bool) -> SchemaArgument:
    alias = _ALIAS.search(text)
    names: frozenset[str] = frozenset()
    is_written = False
    if alias and not text.startswith("("):
        names = frozenset(name.strip() for name in alias[1].split("|"))
        is_written = alias[2] == "!"
        text = text[: alias.start()] + text[alias.end() :]
    declared, equals, default = text.partition("=")
    kind, blank, name = declared.strip().rpartition(" ")
    if not blank:
        # Results usually have no name.
        kind, name = (declared.strip(), "") if not named else ("", declared.strip())
    return SchemaArgument(
        name=name,
        type=kind.strip(),
        alias=names,
        is_written=is_written,
        default=default.strip() if equals else None,
        keyword_only=keyword_only,
    )


def _matching(text: str, opened: int) -> int:
    depth = 0
    quote = ""
    for place in range(opened, len(text)):
        mark = text[place]
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark == "(":
            depth += 1
        elif mark == ")":
            depth -= 1
            if not depth:
                return place
    raise ValueError("a bracket is not closed")


_UNDEFINED_DTYPE = "nullptr (uninitialized)"
_NUMBERS = (int, float)
_NON_FINITE = {"inf", "-inf", "nan", "-nan", "infinity", "-infinity"}


class ValueType(NamedTuple):
    """A type as written, taken apart."""

    kind: str
    """Tensor, Undefined, None, Int, Double, Bool, String, Device, GenericList, Tuple, or whatever else stands there."""
    dtype: str | None = None
    """Element type of a tensor, in torch's spelling."""
    items: tuple[ValueType, ...] = ()
    """Types of the members of a list or tuple."""


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor as the trace saw it. Ids stand for addresses: both are used again after a free."""

    id: int
    storage: int
    offset: int
    """First element, counted in elements from the beginning of the storage."""
    elements: int
    itemsize: int
    device: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None before schema 1.1.1, which does not record them."""

    @property
    def size_bytes(self) -> int:
        return self.elements * self.itemsize

    def storage_range(self) -> tuple[int, int]:
        """First byte, and the byte after the last, that it can touch in its storage.

        Without strides it is taken as dense, which is too short for a slice of columns.
        """
        first = self.offset * self.itemsize
        if not self.elements:
            return first, first
        if self.strides is None or len(self.strides) != len(self.shape):
            return first, first + self.elements * self.itemsize
        low = high = self.offset
        for size, stride in zip(self.shape, self.strides, strict=True):
            reach = (size - 1) * stride
            if reach > 0:
                high += reach
            else:
                low += reach
        return low * self.itemsize, (high + 1) * self.itemsize


class Undefined(msgspec.Struct, frozen=True, gc=False):
    """A tensor argument or result that was there but held nothing; not the same as None."""


class Opaque(msgspec.Struct, frozen=True, gc=False):
    """Something the trace names but does not hold: a generator, a stream, a storage, an object."""

    tag: str


UNDEFINED = Undefined()

Value = Any
"""Tensor, Undefined, None, Opaque, bool, int, float, str, or a tuple of values."""


@lru_cache(maxsize=1 << 15)
def parse_type(text: str) -> ValueType:
    """A type such as `GenericList[None,Tensor(long int)]`, however nested; ValueError where brackets do not match."""
    text = text.strip()
    if text.startswith("Tensor(") and text.endswith(")"):
        inner = text[7:-1]
        if inner == _UNDEFINED_DTYPE or inner.startswith("nullptr"):
            return ValueType("Undefined")
        return ValueType("Tensor", dtype_name(inner))
    bracket = text.find("[")
    if bracket < 0:
        _require_balance(text)
        return ValueType(text or "None")
    if not text.endswith("]"):
        raise ValueError(f"the type {_short(text)} has a [ that is not closed at its end")
    return ValueType(text[:bracket], None, tuple(parse_type(part) for part in split_list(text[bracket + 1 : -1])))


def split_list(text: str) -> list[str]:
    """Parts between commas that stand outside all brackets and quotes."""
    if not text.strip():
        return []
    if not any(mark in text for mark in "([<{\"'"):
        return text.split(",")
    parts: list[str] = []
    depth = begin = 0
    quote = ""
    for place, mark in enumerate(text):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark in "([<{":
            depth += 1
        elif mark in ")]}" or (mark == ">" and text[place - 1] != "-"):
            depth -= 1
            if depth < 0:
                raise ValueError(f"{_short(text)} closes a bracket that was not opened")
        elif mark == "," and not depth:
            parts.append(text[begin:place])
            begin = place + 1
    if depth:
        raise ValueError(f"{_short(text)} leaves a bracket open")
    parts.append(text[begin:])
    return parts


def parse_value(kind: ValueType, value: Any, shape: Any, strides: Any = None) -> Value:
    """One argument. `shape` and `strides` nest as the value does."""
    if isinstance(value, _NUMBERS):
        return value
    if kind.kind == "Tensor":
        return _tensor(kind, value, shape, strides)
    if kind.kind == "Undefined":
        return UNDEFINED
    if isinstance(value, list):
        return _sequence(kind, value, shape, strides)
    return _text(kind, value) if isinstance(value, str) else value


def _text(kind: ValueType, value: str) -> Value:
    """A string, or what the writer put in words."""
    if kind.kind == "String":
        return value
    if kind.kind == "None" or value == "<None>":
        return None
    if kind.kind == "Double" and value.lower() in _NON_FINITE:
        return float(value)
    return Opaque(value[1:-1]) if value.startswith("<") and value.endswith(">") else value


_NESTS = (list, tuple)


def flatten(values: Iterable[Any], kind: type[T]) -> Iterator[T]:
    """All of this kind in a nest of lists and tuples, in order."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, _NESTS):
            yield from flatten(value, kind)


def flatten_tensors(values: Iterable[Value]) -> Iterator[Tensor]:
    """All tensors in a nest of values, in order."""
    return flatten(values, Tensor)


def _tensor(kind: ValueType, value: Any, shape: Any, strides: Any) -> Value:
    if isinstance(value, list) and len(value) >= 5:
        number, storage, offset, elements, itemsize, *more = value
        whole = isinstance(storage, int) and isinstance(offset, int) and isinstance(elements, int)
        if whole and isinstance(itemsize, int):
            sizes = tuple(shape) if isinstance(shape, list) else ()
            steps = tuple(strides) if isinstance(strides, list) else None
            device = more[0] if more else ""
            return Tensor(number, storage, offset, elements, itemsize, device, kind.dtype or "", sizes, steps)
    if isinstance(value, str) and value.startswith("<"):
        return None if value == "<None>" else Opaque(value.strip("<>"))
    raise ValueError(
        f"a tensor is recorded as {_short(str(value))}, not as [id, storage, offset, elements, itemsize, device]"
    )


def _sequence(kind: ValueType, values: list[Any], shapes: Any, strides: Any) -> tuple[Value, ...]:
    items = kind.items
    if not any(item.kind in _NEEDS_CARE for item in items):
        return tuple(values)
    count = len(values)
    shapes = shapes if isinstance(shapes, list) and len(shapes) == count else [[]] * count
    steps = strides if isinstance(strides, list) and len(strides) == count else [None] * count
    # The writer cuts long lists of types; what follows is of the last one's type.
    known = (*items, *([items[-1]] * (count - len(items))))
    return tuple(parse_value(*parts) for parts in zip(known, values, shapes, steps, strict=False))


_NEEDS_CARE = frozenset(
    {"Tensor", "Undefined", "None", "Double", "GenericList", "Tuple", "Object", "Stream", "Generator"}
)


class _Side(msgspec.Struct, gc=False):
    values: list[Any] = []
    shapes: list[Any] = []
    types: list[str] = []
    strides: list[Any] | None = None


class _RawSide(msgspec.Struct, gc=False):
    values: msgspec.Raw = msgspec.Raw(b"[]")
    shapes: msgspec.Raw = msgspec.Raw(b"[]")
    types: msgspec.Raw = msgspec.Raw(b"[]")


_DECODE_SIDE = msgspec.json.Decoder(_Side)
_DECODE_RAW_SIDE = msgspec.json.Decoder(_RawSide)
_DECODE_LIST = msgspec.json.Decoder(list[Any])
_NOTHING = _Side()


class Arguments(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Inputs or outputs of one node; decoded when first asked for, because most are never looked at. ValueError then,
    where what the file holds are no arguments.

    Iterating gives parsed values (see `Value`); `values`, `shapes`, `types` and `strides` are as written.
    """

    _raw: bytes | msgspec.Raw | tuple[msgspec.Raw, ...] | None = None
    _side: _Side | None = None
    _parsed: tuple[Value, ...] | None = None

    @classmethod
    def of(
        cls, values: Sequence[Any], shapes: Sequence[Any], types: Sequence[str], strides: Sequence[Any] | None = None
    ) -> Arguments:
        """From lists as a trace would write them."""
        side = _Side(list(values), list(shapes), list(types), None if strides is None else list(strides))
        return cls(None, side)

    def _decoded(self) -> _Side:
        """As written, kept for the next question."""
        side = self._side
        if side is None:
            side = self._decode()
            force_setattr(self, "_side", side)
        return side

    def _decode(self) -> _Side:
        raw = self._raw
        if not raw:
            return _NOTHING
        if isinstance(raw, tuple):
            values, shapes, types = (_decode_list(part) for part in raw)
            return _Side(values, shapes, [str(kind) for kind in types])
        return _decode_side(raw)

    @property
    def values(self) -> list[Any]:
        return self._decoded().values

    @property
    def shapes(self) -> list[Any]:
        return self._decoded().shapes

    @property
    def types(self) -> list[str]:
        return self._decoded().types

    @property
    def strides(self) -> list[Any] | None:
        return self._decoded().strides

    def texts(self) -> tuple[str, str, str]:
        """Values, shapes and types as JSON text, without decoding what they hold."""
        first, second, third = (bytes(part).decode() or "[]" for part in self.raw_texts())
        return first, second, third

    def raw_texts(self) -> tuple[msgspec.Raw, ...]:
        """The same as bytes; those of a file are not copied."""
        raw = self._raw
        if isinstance(raw, tuple):
            return raw
        if raw:
            try:
                side = _DECODE_RAW_SIDE.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(str(error)) from error
            return side.values, side.shapes, side.types
        decoded = self._decoded()
        parts = (decoded.values, decoded.shapes, decoded.types)
        return tuple(msgspec.Raw(msgspec.json.encode(part)) for part in parts)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.parsed())

    def __getitem__(self, place: int) -> Value:
        return self.parsed()[place]

    def parsed(self) -> tuple[Value, ...]:
        """The values with their types applied; ValueError where they contradict each other."""
        parsed = self._parsed
        if parsed is None:
            # What was decoded is not kept here: its many small lists take more memory than what becomes of them.
            parsed = _parse_side(self._decode() if self._side is None else self._side)
            force_setattr(self, "_parsed", parsed)
        return parsed

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, those inside lists included, in order."""
        return flatten_tensors(self.parsed())

    def __repr__(self) -> str:
        return f"Arguments({', '.join(self.types)})"


NO_ARGUMENTS = Arguments()


def _parse_side(side: _Side) -> tuple[Value, ...]:
    values = side.values
    count = len(values)
    if len(side.types) < count or len(side.shapes) < count:
        raise ValueError(f"{count} values, but {len(side.types)} types and {len(side.shapes)} shapes")
    # Triton kernels have one entry less here than values: the stream at the end has none.
    strides = side.strides if side.strides is not None else []
    if len(strides) < count:
        strides = [*strides, *([None] * (count - len(strides)))]
    kinds = _parse_types(tuple(side.types[:count]))
    return tuple(map(parse_value, kinds, values, side.shapes, strides))


@lru_cache(maxsize=1 << 12)
def _parse_types(texts: tuple[str, ...]) -> tuple[ValueType, ...]:
    """Operators are called with the same types again and again."""
    return tuple(map(parse_type, texts))


def _decode_side(raw: bytes | msgspec.Raw) -> _Side:
    try:
        return _DECODE_SIDE.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _decode_list(raw: msgspec.Raw) -> list[Any]:
    """JSON, or a list as Python prints it: Chakra's own converter writes those."""
    if not raw:
        return []
    try:
        return _DECODE_LIST.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            found = ast.literal_eval(bytes(raw).decode())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"{_short(bytes(raw).decode(errors='replace'))} is no list") from error
        if not isinstance(found, list | tuple):
            raise ValueError(f"{_short(str(found))} is no list") from None
        return list(found)


def _require_balance(text: str) -> None:
    if text.count("(") != text.count(")") or "]" in text:
        raise ValueError(f"the type {_short(text)} has brackets that do not match")


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
