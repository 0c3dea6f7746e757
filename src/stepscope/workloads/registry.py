"""The declared table of workloads: what `stepscope bench list` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stepscope.errors import UsageError
from stepscope.measure import Prepared
from stepscope.records import Benchmark, Case, parse_benchmark_id
from stepscope.workloads import dlrm


class Workload(NamedTuple):
    benchmark: Benchmark
    make_case: Callable[[str], Case]
    """From the device's name."""
    prepare: Callable[[Case], Prepared]


WORKLOADS: dict[str, Workload] = {
    dlrm.SMALL_TRAIN.id: Workload(dlrm.SMALL_TRAIN, dlrm.make_small_case, dlrm.prepare_small),
}


def find_workload(benchmark_id: str) -> Workload:
    parse_benchmark_id(benchmark_id)
    if benchmark_id not in WORKLOADS:
        raise UsageError(f"there is no benchmark {benchmark_id!r}", hint="stepscope bench list shows those there are")
    return WORKLOADS[benchmark_id]
