"""Runs operator cases: the side that knows torch."""

from __future__ import annotations

from pathlib import Path

from stepscope.measure import (
    BarProgress,
    CaseSkipped,
    LineProgress,
    MeasureSettings,
    Prepared,
    free_memory_bytes,
)
from stepscope.measure.session import measure_run
from stepscope.ops.operator import Operator
from stepscope.ops.registry import find_operator
from stepscope.records import Case, Run, Score
from stepscope.system import bfloat16_works
from stepscope.units import format_bytes

MEMORY_SHARE = 0.9
"""Of what is free: the rest belongs to the allocator and to others."""


def run_ops(folder: Path, *, settings: MeasureSettings, device_name: str, progress: LineProgress | BarProgress) -> Run:
    return measure_run(folder, prepare=prepare_case, settings=settings, device_name=device_name, progress=progress)


def prepare_case(case: Case) -> Prepared:
    """Raises CaseSkipped for what this machine cannot do: nothing falls back to another dtype or device."""
    import torch

    operator = find_operator(case.benchmark.model)
    shape = {parameter.name: _whole(case, parameter.name) for parameter in operator.parameters}
    dtype, device = str(case.parameters["dtype"]), str(case.parameters["device"])
    direction = case.benchmark.mode
    _require_dtype(operator, dtype, device)
    _require_memory(operator.memory_bytes(shape, dtype, direction), device)
    built = operator.build(shape, getattr(torch, dtype), device, direction)
    work = operator.work(shape, dtype, direction)
    return Prepared(
        body=built.body,
        check=built.check,
        score=Score(unit=operator.unit, work=work.flops if operator.unit == "TFLOP/s" else work.bytes),
        observed={"flops": work.flops, "moved_bytes": work.bytes},
    )


def _whole(case: Case, name: str) -> int:
    value = case.parameters[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} of {case.label} is not a whole number")
    return value


def _require_dtype(operator: Operator, dtype: str, device: str) -> None:
    if dtype not in operator.dtypes:
        raise CaseSkipped("unsupported_dtype", f"{operator.name} has no {dtype} form")
    if dtype == "bfloat16" and device == "cpu" and not bfloat16_works():
        raise CaseSkipped(
            "unsupported_dtype",
            "bfloat16 ends the process here: this CPU advertises instructions that it does not run",
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and run again; `stepscope doctor` tells more",
        )


def _require_memory(needed_bytes: int, device: str) -> None:
    free_bytes = free_memory_bytes(device)
    if needed_bytes > MEMORY_SHARE * free_bytes:
        raise CaseSkipped(
            "does_not_fit",
            f"needs {format_bytes(needed_bytes)}, {format_bytes(free_bytes)} are free on {device}",
            "use a smaller shape",
        )
