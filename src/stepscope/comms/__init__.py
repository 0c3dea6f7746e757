"""Communication micro-benchmarks."""

from stepscope.comms.cases import make_cases
from stepscope.comms.collectives import COLLECTIVES, Collective, find_collective

__all__ = ["COLLECTIVES", "Collective", "find_collective", "make_cases"]
