"""Communication micro-benchmarks."""

from stepscope.bench.comms.cases import make_cases
from stepscope.bench.comms.operations import Operation, find_operation, operations

__all__ = ["Operation", "find_operation", "make_cases", "operations"]
