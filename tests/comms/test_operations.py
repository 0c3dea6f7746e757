from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.bench.comms.cases import make_cases, read_options
from stepscope.bench.comms.group import Bound, Call, UnsupportedCollectiveError, bind_call
from stepscope.bench.comms.layouts import deal, deal_matrix, parse_layout, parse_matrix, skewed_weights
from stepscope.bench.comms.operations import PATTERNS, CollectiveShape, Traffic, find_operation, operations
from stepscope.core.collectives import FACTS
from stepscope.core.errors import UsageError

CONTRACT = [
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "all_to_all",
    "all_to_allv", "gather", "scatter", "barrier", "send_recv", "incast", "multicast",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
]  # fmt: skip


def test_the_operations_of_the_contract_are_there() -> None:
    assert [name for name in operations() if name in CONTRACT] == CONTRACT


def test_readers_know_the_same_facts_of_every_operation() -> None:
    """They do not load producers: the columns redop and root come from the table of facts."""
    for name, operation in operations().items():
        if name in CONTRACT and name != "send_recv":
            assert (FACTS[name].reduces, FACTS[name].rooted) == (operation.reduces, operation.rooted), name


def plan(name: str, members: int, elements: int, **options: object) -> Traffic:
    return find_operation(name).plan(CollectiveShape(members, elements, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "factor"),
    [
        ("all_reduce", 1200, 2 * 3 / 4),
        ("reduce", 1200, 1),
        ("broadcast", 1200, 1),
        ("all_gather", 1200, 3 / 4),
        ("reduce_scatter", 1200, 3 / 4),
        ("all_to_all", 1200, 3 / 4),
        ("gather", 1200, 3 / 4),
        ("scatter", 1200, 3 / 4),
        ("incast", 1200, 1),
        ("multicast", 1200, 3),
        ("send_recv", 1200, 1),
    ],
)
def test_sizes_and_bus_factors_of_four_ranks(name: str, size: int, factor: float) -> None:
    traffic = plan(name, 4, 1200)
    assert traffic.size == size
    assert traffic.bus / traffic.size == pytest.approx(factor)


def test_uneven_operations_by_hand() -> None:
    """Skew 1 over three members: 6, 3, 2 of 11."""
    gathered = plan("all_gatherv", 3, 11, skew=1.0)
    assert gathered.inputs == (6, 3, 2)
    assert (gathered.size, gathered.bus) == (11, 9)  # the last member lacks the 6 and the 3
    scattered = plan("reduce_scatterv", 3, 11, skew=1.0)
    assert scattered.outputs == (6, 3, 2)
    exchanged = plan("all_to_allv", 2, 8, matrix=[[1, 3], [0, 4]])
    assert exchanged.pieces == ((2, 6), (0, 8))
    assert exchanged.outputs == (2, 14)
    assert (exchanged.size, exchanged.bus) == (14, 6)


def test_messages_by_hand() -> None:
    assert plan("send_recv", 4, 8).partners == ((1, 3), (2, 0), (3, 1), (0, 2))
    assert plan("send_recv", 3, 8, pattern="one_to_one").partners == ((1, None), (None, 0), (None, None))
    assert plan("send_recv", 5, 8, pattern="pairwise").partners == (
        (1, None), (None, 0), (3, None), (None, 2), (None, None),
    )  # fmt: skip
    pairs = ((3, 0), (1, 2))
    one_way = plan("send_recv", 5, 8, pairs=pairs)
    assert one_way.partners == ((None, 3), (2, None), (None, 1), (0, None), (None, None))
    assert plan("send_recv", 4, 8, pairs=((0, 1), (1, 2))).partners == ((1, None), (2, 0), (None, 1), (None, None))
    both = plan("send_recv", 4, 8, pairs=pairs, pattern="ping_pong")
    assert both.partners == ((3, 3), (2, 2), (1, 1), (0, 0))
    assert both.openers == (3, 1)
    windowed = plan("send_recv", 2, 8, pattern="bidirectional", window=5)
    assert (windowed.inputs, windowed.outputs, windowed.bus) == ((40, 40), (40, 40), 8)


every_shape = st.tuples(
    st.sampled_from(CONTRACT),
    st.integers(2, 9),
    st.integers(1, 500),
    st.integers(0, 8),
    st.sampled_from(list(PATTERNS)),
)


