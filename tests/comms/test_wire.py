"""Quantised collectives: encodings within their bounds, whole exchanges between threads, and real gloo ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from comms_runs import cases_of, measure_cases
from hypothesis import given
from hypothesis import strategies as st

from fake_device import FakeDevice
from stepscope.bench.comms.encodings import BLOCK, ENCODINGS, Coder, Encoding, bound_error, find_encoding
from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.group import Bound, Call, UnsupportedCollectiveError
from stepscope.bench.comms.producer import make_trial
from stepscope.bench.comms.trial import Room
from stepscope.bench.comms.wire import Laps, WireTrial, make_normals, require_wire_sense
from stepscope.core.errors import UsageError
from stepscope.launch import Heartbeat
from stepscope.measure import CpuDevice, FakeClock
from stepscope.records import Case
from stepscope.records.kinds import CollectiveSpec

# Encodings


def there_and_back(encoding: Encoding, values: torch.Tensor) -> torch.Tensor:
    rows, count = values.shape
    coder = Coder(encoding, rows, count, "cpu")
    wire = torch.full((rows, encoding.wire_bytes(count)), 255, dtype=torch.uint8)
    back = torch.empty_like(values)
    coder.encode(values, wire)
    coder.decode(wire, back)
    return back


def check_bound(encoding: Encoding, values: torch.Tensor) -> None:
    back = there_and_back(encoding, values)
    for row, got in zip(values, back, strict=True):
        error = (got.double() - row.double()).abs()
        assert bool((error <= bound_error(encoding, row.double().abs())).all())


small = st.floats(-65504, 65504, width=32)
any_size = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.parametrize("name", ENCODINGS)
@given(data=st.data())
def test_what_comes_back_keeps_its_bound(name: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(small if name == "fp16" else any_size, min_size=1, max_size=40))
    repeats = data.draw(st.integers(1, 16))
    check_bound(ENCODINGS[name], torch.tensor(values, dtype=torch.float32).repeat(2, repeats))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("count", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1001])
@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e3])
def test_random_values_of_any_length_keep_their_bound(name: str, count: int, spread: float) -> None:
    check_bound(ENCODINGS[name], spread * torch.randn(3, count, generator=torch.Generator().manual_seed(count)))


@pytest.mark.parametrize("name", ENCODINGS)
def test_zeros_and_the_smallest_numbers(name: str) -> None:
    assert torch.equal(there_and_back(ENCODINGS[name], torch.zeros(2, 300)), torch.zeros(2, 300))
    check_bound(ENCODINGS[name], torch.full((1, 300), 2.0**-149))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_block_does_not_spoil_its_neighbours(name: str) -> None:
    values = torch.full((1, 2 * BLOCK), 1e-3)
    values[0, 0] = 1e6
    back = there_and_back(ENCODINGS[name], values)
    assert torch.allclose(back[0, BLOCK:], values[0, BLOCK:], rtol=0.07)
    assert back[0, 0] == pytest.approx(1e6)


def test_bytes_on_the_wire_count_scales() -> None:
    assert [ENCODINGS[name].wire_bytes(1000) for name in ("fp16", "bf16", "fp8", "int8")] == [2000, 2000, 1016, 1016]
    assert ENCODINGS["int8"].wire_bytes(1) == 4 + 4
    assert ENCODINGS["int8"].wire_bytes(257) == 260 + 8
    assert [ENCODINGS[name].wire_bytes(1000) for name in ("int4", "int2")] == [500 + 16, 252 + 16]
    assert [ENCODINGS["int4"].wire_bytes(count) for count in (1, 7, 8, 9)] == [8, 8, 8, 12]
    with pytest.raises(UsageError, match="int3"):
        find_encoding("int3")


@pytest.mark.parametrize(("name", "largest"), [("int4", 7), ("int2", 1)])
def test_every_whole_number_in_range_comes_back_from_any_place_of_a_byte(name: str, largest: int) -> None:
    numbers = torch.arange(-largest, largest + 1, dtype=torch.float32)
    for shift in range(4):
        values = numbers.roll(shift).repeat(2, 40)
        assert torch.equal(there_and_back(ENCODINGS[name], values), values)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_coder_can_be_used_again_and_again(name: str) -> None:
    """What unpacking leaves behind must not move the scale of the next packing."""
    coder, encoding = Coder(ENCODINGS[name], 1, 5, "cpu"), ENCODINGS[name]
    wire, back = torch.zeros(1, encoding.wire_bytes(5), dtype=torch.uint8), torch.empty(1, 5)
    for values in (torch.full((1, 5), 1000.0), torch.full((1, 5), 0.5)):
        coder.encode(values, wire)
        coder.decode(wire, back)
        assert torch.allclose(back, values)


# Exchanges between threads that play ranks


class Meeting:
    """Where the threads hand each other their tensors."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._given = size, threading.Barrier(size, timeout=30), [None] * size

    def share(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        everybody = list(self._given)
        self._barrier.wait()
        return everybody


Harm = Callable[[torch.Tensor, int], None]


class ThreadGroup:
    def __init__(self, meeting: Meeting, rank: int, harm: Harm | None) -> None:
        self.ranks, self.me = tuple(range(meeting.size)), rank
        self._meeting, self._rank, self._harm = meeting, rank, harm
        self._bound = 0

    def bind(self, calls: Sequence[Call]) -> Bound:
        (call,), number = calls, self._bound
        self._bound += 1

        def run() -> None:
            inputs = self._meeting.share(self._rank, call.input.clone())
            if call.operation.name == "all_to_all":
                width = len(call.input) // self._meeting.size
                inputs = [one[self._rank * width : (self._rank + 1) * width] for one in inputs]
            if call.operation.name != "gather" or self.me == call.root:
                call.output.copy_(torch.cat(inputs))
            if self._harm is not None:
                self._harm(call.output, number)

        return Bound(run, list)


class ThreadWorld(FakeWorld):
    backend = "threads"

    def __init__(self, meeting: Meeting, rank: int, harm: Harm | None) -> None:
        super().__init__(meeting.size, rank)
        self._meeting, self._harm = meeting, harm

    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> Any:
        return ThreadGroup(self._meeting, self.rank, self._harm)


class QuietHeartbeat(Heartbeat):
    def __init__(self) -> None: ...

    def tick(self) -> None:
        return

    def beat(self, phase: str, case: str | None = None) -> None: ...


def wire_case(collective: str, wire: str, *, ranks: int, size: int = 40_000, **options: Any) -> Case:
    (case,) = cases_of(collective, ranks=ranks, sizes=(size,), **options)
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, wire=wire))


