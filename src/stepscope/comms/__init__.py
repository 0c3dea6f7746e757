"""Communication micro-benchmarks."""

from stepscope.comms.cases import make_cases
from stepscope.comms.operations import Operation, find_operation, operations

__all__ = ["Operation", "find_operation", "make_cases", "operations"]
