"""The passes over the graph of a step, compiled."""

from __future__ import annotations

from stepscope.analyze.critical import loops
from stepscope.formats.machine_code import compiled

emit_points = compiled(loops.emit_points)
group_edges = compiled(loops.group_edges)
order_nodes = compiled(loops.order_nodes)
pass_forward = compiled(loops.pass_forward)
pass_backward = compiled(loops.pass_backward)
walk_back = compiled(loops.walk_back)
