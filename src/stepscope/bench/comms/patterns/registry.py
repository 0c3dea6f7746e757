"""The patterns by name, and what a case says of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.bench.comms.cases import make_benchmark
from stepscope.bench.comms.patterns import data_parallel, dlrm, model_parallel
from stepscope.bench.comms.patterns.sequence import Pattern, PatternOptions
from stepscope.core.errors import UsageError, unknown_name
from stepscope.records import Case
from stepscope.records.kinds import PatternSpec

PATTERNS = {
    pattern.name: pattern
    for pattern in (dlrm.DLRM, *data_parallel.PATTERNS, *model_parallel.PATTERNS, data_parallel.PARAMETER_SERVERS)
}


def find_pattern(name: str) -> Pattern:
    if name not in PATTERNS:
        raise unknown_name("pattern", name, PATTERNS, where="bench pattern")
    return PATTERNS[name]


def read_options(pattern: Pattern, parameters: Mapping[str, Any]) -> PatternOptions:
    """Values may be text, as people write them: `top=512-256-1`, `scale=0.1`."""
    lists = {field.name for field in msgspec.structs.fields(pattern.options) if isinstance(field.default, tuple)}
    values = {
        name: re.split(r"[-,x]", value) if name in lists and isinstance(value, str) else value
        for name, value in parameters.items()
    }
    try:
        return msgspec.convert(values, pattern.options, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the parameters of {pattern.name} cannot be: {error}",
            hint="stepscope bench pattern --list shows the parameters",
            where="--set",
        ) from error


def read_settings(names: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """`key=value` for every named pattern that has the key, `ddp.key=value` for one."""
    chosen: dict[str, dict[str, str]] = {name: {} for name in names}
    for setting in settings:
        place, equals, value = setting.partition("=")
        prefix, dot, key = place.strip().rpartition(".")
        if not equals or not value.strip():
            raise UsageError(f"{setting!r} sets nothing", hint="write key=value, for example scale=0.1", where="--set")
        if dot and prefix not in chosen:
            raise UsageError(f"{prefix!r} is not among the patterns to measure", hint="name it too", where="--set")
        fields = {name: find_pattern(name).options.__struct_fields__ for name in ([prefix] if dot else names)}
        having = [name for name, known in fields.items() if key in known]
        if not having:
            known = [field for one in fields.values() for field in one]
            raise unknown_name("parameter", key, dict.fromkeys(known), where=f"--set {setting}")
        for name in having:
            chosen[name][key] = value.strip()
    return chosen


def make_case(
    pattern: Pattern, options: PatternOptions, *, overlap: bool, backend: str, world_size: int, device: str
) -> Case:
    """The spec says what is unusual; a plain case keeps its key when a new option is added."""
    usual = pattern.list_values()
    unusual = {name: value for name, value in pattern.list_values(options).items() if value != usual[name]}
    benchmark = make_benchmark(f"pattern_{pattern.name}", backend, world_size, pattern.summary)
    spec = PatternSpec(pattern=pattern.name, options=unusual, overlap=overlap, device=device)
    return Case(benchmark=benchmark, spec=spec, world_size=world_size)


def read_case(case: Case) -> tuple[Pattern, PatternOptions, bool]:
    """The pattern, its options, and whether communication overlaps."""
    assert isinstance(case.spec, PatternSpec)
    pattern = find_pattern(case.spec.pattern)
    return pattern, read_options(pattern, case.spec.options), case.spec.overlap
