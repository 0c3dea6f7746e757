"""Collectives of float32 data that travel in fewer bits: quantise, exchange, dequantise, each with its own time.

all_reduce and reduce never add in few bits: pieces are quantised and sent to the rank that owns them, unpacked and
added in float32 there; the sum is quantised once more and gathered, by all ranks or by the root. A value passes one
quantisation a rank and one of the sum.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.bench.comms.data import PERIOD, tile
from stepscope.bench.comms.encodings import Coder, bound_error, find_encoding
from stepscope.bench.comms.group import Call, Group, UnsupportedCallError
from stepscope.bench.comms.layouts import parse_layout
from stepscope.bench.comms.operations import Shape, find_operation
from stepscope.bench.comms.options import read_options
from stepscope.bench.comms.trial import Facts, Room, idle
from stepscope.core.errors import UsageError
from stepscope.measure import Device
from stepscope.records import Case, Notice, Score
from stepscope.records.kinds import CollectiveObserved, CollectiveSpec

if TYPE_CHECKING:
    import torch

OPERATIONS = ("all_reduce", "reduce", "all_to_all")
QUANTISE, EXCHANGE, DEQUANTISE = "quantise", "exchange", "dequantise"
FLOAT_BYTES = 4
ADDING = 2.0**-23
"""What one addition in float32 may be off, relative to the values, with room to spare."""


def require_wire_sense(operation: str, options: CollectiveSpec, wire: str) -> None:
    """What has no quantised form is refused, never measured as something else."""
    find_encoding(wire)
    rules = [
        (operation not in OPERATIONS, "--wire", f"{operation} has no quantised form: {', '.join(OPERATIONS)} have"),
        (options.dtype != "float32", "--dtype", "what is quantised is float32"),
        (options.reduction != "sum", "--reduction", "quantised pieces are added, nothing else"),
        (options.mode != "blocking", "--mode", "a quantised collective is several steps, each of which waits"),
        (options.coalesce > 1, "--coalesce", "quantised pieces travel as one call a step"),
        (options.placement == "in_place", "--placement", "the result of a quantised collective has its own place"),
        (options.form != "tensor", "--form", "quantised pieces travel as one tensor"),
    ]
    for broken, where, message in rules:
        if broken:
            raise UsageError(message, hint="leave --wire or the other option out", where=where)


# Data: random numbers, since whole ones would pass some encodings unharmed


def make_normals(seed: int, member: int, start: int, count: int, device: str = "cpu") -> torch.Tensor:
    """What `member` puts in at the places from `start` on: standard normal, the same on every rank."""
    return tile(_normal_table(seed, member), start, count).to(device)


@lru_cache(maxsize=64)
def _normal_table(seed: int, member: int) -> torch.Tensor:
    import torch

    source = torch.Generator().manual_seed(seed * 1_000_003 + member)
    return torch.randn(PERIOD, generator=source)


# The parts of a call and their times


class Laps:
    """Times of named parts, one value a call: by the device's clock where it has one, else by the host's."""

    def __init__(self, device: Device, names: tuple[str, ...]) -> None:
        self._device, self._names = device, names
        self._marks: list[tuple[str, Any]] = []
        self.times_s: dict[str, list[float]] = {}
        self.forget()

    def _mark(self) -> Any:
        return self._device.mark() if self._device.has_events else time.perf_counter_ns()

    def begin(self) -> None:
        self.settle()
        self._marks.append(("", self._mark()))

    def end(self, name: str) -> None:
        """What was done since the last mark was `name`; a part may come several times."""
        self._marks.append((name, self._mark()))

    def settle(self) -> None:
        """Marks become times; on a device that has come to the end of the call."""
        if not self._marks:
            return
        took_s = dict.fromkeys(self._names, 0.0)
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            took_s[name] += self._elapsed_s(before, after)
        for name, value in took_s.items():
            self.times_s[name].append(value)
        self._marks = []

    def _elapsed_s(self, before: Any, after: Any) -> float:
        return self._device.elapsed_s(before, after) if self._device.has_events else (after - before) * 1e-9

    def forget(self) -> None:
        self._marks = []
        self.times_s = {name: [] for name in self._names}


class Data(NamedTuple):
    """Of one rank, one row a piece."""

    input: torch.Tensor
    result: torch.Tensor
    expected: torch.Tensor
    """Float64, exact."""
    bound: torch.Tensor
    """How far off each element of the result may be."""


class WireTrial:
    operations = burst = places = 1
    iterations = 1

    def __init__(self, case: Case, room: Room) -> None:
        self.operation, self.options = read_options(case)
        self.encoding = find_encoding(str(self.options.wire))
        require_wire_sense(self.operation.name, self.options, self.encoding.name)
        if room.world.backend == "fake":
            raise UnsupportedCallError("the fake backend plays no quantised collectives", hint="--backend gloo")
        groups = [room.group(ranks) for ranks in parse_layout(self.options.groups, room.world.size)]
        chosen = groups if self.options.group is None else [groups[self.options.group]]
        largest = max(chosen, key=lambda group: len(group.ranks))
        self._group: Group = next((group for group in chosen if group.me is not None), largest)
        self._largest = len(largest.ranks)
        self.judge = largest.ranks[self.options.root]
        self.active = self._group.me is not None
        self.device: Device = room.device
        self._members = len(self._group.ranks)
        self.synchronises = False  # every call is a lap: none can be left out
        self._seed = zlib.crc32(f"{case.key}/{self._group.ranks}".encode()) & 0xFFFF
        self._laps = Laps(room.device, (QUANTISE, EXCHANGE, DEQUANTISE))
        self._errors: dict[str, float] = {}
        self._data: Data | None = None
        self.body: Callable[[], object] = idle

    @property
    def _adds(self) -> bool:
        return self.operation.reduces

    @property
    def _receives(self) -> bool:
        """Whether this rank ends with a result."""
        return not self.operation.rooted or self._group.me == self.options.root

    @property
    def _chunk(self) -> int:
        """Values of one piece."""
        return self._chunk_of(self._members)

    def _chunk_of(self, members: int) -> int:
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
        import torch

        device, rows, count = self.device.name, self._members, self._chunk
        assert self._group.me is not None
        given = make_normals(self._seed, self._group.me, 0, rows * count, device).view(rows, count)
        self._data = Data(given, torch.empty(rows if self._receives else 0, count, device=device), *self._expect())
        self.body = self._make_reduction(self._data) if self._adds else self._make_all_to_all(self._data)

    def _make_rows(self, rows: int) -> torch.Tensor:
        import torch

        return torch.zeros(rows, self.encoding.wire_bytes(self._chunk), dtype=torch.uint8, device=self.device.name)

    def _bind(self, name: str, given: torch.Tensor, got: torch.Tensor) -> Callable[[], object]:
        operation, root = find_operation(name), self.options.root
        elements = self._members * self.encoding.wire_bytes(self._chunk)
        traffic = operation.plan(Shape(self._members, elements, root))
        call = Call(operation=operation, traffic=traffic, input=given.view(-1), output=got.view(-1), root=root)
        return self._group.bind([call]).run

    def _make_all_to_all(self, data: Data) -> Callable[[], object]:
        sent, received = self._make_rows(self._members), self._make_rows(self._members)
        exchange, laps = self._bind("all_to_all", sent, received), self._laps
        coder = Coder(self.encoding, self._members, self._chunk, self.device.name)

        def body() -> None:
            laps.begin()
            coder.encode(data.input, sent)
            laps.end(QUANTISE)
            exchange()
            laps.end(EXCHANGE)
            coder.decode(received, data.result)
            laps.end(DEQUANTISE)

        return body

    def _make_reduction(self, data: Data) -> Callable[[], object]:
        import torch

        device, rows, count, receives = self.device.name, self._members, self._chunk, self._receives
        sent, received, gathered, packed = (self._make_rows(n) for n in (rows, rows, rows if receives else 0, 1))
        pieces, total = torch.empty(rows, count, device=device), torch.empty(1, count, device=device)
        collect = "gather" if self.operation.rooted else "all_gather"
        scatter, gather = self._bind("all_to_all", sent, received), self._bind(collect, packed, gathered)
        coder, sum_coder = Coder(self.encoding, rows, count, device), Coder(self.encoding, 1, count, device)
        laps = self._laps

        def body() -> None:
            laps.begin()
            coder.encode(data.input, sent)
            laps.end(QUANTISE)
            scatter()
            laps.end(EXCHANGE)
            coder.decode(received, pieces)
            torch.sum(pieces, 0, keepdim=True, out=total)
            laps.end(DEQUANTISE)
            sum_coder.encode(total, packed)
            laps.end(QUANTISE)
            gather()
            laps.end(EXCHANGE)
            if receives:
                coder.decode(gathered, data.result)
            laps.end(DEQUANTISE)

        return body

    def _expect(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact result in float64, and how far off each element may be."""
        import torch

        rows = self._members if self._receives else 0
        expected = torch.empty(rows, self._chunk, dtype=torch.float64, device=self.device.name)
        bound = torch.empty_like(expected)
        for row in range(rows):
            expected[row], bound[row] = self._expect_row(row)
        return expected, bound

    def _expect_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        device, count = self.device.name, self._chunk
        if not self._adds:
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
        rounds = 2 if self._adds else 1
        bus_bytes = rounds * (members - 1) * row_bytes
        collect = "gather" if self.operation.rooted else "all_gather"
        composed = f"all_to_all, sum in float32, {collect}" if self._adds else None
        observed = CollectiveObserved(
            size_bytes=size_bytes,
            count=members * count if self._adds else count,
            bus_factor=bus_bytes / size_bytes,
            members=members,
            wire_bytes=members * row_bytes,
            composed=composed,
            error_max=self._errors.get("error_max"),
            error_l2=self._errors.get("error_l2"),
            error_bound=self._errors.get("error_bound"),
        )
        return Facts(
            score=Score(unit="GB/s", work=bus_bytes), observed=observed, notices=self._find_notices(size_bytes)
        )

    def _find_notices(self, size_bytes: int) -> list[Notice]:
        if size_bytes == self.options.size_bytes:
            return []
        asked, got = f"{self.options.size_bytes:,} bytes", f"{size_bytes:,}"
        message = f"{asked} do not divide evenly among {self._largest} ranks: {got} were measured"
        return [Notice(kind="rounded", message=message)]

    def further_s(self) -> dict[str, list[float]]:
        self._laps.settle()
        return self._laps.times_s

    def own_s(self) -> list[float] | None:
        return None

    def forget(self) -> None:
        self._laps.forget()

    def close(self) -> None:
        self._data, self.body = None, idle
