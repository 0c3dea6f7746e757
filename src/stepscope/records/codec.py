"""Records to JSON and back: versions checked, older ones upgraded step by step, newer ones refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from stepscope.core.errors import BadInputError, NewerVersionError
from stepscope.records.communication import Communication
from stepscope.records.result import CaseResult
from stepscope.records.run import Plan, Run
from stepscope.records.sample import RankSamples
from stepscope.records.system import System
from stepscope.records.typing_kinds import type_plan, type_result

Document = Plan | Run | System | CaseResult | Communication
DocumentT = TypeVar("DocumentT", Plan, Run, System, CaseResult, Communication)
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def same_fields(content: dict[str, Any]) -> dict[str, Any]:
    """The step to a format that differs in nothing that is read."""
    return content


UPGRADES: dict[tuple[str, int], Upgrade] = {
    **{
        (name, version): same_fields
        for name in ("plan", "run", "system", "case_result", "communication")
        for version in (1, 2)
    },
    ("plan", 2): type_plan,
    ("case_result", 2): type_result,
}
"""(record, old version) → a function that makes the next version of it. Every released version keeps its step.

Format 2 has the fields of format 1 and the seal behind them; format 3 has typed kinds in place of names and values."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises, by the damage: no JSON or the wrong types; bytes that are no UTF-8; nesting without end."""

_INTEGER_END = 1 << 63
_encoder = msgspec.json.Encoder()
_samples_decoder = msgspec.json.Decoder(RankSamples)


class _Header(msgspec.Struct):
    record: str
    schema_version: int


def encode_document(record: msgspec.Struct) -> bytes:
    """One line, without a newline inside, as journals need it. Raises BadInputError for numbers that JSON lacks."""
    found = find_unstorable(msgspec.to_builtins(record))
    if found is not None:
        raise BadInputError(f"{found} cannot be stored: it is not a finite number of at most 64 bits", where=found)
    return _encoder.encode(record)


def find_unstorable(content: object, name: str = "") -> str | None:
    """The name of the first number that JSON has no place for: of an infinity the encoder would make null, which no
    reader takes, and integers have 64 bits."""
    if isinstance(content, float):
        return None if math.isfinite(content) else name
    if isinstance(content, int):
        return None if -_INTEGER_END <= content < _INTEGER_END else name
    if isinstance(content, dict):
        parts = ((f"{name}.{key}" if name else str(key), value) for key, value in content.items())
    elif isinstance(content, list | tuple):
        if set(map(type, content)) <= {float} and all(map(math.isfinite, content)):
            return None
        parts = ((f"{name}[{place}]", value) for place, value in enumerate(content))
    else:
        return None
    return next((found for part, value in parts if (found := find_unstorable(value, part)) is not None), None)


def current_version(record_type: type[Document]) -> int:
    return int(record_type.__struct_defaults__[0]) if record_type.__struct_defaults__ else 1


def parse_document(data: bytes, record_type: type[DocumentT], *, where: str) -> DocumentT:
    """Raises BadInputError with the place and the rule broken, NewerVersionError for what the future wrote."""
    name, version = record_type.__struct_config__.tag, current_version(record_type)
    with suppress(*UNREADABLE):  # which is told below, from the head of the document on
        record = msgspec.json.decode(data, type=record_type)
        if record.schema_version == version:
            return record
        steps = [UPGRADES.get((str(name), step)) for step in range(record.schema_version, version)]
        if steps and all(step is same_fields for step in steps):
            return msgspec.structs.replace(record, schema_version=version)
    try:
        header = msgspec.json.decode(data, type=_Header)
    except UNREADABLE as error:
        raise _bad(f"not a {name} record: {error}", where) from error
    if header.record != name:
        raise _bad(f"holds a {header.record!r} record where a {name!r} belongs", where)
    if header.schema_version > version:
        raise NewerVersionError(
            f"this {name} was written in format {header.schema_version}; this Stepscope reads up to {version}",
            hint="upgrade Stepscope: pip install --upgrade stepscope",
            where=where,
        )
    try:
        if header.schema_version == version:
            return msgspec.json.decode(data, type=record_type)
        return msgspec.convert(_upgrade(msgspec.json.decode(data), str(name), version, where), record_type)
    except UNREADABLE as error:
        raise _bad(f"this {name} breaks its format: {error}", where) from error


def _upgrade(content: dict[str, Any], name: str, version: int, where: str) -> dict[str, Any]:
    while (found := content["schema_version"]) < version:
        step = UPGRADES.get((name, found))
        if step is None:
            raise _bad(f"this {name} has format {found}, which no release wrote", where)
        content = {**step(content), "schema_version": found + 1}
    return content


def parse_samples(data: bytes, *, where: str) -> RankSamples:
    try:
        return _samples_decoder.decode(data)
    except UNREADABLE as error:
        raise _bad(f"these samples break their format: {error}", where) from error


def _bad(message: str, where: str) -> BadInputError:
    return BadInputError(message, hint="stepscope runs verify RUN lists every damaged file", where=where)
