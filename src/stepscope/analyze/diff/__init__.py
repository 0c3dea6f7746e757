"""What changed between two traces: how much longer a step takes, what makes up the change, and what is new or gone."""

from stepscope.analyze.diff.compare import diff_traces
from stepscope.analyze.diff.ranks import choose_ranks, step_time_s
from stepscope.analyze.diff.records import Contribution, NameChange, Part, RankSteps, StepsUsed, TraceDiff

__all__ = [
    "Contribution",
    "NameChange",
    "Part",
    "RankSteps",
    "StepsUsed",
    "TraceDiff",
    "choose_ranks",
    "diff_traces",
    "step_time_s",
]