@given(every_shape)
def test_every_result_comes_from_what_somebody_put_in(drawn: tuple[str, int, int, int, str]) -> None:
    name, members, elements, root, pattern = drawn
    operation = find_operation(name)
    shape = CollectiveShape(members, elements, root % members if operation.rooted else 0, pattern=pattern)
    traffic = operation.plan(shape)
    assert len(traffic.inputs) == len(traffic.outputs) == len(traffic.sources) == members
    for outputs, segments in zip(traffic.outputs, traffic.sources, strict=True):
        assert outputs == sum(segment.elements for segment in segments)
        for segment in segments:
            holders = range(members) if segment.member is None else [segment.member]
            for holder in holders:
                assert segment.start >= 0
                assert segment.start + segment.elements <= traffic.inputs[holder]
    assert 0 <= operation.judge(shape) < members
    assert traffic.bus >= 0
    if name != "barrier":
        assert traffic.size > 0


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_dealing_gives_out_everything_in_proportion(total: int, weights: list[float]) -> None:
    shares = deal(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / math.fsum(weights)) < 1 + 1e-6 * total


def test_matrices() -> None:
    assert parse_matrix("1 2 # comment\n\n3,4", 2, where="x") == [[1, 2], [3, 4]]
    assert parse_matrix("3 1", 2, where="x") == [[3, 1]]
    assert deal_matrix(8, [[1, 1], [0, 0]]) == ((4, 4), (0, 0))
    for text in ("1 2 3", "1 2\n3 x", "1 -2\n3 4", "0 0\n0 0", "nan 1\n1 1"):
        with pytest.raises(UsageError):
            parse_matrix(text, 2, where="x")
    assert skewed_weights(3, 0.0) == [1, 1, 1]


