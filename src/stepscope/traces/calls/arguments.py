"""Arguments of any call as text: canonical JSON in records, a short form for people.

A tensor is `{"tensor": [128, 64]}`, with the fields of `TensorSpec` where they differ from their defaults.
`{"dtype": "float16"}`, `{"device": "cuda"}` and `{"number": "-inf"}` stand for what JSON cannot say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec

from stepscope.core.dtypes import DTYPE_BYTES

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
ELEMENT_BYTES = {name: DTYPE_BYTES[name] for name in _DTYPES}
"""Bytes per element of the dtypes in which tensors can be made here."""
FLOAT_NAMES = frozenset(name for name in ELEMENT_BYTES if "float" in name)
DEFAULT_HIGH = 10
"""So many different whole numbers are drawn, from `low` on, where nothing is said."""

LARGEST_TENSOR = 2**40
MAX_TEXT = 1 << 16
MAX_DEPTH = 8
MAX_DIMENSIONS = 32
LARGEST_WHOLE = 2**63

_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_SPECIAL = ("tensor", "dtype", "device", "number")
_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_TENSOR)]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor among the arguments: floats are normal numbers, whole numbers uniform."""

    size: tuple[_Count, ...] = msgspec.field(name="tensor")
    dtype: str | None = None
    """None: the case's."""
    low: int = 0
    """Smallest whole number drawn."""
    high: int | None = None
    """Whole numbers are drawn below it; None: DEFAULT_HIGH above `low`."""
    grad: bool = True
    """Whether a gradient is wanted."""
    strides: tuple[_Count, ...] | None = None
    """In elements; None: row by row."""
    ramp: tuple[_Count, _Count] | None = None
    """Factor and divisor of whole numbers that rise: the i-th is factor · (i // divisor). None: they are drawn."""
    host: bool = False
    """Stays on the host: a kernel that expects a number there reads whatever is at its address."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"its dtype is none of {', '.join(ELEMENT_BYTES)}")
        if len(self.size) > MAX_DIMENSIONS or math.prod(self.size) > LARGEST_TENSOR:
            raise ValueError(f"it has more than {MAX_DIMENSIONS} dimensions or {LARGEST_TENSOR} elements")
        if self.strides is not None and (len(self.strides) != len(self.size) or self.span > LARGEST_TENSOR):
            raise ValueError("its strides are not one whole number for each of its dimensions")
        if self.ramp is not None and not self.ramp[1]:
            raise ValueError("its ramp is not a factor and a divisor above 0")
        if not -LARGEST_WHOLE <= self.low < self.end < LARGEST_WHOLE:
            raise ValueError("it is drawn from low to below high, but high is not above low")

    @property
    def end(self) -> int:
        """Whole numbers are drawn below it."""
        return self.low + DEFAULT_HIGH if self.high is None else self.high

    @property
    def elements(self) -> int:
        """Those in memory: an expanded tensor shows some of them several times."""
        if self.strides is None:
            return math.prod(self.size)
        return math.prod(size for size, stride in zip(self.size, self.strides, strict=True) if stride or not size)

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        if self.strides is None or 0 in self.size:
            return math.prod(self.size)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.strides, strict=True))

    def bytes_in(self, dtype: str) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype or dtype]

    def is_float(self, dtype: str) -> bool:
        return (self.dtype or dtype) in FLOAT_NAMES


def read_list(text: str, what: str) -> list[Any]:
    """The arguments a text holds. Raises ValueError with the rule it breaks."""
    value = _load(text, what)
    if not isinstance(value, list):
        raise ValueError(f'{what} is not a JSON list such as [{{"tensor": [1024, 1024]}}, 2]')
    return value


def read_object(text: str, what: str) -> dict[str, Any]:
    """Keyword arguments. Raises ValueError with the rule they break."""
    value = _load(text, what)
    if not isinstance(value, dict) or not all(name.isidentifier() for name in value):
        raise ValueError(f'{what} is not a JSON object of names and values such as {{"dim": 1}}')
    return value


def _load(text: str, what: str) -> Any:
    if len(text) > MAX_TEXT:
        raise ValueError(f"{what} has {len(text):,} characters, {MAX_TEXT:,} are allowed")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check(part, what, 0)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is no JSON; write {{"number": "inf"}}')


def _check(value: Any, what: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{what} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        for one in value:
            _check(one, what, depth + 1)
    elif isinstance(value, dict):
        _check_object(value, what)
    elif isinstance(value, int) and not -LARGEST_WHOLE <= value < LARGEST_WHOLE:
        raise ValueError(f"{what} holds a whole number of more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} holds a number that is too large")


def _check_object(value: dict[str, Any], what: str) -> None:
    kind = next((key for key in _SPECIAL if key in value), None)
    if kind is None or (kind != "tensor" and len(value) > 1) or None in value.values():
        raise ValueError(f"{what} holds an object of {', '.join(map(repr, value))}: tensor, dtype, device or number")
    if kind == "tensor":
        _read_spec(value, what)
    elif kind == "number" and value["number"] not in _NUMBERS:
        raise ValueError(f"{what} holds a number that is not inf, -inf or nan")
    elif kind == "device" and not isinstance(value["device"], str):
        raise ValueError(f"{what} holds a device that is not a text")
    elif kind == "dtype" and value["dtype"] not in ELEMENT_BYTES:
        raise ValueError(f"{what} holds a dtype that is none of {', '.join(ELEMENT_BYTES)}")


def _read_spec(value: dict[str, Any], what: str) -> TensorSpec:
    try:
        return msgspec.convert(value, TensorSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what} holds a tensor that cannot be made: {error}") from None


def write_json(value: Any) -> str:
    """Canonical: the same arguments give the same text, so that cases are paired by it."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def find_tensors(value: Any, name: str) -> Iterator[tuple[str, TensorSpec]]:
    """Every tensor in a checked value, with its place below `name` as its own name."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from find_tensors(one, f"{name}.{i}")
    elif isinstance(value, dict) and "tensor" in value:
        yield name, _read_spec(value, name)


def fill(value: Any, name: str, tensors: Mapping[str, Any], special: Mapping[str, Any]) -> Any:
    """The Python value with its tensors put in; `special` makes a dtype or a device of its name."""
    if isinstance(value, list):
        return [fill(one, f"{name}.{i}", tensors, special) for i, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[name]
    if "number" in value:
        return _NUMBERS[value["number"]]
    kind = "dtype" if "dtype" in value else "device"
    return special[kind](value[kind])


class ArgumentTexts(NamedTuple):
    """Both as canonical JSON."""

    args: str
    kwargs: str


def parse_arguments(text: str) -> ArgumentTexts:
    """`float32[1024,64] int64[128]<1000 2 true dim=1` or a JSON list. Raises ValueError with the rule it breaks.

    `tensor[…]` takes the case's dtype. Words are texts, `torch.float16` is a dtype, `none` is nothing, and brackets
    alone are a list: `[float32[8,8],float32[8,8]]`.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"the arguments have {len(text):,} characters, {MAX_TEXT:,} are allowed")
    args: list[Any]
    kwargs: dict[str, Any] = {}
    try:
        args = read_list(text, "args")
    except ValueError:
        if re.match(r'\s*\[\s*[{"]', text):
            raise
        args, kwargs = _Scanner(text).read_all()
        for name, value in [*((f"argument {i + 1}", one) for i, one in enumerate(args)), *kwargs.items()]:
            _check(value, name, 0)
    return ArgumentTexts(write_json(args), write_json(kwargs))


