"""Models measured whole: out of the box and optimized, training and inference, scored by rules."""

from stepscope.bench.workloads.registry import Workload, choose_workloads, find_workload, list_workloads

__all__ = ["Workload", "choose_workloads", "find_workload", "list_workloads"]