class Played(msgspec.Struct, frozen=True):
    wrong: int | None
    observed: dict[str, Any]
    times: dict[str, list[float]]
    result: Any


def play(case: Case, *, harm: Harm | None = None, harmed_rank: int = 0) -> list[Played]:
    """One call on every rank, a thread each."""
    meeting = Meeting(case.world_size)

    def be_rank(rank: int) -> Played:
        world = ThreadWorld(meeting, rank, harm if rank == harmed_rank else None)
        trial = make_trial(case, Room(world, CpuDevice(), QuietHeartbeat()))
        assert isinstance(trial, WireTrial)
        assert trial.needed_bytes() > 0
        trial.open()
        trial.body()
        trial.forget()
        trial.refresh()
        trial.body()
        assert trial._data is not None
        played = Played(
            trial.count_wrong(), trial.facts().observed.facts(), trial.further_s(), trial._data.result.clone()
        )
        trial.close()
        return played

    with ThreadPoolExecutor(case.world_size) as threads:
        return list(threads.map(be_rank, range(case.world_size)))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [16, 40_000])
def test_every_element_keeps_its_bound(name: str, collective: str, ranks: int, size: int) -> None:
    played = play(wire_case(collective, name, ranks=ranks, size=size))
    for rank in played:
        assert rank.wrong == 0
        assert 0 <= rank.observed["error_max"] <= rank.observed["error_bound"]
        assert rank.observed["error_max"] > 0 or size == 16  # a block of one value comes back as it was
        assert {len(values) for values in rank.times.values()} == {1}
        assert set(rank.times) == {"quantise", "exchange", "dequantise"}
    if collective == "all_reduce":
        assert all(torch.equal(rank.result, played[0].result) for rank in played)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(("ranks", "root"), [(1, 0), (3, 0), (3, 2)])
