"""One step of a job on one rank."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.group import Bound, Waitable
from stepscope.bench.comms.kernels import EmbeddingTables, make_matmuls, matmul_bytes
from stepscope.bench.comms.patterns.registry import read_case
from stepscope.bench.comms.patterns.sequence import Step, busiest_rank_bytes, make_program
from stepscope.bench.comms.trial import Facts, Room, Stopwatch, Trial, TrialPart
from stepscope.records import Case, Notice, Score
from stepscope.records.kinds import PatternLookup, PatternObserved, PatternStep

STEP, WAIT = "step:", "wait:"
"""Further times of a case are called so, followed by the step's name: from its start to its end as this rank saw it,
and how long of that the rank stood waiting for it."""

Moments = tuple[Any, Any, Any]
"""Moments of one step: started, waited for (None: it computes), done."""


def describe_sequence(steps: list[Step]) -> list[PatternStep]:
    """For readers, who know no builders: each communicating step."""
    return [
        PatternStep(
            name=step.name, operation=str(step.operation), size_bytes=step.size_bytes, bus_bytes=round(step.bus_bytes)
        )
        for step in steps
        if step.communicates
    ]


class PatternTrial(Trial):
    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room)
        pattern, options, overlap = read_case(case)
        self._steps = pattern.make_steps(options, room.world.size)
        self._program = make_program(self._steps, room.world.rank, overlap=overlap)
        self.active = bool(self._program)
        self._exchanges = self._make_exchanges(case.key)
        self._tables = {
            step.name: EmbeddingTables(step.lookups, room.world.rank)
            for step in self._steps
            if step.lookups is not None and step.group_of(room.world.rank) is not None
        }
        self._watch = Stopwatch(room.device)
        self._begun: dict[str, Any] = {}
        self._taken: list[dict[str, Moments]] = []
        """Moments of each step, one entry per call of `body`, until they are known as seconds."""
        parts = [f"{kind}{name}" for name in self._exchanges for kind in (STEP, WAIT)]
        self.times_s = {name: [] for name in (*parts, *(f"{STEP}{name}" for name in self._tables))}
        self._wrong: Counter[str] = Counter()
        self._composed: dict[str, str] = {}

    def _make_exchanges(self, key: str) -> dict[str, Exchange]:
        """Every rank asks for every group, in the order of the steps; each step has data of its own."""
        found: dict[str, Exchange] = {}
        rank = self.room.world.rank
        for number, step in enumerate(self._steps):
            if not step.communicates:
                continue
            groups = {ranks: self.room.group(ranks) for ranks in step.groups}
            mine = step.group_of(rank)
            if mine is not None:
                found[step.name] = Exchange(
                    step.make_operation(),
                    step.make_shape(),
                    groups[mine],
                    device=self.room.device.name,
                    dtype=step.dtype,
                    seed=zlib.crc32(f"{key}/{step.name}/{mine}".encode()) & 0xFFFF,
                    tag=number,
                )
        return found

    def needed_bytes(self) -> int:
        """What values are made from is needed by one step at a time only."""
        making = [self._making_bytes(step) for step in self._steps if step.name in self._exchanges]
        kept = super().needed_bytes() - sum(making)
        return kept + max(making, default=0) + matmul_bytes(self._find_flops(), self.room.device.name)

    def parts(self) -> list[TrialPart]:
        return [*self._exchanges.values(), *self._tables.values()]

    def _making_bytes(self, step: Step) -> int:
        """The part of `Exchange.needed_bytes` that is free again when the step's values are made."""
        group, traffic = step.group_of(self.room.world.rank), self._exchanges[step.name].traffic
        assert group is not None
        me = group.index(self.room.world.rank)
        return max(traffic.inputs[me], traffic.outputs[me]) * 2 * DTYPE_BYTES["float64"]

    def open(self) -> None:
        if not self.active:
            return
        bounds = {name: exchange.bind() for name, exchange in self._exchanges.items()}
        self._composed = {name: bound.composed for name, bound in bounds.items() if bound.composed}
        work = {flops: make_matmuls(flops, self.room.device.name) for flops in self._find_flops()}
        going: dict[str, list[Waitable]] = {}
        actions: list[Callable[[], object]] = []
        for kind, step in self._program:
            if kind == "start":
                actions.append(partial(self._start, step.name, bounds[step.name], going))
            elif kind == "wait":
                actions.append(partial(self._wait, step.name, going))
            else:
                if step.flops:
                    actions.append(work[step.flops])
                if step.name in self._tables:
                    look_up = self._tables[step.name].open(self.room.device.name)
                    actions.append(partial(self._look_up, step.name, look_up))
        self.body = partial(self._do, actions)

    def _find_flops(self) -> set[float]:
        """Operations of the steps that compute here: one set of matrices serves all of a size."""
        return {action.step.flops for action in self._program if action.step.flops}

    def _do(self, actions: list[Callable[[], object]]) -> None:
        self._taken.append({})
        for act in actions:
            act()

    def _start(self, name: str, bound: Bound, going: dict[str, list[Waitable]]) -> None:
        self._begun[name] = self._watch.now()
        going[name] = list(bound.start())

    def _wait(self, name: str, going: dict[str, list[Waitable]]) -> None:
        before = self._watch.now()
        for work in going.pop(name):
            work.wait()
        self._taken[-1][name] = (self._begun[name], before, self._watch.now())

    def _look_up(self, name: str, look_up: Callable[[], None]) -> None:
        before = self._watch.now()
        look_up()
        self._taken[-1][name] = (before, None, self._watch.now())

    def refresh(self) -> None:
        self.settle()
        super().refresh()

    def settle(self) -> None:
        """Moments on a device's time line can be read only when it has passed them: between samples."""
        for moments in self._taken:
            for name, (start, waiting, stop) in moments.items():
                self.times_s[f"{STEP}{name}"].append(self._watch.between_s(start, stop))
                if waiting is not None:
                    self.times_s[f"{WAIT}{name}"].append(self._watch.between_s(waiting, stop))
        self._taken.clear()

    def count_wrong(self) -> int | None:
        parts: dict[str, TrialPart] = {**self._exchanges, **self._tables}
        counts = {name: part.count_wrong() for name, part in parts.items()}
        self._wrong += Counter({name: count for name, count in counts.items() if count})
        known = [count for count in counts.values() if count is not None]
        return sum(known) if known else None

    def facts(self) -> Facts:
        moved = busiest_rank_bytes(self._steps, self.room.world.size)
        sequence = describe_sequence(self._steps)
        # Lookups of the busiest rank, which every rank can tell.
        lookups = [
            PatternLookup(
                name=step.name, tables=max(one.tables), rows=one.rows, moved_bytes=max(one.list_moved_bytes())
            )
            for step in self._steps
            if (one := step.lookups) is not None
        ]
        observed = PatternObserved(
            steps=len(sequence),
            busiest_rank_bytes=round(moved),
            sequence=sequence,
            composed="; ".join(dict.fromkeys(self._composed.values())) or None,
            lookups=lookups,
        )
        named = ", ".join(f"{name} ({count})" for name, count in self._wrong.items())
        message = f"wrong elements on rank {self.room.world.rank}: {named}"
        notices = [Notice(kind="wrong_steps", message=message)] if named else []
        return Facts(score=Score(unit="GB/s", work=moved) if moved else None, observed=observed, notices=notices)

    def forget(self) -> None:
        self._taken.clear()
        super().forget()
