"""Which operators there are, and the named sets of shapes of each."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module, resources
from inspect import isabstract
from pkgutil import iter_modules
from string import Template
from typing import Any

import msgspec

from stepscope.bench.ops import families
from stepscope.bench.ops.language import expand_shape, parse_condition
from stepscope.bench.ops.operator import Operator, Value
from stepscope.core.errors import unknown_name
from stepscope.core.plugins import add_plugins

ENTRY_POINT_GROUP = "stepscope.ops"


@cache
def operators() -> dict[str, Operator]:
    """Name → operator: those of every module in `families`, then those that other packages add by entry point.

    An entry point's value is a subclass of Operator; its name must be new.
    """
    modules = [import_module(f"{families.__name__}.{one.name}") for one in iter_modules(families.__path__)]
    kinds = [kind for module in modules for kind in vars(module).values() if _is_operator_of(kind, module.__name__)]
    found = {kind.name: kind() for kind in kinds}
    add_plugins(found, ENTRY_POINT_GROUP, "operator", lambda kind: kind())
    return found


def _is_operator_of(kind: object, module: str) -> bool:
    """A class that the module itself defines; one whose own name begins with _ is the base or a variant of others."""
    if not (isinstance(kind, type) and issubclass(kind, Operator)):
        return False
    return kind.__module__ == module and not isabstract(kind) and not kind.__name__.startswith("_")


def find_operator(name: str, *, where: str = "--op") -> Operator:
    known = operators()
    if name not in known:
        raise unknown_name("operator", name, known, where=where)
    return known[name]


TINY = "tiny"
"""Every operator has it: what it declares itself."""


class SetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text of the case language, and the conditions that keep only some of its combinations."""

    shape: str | dict[str, Value]
    where: list[str] = []


class ShapeSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    source: str
    """Where the shapes come from, for people."""
    shapes: list[str | SetEntry]
    draws: int | None = None
    """So many cases of each text; None: all of them."""
    seed: int = 0
    dtypes: list[str] = []
    """What runs where nobody asks for a dtype; empty: the usual one."""
    passes: list[str] = []

    def expand(self, operator: Operator) -> list[dict[str, Value]]:
        """Its shapes in their order, each once."""
        where = f"shape set {self.name} of {operator.name}"
        found: dict[tuple[Value, ...], dict[str, Value]] = {}
        for one in self.shapes:
            entry = SetEntry(shape=one) if isinstance(one, str) else one
            conditions = [parse_condition(text, operator, where=where) for text in entry.where]
            shapes = expand_shape(
                entry.shape, operator, draws=self.draws, seed=self.seed, conditions=conditions, where=where
            )
            for shape in shapes:
                found.setdefault(tuple(shape.values()), shape)
        return list(found.values())


@cache
def all_sets() -> Mapping[str, Mapping[str, ShapeSet]]:
    """Operator → name → set of the packaged files, for every operator named there."""
    found: dict[str, dict[str, ShapeSet]] = {}
    for file in sorted(resources.files(__package__).joinpath("data").iterdir(), key=lambda one: one.name):
        if not file.name.endswith(".toml"):
            continue
        for operator, name, content in _read_sets(file.read_text(encoding="utf-8")):
            known = found.setdefault(operator, {})
            if name in known:
                raise ValueError(f"{file.name}: {operator}.{name} stands in another file too")
            known[name] = msgspec.convert({**content, "name": name}, ShapeSet)
    return found


def _read_sets(text: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Operator, name and content of each; a file of models has them once per family, to be filled with each model's
    values.
    """
    file = tomllib.loads(text)
    models, sets, usual = file.pop("models", {}), file.pop("sets", []), file.pop("usual", {})
    for operator, named in file.items():
        for name, content in named.items():
            yield operator, name, content
    for name, model in models.items():
        values = {key: value for part in model.values() if isinstance(part, dict) for key, value in part.items()}
        for one in sets:
            if model["family"] in one["families"]:
                filled = Template(json.dumps(one)).substitute(values, about=model["about"])
                content = {**usual, **json.loads(filled)}
                del content["families"]
                yield content.pop("operator"), name, content


def shape_sets(operator: Operator) -> dict[str, ShapeSet]:
    tiny = ShapeSet(name=TINY, source="runs anywhere in an instant", shapes=[SetEntry(shape=dict(operator.tiny))])
    return {TINY: tiny, **all_sets().get(operator.name, {})}


def find_set(operator: Operator, name: str, *, where: str = "--set") -> ShapeSet:
    known = shape_sets(operator)
    if name not in known:
        raise unknown_name(f"shape set of {operator.name}", name, known, where=where)
    return known[name]
