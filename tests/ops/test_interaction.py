from __future__ import annotations

import pytest
from op_checks import full_shape, moved_by_hand, run_and_check

from stepscope.bench.ops.families.interaction import DotInteraction, TrilIndex
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS, Work
from stepscope.run.producer import WrongResultError

PASSES = ("forward", "backward")


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("part", ["lower", "upper"])
@pytest.mark.parametrize("diagonal", [0, 1, 3])
def test_tril_index(direction: str, dtype: str, part: str, diagonal: int) -> None:
    run_and_check(TrilIndex(), direction, dtype, part=part, diagonal=diagonal)
    shape = full_shape(TrilIndex(), part=part, diagonal=diagonal)
    moved = moved_by_hand(TrilIndex(), dtype, part=part, diagonal=diagonal)
    assert TrilIndex().footprint_bytes(shape, dtype) == moved


def test_work_of_tril_index() -> None:
    shape = {"batch": 3, "features": 5, "diagonal": 1, "part": "lower"}
    pairs = 4 + 3 + 2 + 1
    assert TrilIndex().work(shape, "float32", "forward") == Work(0, 4 * (3 * pairs + 3 * pairs) + 8 * 2 * pairs)
    cleared, upstream, added = 3 * 5 * 5, 3 * pairs, 2 * 3 * pairs
    backward = Work(3 * pairs, 4 * (cleared + upstream + added) + 8 * 2 * pairs)
    assert TrilIndex().work(shape, "float32", "backward") == backward
    whole = {**shape, "diagonal": 0}
    assert TrilIndex().work(whole, "float32", "forward") == Work(0, 4 * (2 * 3 * 15) + 8 * 2 * 15)


def test_tril_index_adds_to_what_it_cleared() -> None:
    shape = {"batch": 3, "features": 5, "diagonal": 1, "part": "lower"}
    inputs = TrilIndex().make_inputs(shape, Maker("float32", "cpu"))
    assert TrilIndex().repeated_bytes(shape, "float32", "forward", inputs) == 0
    # 4 + 3 + 2 + 1 places of each of 3 matrices are read and written after they were cleared
    assert TrilIndex().repeated_bytes(shape, "float32", "backward", inputs) == 4 * (2 * 3 * 10)
    # left: the gradient, the upstream and both indices
    unique = TrilIndex().work(shape, "float32", "backward").bytes - 4 * (2 * 3 * 10)
    assert unique == 4 * (3 * 5 * 5) + 4 * (3 * 10) + 8 * (2 * 10)


def test_tril_index_takes_rows_of_the_triangle_in_order() -> None:
    import torch

    matrix = torch.arange(9.0).view(1, 3, 3)
    for part, diagonal, expected in [
        ("lower", 0, [0, 3, 4, 6, 7, 8]),
        ("lower", 1, [3, 6, 7]),
        ("upper", 1, [1, 2, 5]),
    ]:
        shape = {"batch": 1, "features": 3, "diagonal": diagonal, "part": part}
        inputs = {**TrilIndex().make_inputs(shape, Maker("float32", "cpu")), "matrices": matrix}
        assert TrilIndex().bind(shape, inputs)().tolist() == [expected]


def test_tril_index_refuses_an_empty_triangle() -> None:
    with pytest.raises(ValueError, match="diagonal is less than features"):
        TrilIndex().check_shape({"batch": 1, "features": 3, "diagonal": 3, "part": "lower"})


@pytest.mark.parametrize("direction", PASSES)
def test_a_wrong_triangle_is_found(direction: str) -> None:
    shape = full_shape(TrilIndex())
    inputs = TrilIndex().make_inputs(shape, Maker("float32", "cpu"))
    turned = {**inputs, "rows": inputs["columns"], "columns": inputs["rows"]}
    TrilIndex().check(shape, inputs, "float32", direction)
    with pytest.raises(WrongResultError):
        TrilIndex().check(shape, turned, "float32", direction)


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [2, 5])
def test_dot_interaction(direction: str, dtype: str, features: int) -> None:
    run_and_check(DotInteraction(), direction, dtype, features=features)
    shape = full_shape(DotInteraction(), features=features)
    moved = moved_by_hand(DotInteraction(), dtype, features=features)
    assert DotInteraction().work(shape, dtype, "forward").bytes == moved
    assert DotInteraction().footprint_bytes(shape, dtype) == moved


def test_work_of_dot_interaction() -> None:
    shape = {"batch": 3, "features": 5, "dim": 8}
    pairs = 5 * 4 // 2
    given, result, product = 3 * 5 * 8, 3 * (8 + pairs), 2 * 3 * 5 * 5 * 8
    assert DotInteraction().work(shape, "float32", "forward") == Work(product, 4 * (given + result) + 8 * 2 * pairs)
    backward = Work(2 * product + given + 3 * 8, 4 * (result + given + given) + 8 * 2 * pairs)
    assert DotInteraction().work(shape, "float32", "backward") == backward
    assert DotInteraction().scratch_bytes(shape, "float32", "forward") == 4 * 3 * 5 * 5
    assert DotInteraction().scratch_bytes(shape, "float32", "backward") == 4 * (2 * 3 * 5 * 5 + 2 * given)


def test_dot_interaction_keeps_the_dense_feature_and_the_pairs_in_order() -> None:
    import torch

    shape = {"batch": 1, "features": 3, "dim": 2}
    features = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    inputs = {**DotInteraction().make_inputs(shape, Maker("float32", "cpu")), "features": features}
    expected = [1, 2, 3 * 1 + 4 * 2, 5 * 1 + 6 * 2, 5 * 3 + 6 * 4]
    assert DotInteraction().bind(shape, inputs)().tolist() == [expected]


def test_dot_interaction_refuses_a_single_feature() -> None:
    with pytest.raises(ValueError, match="features is at least 2"):
        DotInteraction().check_shape({"batch": 1, "features": 1, "dim": 8})
