"""Collectives of Python objects: sizes to the byte, values that are compared, serialisation beside the call."""

from __future__ import annotations

import pickle

import pytest
from comms_runs import cases_of
from hypothesis import given, settings
from hypothesis import strategies as st
from spoiled import SpoiledWorld, flip_element
from test_trial import QuietHeartbeat, try_out

from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.objects import DESERIALISE, EXCHANGE, SERIALISE, ObjectTrial, make_object, plan_object
from stepscope.bench.comms.operations import operations
from stepscope.bench.comms.trial import Room
from stepscope.core.errors import UsageError
from stepscope.measure import CpuDevice

OBJECTS = [one.name for one in operations().values() if one.objects]


@settings(deadline=None, max_examples=30)
@given(st.integers(63, 300_000), st.integers(0, 1 << 17))
def test_an_object_has_its_size_to_the_byte_whatever_its_values(size: int, seed: int) -> None:
    planned = plan_object(size)
    assert len(pickle.dumps(make_object(seed, *planned))) == size
    assert make_object(seed, *planned) != make_object(seed + 1, *planned)


def test_smaller_sizes_are_those_of_the_smallest_object() -> None:
    assert {plan_object(size) for size in range(1, 50)} == {(0, 0)}


@pytest.mark.parametrize(
    ("name", "size", "count", "factor"),
    [
        ("all_gather_object", 4096, 1024, 3 / 4),
        ("gather_object", 4096, 1024, 3 / 4),
        ("scatter_object_list", 4096, 1024, 3 / 4),
        ("broadcast_object_list", 4096, 4096, 1.0),
    ],
)
def test_sizes_are_those_of_the_pickled_objects(name: str, size: int, count: int, factor: float) -> None:
    (case,) = cases_of(name, ranks=4, root=1 if name != "all_gather_object" else 0)
    for rank in range(4):
        done = try_out(case, FakeWorld(4, rank))
        facts = done.facts.observed.facts()
        assert (facts["size_bytes"], facts["count"], facts["bus_factor"], facts["members"]) == (size, count, factor, 4)
        assert done.wrong == 0
        assert not done.facts.notices
        # Only the root of a gather gets something to compare.
        assert bool(done.checked) == (name != "gather_object" or rank == 1)


def test_what_has_no_such_size_is_said() -> None:
    (case,) = cases_of("all_gather_object", ranks=4, sizes=(64,))
    (notice,) = try_out(case, FakeWorld(4)).facts.notices
    assert notice.message == "64 bytes are not the size of 4 equal pickled objects: 212 were measured"


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_not_the_one_given_is_found(name: str) -> None:
    (case,) = cases_of(name, ranks=2)
    assert try_out(case, SpoiledWorld(FakeWorld(2), flip_element())).wrong > 0


def test_a_result_of_an_earlier_call_is_found() -> None:
    (case,) = cases_of("all_gather_object", ranks=2)
    trial = ObjectTrial(case, Room(FakeWorld(2), CpuDevice(), QuietHeartbeat()))
    trial.open()
    trial.refresh()
    trial.body()
    assert trial.count_wrong() == 0
    kept = trial._received
    trial.refresh()
    assert trial.count_wrong() == 2, "nothing was received"
    trial._received = kept
    assert trial.count_wrong() == 2


def test_serialisation_is_timed_beside_the_call() -> None:
    (case,) = cases_of("all_gather_object", ranks=2, sizes=(200_000,))
    trial = ObjectTrial(case, Room(FakeWorld(2), CpuDevice(), QuietHeartbeat()))
    trial.open()
    for _ in range(3):
        trial.body()
    parts_s, own_s = trial.further_s(), trial.own_s()
    assert list(parts_s) == [SERIALISE, EXCHANGE, DESERIALISE]
    assert [len(values) for values in (*parts_s.values(), own_s)] == [3] * 4
    assert min(*parts_s[SERIALISE], *parts_s[DESERIALISE]) > 0
    for serialise, exchange, deserialise, own in zip(*parts_s.values(), own_s, strict=True):
        assert exchange == pytest.approx(max(0.0, own - serialise - deserialise))
    trial.forget()
    assert trial.own_s() == []


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"dtype": "int8"}, "--dtype"),
        ({"mode": "nonblocking"}, "--mode"),
        ({"coalesce": 2}, "--coalesce"),
        ({"reduction": "max"}, "--reduction"),
        ({"placement": "in_place"}, "--placement"),
        ({"form": "list"}, "--form"),
        ({"wire": "int8"}, "--wire"),
        ({"root": 1}, "--root"),
    ],
)
def test_options_of_tensors_are_refused(options: dict[str, object], where: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases_of("all_gather_object", ranks=2, **options)
    assert caught.value.where == where