def test_a_quantised_reduce_ends_at_the_root_alone_with_what_an_all_reduce_gives(
    name: str, ranks: int, root: int
) -> None:
    played = play(wire_case("reduce", name, ranks=ranks, root=root))
    everywhere = play(wire_case("all_reduce", name, ranks=ranks))
    for rank, one in enumerate(played):
        assert one.wrong == (0 if rank == root else None)
        assert one.result.numel() == (10_000 // ranks * ranks if rank == root else 0)
        assert one.observed["bus_factor"] == everywhere[0].observed["bus_factor"]
        assert one.observed["composed"] == "all_to_all, sum in float32, gather"
    assert played[root].observed["error_l2"] == pytest.approx(everywhere[0].observed["error_l2"], rel=0.2)


@pytest.mark.parametrize(
    ("name", "limit"), [("int4", 0.15), ("fp16", 2**-11), ("bf16", 2**-8), ("int8", 0.01), ("fp8", 2**-4)]
)
def test_the_error_is_that_of_the_encoding(name: str, limit: float) -> None:
    """A relative L2 below what one value may be off, and not by orders of magnitude: the encoding was really used."""
    for rank in play(wire_case("all_to_all", name, ranks=2)):
        assert limit / 20 < rank.observed["error_l2"] < limit


def test_few_bits_never_hold_a_sum_on_its_way() -> None:
    """With eight ranks the error stays that of one quantisation a rank and one of the sum, added at random."""
    (first, *_) = play(wire_case("all_reduce", "int8", ranks=8, size=80_000))
    (two, *_) = play(wire_case("all_reduce", "int8", ranks=2, size=80_000))
    assert first.observed["error_l2"] < 1.5 * two.observed["error_l2"]


def test_facts_count_float_bytes_as_size_and_wire_bytes_on_the_bus() -> None:
    count = 40_000 // 4 // 4
    (one, *_) = play(wire_case("all_reduce", "int8", ranks=4))
    row = count + 4 * math.ceil(count / BLOCK)
    assert one.observed["size_bytes"] == 40_000
    assert one.observed["wire_bytes"] == 4 * row
    assert one.observed["bus_factor"] == pytest.approx(2 * 3 * row / 40_000)
    (one, *_) = play(wire_case("all_to_all", "bf16", ranks=4))
    assert one.observed["bus_factor"] == pytest.approx(3 / 4 / 2)
    assert one.observed["wire_bytes"] == 20_000


def flip_top_bit(place: int, *, only_exchange: int) -> Harm:
    def harm(received: torch.Tensor, number: int) -> None:
        if number == only_exchange:
            received[place] ^= 0x80

    return harm


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("only_exchange", [0, 1])
@pytest.mark.parametrize("place", [2, 1000, 6000])
def test_a_flipped_bit_is_found(name: str, only_exchange: int, place: int) -> None:
    """In a piece before it was added (everybody then has it wrong) and in a sum after."""
    case = wire_case("all_reduce", name, ranks=2)
    played = play(case, harm=flip_top_bit(place, only_exchange=only_exchange))
    assert [rank.wrong for rank in played] == ([1, 1] if only_exchange == 0 else [1, 0])


def test_a_lost_scale_is_found_in_its_whole_block() -> None:
    count = 40_000 // 4 // 2

    def lose(received: torch.Tensor, number: int) -> None:
        received[count : count + 4] = 0

    first, second = play(wire_case("all_to_all", "int8", ranks=2), harm=lose)
    assert first.wrong is not None
    assert BLOCK * 0.9 < first.wrong <= BLOCK
    assert second.wrong == 0


def test_a_result_that_nobody_wrote_is_wrong() -> None:
    case = wire_case("all_to_all", "fp16", ranks=1)
    trial = WireTrial(case, Room(ThreadWorld(Meeting(1), 0, None), CpuDevice(), QuietHeartbeat()))
    trial.open()
    trial.refresh()
    assert trial.count_wrong() == 10_000
    assert "error_l2" not in trial.facts().observed.facts()


def test_data_is_random_known_to_all_and_no_whole_number() -> None:
    first, second = make_normals(1, 0, 0, 100_000), make_normals(1, 1, 0, 100_000)
    assert not torch.equal(first, second)
    assert torch.equal(make_normals(1, 0, 70_000, 10), first[70_000:70_010])
    assert float(first.mean().abs()) < 0.02
    assert float(first.std()) == pytest.approx(1, abs=0.02)
    assert int((first == first.round()).sum()) == 0


def test_sizes_that_do_not_divide_are_told() -> None:
    case = wire_case("all_reduce", "int8", ranks=3, size=40_000)
    (one, *_) = play(case)
    assert one.observed["size_bytes"] == 39_996


@pytest.mark.parametrize(
    ("operation", "options", "where"),
    [
        ("broadcast", {}, "--wire"),
        ("all_reduce", {"dtype": "float16"}, "--dtype"),
        ("all_reduce", {"reduction": "max"}, "--reduction"),
        ("all_reduce", {"mode": "nonblocking"}, "--mode"),
        ("all_reduce", {"coalesce": 2}, "--coalesce"),
        ("all_reduce", {"placement": "in_place"}, "--placement"),
        ("all_to_all", {"form": "list"}, "--form"),
    ],
)
def test_what_has_no_quantised_form_is_refused(operation: str, options: dict[str, Any], where: str) -> None:
    require_wire_sense("all_reduce", CollectiveSpec(operation="all_reduce", size_bytes=4), "int8")
    with pytest.raises(UsageError) as caught:
        require_wire_sense(operation, CollectiveSpec(operation=operation, size_bytes=4, **options), "int8")
    assert caught.value.where == where


def test_the_fake_backend_refuses() -> None:
    room = Room(FakeWorld(2), CpuDevice(), QuietHeartbeat())
    with pytest.raises(UnsupportedCollectiveError, match="fake"):
        WireTrial(wire_case("all_reduce", "int8", ranks=2), room)


def test_parts_are_timed_by_the_device_where_it_has_a_clock() -> None:
    clock = FakeClock()
    device = FakeDevice(clock, launch_s=1e-6)
    times_s: dict[str, list[float]] = {"a": [], "b": []}
    laps = Laps(device, times_s)
    for _ in range(2):
        laps.begin()
        device.submit(3e-3)
        laps.end("a")
        device.submit(5e-3)
        laps.end("b")
        device.submit(1e-3)
        laps.end("a")
        device.synchronize()
    laps.settle()
    assert times_s["a"] == pytest.approx([4e-3, 4e-3], rel=1e-2)
    assert times_s["b"] == pytest.approx([5e-3, 5e-3], rel=1e-2)
    laps.begin()
    laps.forget()
    laps.settle()
    assert len(times_s["a"]) == 2


# Real ranks


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_real_gloo_ranks(tmp_path: Path, ranks: int) -> None:
    cases = [
        wire_case(collective, name, ranks=ranks, size=size, **options)
        for collective, options in (("all_reduce", {}), ("all_to_all", {}), ("reduce", {"root": 1}))
        for name in ENCODINGS
        for size in (24, 120_000)
    ]
    _, measured = measure_cases(tmp_path, cases, ranks=ranks)
    assert len(measured) == 3 * 2 * len(ENCODINGS)
    for one in measured:
        assert one.result.status == "ok", one.result.failure
        observed = one.result.facts
        assert observed["wrong"] == 0
        assert float(observed["error_max"]) <= float(observed["error_bound"])
        for rank in one.samples:
            parts = [rank.extra_s[name] for name in ("quantise", "exchange", "dequantise")]
            assert all(
                math.fsum(row) <= whole for row, whole in zip(zip(*parts, strict=True), rank.seconds(), strict=True)
            )
