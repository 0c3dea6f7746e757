"""Cost models: how long one piece of a step takes, with an interval, and where that was fitted."""

from stepscope.costs.collective import (
    Candidate,
    CollectiveCost,
    CollectiveCurve,
    CollectiveFit,
    CollectiveSetting,
    CostEstimate,
    Refusal,
    fit_collective,
    fit_collectives,
)
from stepscope.costs.collective_points import (
    Measurement,
    group_curves,
    measurements_of_run,
    read_published_table,
)
from stepscope.costs.collective_table import (
    CollectiveTable,
    find_cost,
    read_collective_table,
    write_collective_table,
)
from stepscope.costs.curves import MODEL_NAMES, AlphaBeta, Curve, ModelName, Piecewise, SquareRoot
from stepscope.costs.fitting import Point
from stepscope.costs.held_out import Extrapolation, HeldOut

__all__ = [
    "MODEL_NAMES",
    "AlphaBeta",
    "Candidate",
    "CollectiveCost",
    "CollectiveCurve",
    "CollectiveFit",
    "CollectiveSetting",
    "CollectiveTable",
    "CostEstimate",
    "Curve",
    "Extrapolation",
    "HeldOut",
    "Measurement",
    "ModelName",
    "Piecewise",
    "Point",
    "Refusal",
    "SquareRoot",
    "find_cost",
    "fit_collective",
    "fit_collectives",
    "group_curves",
    "measurements_of_run",
    "read_collective_table",
    "read_published_table",
    "write_collective_table",
]
