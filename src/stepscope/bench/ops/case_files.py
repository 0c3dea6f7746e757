"""Case files: a list `cases` in TOML, YAML or JSON, or one of PARAM's operator files. Nothing in them is ever run.

PARAM's files are taken as they are: each configuration becomes cases of the operator `call`.
`{operator: {config: [{build: [{args, kwargs}], input: [{args, kwargs}]}]}}`; `__range__` names the attribute of an
argument that sweeps, `__copy__` ties dimensions of tensors to each other. The iterators and data generators that such
a file names are classes of PARAM's: ranges are read where they stand, and data is this package's own.
"""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import yaml

from stepscope.bench.ops.families.call import OPERATOR, make_shape
from stepscope.bench.ops.language import LARGEST_SIZE, MAX_CASES, CaseRequest
from stepscope.core.dtypes import dtype_name
from stepscope.core.errors import BadInputError, UsageError, unknown_name
from stepscope.traces.calls.arguments import ELEMENT_BYTES, LARGEST_WHOLE, write_json
from stepscope.traces.calls.torch_calls import ATEN

MAX_FILE_BYTES = 16 << 20
_HINT = 'write for example [[cases]] with op = "gemm" and shape = "m=128/256,n=4096,k=4096"'


def read_case_file(path: Path, *, seed: int = 0) -> list[CaseRequest]:
    """What a file asks for, in its order; `seed` is for what PARAM's files leave to chance."""
    loaders: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": partial(yaml.load, Loader=_Loader),
        ".yml": partial(yaml.load, Loader=_Loader),
        ".json": partial(json.loads, object_pairs_hook=_no_doubles, parse_constant=_no_constant),
    }
    loader = loaders.get(path.suffix.lower())
    if loader is None:
        raise UsageError(
            f"{path.name} is no case file", hint=f"name it {', '.join(f'*{one}' for one in loaders)}", where=str(path)
        )
    text = _read_text(path)
    try:
        content = loader(text)
        if path.suffix.lower() == ".json" and is_param_file(content):
            return read_param_file(content, file=str(path), seed=seed)
        return _read_cases(content, str(path))
    except RecursionError:
        raise BadInputError(f"{path.name} is nested too deeply", hint=_HINT, where=str(path)) from None
    except (ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())[:300]
        kind = path.suffix.lower().lstrip(".").upper()
        raise BadInputError(f"{path.name} is no {kind}: {message}", hint=_HINT, where=str(path)) from None


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadInputError(
                f"{path.name} has {size:,} bytes, {MAX_FILE_BYTES:,} are allowed",
                hint="write ranges and draws instead of single cases, or several files",
                where=str(path),
            )
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check the path", where=str(path)) from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path.name} is not UTF-8 text", hint="save it as UTF-8", where=str(path)) from None


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:40]!r} stands twice")
        table[name] = value
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class _Loader(yaml.SafeLoader):
    """Refuses what YAML would quietly drop: a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise ValueError(f"{str(key)[:40]!r} stands twice, at line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_TEXTS = str | Annotated[list[str], msgspec.Meta(min_length=1)]
_WHOLE = Annotated[int, msgspec.Meta(ge=0)]
_PART = str | int | float | bool
_KEYS: dict[str, tuple[Any, str, str]] = {
    "op": (str, "a text", _HINT),
    "shape": (str | dict, "a text of the case language or a table", _HINT),
    "set": (str, "a text", _HINT),
    "dtypes": (_TEXTS, "a list of texts", 'write for example dtypes = ["bfloat16"]'),
    "passes": (_TEXTS, "a list of texts", 'write for example passes = ["forward"]'),
    "caches": (_TEXTS, "a list of texts", 'write for example caches = ["cold"]'),
    "draws": (_WHOLE, "a whole number, 0 or more", "write for example draws = 100"),
    "seed": (_WHOLE, "a whole number, 0 or more", "write for example seed = 100"),
}
"""What each key of a case holds, in words, and an example."""


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError):
        return False
    return True


def _read_entry(table: object, file: str, place: str) -> CaseRequest:
    """One table of `cases`; every refusal names its place."""

    def refuse(message: str, key: str = "", hint: str | None = _HINT) -> NoReturn:
        raise BadInputError(message, hint=hint, where=f"{file}: {place}.{key}" if key else f"{file}: {place}")

    if not isinstance(table, dict):
        refuse("a case is a table of names and values")
    for key in table:
        if key not in _KEYS:
            name = str(key)[:40]
            refuse(f"a case has no {name!r}", hint=unknown_name("key", name, _KEYS).hint)
    given = {key: table[key] for key in _KEYS if table.get(key) is not None}
    if "op" not in given:
        refuse("a case names its operator: op is missing")
    for key, value in given.items():
        kind, says, hint = _KEYS[key]
        if not _fits(value, kind):
            refuse(f"{key} is {says}", key, hint)
        if kind is _TEXTS:
            given[key] = (value,) if isinstance(value, str) else tuple(value)
    shape = given.get("shape")
    for name, value in shape.items() if isinstance(shape, dict) else ():
        if not isinstance(name, str) or not _fits(value, _PART | list[_PART]):
            refuse("a value of a shape is a number, a text, or a list of those", f"shape.{str(name)[:40]}")
    if shape is not None and "set" in given:
        refuse("a case has a shape or a set, not both", "set", "write two cases")
    return CaseRequest(**given, where=f"{file}: {place}")


def _read_cases(content: object, file: str) -> list[CaseRequest]:
    if not isinstance(content, dict) or set(content) != {"cases"}:
        raise BadInputError("a case file holds one list, `cases`", hint=_HINT, where=file)
    cases = content["cases"]
    if not isinstance(cases, list) or not cases:
        raise BadInputError("`cases` is a list of at least one case", hint=_HINT, where=f"{file}: cases")
    if len(cases) > MAX_CASES:
        raise BadInputError(
            f"{len(cases):,} cases, {MAX_CASES:,} are allowed", hint="write ranges and draws", where=f"{file}: cases"
        )
    return [_read_entry(one, file, f"cases[{i}]") for i, one in enumerate(cases)]


# PARAM

_NUMBERS = frozenset({"int", "long", "float", "double"})
_LISTS = frozenset({"genericlist", "tuple"})
_RANGE, _COPY, _LIST = "__range__", "__copy__", "__list__"
_OPERATOR_KEYS = frozenset(
    {"build_iterator", "input_iterator", "build_data_generator", "input_data_generator", "config"}
)
_PARAM_HINT = "write it as PARAM's examples in train/compute/python/examples/pytorch/configs do"


_Given = tuple[list[Any], dict[str, Any]]
"""Arguments of a call, or of a module's construction: by place and by name."""


