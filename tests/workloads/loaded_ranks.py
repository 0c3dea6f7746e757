"""`failing_ranks.measure_by_case` by ranks that are forked after everything was loaded that their models need."""

from __future__ import annotations

from importlib import import_module

from failing_ranks import measure_by_case

from stepscope.bench.workloads import choose_workloads
from stepscope.run import execute

__all__ = ["load_before_fork", "measure_by_case"]


def load_before_fork(verb: str) -> None:
    """Each rank would take five seconds for transformers and the compiler."""
    execute.load_before_fork(verb)
    for workload in choose_workloads():
        workload.make_task("tiny")
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        import_module(name)
