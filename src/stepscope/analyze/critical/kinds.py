"""The words of the graph: what an edge stands for and what the time on it is spent on."""

from __future__ import annotations

from stepscope.formats.timeline import EDGE_KINDS

GRAPH_EDGE_KINDS = (*EDGE_KINDS, "work", "window")
"""Those of dependencies, and: from start to end of device work; from the beginning and to the end of the window."""
HOST, THREAD, LAUNCH, STREAM, EVENT, SYNC, QUEUE, COLLECTIVE, GRAPH, DATA, WORK, WINDOW = range(12)

COSTS = (
    "operator", "runtime", "launch_call", "python", "gap", "data_loading", "handover", "launch", "compute",
    "communication", "copy", "stream", "sync", "unexplained",
)  # fmt: skip
"""What time on the path was spent on. Host: inside operators; inside calls of the runtime, of those that launch; inside
Python functions; between recorded events; loading data; handing over to another thread. Device: from a launch call to
the start of its work; work, by class (copies and fills are `copy`); from one activity to the next. `sync`: from
the end of device work to the return of the call that waited for it. `unexplained`: delay that nothing known gives."""
(
    C_OPERATOR, C_RUNTIME, C_LAUNCH_CALL, C_PYTHON, C_GAP, C_DATA_LOADING, C_HANDOVER, C_LAUNCH, C_COMPUTE,
    C_COMMUNICATION, C_COPY, C_STREAM, C_SYNC, C_UNEXPLAINED,
) = range(len(COSTS))  # fmt: skip

HOST_COSTS = (C_OPERATOR, C_RUNTIME, C_LAUNCH_CALL, C_PYTHON, C_GAP, C_DATA_LOADING, C_HANDOVER)
DELAYS = ("launch", "stream", "sync", "unexplained")
"""Costs that nothing was busy with."""
WORK_COSTS = (C_COMPUTE, C_COMMUNICATION, C_COPY)
