"""The patterns by name, and what a case says of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.bench.comms.cases import make_benchmark
from stepscope.bench.comms.patterns.data_parallel import (
    DdpOptions,
    FsdpOptions,
    ServerOptions,
    build_ddp,
    build_fsdp,
    build_ps,
)
from stepscope.bench.comms.patterns.dlrm import DlrmOptions, build_dlrm
from stepscope.bench.comms.patterns.model_parallel import (
    ExpertOptions,
    PipelineOptions,
    SequenceOptions,
    TensorOptions,
    build_ep,
    build_pp,
    build_sp,
    build_tp,
)
from stepscope.bench.comms.patterns.sequence import PatternOptions, Step, order_steps, require_sound
from stepscope.core.errors import UsageError, unknown_name
from stepscope.records import Case, Parameter
from stepscope.records.kinds import PatternSpec


class Pattern(NamedTuple):
    name: str
    summary: str
    options: type[PatternOptions]
    build: Callable[[Any, int], list[Step]]

    def make_steps(self, options: PatternOptions, world_size: int) -> list[Step]:
        steps = self.build(options, world_size)
        require_sound(steps, world_size)
        return order_steps(steps)

    def list_values(self, options: PatternOptions | None = None) -> dict[str, Parameter]:
        """As plain values; without options, the usual ones."""
        values: dict[str, Any] = msgspec.to_builtins(options or self.options())
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_ALL = (
    Pattern("dlrm", "recommendation: embeddings exchanged, dense gradients added up", DlrmOptions, build_dlrm),
    Pattern("ddp", "data parallel: gradient buckets of a named model, added up during backward", DdpOptions, build_ddp),
    Pattern("fsdp", "fully sharded: parameters gathered layer by layer, gradients scattered", FsdpOptions, build_fsdp),
    Pattern("tp", "tensor parallel: an all_reduce behind each half of a layer", TensorOptions, build_tp),
    Pattern("sp", "sequence parallel: all_gather and reduce_scatter in its place", SequenceOptions, build_sp),
    Pattern("pp", "pipeline: messages between stages, one forward and one backward in turn", PipelineOptions, build_pp),
    Pattern("ep", "experts: tokens dispatched to skewed experts and combined", ExpertOptions, build_ep),
    Pattern("ps", "parameter servers: workers push gradients, servers send parameters", ServerOptions, build_ps),
)
PATTERNS = {pattern.name: pattern for pattern in _ALL}


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
