from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from op_checks import full_shape, moved_by_hand, run_and_check

from stepscope.bench.ops.families.indexing import (
    Embedding,
    Gather,
    IndexPut,
    IndexSelect,
    Scatter,
    Sort,
    TopK,
)
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS, Operator, Work
from stepscope.run.producer import WrongResultError

PASSES = ("forward", "backward")
EACH = [kind() for kind in (Gather, Scatter, IndexSelect, IndexPut, Embedding, Sort, TopK)]


def bind_otherwise(monkeypatch: pytest.MonkeyPatch, operator: Operator, change: Callable[[Any, Any], Any]) -> None:
    """Let the operator's call return what `change` makes of inputs and result."""
    bind = type(operator).bind
    monkeypatch.setattr(
        type(operator),
        "bind",
        lambda self, shape, inputs: lambda: change(inputs, bind(self, shape, inputs)()),
    )


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", EACH, ids=lambda one: one.name)
def test_results_and_footprints(operator: Operator, direction: str, dtype: str) -> None:
    run_and_check(operator, direction, dtype)
    assert operator.footprint_bytes(full_shape(operator), dtype) == moved_by_hand(operator, dtype)


def test_work_of_gather() -> None:
    shape = {"rows": 50, "columns": 6, "count": 40}
    assert Gather().work(shape, "float32", "forward") == Work(0, 4 * (40 * 6) + 8 * (40 * 6) + 4 * (40 * 6))
    cleared, upstream, added = 50 * 6, 40 * 6, 2 * 40 * 6
    backward = Work(40 * 6, 4 * (cleared + upstream + added) + 8 * (40 * 6))
    assert Gather().work(shape, "float32", "backward") == backward


def test_work_of_scatter() -> None:
    shape = {"rows": 50, "columns": 6, "count": 40}
    copied, source, added = 2 * 50 * 6, 40 * 6, 2 * 40 * 6
    forward = Work(40 * 6, 4 * (copied + source + added) + 8 * (40 * 6))
    assert Scatter().work(shape, "float32", "forward") == forward
    assert Scatter().work(shape, "float32", "backward") == Work(0, 4 * (40 * 6 + 40 * 6) + 8 * (40 * 6))


@pytest.mark.parametrize("operator", [IndexSelect(), Embedding()], ids=lambda one: one.name)
def test_work_of_picked_rows(operator: Operator) -> None:
    shape = {"rows": 50, "dim": 8, "count": 40}
    assert operator.work(shape, "float32", "forward") == Work(0, 4 * (40 * 8 + 40 * 8) + 8 * 40)
    cleared, upstream, added = 50 * 8, 40 * 8, 2 * 40 * 8
    assert operator.work(shape, "float32", "backward") == Work(40 * 8, 4 * (cleared + upstream + added) + 8 * 40)


def test_work_of_index_put() -> None:
    replace = {"rows": 50, "dim": 8, "count": 40, "accumulate": "no"}
    add = {**replace, "accumulate": "yes"}
    copied, values, written = 2 * 50 * 8, 40 * 8, 40 * 8
    assert IndexPut().work(replace, "float32", "forward") == Work(0, 4 * (copied + values + written) + 8 * 40)
    assert IndexPut().work(add, "float32", "forward") == Work(40 * 8, 4 * (copied + values + 2 * written) + 8 * 40)
    picked, zeroed = 40 * 8 + 40 * 8, 40 * 8
    assert IndexPut().work(replace, "float32", "backward") == Work(0, 4 * (copied + zeroed + picked) + 8 * 40)
    assert IndexPut().work(add, "float32", "backward") == Work(0, 4 * picked + 8 * 40)


@pytest.mark.parametrize("operator", [Scatter(), IndexPut()], ids=lambda one: one.name)
def test_the_gradient_of_what_is_added_to_is_the_upstream_itself(operator: Operator) -> None:
    import torch

    shape = full_shape(operator, **({"accumulate": "yes"} if operator.name == "index_put" else {}))
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    base = inputs["base"].requires_grad_()
    output = operator.bind(shape, inputs)()
    upstream = torch.randn(output.shape)
    assert torch.autograd.grad(output, base, upstream)[0].data_ptr() == upstream.data_ptr()


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_index_put_adds_repeated_rows(direction: str, dtype: str) -> None:
    run_and_check(IndexPut(), direction, dtype, accumulate="yes", count=200)
    shape = full_shape(IndexPut(), accumulate="yes", count=200)
    assert IndexPut().footprint_bytes(shape, dtype) == moved_by_hand(IndexPut(), dtype, accumulate="yes", count=200)


