"""Case files: a list `cases` in TOML, YAML or JSON, or one of PARAM's operator files. Nothing in them is ever run."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from stepscope.bench.ops.language import MAX_CASES, CaseRequest
from stepscope.bench.ops.param_files import is_param_file, read_param_file
from stepscope.core.errors import BadInputError, UsageError

MAX_FILE_BYTES = 16 << 20
_KEYS = ("op", "shape", "set", "dtypes", "passes", "caches", "draws", "seed")
_HINT = 'write for example [[cases]] with op = "gemm" and shape = "m=128/256,n=4096,k=4096"'


def read_case_file(path: Path, *, seed: int = 0) -> list[CaseRequest]:
    """What a file asks for, in its order; `seed` is for what PARAM's files leave to chance."""
    loaders = {".toml": _load_toml, ".yaml": _load_yaml, ".yml": _load_yaml, ".json": _load_json}
    loader = loaders.get(path.suffix.lower())
    if loader is None:
        raise UsageError(
            f"{path.name} is no case file", hint=f"name it {', '.join(f'*{one}' for one in loaders)}", where=str(path)
        )
    content = _load(path, loader)
    try:
        if path.suffix.lower() == ".json" and is_param_file(content):
            return read_param_file(content, file=str(path), seed=seed)
        return _read_cases(content, str(path))
    except RecursionError:
        raise BadInputError(f"{path.name} is nested too deeply", hint=_HINT, where=str(path)) from None


def _load(path: Path, loader: Callable[[str], Any]) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadInputError(
                f"{path.name} has {size:,} bytes, {MAX_FILE_BYTES:,} are allowed",
                hint="write ranges and draws instead of single cases, or several files",
                where=str(path),
            )
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check the path", where=str(path)) from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path.name} is not UTF-8 text", hint="save it as UTF-8", where=str(path)) from None
    try:
        return loader(text)
    except RecursionError:
        raise BadInputError(f"{path.name} is nested too deeply", hint=_HINT, where=str(path)) from None
    except (ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())[:300]
        kind = path.suffix.lower().lstrip(".").upper()
        raise BadInputError(f"{path.name} is no {kind}: {message}", hint=_HINT, where=str(path)) from None


def _load_toml(text: str) -> Any:
    return tomllib.loads(text)


def _load_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constant)


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


def _load_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _Entry:
    """Reads one table of `cases`; every refusal names its place."""

    def __init__(self, table: object, file: str, place: str) -> None:
        self._file, self._place = file, place
        if not isinstance(table, dict):
            self.refuse("a case is a table of names and values")
        self._table: Mapping[Any, Any] = table
        for key in table:
            if key not in _KEYS:
                near = difflib.get_close_matches(str(key)[:40], _KEYS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(_KEYS)}"
                self.refuse(f"a case has no {str(key)[:40]!r}", hint=hint)

    def refuse(self, message: str, key: str = "", hint: str = _HINT) -> NoReturn:
        place = f"{self._place}.{key}" if key else self._place
        raise BadInputError(message, hint=hint, where=f"{self._file}: {place}")

    def read(self) -> CaseRequest:
        op = self._text("op")
        if op is None:
            self.refuse("a case names its operator: op is missing")
        shape, name = self._shape(), self._text("set")
        if shape is not None and name is not None:
            self.refuse("a case has a shape or a set, not both", "set", "write two cases")
        return CaseRequest(
            op=op,
            shape=shape,
            set=name,
            dtypes=self._texts("dtypes"),
            passes=self._texts("passes"),
            caches=self._texts("caches"),
            draws=self._whole("draws"),
            seed=self._whole("seed"),
            where=f"{self._file}: {self._place}",
        )

    def _text(self, key: str) -> str | None:
        value = self._table.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(f"{key} is a text", key)
        return value

    def _texts(self, key: str) -> tuple[str, ...] | None:
        value = self._table.get(key)
        if value is None:
            return None
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
            self.refuse(f"{key} is a list of texts", key, f'write for example {key} = ["{_EXAMPLES[key]}"]')
        return tuple(listed)

    def _whole(self, key: str) -> int | None:
        value = self._table.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(f"{key} is a whole number, 0 or more", key, f"write for example {key} = 100")
        return value

    def _shape(self) -> str | dict[str, Any] | None:
        value = self._table.get("shape")
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, dict):
            self.refuse("shape is a text of the case language or a table", "shape")
        for name, one in value.items():
            parts = one if isinstance(one, list) else [one]
            if not isinstance(name, str) or not all(isinstance(part, str | int | float) for part in parts):
                self.refuse("a value of a shape is a number, a text, or a list of those", f"shape.{str(name)[:40]}")
        return value


_EXAMPLES = {"dtypes": "bfloat16", "passes": "forward", "caches": "cold"}


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
    return [_Entry(one, file, f"cases[{i}]").read() for i, one in enumerate(cases)]