def is_param_file(content: object) -> bool:
    """Whether a JSON file is PARAM's: operators with a `config` each, or a batch of one operator."""
    if not isinstance(content, dict) or not content:
        return False
    if "op_name" in content and "op_info" in content:
        return True
    return all(isinstance(value, dict) and "config" in value for value in content.values())


def read_param_file(content: Mapping[str, Any], *, file: str, seed: int = 0) -> list[CaseRequest]:
    """One request for each combination; random numbers (`value_range`) are drawn with `seed`."""
    if "op_name" in content and "op_info" in content:
        content = {str(content["op_name"]): content["op_info"]}
    reader = _ParamReader(file, seed)
    requests: list[CaseRequest] = []
    for name, operator in content.items():
        for request in reader.read_operator(str(name), operator):
            requests.append(request)
            reader.require_few(len(requests), str(name))
    return requests


class _ParamReader:
    def __init__(self, file: str, seed: int) -> None:
        self._file = file
        self._random = random.Random(seed)

    def refuse(self, message: str, place: str, hint: str = _PARAM_HINT) -> NoReturn:
        raise BadInputError(message, hint=hint, where=f"{self._file}: {place}")

    def read_operator(self, name: str, operator: object) -> Iterator[CaseRequest]:
        table = self._table(operator, name[:40], _OPERATOR_KEYS)
        for i, config in enumerate(self._list(table.get("config"), f"{name[:40]}.config")):
            where = f"{name[:40]}.config[{i}]"
            entry = self._table(config, where, frozenset({"build", "input"}))
            builds = self._list(entry.get("build", []), f"{where}.build") or [{}]
            inputs = self._list(entry.get("input"), f"{where}.input")
            made = [one for j, build in enumerate(builds) for one in self._read_variants(build, f"{where}.build[{j}]")]
            for k, given in enumerate(inputs):
                called = list(self._read_variants(given, f"{where}.input[{k}]"))
                for build, one in product(made, called):
                    yield self._request(name, build, one, f"{where}.input[{k}]")

    def _request(self, name: str, build: _Given, given: _Given, place: str) -> CaseRequest:
        target = name
        if name.startswith(ATEN):
            # TorchScript's operators are built from their schema, or in older files from the types of arguments.
            schemas = [one for one in build[0] if isinstance(one, str) and one.startswith(ATEN)]
            target, build = (schemas[0] if schemas else name), ([], {})
        shape = make_shape(target, *map(write_json, (*given, *build)))
        try:
            OPERATOR.check_shape(shape)
        except ValueError as error:
            self.refuse(str(error), place)
        dtype = OPERATOR.named_dtype(shape)
        where = f"{self._file}: {place}"
        return CaseRequest(op="call", shape=shape, dtypes=(dtype,) if dtype else None, config="param", where=where)

    def _read_variants(self, entry: object, place: str) -> Iterator[_Given]:
        """Every combination of what an entry's arguments sweep over."""
        table = self._table(entry, place, frozenset({"args", "kwargs", "id"}))
        args = self._list(table.get("args", []), f"{place}.args")
        kwargs = self._table(table.get("kwargs", {}), f"{place}.kwargs", None)
        choices = [self._sweep(one, f"{place}.args[{i}]") for i, one in enumerate(args)]
        named = [self._sweep(one, f"{place}.kwargs.{name}") for name, one in kwargs.items()]
        self.require_few(math.prod(map(len, (*choices, *named))), place)
        for values in product(*choices, *named):
            copied = [dict(one) for one in values]
            self._apply_copies(copied[: len(args)], place)
            read = [self._read_argument(one, place) for one in copied]
            yield read[: len(args)], dict(zip(kwargs, read[len(args) :], strict=True))

    def _sweep(self, argument: object, place: str) -> list[dict[str, Any]]:
        """An argument with each value of what its `__range__` names."""
        table = self._table(argument, place, None)
        swept = [*self._names(table, _RANGE, place), *self._names(table, _LIST, place)]
        plain = {key: value for key, value in table.items() if key not in (_RANGE, _LIST)}
        if str(plain.get("type")) in _LISTS and "value" in swept:
            entries = self._list(plain.get("value"), f"{place}.value")
            parts = [self._sweep(one, f"{place}.value[{i}]") for i, one in enumerate(entries)]
            self.require_few(math.prod(map(len, parts)), place)
            return [{**plain, "value": list(values)} for values in product(*parts)]
        variants = [plain]
        for key in swept:
            points = self._points(plain, key, is_list=key in self._names(table, _LIST, place), place=place)
            self.require_few(len(points) * len(variants), place)
            variants = [{**variant, key: point} for variant in variants for point in points]
        return variants

    def _names(self, table: Mapping[str, Any], key: str, place: str) -> list[str]:
        names = self._list(table.get(key, []), f"{place}.{key}")
        if not all(isinstance(one, str) and one in table for one in names):
            self.refuse(f"{key} names what is not there", place)
        return names

    def _points(self, table: Mapping[str, Any], key: str, *, is_list: bool, place: str) -> list[Any]:
        values = self._list(table[key], f"{place}.{key}")
        if key == "shape":
            dimensions = [self._span(one, place) if isinstance(one, list) else [one] for one in values]
            self.require_few(math.prod(map(len, dimensions)), place)
            return [list(one) for one in product(*dimensions)]
        if key == "value" and str(table.get("type")) in _NUMBERS and not is_list:
            return self._span(values, place)
        return values

    def _span(self, values: list[Any], place: str) -> list[int]:
        """[first, last, step], both ends included."""
        if len(values) != 3 or not all(_is_whole(one) for one in values) or values[2] < 1 or values[1] < values[0]:
            self.refuse("a range is [first, last, step] with a step above 0", place)
        span = range(values[0], values[1] + 1, values[2])
        self.require_few(len(span), place)
        return list(span)

    def require_few(self, count: int, place: str) -> None:
        if count > MAX_CASES:
            self.refuse(f"these are more than {MAX_CASES:,} cases", place, "use larger steps")

    def _apply_copies(self, args: list[dict[str, Any]], place: str) -> None:
        """Dimensions taken from other tensors, in the order in which their sources become known."""
        waiting = []
        for i, arg in enumerate(args):
            for entry in self._list(arg.pop(_COPY, []), f"{place}.args[{i}].{_COPY}"):
                for key, mapping in self._table(entry, place, None).items():
                    waiting.append((i, key, mapping))
                    if isinstance(arg.get(key), list):
                        arg[key] = list(arg[key])
        while waiting:
            left = [one for one in waiting if not self._copy_one(args, *one, place=place)]
            if len(left) == len(waiting):
                self.refuse(f"{_COPY} follows itself: no dimension is given", place)
            waiting = left

    def _copy_one(self, args: list[dict[str, Any]], i: int, key: str, mapping: Any, *, place: str) -> bool:
        """False where the source itself still waits for its value (−1)."""
        try:
            target, (source, dimension) = mapping
            value = args[source][key][dimension]
            goal = args[i][key]
            goal[target]
        except (TypeError, ValueError, KeyError, IndexError):
            self.refuse(f'{_COPY} is {{"shape": [dimension, [argument, dimension]]}} of tensors given by place', place)
        if value == -1:
            return False
        goal[target] = value
        return True

    def _read_argument(self, argument: object, place: str) -> Any:
        """PARAM's argument as a value of `call`."""
        table = self._table(argument, place, None)
        kind, value = str(table.get("type")), table.get("value")
        if kind == "tensor":
            return self._read_tensor(table, place)
        if kind in _LISTS:
            return [self._read_argument(one, place) for one in self._list(value, place)]
        if kind in _NUMBERS and value is None:
            return self._draw(table, kind in {"int", "long"}, place)
        fits = {
            "none": value is None,
            "bool": isinstance(value, bool),
            "str": value is None or isinstance(value, str),
            "device": isinstance(value, str),
            **dict.fromkeys(_NUMBERS, _is_number(value) or _are_numbers(value)),
        }
        if not fits.get(kind, False):
            known = ", ".join(["tensor", *sorted(_LISTS), *fits])
            self.refuse(f"an argument has no type and value that fit: the types are {known}", place)
        return {"device": value} if kind == "device" else "" if kind == "str" and value is None else value

    def _read_tensor(self, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        size = self._list(table.get("shape"), f"{place}.shape")
        if not all(_is_whole(one) and 0 <= one <= LARGEST_SIZE for one in size):
            self.refuse(
                "a tensor's shape is a list of whole numbers; −1 needs a __copy__, [a, b, c] a __range__", place
            )
        dtype = dtype_name(str(table.get("dtype", "float")))
        if dtype not in ELEMENT_BYTES:
            self.refuse(f"a tensor's dtype is none of {', '.join(ELEMENT_BYTES)}", place)
        tensor: dict[str, Any] = {"tensor": size, "dtype": dtype}
        if table.get("requires_grad") is False:
            tensor["grad"] = False
        return tensor

    def _draw(self, table: Mapping[str, Any], whole: bool, place: str) -> int | float:
        bounds = self._list(table.get("value_range"), f"{place}.value_range")
        if len(bounds) != 2 or not all(_is_number(one) for one in bounds) or bounds[1] < bounds[0]:
            self.refuse("value_range is [least, most]", place)
        low, high = bounds
        drawn = self._random.random()
        return int(low) + math.floor(drawn * (int(high) - int(low) + 1)) if whole else low + (high - low) * drawn

    def _table(self, value: object, place: str, keys: frozenset[str] | None) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse("an object is expected here", place)
        unknown = value.keys() - keys if keys is not None else ()
        if unknown:
            self.refuse(f"unknown key {min(unknown)[:40]!r}: {', '.join(sorted(keys or ()))}", place)
        return value

    def _list(self, value: object, place: str) -> list[Any]:
        if not isinstance(value, list):
            self.refuse("a list is expected here", place)
        return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_WHOLE


def _are_numbers(value: object) -> bool:
    """Tables of different sizes have a list where others have a number."""
    return isinstance(value, list) and all(_is_number(one) for one in value)
