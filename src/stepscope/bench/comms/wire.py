"""Collectives of float32 data that travel in fewer bits: quantise, exchange, dequantise, each with its own time.

all_reduce and reduce never add in few bits: pieces are quantised and sent to the rank that owns them, unpacked and
added in float32 there; the sum is quantised once more and gathered, by all ranks or by the root. A value passes one
quantisation a rank and one of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from stepscope.bench.comms.cases import read_options, require_wire_sense
from stepscope.bench.comms.data import PERIOD, tile
from stepscope.bench.comms.encodings import Coder, bound_error, find_encoding
from stepscope.bench.comms.exchange import make_seed, note_rounding
from stepscope.bench.comms.group import Call, UnsupportedCollectiveError
from stepscope.bench.comms.operations import CollectiveShape, find_operation
from stepscope.bench.comms.trial import Facts, Room, Stopwatch, Trial, idle
from stepscope.core.lazy_torch import torch
from stepscope.measure import Device
from stepscope.records import Case, Score
from stepscope.records.kinds import CollectiveObserved

QUANTISE, EXCHANGE, DEQUANTISE = "quantise", "exchange", "dequantise"
FLOAT_BYTES = 4
ADDING = 2.0**-23
"""What one addition in float32 may be off, relative to the values, with room to spare."""


# Data: random numbers, since whole ones would pass some encodings unharmed


def make_normals(seed: int, member: int, start: int, count: int, device: str = "cpu") -> torch.Tensor:
    """What `member` puts in at the places from `start` on: standard normal, the same on every rank."""
    return tile(_normal_table(seed, member), start, count).to(device)


@lru_cache(maxsize=64)
def _normal_table(seed: int, member: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed * 1_000_003 + member)
    return torch.randn(PERIOD, generator=source)


# The parts of a call and their times


class Laps:
    """Times of named parts, one value per call."""

    def __init__(self, device: Device, times_s: dict[str, list[float]]) -> None:
        self._watch, self._times_s = Stopwatch(device), times_s
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        self.settle()
        self._marks.append(("", self._watch.now()))

    def end(self, name: str) -> None:
        """What was done since the last mark was `name`; a part may come several times."""
        self._marks.append((name, self._watch.now()))

    def settle(self) -> None:
        """Marks become times; on a device that has come to the end of the call."""
        if not self._marks:
            return
        took_s = dict.fromkeys(self._times_s, 0.0)
        for (_, before), (name, after) in pairwise(self._marks):
            took_s[name] += self._watch.between_s(before, after)
        for name, value in took_s.items():
            self._times_s[name].append(value)
        self._marks = []

    def forget(self) -> None:
        self._marks = []


class Data(NamedTuple):
    """One rank's data, one row per piece."""

    input: torch.Tensor
    result: torch.Tensor
    expected: torch.Tensor
    """Float64, exact."""
    bound: torch.Tensor
    """How far off each element of the result may be."""


