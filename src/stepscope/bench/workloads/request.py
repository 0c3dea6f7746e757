"""What a run of workload cases was asked for, and each of its cases as parsed."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from stepscope.bench.workloads.catalogue import Scale
from stepscope.bench.workloads.protocol import Precision
from stepscope.bench.workloads.registry import Workload, find_workload
from stepscope.measure import Device, MeasureSettings
from stepscope.records import Case
from stepscope.records.kinds import WorkloadSpec

TRAIN_SAMPLE_S = 0.2
"""On a GPU several steps make one sample: in training nobody waits for the device between two steps."""
LOADER_STEPS, LOADER_TIME_S = 20, 2.0


def choose_settings(parsed: ParsedCase, settings: MeasureSettings, device: Device) -> MeasureSettings:
    """A latency is that of one batch."""
    if parsed.mode == "infer":
        return msgspec.structs.replace(settings, iterations=1)
    if device.has_events:
        return msgspec.structs.replace(settings, min_sample_s=max(settings.min_sample_s, TRAIN_SAMPLE_S))
    return settings


def require_samples(settings: MeasureSettings, least: int) -> MeasureSettings:
    """Latencies of at least so many batches, however long they take."""
    limits = ("few_samples", "min_samples", "max_samples")
    return msgspec.structs.replace(settings, **{name: max(getattr(settings, name), least) for name in limits})


SEED = 727


class ParsedCase(NamedTuple):
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


def read_case(case: Case) -> ParsedCase:
    workload = find_workload(case.benchmark.id)
    spec = case.spec
    assert isinstance(spec, WorkloadSpec)
    scale: Scale = "tiny" if spec.scale == "tiny" else "full"
    precision = workload.require_precision(spec.precision)
    return ParsedCase(case, workload, scale, precision, case.batch_size or workload.declared.batch_size_at(scale))


def count_accumulated(parsed: ParsedCase) -> int:
    """Batches whose gradients are added up for one step: as asked for, else as the benchmark declares."""
    usual = parsed.workload.declared.accumulate if parsed.scale == "full" else 1
    stated = parsed.spec.accumulate
    return usual if stated is None else stated
