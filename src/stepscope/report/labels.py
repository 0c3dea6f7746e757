"""Short texts that tell the cases of one benchmark apart, and values as tables and pages write them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_share, format_significant
from stepscope.records import Case, CaseResult, Communication, Parameter, Scalar
from stepscope.records.kinds import CallSpec, OperatorSpec, WorkloadSpec

MODELS = frozenset({"ootb", "optimized"})
"""Implementations of whole models."""

_ABSENT = object()

Facts = Mapping[str, Parameter]


class CaseLabels(NamedTuple):
    differences: dict[str, str]
    """Case key → the parameters in which the cases of its benchmark differ, and those that are unusual; empty where
    there are none."""
    shared: list[str]
    """What is unusual in every case alike, and stands in none of the above."""


def label_cases(cases: Iterable[Case], *, hidden: frozenset[str] = frozenset()) -> CaseLabels:
    """Ranks and the benchmark's version count as parameters here. The batch size does not: it has a column of its
    own, as has everything in `hidden`.
    """
    by_key = {case.key: case for case in cases}
    shared = _find_shared(by_key.values(), hidden)
    families: dict[str, dict[str, Case]] = defaultdict(dict)
    for key, case in by_key.items():
        families[case.benchmark.id][key] = case
    left_out = hidden | shared.keys()
    differences = {key: text for family in families.values() for key, text in _describe_family(family, left_out)}
    return CaseLabels(differences, list(shared.values()))


def _find_shared(cases: Collection[Case], hidden: frozenset[str]) -> dict[str, str]:
    """By name; what contradicts the config's name stays beside it."""
    texts = [
        {name: _format(case, name, value) for name, value in _facts(case, hidden).items() if name in named}
        for case in cases
        for named in [find_unusual(case) - find_unnamed(case) | (_SETTINGS if _is_micro(case) else frozenset())]
    ]
    first, *others = texts or [{}]
    return {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}


_SETTINGS = frozenset({"dtype", "device"})


def _shape_names(case: Case) -> frozenset[str]:
    """Parameters that make an operator or a part of communication this one; empty where a benchmark's name says them,
    as those of suites and of whole models do."""
    spec, benchmark = case.spec, case.benchmark
    if isinstance(spec, OperatorSpec | CallSpec):
        return frozenset(spec.shape if (spec.op, spec.direction) == (benchmark.model, benchmark.mode) else ())
    return frozenset(case.parameters) - _SETTINGS if _is_micro(case) else frozenset()


def _is_micro(case: Case) -> bool:
    return case.benchmark.implementation == "micro"


def _facts(case: Case, hidden: frozenset[str]) -> Facts:
    facts = {**case.parameters, "ranks": case.world_size, "version": case.benchmark.version}
    if facts.get("batch") == case.batch_size:
        facts.pop("batch", None)
    return {name: value for name, value in facts.items() if name not in hidden}


def _describe_family(family: Mapping[str, Case], hidden: frozenset[str]) -> Iterator[tuple[str, str]]:
    facts = {key: _facts(case, hidden) for key, case in family.items()}
    names = list(dict.fromkeys(name for one in facts.values() for name in one))
    differing = {name for name in names if len({repr(one.get(name, _ABSENT)) for one in facts.values()}) > 1}
    for key, case in family.items():
        shown = differing | find_unusual(case) | _shape_names(case)
        yield (
            key,
            " ".join(_format(case, name, facts[key][name]) for name in names if name in shown & facts[key].keys()),
        )


# What the name of a benchmark does not say

_DEVICES = re.compile(r"(?:^|[.-])(\d+)dev(?=[.-]|$)")
_CHOICES = ("parallel", "accumulate", "data", "search")
"""Fields that a case states only where they were chosen otherwise than the benchmark does."""


def find_unusual(case: Case) -> frozenset[str]:
    """Names of parameters, and `ranks`; none for operators and collectives, whose tables show what differs."""
    if case.benchmark.implementation not in MODELS:
        return frozenset()
    names = set()
    if isinstance(case.spec, WorkloadSpec):
        names = {name for name in _CHOICES if getattr(case.spec, name) is not None}
        if case.spec.scale not in (None, "full"):
            names.add("scale")
    if case.world_size > 1:
        names.add("ranks")
    return frozenset(names) | find_unnamed(case)


def find_unnamed(case: Case) -> frozenset[str]:
    """Those in which the case is not what the config's name says: they belong beside that name. A config that names
    no precision leaves it open."""
    if case.benchmark.implementation not in MODELS:
        return frozenset()
    precision = case.spec.precision
    names = set()
    if precision is not None and not case.benchmark.config.endswith(f"-{precision}"):
        names.add("precision")
    if read_other_devices(case) is not None:
        names.add("ranks")
    return frozenset(names)


