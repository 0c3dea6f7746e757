"""From format 2, in which parameters and facts were plain names and values, to typed kinds.

This is the only place that tells the kind of a case from its names. A record of which no kind says exactly the same is
kept as `other`: whatever was stored can be read, and has the key that it had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stepscope.records import kinds
from stepscope.records.benchmark import Benchmark
from stepscope.records.kinds import Observed, Parameter, Scalar, Spec
from stepscope.records.kinds.base import inspect_fields

_PATTERN_PREFIX = "pattern_"
_PEAK_CONFIG = "ceiling"
_SIDE = re.compile(r"(comm\d*)_(collective|size_bytes|bus_bytes)")
_COMPUTE = ("dtype", "device", "cache", "compile")


class _OldCase(msgspec.Struct):
    benchmark: Benchmark
    parameters: dict[str, Parameter] = {}


class _OldResult(msgspec.Struct):
    observed: dict[str, Scalar] = {}


def type_plan(content: dict[str, Any]) -> dict[str, Any]:
    cases = content.get("cases")
    return {**content, "cases": [_type_case(case)[1] for case in cases] if isinstance(cases, list) else cases}


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
    if model in {"overlap", "pair"}:
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
    made: Observed = struct(**fields, other=left)
    return made


def _take_numbers(facts: dict[str, Scalar], prefix: str) -> dict[str, Scalar]:
    names = [name for name, value in facts.items() if name.startswith(prefix) and type(value) in {int, float}]
    return {name.removeprefix(prefix): facts.pop(name) for name in names}


def _rewrite_collective(facts: dict[str, Scalar]) -> dict[str, Any]:
    found = _take_numbers(facts, "iteration_")
    return {"iteration": {name: float(value) for name, value in found.items()}} if found else {}


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
    stated: dict[str, Any] = {name: facts.pop(name) for name in ("check_s", "check_examples") if name in facts}
    errors = _take_numbers(facts, "check_")
    facts |= stated
    fields: dict[str, Any] = {"check_errors": {name: float(value) for name, value in errors.items()}} if errors else {}
    served = {name: value for name, value in facts.items() if name.startswith("serving_")}
    try:
        serving = msgspec.convert({name.removeprefix("serving_"): one for name, one in served.items()}, kinds.Serving)
    except msgspec.ValidationError:
        return fields
    for name in served:
        del facts[name]
    return {**fields, "serving": serving} if served else fields


_REWRITES: dict[str, Callable[[dict[str, Scalar]], dict[str, Any]]] = {
    "collective": _rewrite_collective,
    "point_to_point": _rewrite_collective,
    "overlap": _rewrite_overlap,
    "pattern": _rewrite_pattern,
    "workload": _rewrite_workload,
}
"""Facts that one field holds together: taken out of those given, and returned by the field."""
_OBSERVED: dict[str, Any] = {
    str(struct.__struct_config__.tag): struct
    for struct in (
        kinds.OperatorObserved, kinds.CallObserved, kinds.CollectiveObserved, kinds.PointToPointObserved,
        kinds.PairObserved, kinds.OverlapObserved, kinds.PatternObserved, kinds.WorkloadObserved,
        kinds.UserModelObserved, kinds.OtherObserved,
    )
}  # fmt: skip
