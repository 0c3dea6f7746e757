"""What decides how long a step takes: its dependency graph, the critical path through it, and what-if."""

from stepscope.analyze.critical.edges import row_edges
from stepscope.analyze.critical.kinds import COSTS, GRAPH_EDGE_KINDS
from stepscope.analyze.critical.latencies import Constants
from stepscope.analyze.critical.model import StepGraph, build_graph, build_graph_of_ranks
from stepscope.analyze.critical.overlay import path_events, path_records
from stepscope.analyze.critical.path import (
    CriticalPath,
    NameSlack,
    PathSegment,
    PathShare,
    critical_path,
    critical_path_of_ranks,
    describe_path,
)
from stepscope.analyze.critical.schedule import Checks, Schedule, find_slack, retime, slack_of_rows
from stepscope.analyze.critical.what_if import (
    TARGETS,
    AppliedEdit,
    Edit,
    Limit,
    WhatIf,
    find_limits,
    parse_what_if,
    what_if,
)

__all__ = [
    "COSTS",
    "GRAPH_EDGE_KINDS",
    "TARGETS",
    "AppliedEdit",
    "Checks",
    "Constants",
    "CriticalPath",
    "Edit",
    "Limit",
    "NameSlack",
    "PathSegment",
    "PathShare",
    "Schedule",
    "StepGraph",
    "WhatIf",
    "build_graph",
    "build_graph_of_ranks",
    "critical_path",
    "critical_path_of_ranks",
    "describe_path",
    "find_limits",
    "find_slack",
    "parse_what_if",
    "path_events",
    "path_records",
    "retime",
    "row_edges",
    "slack_of_rows",
    "what_if",
]
