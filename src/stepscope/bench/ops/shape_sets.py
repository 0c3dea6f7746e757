"""Named sets of shapes, operator by operator, with the source each comes from; the data is in `data/*.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

from stepscope.bench.ops.language import expand_shape, expand_table, parse_condition
from stepscope.bench.ops.operator import Operator, Value
from stepscope.core.errors import unknown_name

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
            if isinstance(entry.shape, str):
                shapes = expand_shape(
                    entry.shape, operator, draws=self.draws, seed=self.seed, conditions=conditions, where=where
                )
            else:
                shapes = expand_table(
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
        for operator, sets in tomllib.loads(file.read_text(encoding="utf-8")).items():
            for name, content in sets.items():
                known = found.setdefault(operator, {})
                if name in known:
                    raise ValueError(f"{file.name}: {operator}.{name} stands in another file too")
                known[name] = msgspec.convert({**content, "name": name}, ShapeSet)
    return found


def shape_sets(operator: Operator) -> dict[str, ShapeSet]:
    tiny = ShapeSet(name=TINY, source="runs anywhere in an instant", shapes=[SetEntry(shape=dict(operator.tiny))])
    return {TINY: tiny, **all_sets().get(operator.name, {})}


def find_set(operator: Operator, name: str, *, where: str = "--set") -> ShapeSet:
    known = shape_sets(operator)
    if name not in known:
        raise unknown_name(f"shape set of {operator.name}", name, known, where=where)
    return known[name]