def test_index_put_replaces_each_row_once() -> None:
    shape = full_shape(IndexPut(), count=50)
    index = IndexPut().make_inputs(shape, Maker("float32", "cpu"))["index"]
    assert sorted(index.tolist()) == list(range(50))
    IndexPut().check_shape(shape)
    IndexPut().check_shape({**shape, "count": 51, "accumulate": "yes"})
    with pytest.raises(ValueError, match="count is at most rows with accumulate=no"):
        IndexPut().check_shape({**shape, "count": 51})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("operator", "direction", "changes"),
    [
        (Scatter(), "forward", {}),
        (IndexPut(), "forward", {"accumulate": "yes"}),
        (Gather(), "backward", {}),
        (IndexSelect(), "backward", {}),
        (Embedding(), "backward", {}),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_thousands_of_additions_to_a_row_pass_in_short_floats(
    operator: Operator, direction: str, changes: dict[str, str], dtype: str
) -> None:
    run_and_check(operator, direction, dtype, rows=2, count=20_000, **changes)


@pytest.mark.parametrize("operator", [Gather(), IndexSelect(), Embedding()], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_row_is_found(operator: Operator, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker(dtype, "cpu"))
    bind = type(operator).bind

    def bind_with_one_index_off(self: Operator, shape: Any, inputs: Any) -> Any:
        index = inputs["index"].clone()
        index[3] = (index[3] + 1) % shape["rows"]
        return bind(self, shape, {**inputs, "index": index})

    monkeypatch.setattr(type(operator), "bind", bind_with_one_index_off)
    with pytest.raises(WrongResultError, match=operator.name):
        operator.check(shape, inputs, dtype, "forward")
    with pytest.raises(WrongResultError, match=rf"{operator.name} backward \(table\)"):
        operator.check(shape, inputs, dtype, "backward")


@pytest.mark.parametrize(
    ("operator", "changes"), [(Scatter(), {}), (IndexPut(), {}), (IndexPut(), {"accumulate": "yes"})]
)
def test_a_wrong_addition_is_found(
    operator: Operator, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = full_shape(operator, **changes)
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))

    def spoil(inputs: Any, result: Any) -> Any:
        changed = result.clone()
        changed[7, 2] += 1
        return changed

    operator.check(shape, inputs, "float32", "forward")
    bind_otherwise(monkeypatch, operator, spoil)
    with pytest.raises(WrongResultError, match=operator.name):
        operator.check(shape, inputs, "float32", "forward")


def test_work_of_sort_and_topk() -> None:
    sort = {"rows": 5, "columns": 20}
    assert Sort().work(sort, "float32", "forward") == Work(5 * 20 * 5, (5 * 20) * (4 + 4 + 8))
    assert Sort().work({"rows": 5, "columns": 16}, "float32", "forward").flops == 5 * 16 * 4
    assert Sort().work({"rows": 5, "columns": 1}, "float32", "forward").flops == 0
    assert Sort().work(sort, "float32", "backward") == Work(0, (5 * 20) * (4 + 4 + 4 + 8))
    topk = {"rows": 5, "columns": 20, "k": 3}
    assert TopK().work(topk, "float32", "forward") == Work(5 * 20, 4 * (5 * 20) + (4 + 8) * (5 * 3))
    assert TopK().work(topk, "float32", "backward") == Work(0, 4 * (5 * 20) + (4 + 4 + 8) * (5 * 3))
    for operator, shape in [(Sort(), sort), (TopK(), topk)]:
        assert operator.work(shape, "float32", "forward").bytes == moved_by_hand(operator)


@pytest.mark.parametrize("direction", PASSES)
def test_equal_values_may_stand_in_any_order(direction: str) -> None:
    """2000 bfloat16 numbers hold many equal ones."""
    run_and_check(Sort(), direction, "bfloat16", columns=2000)
    run_and_check(TopK(), direction, "bfloat16", columns=2000, k=1500)
    run_and_check(TopK(), direction, columns=20, k=20)


def test_topk_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="k is at most columns"):
        TopK().check_shape({"rows": 5, "columns": 20, "k": 21})


