"""How workload cases are measured, as the plan says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stepscope.bench.workloads.asked import Asked
from stepscope.measure import Device, MeasureSettings

TRAIN_SAMPLE_S = 0.2
"""On a GPU several steps make one sample: in training nobody waits for the device between two steps."""
LOADER_STEPS, LOADER_TIME_S = 20, 2.0


class WorkloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of workload cases was asked for, apart from its cases."""

    settings: MeasureSettings
    device: str = "cpu"
    check: bool = True
    """Compare fast forms with the plain one; without it they have no score."""
    loader_workers: int | None = 2
    """Processes that feed the second score; None: only batches that are ready on the device."""
    trace: bool = False
    """Record a few steps after the timed ones."""
    compile_backend: str = "inductor"
    """Of torch.compile."""
    data: str | None = None
    """A user's examples instead of synthetic ones."""
    find_batch: dict[str, Any] | None = None
    rate_per_s: float | None = None
    """Requests a second that come to a decoder after the timed batches; None: none do."""
    requests: int = 64


def read_request(request: Mapping[str, Any]) -> WorkloadRequest:
    known = {name: request[name] for name in WorkloadRequest.__struct_fields__ if name in request}
    return msgspec.convert(known, WorkloadRequest)


def choose_settings(asked: Asked, settings: MeasureSettings, device: Device) -> MeasureSettings:
    """A latency is that of one batch."""
    if asked.mode == "infer":
        return msgspec.structs.replace(settings, iterations=1)
    if device.has_events:
        return msgspec.structs.replace(settings, min_sample_s=max(settings.min_sample_s, TRAIN_SAMPLE_S))
    return settings


def require_samples(settings: MeasureSettings, least: int) -> MeasureSettings:
    """Latencies of at least so many batches, however long they take."""
    limits = ("few_samples", "min_samples", "max_samples")
    return msgspec.structs.replace(settings, **{name: max(getattr(settings, name), least) for name in limits})
