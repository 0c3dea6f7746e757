"""A stored case read back: which operator, which shape, how."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.bench.ops.build import memory_bytes
from stepscope.bench.ops.caches import WARM, Rotation, plan_rotation
from stepscope.bench.ops.operator import Operator, Shape, UnsupportedError, Work
from stepscope.bench.ops.registry import find_operator
from stepscope.records import Case
from stepscope.records.kinds import CallSpec, OperatorSpec
from stepscope.run.ranks import CaseSkipped
from stepscope.system import bfloat16_works

TF32_CAPABILITY = (8, 0)


class OperatorCase(NamedTuple):
    operator: Operator
    shape: Shape
    dtype: str
    direction: str
    cold: bool
    compiled: bool
    is_ceiling: bool

    @property
    def work(self) -> Work:
        return self.operator.work(self.shape, self.dtype, self.direction)

    def require(self, device: str) -> None:
        """Raises CaseSkipped for what the operator, or the device, is known not to have before anything is built."""
        name, kind = self.operator.name, device.partition(":")[0]
        if self.dtype not in self.operator.dtypes:
            raise CaseSkipped("unsupported_dtype", f"{name} has no {self.dtype} form")
        if self.direction not in self.operator.passes:
            raise CaseSkipped("unsupported_pass", f"{name} has no {self.direction} pass")
        if self.dtype == "tf32" and not _has_tf32(device):
            raise CaseSkipped("unsupported_dtype", f"{device} has no tf32 mode", "ask for float32")
        if self.dtype == "bfloat16" and kind == "cpu" and not bfloat16_works():
            raise CaseSkipped(
                "unsupported_dtype",
                "bfloat16 ends the process here: this CPU advertises instructions that it does not run",
                "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and run again; `stepscope doctor` tells more",
            )
        try:
            self.operator.work(self.shape, self.dtype, self.direction)
        except UnsupportedError as error:
            raise CaseSkipped("unsupported", str(error)) from error

    def rotation(self, cache_bytes: int) -> Rotation:
        """How its inputs rotate; by the pass that touches least of them."""
        if not self.cold:
            return WARM
        touched = min(self.operator.work(self.shape, self.dtype, "forward").bytes, self.work.bytes)
        planned = plan_rotation(touched, self.operator.footprint_bytes(self.shape, self.dtype), cache_bytes)
        # Where what is looked up repeats, how much of the traffic evicts anything is known only to the indices.
        repeats = type(self.operator).repeated_bytes is not Operator.repeated_bytes
        return planned._replace(flush=planned.flush or repeats)

    def memory_bytes(self, rotation: Rotation, *, check: bool) -> int:
        return memory_bytes(
            self.operator, self.shape, dtype=self.dtype, direction=self.direction, sets=rotation.sets,
            check=check and not self.is_ceiling,
        )  # fmt: skip


def _has_tf32(device: str) -> bool:
    import torch

    return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY


def read_case(case: Case) -> OperatorCase:
    spec = case.spec
    assert isinstance(spec, OperatorSpec | CallSpec)
    return OperatorCase(
        operator=find_operator(spec.op),
        shape=spec.shape,
        dtype=str(spec.dtype),
        direction=spec.direction,
        cold=spec.cache == "cold",
        compiled=spec.compile,
        is_ceiling=spec.is_measured_peak,
    )
