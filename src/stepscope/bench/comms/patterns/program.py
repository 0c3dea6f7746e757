"""When a rank does what: a sequence made into the actions of one rank. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from stepscope.bench.comms.patterns.sequence import Step, order_steps


class Action(NamedTuple):
    kind: Literal["start", "wait", "compute"]
    step: Step


def make_program(steps: Sequence[Step], rank: int, *, overlap: bool = True) -> list[Action]:
    """Everything this rank does in one step of the job, in order.

    With overlap a communication is started as soon as what it comes after is done, and waited for when the next step
    needs it, or at the end. Without, each is waited for at once; as all ranks then follow one order, no two can wait
    for each other.
    """
    mine = [step for step in order_steps(steps) if step.group_of(rank) is not None]
    return _overlap(mine) if overlap else _one_at_a_time(mine)


def _one_at_a_time(steps: Sequence[Step]) -> list[Action]:
    actions = []
    for step in steps:
        actions += [Action("start", step), Action("wait", step)] if step.communicates else [Action("compute", step)]
    return actions


def _overlap(steps: Sequence[Step]) -> list[Action]:
    """Steps that other ranks alone are in hold nobody up here: what comes from them arrives by messages."""
    names = {step.name for step in steps}
    needs = {step.name: [name for name in step.after if name in names] for step in steps}
    actions: list[Action] = []
    done: set[str] = set()
    going: dict[str, Step] = {}
    pending = list(steps)
    while pending:
        ready = [step for step in pending if done.issuperset(needs[step.name])]
        # Communication first: it goes on by itself while this rank computes.
        startable = [step for step in ready if step.communicates]
        if startable:
            actions += [Action("start", step) for step in startable]
            going.update((step.name, step) for step in startable)
            pending = [step for step in pending if step.name not in going]
        elif ready:
            actions.append(Action("compute", ready[0]))
            done.add(ready[0].name)
            pending.remove(ready[0])
        else:
            following = next(
                step for step in pending if all(name in done or name in going for name in needs[step.name])
            )
            for name in needs[following.name]:
                if name in going:
                    actions.append(Action("wait", going.pop(name)))
                    done.add(name)
    return actions + [Action("wait", step) for step in going.values()]
