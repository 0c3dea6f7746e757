"""Which trial a case needs."""

from __future__ import annotations

from stepscope.bench.comms.collective_trial import CollectiveTrial
from stepscope.bench.comms.operations import find_operation
from stepscope.bench.comms.pairs import PairTrial
from stepscope.bench.comms.trial import Room, Trial
from stepscope.core.errors import UsageError
from stepscope.records import Case
from stepscope.records.kinds import CollectiveSpec, OverlapSpec, PairSpec, PatternSpec, ProcessGroupSpec


def make_trial(case: Case, room: Room) -> Trial:
    spec = case.spec
    if isinstance(spec, OverlapSpec):
        from stepscope.bench.comms.overlap import OverlapTrial

        return OverlapTrial(case, room)
    if isinstance(spec, CollectiveSpec) and spec.wire is not None:
        from stepscope.bench.comms.wire import WireTrial

        return WireTrial(case, room)
    if isinstance(spec, CollectiveSpec) and find_operation(spec.operation).objects:
        from stepscope.bench.comms.objects import ObjectTrial

        return ObjectTrial(case, room)
    if isinstance(spec, CollectiveSpec):
        return CollectiveTrial(case, room)
    if isinstance(spec, PairSpec):
        return PairTrial(case, room)
    if isinstance(spec, PatternSpec):
        from stepscope.bench.comms.patterns.trial import PatternTrial

        return PatternTrial(case, room)
    if isinstance(spec, ProcessGroupSpec):
        from stepscope.bench.comms.process_group import ProcessGroupTrial

        return ProcessGroupTrial(case, room)
    raise UsageError(f"{case.label} is no case of communication", hint="stepscope bench comms --list")