class _Scanner:
    """Reads the short form from left to right."""

    _tensor = re.compile(r"([A-Za-z]\w*)\[([\d,\s]*)\](?:\s*<\s*(\d+))?")
    _number = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf\b)|nan\b")
    _quoted = re.compile(r"\"([^\"]*)\"|'([^']*)'")
    _word = re.compile(r"[A-Za-z_][\w.]*")
    _keyword = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
    _gap = re.compile(r"[\s,]*")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read_all(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self._take(self._gap)
        while self._at < len(self._text):
            keyword = self._take(self._keyword)
            if keyword is None:
                if kwargs:
                    raise ValueError(f"{self._rest()!r} stands after name=value: arguments by place come first")
                args.append(self._read_value(0))
            elif keyword[1] in kwargs:
                raise ValueError(f"{keyword[1]} is given twice")
            else:
                kwargs[keyword[1]] = self._read_value(0)
            self._require_gap()
        return args, kwargs

    def _require_gap(self) -> None:
        before = self._at
        self._take(self._gap)
        if before == self._at < len(self._text):
            raise ValueError(f"{self._rest()!r} follows an argument without a space")

    def _read_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"lists are nested more than {MAX_DEPTH} deep")
        if self._text.startswith("[", self._at):
            return self._read_list(depth)
        if (tensor := self._take(self._tensor)) is not None:
            return _read_tensor(tensor)
        if (quoted := self._take(self._quoted)) is not None:
            return quoted[1] if quoted[1] is not None else quoted[2]
        if (number := self._take(self._number)) is not None:
            return _read_number(number[0])
        if (word := self._take(self._word)) is not None:
            return _read_word(word[0])
        raise ValueError(f"{self._rest()!r} is no argument; write for example float32[128,64], 2, true or dim=1")

    def _read_list(self, depth: int) -> list[Any]:
        self._at += 1
        values = []
        self._take(self._gap)
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                raise ValueError("a list is not closed by ]")
            values.append(self._read_value(depth + 1))
            self._take(self._gap)
        self._at += 1
        return values

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _rest(self) -> str:
        return self._text[self._at : self._at + 20]


def _read_tensor(match: re.Match[str]) -> dict[str, Any]:
    dtype, dimensions, high = match.groups()
    if dtype not in (*ELEMENT_BYTES, "tensor"):
        raise ValueError(f"{dtype!r} is no dtype: tensor (the case's), {', '.join(ELEMENT_BYTES)}")
    sizes = [one.strip() for one in dimensions.split(",")] if dimensions.strip() else []
    if not all(one.isdecimal() and len(one) < 20 for one in sizes) or (high and len(high) > 19):
        raise ValueError(f"{match[0]!r} is no tensor; write for example float32[128,64] or int64[128]<1000")
    tensor: dict[str, Any] = {"tensor": [int(one) for one in sizes]}
    if dtype != "tensor":
        tensor["dtype"] = dtype
    if high:
        tensor["high"] = int(high)
    return tensor


def _read_number(text: str) -> Any:
    bare = text.removeprefix("+")
    if bare in _NUMBERS:
        return {"number": bare}
    if len(bare) > 64:
        raise ValueError(f"a number of {len(bare)} characters")
    return int(bare) if bare.lstrip("-").isdecimal() else float(bare)


def _read_word(text: str) -> Any:
    if text.startswith("torch."):
        return {"dtype": text.removeprefix("torch.")}
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)
