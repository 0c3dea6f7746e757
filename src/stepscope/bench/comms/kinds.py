"""Which trial a case needs."""

from __future__ import annotations

from stepscope.bench.comms.collective_trial import CollectiveTrial
from stepscope.bench.comms.operations import operations
from stepscope.bench.comms.pairs import MODEL as PAIR_MODEL
from stepscope.bench.comms.pairs import PairTrial
from stepscope.bench.comms.trial import Room, Trial
from stepscope.core.errors import UsageError
from stepscope.records import Case


def make_trial(case: Case, room: Room) -> Trial:
    model = case.benchmark.model
    if model == "overlap":
        from stepscope.bench.comms.overlap import OverlapTrial

        return OverlapTrial(case, room)
    if "wire" in case.parameters:
        from stepscope.bench.comms.wire import WireTrial

        return WireTrial(case, room)
    if model in operations():
        return CollectiveTrial(case, room)
    if model == PAIR_MODEL:
        return PairTrial(case, room)
    if model.startswith("pattern_"):
        from stepscope.bench.comms.patterns.trial import PatternTrial

        return PatternTrial(case, room)
    raise UsageError(f"no communication benchmark is called {model!r}", hint="stepscope bench comms --list")