def test_layouts_by_hand() -> None:
    assert parse_layout("world", 3) == ((0, 1, 2),)
    assert parse_layout("split:2", 5) == ((0, 2, 4), (1, 3))
    assert parse_layout("colours:a,b,a", 3) == ((0, 2), (1,))
    assert parse_layout("mesh:dp=2,tp=4/tp", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parse_layout("mesh:dp=2,tp=4/dp", 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert parse_layout("mesh:pp=2,dp=2,tp=2/dp", 8) == ((0, 2), (1, 3), (4, 6), (5, 7))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_the_lines_of_a_mesh_hold_every_rank_once(sizes: list[int], data: st.DataObject) -> None:
    names = [f"a{i}" for i in range(len(sizes))]
    axis = data.draw(st.sampled_from(names))
    axes = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    groups = parse_layout(f"mesh:{axes}/{axis}", math.prod(sizes))
    assert sorted(rank for group in groups for rank in group) == list(range(math.prod(sizes)))
    assert {len(group) for group in groups} == {sizes[names.index(axis)]}


@pytest.mark.parametrize(
    "text", ["split:0", "split:9", "colours:0,1", "mesh:dp=2/tp", "mesh:dp=3/dp", "mesh:dp=2,dp=2/dp", "mesh:x/x", "??"]
)
def test_layouts_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layout(text, 4)


def cases(collective: str = "all_reduce", sizes: tuple[int, ...] = (64,), **options: object) -> list[object]:
    chosen = {"dtype": "float32", "backend": "gloo", "world_size": 4, "device": "cpu", **options}
    return list(make_cases(collective=collective, sizes=sizes, **chosen))  # type: ignore[arg-type]


def test_the_key_of_a_plain_case_has_only_what_sets_it_apart() -> None:
    (case,) = make_cases(
        collective="all_reduce", sizes=[64], dtype="float32", backend="gloo", world_size=2, device="cpu"
    )
    assert case.parameters == {"size_bytes": 64, "dtype": "float32", "device": "cpu"}
    operation, options = read_options(case)
    assert (operation.name, options.reduction, options.depth) == ("all_reduce", "sum", 1)


def test_asking_for_what_is_usual_is_the_same_case() -> None:
    assert cases(placement="in_place") == cases()
    assert cases("all_gather", placement="out_of_place") == cases("all_gather")
    assert cases("send_recv", pattern="ring") == cases("send_recv")
    assert cases(placement="out_of_place") != cases()


def test_groups_in_turn_are_cases_of_their_own() -> None:
    listed = make_cases(
        collective="all_gather", sizes=[64, 128], dtype="float32", backend="gloo", world_size=4, device="cpu",
        groups="split:2", one_group_at_a_time=True,
    )  # fmt: skip
    assert [(case.parameters["group"], case.parameters["size_bytes"]) for case in listed] == list(
        product((0, 1), (64, 128))
    )


def test_a_barrier_has_no_size() -> None:
    assert len(cases("barrier", (64, 128))) == 1


@pytest.mark.parametrize(
    ("collective", "options", "where"),
    [
        ("broadcast", {"reduction": "max"}, "--reduction"),
        ("all_reduce", {"reduction": "xor"}, "--reduction"),
        ("all_reduce", {"root": 1}, "--root"),
        ("broadcast", {"root": 4}, "--root"),
        ("all_reduce", {"form": "list"}, "--form"),
        ("all_reduce", {"pattern": "ring"}, "--pattern"),
        ("send_recv", {"pattern": "spiral"}, "--pattern"),
        ("all_reduce", {"window": 2}, "--window"),
        ("all_to_all", {"skew": 1.0}, "--skew"),
        ("all_gatherv", {"matrix": [1.0] * 16}, "--splits"),
        ("all_gather", {"matrix": [1.0] * 4}, "--splits"),
        ("all_reduce", {"sources": [0], "targets": [1]}, "--src-ranks"),
        ("send_recv", {"sources": [0]}, "--dst-ranks"),
        ("send_recv", {"sources": [0, 1], "targets": [2]}, "--dst-ranks"),
        ("send_recv", {"sources": [0], "targets": [4]}, "--src-ranks"),
        ("send_recv", {"sources": [1], "targets": [1]}, "--dst-ranks"),
        ("send_recv", {"sources": [0, 0], "targets": [1, 2]}, "--src-ranks"),
        ("send_recv", {"sources": [0, 1], "targets": [2, 2]}, "--dst-ranks"),
        ("send_recv", {"sources": [0, 1], "targets": [1, 2], "pattern": "ping_pong"}, "--dst-ranks"),
        ("send_recv", {"sources": [0], "targets": [1], "pattern": "ring"}, "--pattern"),
        ("send_recv", {"sources": [0, 2], "targets": [1, 3], "pattern": "one_to_one"}, "--pattern"),
        ("send_recv", {"sources": [0], "targets": [1], "groups": "split:2"}, "--src-ranks"),
        ("all_gatherv", {"matrix": [1.0] * 4, "skew": 1.0}, "--splits"),
        ("all_to_allv", {"matrix": [1.0] * 16, "groups": "split:2"}, "--splits"),
        ("all_reduce", {"reduction": "avg", "dtype": "bool"}, "--reduction"),
        ("all_to_all", {"placement": "in_place"}, "--placement"),
        ("all_reduce", {"coalesce": 100}, "--coalesce"),
        ("send_recv", {"mode": "nonblocking", "pattern": "ping_pong"}, "--mode"),
        ("all_reduce", {"depth": 3}, "--depth"),
    ],
)
def test_options_that_an_operation_does_not_have_are_refused(
    collective: str, options: dict[str, object], where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        cases(collective, **options)
    assert caught.value.where == where


@pytest.mark.parametrize("size", [0, 3, 6, 2**50])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(UsageError):
        cases(sizes=(size,))


def test_unknown_names() -> None:
    with pytest.raises(UsageError) as caught:
        find_operation("allreduce")
    assert "all_reduce" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="dtype"):
        cases(dtype="float7")


def test_an_operation_may_be_made_of_others() -> None:
    done: list[str] = []

    class StepGroup:
        def _reduce(self, call: Call) -> Bound:
            return Bound(lambda: done.append(f"reduce to {call.root}"), list)

        def _broadcast(self, call: Call) -> Bound:
            return Bound(lambda: done.append(f"broadcast from {call.root}"), list)

    made = find_operation("all_reduce")._replace(name="reduce_broadcast", made_of=("reduce", "broadcast"))
    call = Call(made, made.plan(CollectiveShape(2, 4)), input=None, output=None, root=1)  # type: ignore[arg-type]
    bound = bind_call(StepGroup(), call, "this backend")
    bound.run()
    assert done == ["reduce to 1", "broadcast from 1"]
    assert bound.composed == "reduce, then broadcast"
    with pytest.raises(UnsupportedCollectiveError, match="non-blocking"):
        bound.start()
    with pytest.raises(UnsupportedCollectiveError, match="this backend has no all_gather"):
        bind_call(StepGroup(), call._replace(operation=find_operation("all_gather")), "this backend")
