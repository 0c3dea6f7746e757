"""Records to JSON and back: versions checked, older ones upgraded step by step, newer ones refused; JSON Schemas.

In format 2 parameters and facts were plain names and values. This is the only place that finds the kind of a case from
its names. What no kind says exactly is kept as `other`: whatever was stored can be read, and has the key that it had.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, get_args

import msgspec

from stepscope.core.errors import BadInputError, NewerVersionError
from stepscope.records import kinds
from stepscope.records.case import Benchmark, RankSamples
from stepscope.records.kinds import Observed, Parameter, Scalar, Spec
from stepscope.records.kinds.base import inspect_fields
from stepscope.records.request import make_request

_PATTERN_PREFIX = "pattern_"
_PEAK_CONFIG = "ceiling"
_SIDE = re.compile(r"(comm\d*)_(collective|size_bytes|bus_bytes)")
_COMPUTE = ("dtype", "device", "cache", "compile")


class _OldCase(msgspec.Struct):
    benchmark: Benchmark
    parameters: dict[str, Parameter] = {}


class _OldResult(msgspec.Struct):
    observed: dict[str, Scalar] = {}


class _OldPlan(msgspec.Struct):
    verb: str
    request: dict[str, Any]


def type_plan(content: dict[str, Any]) -> dict[str, Any]:
    old, cases = msgspec.convert(content, _OldPlan), content.get("cases")
    typed = [_type_case(case)[1] for case in cases] if isinstance(cases, list) else cases
    return {**content, "cases": typed, "request": msgspec.to_builtins(make_request(old.verb, old.request))}


def type_result(content: dict[str, Any]) -> dict[str, Any]:
    spec, case = _type_case(content.get("case"))
    observed = make_observed(spec, msgspec.convert(content, _OldResult).observed)
    return {**content, "case": case, "observed": msgspec.to_builtins(observed)}


def _type_case(content: Any) -> tuple[Spec, dict[str, Any]]:
    old = msgspec.convert(content, _OldCase)
    spec = make_spec(old.benchmark, old.parameters)
    kept = {name: value for name, value in content.items() if name != "parameters"}
    return spec, {**kept, "spec": msgspec.to_builtins(spec)}


# What was asked


def make_spec(benchmark: Benchmark, parameters: Mapping[str, Parameter]) -> Spec:
    """The kind that says exactly these parameters."""
    fields = _find_fields(benchmark, dict(parameters))
    try:
        spec: Spec = msgspec.convert(fields, Spec)
    except msgspec.ValidationError:
        return kinds.OtherSpec(parameters=dict(parameters))
    said = spec.list_parameters(benchmark.model, benchmark.mode)
    is_same = _encode(said) == _encode(parameters)
    return spec if is_same else kinds.OtherSpec(parameters=dict(parameters))


def _encode(parameters: Mapping[str, Parameter]) -> bytes:
    return msgspec.json.encode(dict(parameters), order="sorted")


def _find_fields(benchmark: Benchmark, parameters: dict[str, Parameter]) -> dict[str, Any]:
    if {"file", "function"} <= parameters.keys():
        return {**parameters, "kind": "user_model"}
    if benchmark.implementation != "micro":
        return {**parameters, "kind": "workload"}
    if benchmark.owner == kinds.COMMUNICATION_OWNER:
        return _find_communication(benchmark.model, parameters)
    op, direction = parameters.pop("op", benchmark.model), parameters.pop("pass", benchmark.mode)
    stated = {name: parameters.pop(name) for name in _COMPUTE if name in parameters} | {"direction": direction}
    if op == kinds.CALL:
        return {**parameters, **stated, "kind": "call"}
    is_peak = benchmark.config == _PEAK_CONFIG
    return {**stated, "op": op, "shape": parameters, "measured_peak": is_peak, "kind": "operator"}


def _find_communication(model: str, parameters: dict[str, Parameter]) -> dict[str, Any]:
    if model in {"overlap", "pair", "process_group"}:
        return {**parameters, "kind": model}
    if model.startswith(_PATTERN_PREFIX):
        stated: dict[str, Any] = {name: parameters.pop(name) for name in ("overlap", "device") if name in parameters}
        name = model.removeprefix(_PATTERN_PREFIX)
        return {**stated, "pattern": name, "options": parameters, "kind": "pattern"}
    kind = "point_to_point" if model == kinds.POINT_TO_POINT else "collective"
    return {**parameters, "operation": model, "kind": kind}


# What was found


def make_observed(spec: Spec, facts: Mapping[str, Scalar]) -> Observed | None:
    """Facts that the kind has no field for, or that are no value of their field, are kept under their names."""
    if not facts:
        return None
    tag = type(spec).__struct_config__.tag
    left = dict(facts)
    fields: dict[str, Any] = _REWRITES[str(tag)](left) if tag in _REWRITES else {}
    struct = _OBSERVED[str(tag)]
    for field in inspect_fields(struct):
        if field.name in left and field.name != "other":
            try:
                fields[field.name] = msgspec.convert(left[field.name], field.type)
            except msgspec.ValidationError:
                continue
            del left[field.name]
    for name, pattern in struct.NAMES.items():
        found = _take_numbers(left, re.compile(pattern.replace("{}", "(.+)")))
        if found:
            fields[name] = found
    made: Observed = struct(**fields, other=left)
    return made


def _take_numbers(facts: dict[str, Scalar], pattern: re.Pattern[str]) -> dict[str, float]:
    matches = [match for name, value in facts.items()
               if type(value) in {int, float} and (match := pattern.fullmatch(name)) is not None]  # fmt: skip
    return {match[1]: float(facts.pop(match[0])) for match in matches}


def _rewrite_overlap(facts: dict[str, Scalar]) -> dict[str, Any]:
    sides: dict[str, dict[str, Any]] = {}
    for name, value in facts.items():
        if (found := _SIDE.fullmatch(name)) is not None:
            sides.setdefault(found[1], {"name": found[1]})[found[2]] = value
    made = []
    for content in sides.values():
        try:
            side = msgspec.convert(content, kinds.OverlapSide)
        except msgspec.ValidationError:
            continue
        made.append(side)
        for part in ("collective", "size_bytes", "bus_bytes"):
            del facts[f"{side.name}_{part}"]
    return {"sides": made}


def _rewrite_pattern(facts: dict[str, Scalar]) -> dict[str, Any]:
    """`name:operation:size_bytes:bus_bytes`, divided by blanks."""
    words = [word.split(":") for word in str(facts.get("sequence", "")).split()]
    if not all(len(parts) == 4 and parts[2].isdigit() and parts[3].isdigit() for parts in words):
        return {}
    facts.pop("sequence", None)
    steps = [
        kinds.PatternStep(name=name, operation=operation, size_bytes=int(size), bus_bytes=int(bus))
        for name, operation, size, bus in words
    ]
    moved = facts.get("bytes")
    if type(moved) not in {int, float}:
        return {"sequence": steps}
    return {"sequence": steps, "busiest_rank_bytes": facts.pop("bytes")}


def _rewrite_workload(facts: dict[str, Scalar]) -> dict[str, Any]:
    served = {name: value for name, value in facts.items() if name.startswith("serving_")}
    try:
        serving = msgspec.convert({name.removeprefix("serving_"): one for name, one in served.items()}, kinds.Serving)
    except msgspec.ValidationError:
        return {}
    for name in served:
        del facts[name]
    return {"serving": serving} if served else {}


_REWRITES: dict[str, Callable[[dict[str, Scalar]], dict[str, Any]]] = {
    "overlap": _rewrite_overlap,
    "pattern": _rewrite_pattern,
    "workload": _rewrite_workload,
}
"""Facts that one field holds together: taken out of those given, and returned by the field."""
_OBSERVED: dict[str, Any] = {str(struct.__struct_config__.tag): struct for struct in get_args(Observed)}


RecordT = TypeVar("RecordT", bound=msgspec.Struct)
_HINT = "stepscope runs verify RUN lists every damaged file"
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


def current_version(record_type: type[msgspec.Struct]) -> int:
    return int(record_type.__struct_defaults__[0]) if record_type.__struct_defaults__ else 1


def parse_document(data: bytes, record_type: type[RecordT], *, where: str, hint: str = _HINT) -> RecordT:
    """Raises BadInputError with the place and the rule broken, NewerVersionError for a newer format."""
    name, version = record_type.__struct_config__.tag, current_version(record_type)
    with suppress(*UNREADABLE):  # reported below, from the head of the document on
        record = msgspec.json.decode(data, type=record_type)
        fields: Any = record
        found: int = fields.schema_version
        if found == version:
            return record
        steps = [UPGRADES.get((str(name), step)) for step in range(found, version)]
        if steps and all(step is same_fields for step in steps):
            return msgspec.structs.replace(record, schema_version=version)
    try:
        header = msgspec.json.decode(data, type=_Header)
    except UNREADABLE as error:
        raise _bad(f"not a {name} record: {error}", where, hint) from error
    if header.record != name:
        raise _bad(f"holds a {header.record!r} record where a {name!r} belongs", where, hint)
    if header.schema_version > version:
        raise NewerVersionError(
            f"this {name} was written in format {header.schema_version}; this Stepscope reads up to {version}",
            hint="upgrade Stepscope: pip install --upgrade stepscope",
            where=where,
        )
    try:
        if header.schema_version == version:
            return msgspec.json.decode(data, type=record_type)
        return msgspec.convert(_upgrade(msgspec.json.decode(data), str(name), version, where, hint), record_type)
    except UNREADABLE as error:
        raise _bad(f"this {name} breaks its format: {error}", where, hint) from error


def _upgrade(content: dict[str, Any], name: str, version: int, where: str, hint: str) -> dict[str, Any]:
    while (found := content["schema_version"]) < version:
        step = UPGRADES.get((name, found))
        if step is None:
            raise _bad(f"this {name} has format {found}, which no release wrote", where, hint)
        content = {**step(content), "schema_version": found + 1}
    return content


def parse_samples(data: bytes, *, where: str) -> RankSamples:
    try:
        return _samples_decoder.decode(data)
    except UNREADABLE as error:
        raise _bad(f"these samples break their format: {error}", where) from error


def _bad(message: str, where: str, hint: str = _HINT) -> BadInputError:
    return BadInputError(message, hint=hint, where=where)
