"""What the ranks of a run say together: collectives matched, waiting told from moving data, clocks, stragglers."""

from stepscope.analyze.ranks.clocks import ClockOffset, Clocks, find_clocks, shift
from stepscope.analyze.ranks.collective_table import CollectiveRow, GroupTotals
from stepscope.analyze.ranks.collectives import CollectiveCall, list_collectives
from stepscope.analyze.ranks.conventions import COLLECTIVES, SYNCHRONISING, bus_factor
from stepscope.analyze.ranks.digest import RankDigest, StepDigest, digest
from stepscope.analyze.ranks.groups import ProcessGroup, format_members, parse_members
from stepscope.analyze.ranks.matching import Matching, MatchingSummary, match, summarize_matching
from stepscope.analyze.ranks.ranks_report import (
    ClockChoice,
    OverSteps,
    RanksReport,
    RankWaiting,
    StepRanks,
    explain_ranks,
)
from stepscope.analyze.ranks.stragglers import LoadBalance, RankLateness, Stragglers
from stepscope.analyze.ranks.waiting import Waiting, find_waiting
from stepscope.analyze.ranks.waiting_map import MapColumn, MapRow, WaitingMap

__all__ = [
    "COLLECTIVES",
    "SYNCHRONISING",
    "ClockChoice",
    "ClockOffset",
    "Clocks",
    "CollectiveCall",
    "CollectiveRow",
    "GroupTotals",
    "LoadBalance",
    "MapColumn",
    "MapRow",
    "Matching",
    "MatchingSummary",
    "OverSteps",
    "ProcessGroup",
    "RankDigest",
    "RankLateness",
    "RankWaiting",
    "RanksReport",
    "StepDigest",
    "StepRanks",
    "Stragglers",
    "Waiting",
    "WaitingMap",
    "bus_factor",
    "digest",
    "explain_ranks",
    "find_clocks",
    "find_waiting",
    "format_members",
    "list_collectives",
    "match",
    "parse_members",
    "shift",
    "summarize_matching",
]