@pytest.mark.parametrize("operator", [Sort(), TopK()], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs, result: (result[0] * 1.001, result[1]), "values in float32 is off"),
        (lambda inputs, result: (result[0].flip(1), result[1].flip(1)), "values in float32 is off"),
        (lambda inputs, result: (result[0], result[1].flip(1)), "do not point at its values"),
        (lambda inputs, result: (result[0], result[1][:, :1].expand_as(result[1])), "do not point at its values"),
    ],
)
def test_wrong_order_and_wrong_indices_are_found(
    operator: Operator, change: Callable[[Any, Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    bind_otherwise(monkeypatch, operator, change)
    for direction in PASSES:
        with pytest.raises(WrongResultError, match=message):
            operator.check(shape, inputs, "float32", direction)


@pytest.mark.parametrize("operator", [Sort(), TopK()], ids=lambda one: one.name)
def test_the_same_element_twice_is_found(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    shape = full_shape(operator)
    table = torch.ones(shape["rows"], shape["columns"])
    operator.check(shape, {"table": table}, "float32", "forward")
    bind_otherwise(monkeypatch, operator, lambda inputs, result: (result[0], torch.zeros_like(result[1])))
    with pytest.raises(WrongResultError, match="once each"):
        operator.check(shape, {"table": table}, "float32", "forward")


@pytest.mark.parametrize("operator", [Sort(), TopK()], ids=lambda one: one.name)
def test_a_wrong_gradient_is_found(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    # The same values, but a gradient twice as large.
    bind_otherwise(
        monkeypatch, operator, lambda inputs, result: (result[0] + (result[0] - result[0].detach()), result[1])
    )
    operator.check(shape, inputs, "float32", "forward")
    with pytest.raises(WrongResultError, match=f"{operator.name} backward"):
        operator.check(shape, inputs, "float32", "backward")


def repeated(operator: Operator, direction: str, index: list[int] | list[list[int]], **changes: Any) -> int:
    """Repeated bytes in float32 with these indices instead of drawn ones."""
    import torch

    shape = full_shape(operator, **changes)
    return operator.repeated_bytes(shape, "float32", direction, {"index": torch.tensor(index)})


def test_what_is_touched_twice_is_not_unique() -> None:
    # rows 3 and 1 are each looked up again: two rows of 8 floats come from the cache
    assert repeated(IndexSelect(), "forward", [3, 1, 3, 1, 0], dim=8, count=5) == 2 * 8 * 4
    assert repeated(Embedding(), "forward", [0, 1, 2], dim=8, count=3) == 0
    # a dense gradient is cleared first: reading and writing its rows again is not unique
    assert repeated(IndexSelect(), "backward", [3, 1, 3], dim=8, count=3) == 2 * 3 * 8 * 4
    # by column: (0, 0) twice, (1, 1) twice
    assert repeated(Gather(), "forward", [[0, 1], [0, 1]], columns=2, count=2) == 2 * 4
    assert repeated(Gather(), "forward", [[0, 1], [1, 0]], columns=2, count=2) == 0
    assert repeated(Scatter(), "forward", [[0, 1]], columns=2, count=1) == 2 * 2 * 4
    assert repeated(IndexPut(), "forward", [5, 6], dim=8, count=2) == 2 * 8 * 4
    assert repeated(IndexPut(), "backward", [5, 5], dim=8, count=2, accumulate="yes") == 8 * 4


def test_ordered_gradients_are_cleared_before_they_are_written() -> None:
    # 5 rows of 20: all places are written twice; 3 of each row where only those were found
    for operator, again in ((Sort(), 5 * 20), (TopK(), 5 * 3)):
        shape = full_shape(operator)
        inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
        assert operator.repeated_bytes(shape, "float32", "forward", inputs) == 0
        assert operator.repeated_bytes(shape, "float32", "backward", inputs) == 4 * again
        assert operator.repeated_bytes(shape, "float16", "backward", inputs) == 2 * again


@pytest.mark.parametrize(
    "operator", [Gather(), IndexSelect(), Embedding(), IndexPut(), Scatter(), Sort(), TopK()], ids=lambda one: one.name
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_unique_bytes_are_no_more_than_there_are(operator: Operator, direction: str) -> None:
    """Each byte of the inputs and outputs, and in backward of upstreams and gradients, once at most."""
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    unique = operator.work(shape, "float32", direction).bytes - operator.repeated_bytes(
        shape, "float32", direction, inputs
    )
    held = moved_by_hand(operator)
    if direction == "backward":
        # The values that were put in order or picked are not read again; their upstreams are.
        held += sum(inputs[name].nbytes for name in operator.gradient_names(shape))
        held -= inputs["table"].nbytes if "table" in inputs else 0
    assert 0 < unique <= held
