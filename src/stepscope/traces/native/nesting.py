"""The walk over nested calls, compiled."""

from __future__ import annotations

from stepscope.traces.native import compiled
from stepscope.traces.nesting import walk_stack

walk_stack_compiled = compiled(walk_stack)
