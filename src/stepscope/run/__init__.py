"""The executor: plan → cases → ranks or processes → journal → finished run."""

from stepscope.run.execute import execute
from stepscope.run.producer import (
    ExtraMeasurements,
    Folded,
    Prepared,
    Producer,
    RankOutcome,
    WrongResultError,
    find_producer,
)
from stepscope.run.rank import run_rank
from stepscope.run.ranks import CaseSkipped, Ranks

__all__ = [
    "CaseSkipped",
    "ExtraMeasurements",
    "Folded",
    "Prepared",
    "Producer",
    "RankOutcome",
    "Ranks",
    "WrongResultError",
    "execute",
    "find_producer",
    "run_rank",
]
