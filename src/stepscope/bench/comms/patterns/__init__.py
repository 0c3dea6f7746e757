"""What real jobs communicate in one step, with the right dependencies."""

from stepscope.bench.comms.patterns.registry import PATTERNS, find_pattern
from stepscope.bench.comms.patterns.sequence import Action, Pattern, Step, make_program, require_sound

__all__ = ["PATTERNS", "Action", "Pattern", "Step", "find_pattern", "make_program", "require_sound"]
