"""A case in the words of this room."""

from __future__ import annotations

from typing import Any, NamedTuple

from stepscope.bench.workloads.catalogue import Scale
from stepscope.bench.workloads.protocol import Precision
from stepscope.bench.workloads.registry import Workload, find_workload
from stepscope.records import Case
from stepscope.records.kinds import WorkloadSpec

SEED = 727


class Asked(NamedTuple):
    case: Case
    workload: Workload
    scale: Scale
    precision: Precision
    batch_size: int

    @property
    def spec(self) -> WorkloadSpec:
        assert isinstance(self.case.spec, WorkloadSpec)
        return self.case.spec

    @property
    def mode(self) -> Any:
        return self.workload.declared.mode


def read_case(case: Case) -> Asked:
    workload = find_workload(case.benchmark.id)
    spec = case.spec
    assert isinstance(spec, WorkloadSpec)
    scale: Scale = "tiny" if spec.scale == "tiny" else "full"
    precision = workload.require_precision(spec.precision)
    return Asked(case, workload, scale, precision, case.batch_size or workload.declared.batch_size_at(scale))


def count_accumulated(asked: Asked) -> int:
    """Batches whose gradients are added up for one step: as asked for, else as the benchmark declares."""
    usual = asked.workload.declared.accumulate if asked.scale == "full" else 1
    stated = asked.spec.accumulate
    return usual if stated is None else stated
