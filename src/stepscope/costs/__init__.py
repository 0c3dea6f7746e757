"""Cost models: how long one piece of a step takes, with an interval, and where that was fitted."""

from stepscope.costs.collective import find_cost, read_collective_table

__all__ = ["find_cost", "read_collective_table"]
