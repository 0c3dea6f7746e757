"""Compute micro-benchmarks: one small class an operator."""

from stepscope.ops.cases import make_cases, parse_shape
from stepscope.ops.operator import DTYPE_BYTES, Built, Operator, Shape, ShapeParameter, Work
from stepscope.ops.registry import find_operator, operators

__all__ = [
    "DTYPE_BYTES",
    "Built",
    "Operator",
    "Shape",
    "ShapeParameter",
    "Work",
    "find_operator",
    "make_cases",
    "operators",
    "parse_shape",
]
