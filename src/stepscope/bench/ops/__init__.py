"""Compute micro-benchmarks: one small class an operator."""

from stepscope.bench.ops.case_files import read_case_file
from stepscope.bench.ops.cases import call_cases, cases_of_requests, make_cases, make_peak_cases, parse_shape
from stepscope.bench.ops.catalogue import find_operator, operators, shape_sets
from stepscope.bench.ops.language import expand_shape
from stepscope.bench.ops.operator import DTYPE_BYTES, DTYPES, Operator, Parameter, Shape, Work

__all__ = [
    "DTYPES",
    "DTYPE_BYTES",
    "Operator",
    "Parameter",
    "Shape",
    "Work",
    "call_cases",
    "cases_of_requests",
    "expand_shape",
    "find_operator",
    "make_cases",
    "make_peak_cases",
    "operators",
    "parse_shape",
    "read_case_file",
    "shape_sets",
]
