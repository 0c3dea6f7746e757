"""What changed between two traces: how much longer a step takes, what makes up the change, and what is new or gone."""

from stepscope.analyze.diff.compare import diff_traces
from stepscope.analyze.diff.records import Contribution, NameChange, Part, StepsUsed, TraceDiff

__all__ = ["Contribution", "NameChange", "Part", "StepsUsed", "TraceDiff", "diff_traces"]
