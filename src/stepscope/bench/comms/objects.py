"""Collectives of Python objects, as training loops use them for metrics and checkpoints.

The library's call is timed whole. Pickling and unpickling the same objects is timed again after it, which tells how
much of the call is serialisation.
"""

from __future__ import annotations

import pickle
import random
import time
from functools import lru_cache
from itertools import pairwise
from typing import Any

from stepscope.bench.comms.cases import make_shape, read_options
from stepscope.bench.comms.exchange import make_seed, note_rounding
from stepscope.bench.comms.group import ObjectCall
from stepscope.bench.comms.trial import Facts, Room, Trial, idle
from stepscope.records import Case, Score
from stepscope.records.kinds import CollectiveObserved

SERIALISE, EXCHANGE, DESERIALISE = "serialise", "exchange", "deserialise"
PERIOD = 4099
"""Values of an object repeat after so many."""
FLOAT_BYTES, LONGEST_REST = 9, 255
"""What a float takes in a pickle; bytes that fill up what is left."""
KEPT_PER_BYTE = 8
"""Memory per pickled byte: two sets of objects to give and to expect, and what is received."""


def make_object(seed: int, count: int, rest: int) -> dict[str, Any]:
    """A dictionary with a list of floats, as losses and metrics are; other seeds give other values."""
    draw = random.Random(seed)
    table = [draw.random() for _ in range(min(count, PERIOD) + 1)]
    repeats = -(-count // len(table))
    return {"seed": table[0] + seed, "values": (table * repeats)[:count], "rest": bytes(rest)}


def count_pickled(count: int, rest: int) -> int:
    return len(pickle.dumps(make_object(0, count, rest)))


@lru_cache(maxsize=64)
def plan_object(size_bytes: int) -> tuple[int, int]:
    """Floats and further bytes of the object that has this size when pickled; the smallest there is, if none has."""
    count, rest = max(0, (size_bytes - count_pickled(0, 0)) // FLOAT_BYTES), 0
    for _ in range(16):
        lacking = size_bytes - count_pickled(count, rest)
        if not lacking:
            break
        if 0 < lacking <= LONGEST_REST - rest:
            rest += lacking
        else:  # a list is cut into batches and a pickle into frames, which have bytes of their own
            count, rest = max(0, count + lacking // FLOAT_BYTES), 0
    return count, rest


class ObjectTrial(Trial):
    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room, (SERIALISE, EXCHANGE, DESERIALISE))
        self.operation, self.options = read_options(case)
        self._chosen = room.choose_groups(self.options.groups, self.options.group)
        self._group, ranks = self._chosen.mine, self._chosen.largest.ranks
        self.active = self._group.me is not None
        self._largest = self.operation.plan(make_shape(self.options, len(ranks)))
        self._traffic = self.operation.plan(make_shape(self.options, len(self._group.ranks)))
        self.judge = ranks[self.operation.judge(make_shape(self.options, len(ranks)))]
        self._seed, self._turn = make_seed(case, self._group), 0
        self._calls: list[ObjectCall] = []
        self._pickled: list[list[bytes]] = []
        """What this member unpickles, for each set of objects."""
        self._received: list[Any] = []
        self._own_s: list[float] = []

    def needed_bytes(self) -> int:
        me = self._group.me
        return KEPT_PER_BYTE * (self._traffic.inputs[me] + self._traffic.outputs[me]) if me is not None else 0

    def open(self) -> None:
        if not self.active:
            return
        self._calls = [self._make_call(turn) for turn in range(2)]
        receives = self._group.me != self.options.root or self.operation.name != "broadcast_object_list"
        self._pickled = [[pickle.dumps(one) for one in call.expected if receives] for call in self._calls]
        self.body = self._exchange

    def _make_call(self, turn: int) -> ObjectCall:
        """Every member's objects are known to every other: a receiver knows what it must get."""
        me, root, name = self._group.me or 0, self.options.root, self.operation.name
        count, rest = plan_object(self._traffic.contribution)
        made = [make_object(self._seed + 2 * member + turn, count, rest) for member in range(len(self._group.ranks))]
        if name == "scatter_object_list":
            return ObjectCall(name, made if me == root else [], root, [made[me]])
        if name == "broadcast_object_list":
            return ObjectCall(name, [made[root]] if me == root else [], root, [made[root]])
        gets = not self.operation.rooted or me == root
        return ObjectCall(name, [made[me]], root, made if gets else [])

    def _exchange(self) -> None:
        call, pickled = self._calls[self._turn], self._pickled[self._turn]
        moments_s = [time.perf_counter()]
        self._received = self._group.exchange_objects(call)
        self.device.synchronize()
        moments_s.append(time.perf_counter())
        for one in call.given:
            pickle.dumps(one)
        moments_s.append(time.perf_counter())
        for content in pickled:
            pickle.loads(content)
        moments_s.append(time.perf_counter())
        own_s, serialise_s, deserialise_s = (after - before for before, after in pairwise(moments_s))
        self._own_s.append(own_s)
        self.times_s[SERIALISE].append(serialise_s)
        self.times_s[EXCHANGE].append(max(0.0, own_s - serialise_s - deserialise_s))
        self.times_s[DESERIALISE].append(deserialise_s)

    def refresh(self) -> None:
        self._turn, self._received = 1 - self._turn, []

    def count_wrong(self) -> int | None:
        """Objects that are not equal to those that were given."""
        if not self.active or not self._calls[self._turn].expected:
            return None
        expected = self._calls[self._turn].expected
        missing = abs(len(expected) - len(self._received))
        return missing + sum(bool(got != wanted) for got, wanted in zip(self._received, expected, strict=False))

    def facts(self) -> Facts:
        traffic, pickled = self._largest, count_pickled(*plan_object(self._largest.contribution))
        objects = traffic.size // traffic.contribution
        size_bytes, factor = objects * pickled, traffic.bus / traffic.size
        observed = CollectiveObserved(
            size_bytes=size_bytes, count=pickled, bus_factor=factor, members=len(self._chosen.largest.ranks),
            groups=self._chosen.at_once,
        )  # fmt: skip
        reason = f"are not the size of {objects} equal pickled objects: {{}} were measured"
        notices = note_rounding(self.options.size_bytes, size_bytes, reason)
        return Facts(score=Score(unit="GB/s", work=size_bytes * factor), observed=observed, notices=notices)

    def own_s(self) -> list[float]:
        return self._own_s

    def forget(self) -> None:
        super().forget()
        self._own_s.clear()

    def close(self) -> None:
        self._calls, self._pickled, self._received, self.body = [], [], [], idle