class WireTrial(Trial):
    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room, (QUANTISE, EXCHANGE, DEQUANTISE))
        self.operation, self.options = read_options(case)
        self.encoding = find_encoding(str(self.options.wire))
        require_wire_sense(self.operation.name, self.options, self.encoding.name)
        if room.world.backend == "fake":
            raise UnsupportedCollectiveError(
                "quantised collectives cannot run on the fake backend", hint="--backend gloo"
            )
        chosen = room.choose_groups(self.options.groups, self.options.group)
        self._group, self._largest = chosen.mine, len(chosen.largest.ranks)
        self.judge = chosen.largest.ranks[self.options.root]
        self.active = self._group.me is not None
        self._members = len(self._group.ranks)
        self._chunk = self._chunk_of(self._members)
        self._receives = not self.operation.rooted or self._group.me == self.options.root
        """Whether this rank ends with a result."""
        self._seed = make_seed(case, self._group)
        self._laps = Laps(room.device, self.times_s)
        self._errors: dict[str, float] = {}
        self._data: Data | None = None

    def _chunk_of(self, members: int) -> int:
        """Values of one piece."""
        return max(1, self.options.size_bytes // FLOAT_BYTES // members)

    def needed_bytes(self) -> int:
        if not self.active:
            return 0
        count, rows = self._chunk, self._members
        wire = 4 * rows * self.encoding.wire_bytes(count)
        kept = rows * count * (3 * FLOAT_BYTES + 2 * 8)  # input, unpacked pieces, result; expected and bound in float64
        return kept + wire + 2 * Coder.needed_bytes(self.encoding, rows, count) + 8 * 8 * count

    def open(self) -> None:
        if not self.active:
            return
        device, rows, count = self.device.name, self._members, self._chunk
        assert self._group.me is not None
        given = make_normals(self._seed, self._group.me, 0, rows * count, device).view(rows, count)
        self._data = Data(given, torch.empty(rows if self._receives else 0, count, device=device), *self._expect())
        self.body = self._make_body(self._data)

    def _make_rows(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, self.encoding.wire_bytes(self._chunk), dtype=torch.uint8, device=self.device.name)

    def _bind(self, name: str, given: torch.Tensor, got: torch.Tensor) -> Callable[[], object]:
        operation, root = find_operation(name), self.options.root
        elements = self._members * self.encoding.wire_bytes(self._chunk)
        traffic = operation.plan(CollectiveShape(self._members, elements, root))
        call = Call(operation=operation, traffic=traffic, input=given.view(-1), output=got.view(-1), root=root)
        return self._group.bind([call]).run

    def _make_body(self, data: Data) -> Callable[[], None]:
        """Each action counts as the part it stands with. Scratch memory is taken here, and once."""
        device, rows, count, encoding = self.device.name, self._members, self._chunk, self.encoding
        sent, received, coder = self._make_rows(rows), self._make_rows(rows), Coder(encoding, rows, count, device)
        actions: list[tuple[str, Callable[[], object]]] = [
            (QUANTISE, partial(coder.encode, data.input, sent)),
            (EXCHANGE, self._bind("all_to_all", sent, received)),
        ]
        if self.operation.reduces:
            gathered, packed = self._make_rows(rows if self._receives else 0), self._make_rows(1)
            pieces, total = torch.empty(rows, count, device=device), torch.empty(1, count, device=device)
            actions += [
                (DEQUANTISE, partial(coder.decode, received, pieces)),
                (DEQUANTISE, partial(torch.sum, pieces, 0, keepdim=True, out=total)),
                (QUANTISE, partial(Coder(encoding, 1, count, device).encode, total, packed)),
                (EXCHANGE, self._bind("gather" if self.operation.rooted else "all_gather", packed, gathered)),
            ]
            received = gathered
        if self._receives:
            actions.append((DEQUANTISE, partial(coder.decode, received, data.result)))
        laps = self._laps

        def body() -> None:
            laps.begin()
            for part, act in actions:
                act()
                laps.end(part)

        return body

    def _expect(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact result in float64, and how far off each element may be."""
        rows = self._members if self._receives else 0
        expected = torch.empty(rows, self._chunk, dtype=torch.float64, device=self.device.name)
        bound = torch.empty_like(expected)
        for row in range(rows):
            expected[row], bound[row] = self._expect_row(row)
        return expected, bound

    def _expect_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        device, count = self.device.name, self._chunk
        if not self.operation.reduces:
            assert self._group.me is not None
            exact = make_normals(self._seed, row, self._group.me * count, count, device).double()
            return exact, bound_error(self.encoding, exact.abs())
        exact = make_normals(self._seed, 0, row * count, count, device).double()
        magnitude, error = exact.abs(), bound_error(self.encoding, exact.abs())
        for member in range(1, self._members):
            value = make_normals(self._seed, member, row * count, count, device).double()
            exact += value
            magnitude += value.abs()
            error += bound_error(self.encoding, value.abs())
        error += self._members * ADDING * (magnitude + error)
        # The sum that is quantised is off by that much already, and so is the scale of its block.
        return exact, error + bound_error(self.encoding, exact.abs() + error)

    def refresh(self) -> None:
        """The input is never written to."""
        if self._data is not None:
            self._data.result.fill_(float("nan"))

    def count_wrong(self) -> int | None:
        """Elements beyond their bound; the errors of the last look are kept."""
        if self._data is None or not self._receives:
            return None
        wrong, largest, error_square, exact_square = 0, 0.0, 0.0, 0.0
        for got, exact, bound in zip(self._data.result, self._data.expected, self._data.bound, strict=True):
            error = (got.double() - exact).abs()
            wrong += int((~(error <= bound)).sum())  # so put, NaN is wrong: it was never written
            largest = max(largest, float(error.max()))
            error_square += float(error.square().sum())
            exact_square += float(exact.square().sum())
        errors = {
            "error_max": largest,
            "error_l2": math.sqrt(error_square / exact_square) if exact_square else 0.0,
            "error_bound": float(self._data.bound.max()),
        }
        self._errors = {name: value for name, value in errors.items() if math.isfinite(value)}
        return wrong

    def facts(self) -> Facts:
        """By the largest group; the errors are those of the rank that is asked."""
        members, count = self._largest, self._chunk_of(self._largest)
        size_bytes, row_bytes = members * count * FLOAT_BYTES, self.encoding.wire_bytes(count)
        rounds = 2 if self.operation.reduces else 1
        bus_bytes = rounds * (members - 1) * row_bytes
        collect = "gather" if self.operation.rooted else "all_gather"
        composed = f"all_to_all, sum in float32, {collect}" if self.operation.reduces else None
        observed = CollectiveObserved(
            size_bytes=size_bytes,
            count=members * count if self.operation.reduces else count,
            bus_factor=bus_bytes / size_bytes,
            members=members,
            wire_bytes=members * row_bytes,
            composed=composed,
        )
        reason = f"do not divide evenly among {members} ranks: {{}} were measured"
        notices = note_rounding(self.options.size_bytes, size_bytes, reason)
        return Facts(
            score=Score(unit="GB/s", work=bus_bytes),
            observed=msgspec.structs.replace(observed, **self._errors),
            notices=notices,
        )

    def settle(self) -> None:
        self._laps.settle()

    def forget(self) -> None:
        super().forget()
        self._laps.forget()

    def close(self) -> None:
        self._data, self.body = None, idle
