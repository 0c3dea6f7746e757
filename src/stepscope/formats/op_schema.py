"""Operator schemas as ATen writes them: arguments, what they alias, what is written."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from stepscope.formats.tensors import split_list

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
