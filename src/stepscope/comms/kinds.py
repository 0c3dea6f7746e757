"""Which trial a case needs."""

from __future__ import annotations

from stepscope.comms.collective_trial import CollectiveTrial
from stepscope.comms.operations import operations
from stepscope.comms.pairs import MODEL as PAIR_MODEL
from stepscope.comms.pairs import PairTrial
from stepscope.comms.trial import Room, Trial
from stepscope.errors import UsageError
from stepscope.records import Case


def make_trial(case: Case, room: Room) -> Trial:
    model = case.benchmark.model
    if model == "overlap":
        from stepscope.comms.overlap import OverlapTrial

        return OverlapTrial(case, room)
    if "wire" in case.parameters:
        from stepscope.comms.wire import WireTrial

        return WireTrial(case, room)
    if model in operations():
        return CollectiveTrial(case, room)
    if model == PAIR_MODEL:
        return PairTrial(case, room)
    if model.startswith("pattern_"):
        from stepscope.comms.patterns.trial import PatternTrial

        return PatternTrial(case, room)
    raise UsageError(f"no communication benchmark is called {model!r}", hint="stepscope bench comms --list")
