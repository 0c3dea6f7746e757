"""Models measured whole: out of the box and optimized."""

from stepscope.workloads.registry import WORKLOADS, Workload, find_workload

__all__ = ["WORKLOADS", "Workload", "find_workload"]