def read_other_devices(case: Case) -> int | None:
    """For how many devices the benchmark is declared, where the case ran on another number of ranks."""
    found = _DEVICES.search(case.benchmark.config) if case.benchmark.implementation in MODELS else None
    return int(found[1]) if found is not None and int(found[1]) != case.world_size else None


def _format(case: Case, name: str, value: Parameter) -> str:
    declared = read_other_devices(case) if name == "ranks" else None
    return format_parameter(name, value) + (f" (declared for {declared})" if declared is not None else "")


_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_per_s": lambda rate: f"{format_bytes(rate)}/s" if abs(rate) < 1e6 else format_bandwidth(rate),
    "_bytes": format_bytes,
    "_per_s": lambda rate: f"{format_significant(rate)}/s",
    "_s": format_duration,
}
"""How a value is written whose name ends so."""


def _find_unit(name: str) -> str:
    return next((ending for ending in _UNITS if name.endswith(ending)), "")


def strip_unit(name: str) -> str:
    return name.removesuffix(_find_unit(name))


def format_parameter(name: str, value: Parameter) -> str:
    """`size=1 MiB`, `shape=1024x512`, `dtype=float16`: a unit in the name moves to the value."""
    if isinstance(value, list):
        return f"{name}={'x'.join(format_scalar(item) for item in value)}"
    return f"{strip_unit(name) if _is_number(value) else name}={format_fact(name, value)}"


def format_scalar(value: Scalar) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_significant(value) if isinstance(value, float) else str(value)


def format_fact(name: str, value: Scalar) -> str:
    """An observed fact's value in the unit that its name carries."""
    form = format_flops if name == "flops" else _UNITS.get(_find_unit(name))
    return form(float(value)) if form is not None and _is_number(value) else format_scalar(value)


_FACT_NAMES = {"flops": "work", "moved_bytes": "compulsory bytes", "compile_s": "compile time"}


def name_fact(name: str) -> str:
    """`peak_memory_bytes` → `peak memory`, beside a value that shows its unit."""
    return _FACT_NAMES.get(name) or strip_unit(name).replace("_", " ")


_DECIMAL = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def format_decimal(value: float, unit: str, prefixes: Sequence[str] = tuple(_DECIMAL), digits: int = 4) -> str:
    """With the first of the prefixes that the value fills, else with the last: `2.147 GFLOP`."""
    prefix = next((one for one in prefixes if abs(value) >= _DECIMAL[one]), prefixes[-1])
    return f"{format_significant(value / _DECIMAL[prefix], digits)} {prefix}{unit}"


def format_frequency(hertz: float) -> str:
    return format_decimal(hertz, "Hz", "GM")


def format_flops(flops: float) -> str:
    return format_decimal(flops, "FLOP")


def format_flop_rate(flops_per_s: float) -> str:
    return format_decimal(flops_per_s, "FLOP/s")


def format_percent(share: float) -> str:
    """One decimal, so that a column can be read down; what that would show as nothing says so."""
    return format_share(share) if share >= 0.0005 else "<0.1 %"


def _is_number(value: Parameter) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# How much of a system a table of results covers, and what it can and cannot tell

Scope = Literal["operators only", "one device", "one node", "cluster"]


class ScaleScope(msgspec.Struct, frozen=True):
    scope: Scope
    tells: str
    silent: str
    """What it does not tell."""

    def describe(self) -> str:
        return f"{self.scope}; tells {self.tells}, not {self.silent}"


COVERAGES = (
    ScaleScope("operators only", "early what devices can do at best", "how much of it a model uses"),
    ScaleScope("one device", "trends, and inference", "communication or input from shared storage"),
    ScaleScope("one node", "inference as it is served, and the node's share of training", "the network between nodes"),
    ScaleScope("cluster", "training as it is run", "more than one node does about inference"),
)
"""From the narrowest to the widest."""


def find_coverage(runs: Iterable[tuple[Iterable[CaseResult], Communication | None]]) -> ScaleScope | None:
    """By the widest case of a whole model that was measured, if there is one; None where nothing was."""
    found = {_scope(one.case, carried) for results, carried in runs for one in results if one.status == "ok"}
    return next((one for one in reversed(COVERAGES) if one.scope in found), None)


def _scope(case: Case, communication: Communication | None) -> Scope:
    if case.benchmark.implementation not in MODELS:
        return "operators only"
    if case.world_size == 1:
        return "one device"
    hosts = {place.host for place in communication.ranks} if communication is not None else set()
    return "cluster" if len(hosts) > 1 else "one node"
