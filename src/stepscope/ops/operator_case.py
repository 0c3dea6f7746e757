"""A stored case read back: which operator, which shape, how."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.ops.build import memory_bytes
from stepscope.ops.caches import WARM, Rotation, plan_rotation
from stepscope.ops.operator import Operator, Shape, Work
from stepscope.ops.registry import find_operator
from stepscope.records import Case
from stepscope.store.ceilings import CEILING_CONFIG


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

    def lacks(self) -> tuple[str, str] | None:
        """Kind and words of what the operator does not have; None: it has all of it."""
        name = self.operator.name
        if self.dtype not in self.operator.dtypes:
            return "unsupported_dtype", f"{name} has no {self.dtype} form"
        if self.direction not in self.operator.passes:
            return "unsupported_pass", f"{name} has no {self.direction} pass"
        return None

    def rotation(self, cache_bytes: int) -> Rotation:
        """How its inputs rotate; by the forward pass, whose inputs they are."""
        if not self.cold:
            return WARM
        touched = self.operator.work(self.shape, self.dtype, "forward").bytes
        return plan_rotation(touched, self.operator.footprint_bytes(self.shape, self.dtype), cache_bytes)

    def memory_bytes(self, rotation: Rotation, *, check: bool) -> int:
        return memory_bytes(
            self.operator, self.shape, dtype=self.dtype, direction=self.direction, sets=rotation.sets,
            check=check and not self.is_ceiling,
        )  # fmt: skip


def read_case(case: Case) -> OperatorCase:
    """`op` and `pass` are parameters where the benchmark's own names say something else (suites)."""
    given = case.parameters
    operator = find_operator(str(given.get("op", case.benchmark.model)))
    return OperatorCase(
        operator=operator,
        shape={parameter.name: given[parameter.name] for parameter in operator.parameters},
        dtype=str(given["dtype"]),
        direction=str(given.get("pass", case.benchmark.mode)),
        cold=given.get("cache") == "cold",
        compiled=bool(given.get("compile")),
        is_ceiling=case.benchmark.config == CEILING_CONFIG,
    )
