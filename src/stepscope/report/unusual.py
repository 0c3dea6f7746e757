"""What of a whole model's case a reader cannot take for granted from the name of its benchmark.

The names are all there is to go by here: what a benchmark declares is known to those who measure it.
"""

from __future__ import annotations

import re

from stepscope.records import Case
from stepscope.records.kinds import WorkloadSpec
from stepscope.report.reach import MODELS

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
