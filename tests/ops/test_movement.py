from __future__ import annotations

from typing import Any

import pytest
from op_checks import full_shape, moved_by_hand, run_and_check

from stepscope.bench.ops.families.movement import (
    COPIES,
    ORDERS,
    Concat,
    MemCopy,
    MemSet,
    Permute,
    Read,
    Split,
    Transpose,
)
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS, Operator, Work
from stepscope.run.producer import WrongResultError


def check_traffic(operator: Operator, dtype: str, **changes: Any) -> None:
    shape = full_shape(operator, **changes)
    moved = moved_by_hand(operator, dtype, **changes)
    assert operator.work(shape, dtype, "forward").bytes == moved
    assert operator.footprint_bytes(shape, dtype) == moved


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [{}, {"m": 1}, {"n": 1}])
def test_transpose(dtype: str, sizes: dict[str, int]) -> None:
    run_and_check(Transpose(), dtype=dtype, **sizes)
    check_traffic(Transpose(), dtype, **sizes)


def test_transpose_reads_and_writes_each_element_once() -> None:
    assert Transpose().work({"batch": 2, "m": 5, "n": 7}, "float32", "forward") == Work(0, 2 * 4 * (2 * 5 * 7))


def test_transpose_copies_even_where_the_view_is_contiguous() -> None:
    shape = {"batch": 2, "m": 1, "n": 7}
    inputs = Transpose().make_inputs(shape, Maker("float32", "cpu"))
    result = Transpose().bind(shape, inputs)()
    assert result.shape == (2, 7, 1)
    assert result.data_ptr() != inputs["matrices"].data_ptr()


@pytest.mark.parametrize("order", ORDERS)
def test_permute(order: str) -> None:
    run_and_check(Permute(), order=order)
    check_traffic(Permute(), "float32", order=order)


@pytest.mark.parametrize("dtype", FLOATS)
def test_permute_in_every_dtype(dtype: str) -> None:
    run_and_check(Permute(), dtype=dtype, order="3210")
    check_traffic(Permute(), dtype)


def test_permute_is_contiguous_in_the_order_asked_for() -> None:
    assert len(ORDERS) == 4 * 3 * 2 * 1 - 1
    shape = full_shape(Permute(), order="0312")
    result = Permute().bind(shape, Permute().make_inputs(shape, Maker("float32", "cpu")))()
    assert (result.shape, result.is_contiguous()) == ((2, 5, 3, 4), True)
    assert Permute().work(shape, "float16", "forward") == Work(0, 2 * 2 * (2 * 3 * 4 * 5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parts", [1, 4])
def test_concat(dtype: str, parts: int) -> None:
    run_and_check(Concat(), dtype=dtype, parts=parts)
    check_traffic(Concat(), dtype, parts=parts)


def test_concat_reads_each_part_and_writes_the_whole() -> None:
    shape = {"batch": 2, "rows": 3, "columns": 5, "parts": 4}
    assert Concat().work(shape, "float32", "forward") == Work(0, 4 * (4 * (2 * 3 * 5) + 2 * 3 * (4 * 5)))


@pytest.mark.parametrize("operator", [Transpose(), Permute(), Concat()], ids=lambda one: one.name)
def test_what_has_no_backward_pass_would_move_nothing_in_it(operator: Operator) -> None:
    import torch

    assert operator.passes == ("forward",)
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    output = operator.bind(shape, leaves)()
    upstream = torch.randn(output.shape)
    for gradient in torch.autograd.grad(output, tuple(leaves.values()), upstream):
        assert gradient.untyped_storage().data_ptr() == upstream.untyped_storage().data_ptr()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parts", [1, 4])
def test_split(direction: str, dtype: str, parts: int) -> None:
    run_and_check(Split(), direction, dtype, parts=parts)
    check_traffic(Split(), dtype, parts=parts)


def test_split_copies_its_parts_and_joins_their_gradients() -> None:
    shape = {"rows": 3, "columns": 20, "parts": 4}
    assert Split().work(shape, "float32", "forward") == Work(0, 4 * (3 * 20 + 4 * (3 * 5)))
    assert Split().work(shape, "float64", "backward") == Work(0, 8 * (4 * (3 * 5) + 3 * 20))
    inputs = Split().make_inputs(shape, Maker("float32", "cpu"))
    parts = Split().bind(shape, inputs)()
    assert [part.shape for part in parts] == [(3, 5)] * 4
    assert all(part.is_contiguous() for part in parts)


def test_split_refuses_unequal_parts() -> None:
    with pytest.raises(ValueError, match="columns is a multiple of parts"):
        Split().check_shape({"rows": 3, "columns": 20, "parts": 3})


def test_memcpy_counts_both_sides_on_the_device_and_the_link_once() -> None:
    for kind in COPIES:
        shape = {"size": 1000, "kind": kind}
        assert MemCopy().work(shape, "int8", "forward") == Work(0, 1000 + 1000 if kind == "d2d" else 1000)
        assert MemCopy().footprint_bytes(shape, "int8") == 1000 + 1000
    run_and_check(MemCopy(), dtype="int8")
    check_traffic(MemCopy(), "int8")


@pytest.mark.parametrize("kind", COPIES[1:])
def test_the_cpu_has_no_link_to_copy_over(kind: str) -> None:
    with pytest.raises(NotImplementedError, match=f"kind={kind}.*CPU has only d2d"):
        MemCopy().make_inputs({"size": 10, "kind": kind}, Maker("int8", "cpu"))


def test_a_copy_that_leaves_bytes_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = full_shape(MemCopy())
    inputs = MemCopy().make_inputs(shape, Maker("int8", "cpu"))

    def copy_less(self: Operator, shape: Any, inputs: Any) -> Any:
        return lambda: inputs["destination"][:-3].copy_(inputs["source"][:-3])

    monkeypatch.setattr(MemCopy, "bind", copy_less)
    with pytest.raises(WrongResultError, match="memcpy leaves 3 of 1000 bytes wrong"):
        MemCopy().check(shape, inputs, "int8", "forward")


def test_memset() -> None:
    assert MemSet().work({"size": 1000}, "int8", "forward") == Work(0, 1000)
    run_and_check(MemSet(), dtype="int8")
    check_traffic(MemSet(), "int8")


def test_a_fill_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = full_shape(MemSet())
    inputs = MemSet().make_inputs(shape, Maker("int8", "cpu"))
    monkeypatch.setattr(MemSet, "bind", lambda self, shape, inputs: lambda: None)
    with pytest.raises(WrongResultError, match="memset leaves 1000 of 1000 bytes wrong"):
        MemSet().check(shape, inputs, "int8", "forward")


def test_read() -> None:
    assert Read().work({"size": 4000}, "float32", "forward") == Work(4000 // 4, 4000 + 4)
    run_and_check(Read())
    run_and_check(Read(), size=4 << 20)
    check_traffic(Read(), "float32")


def test_read_refuses_half_a_number() -> None:
    with pytest.raises(ValueError, match="size is a multiple of 4"):
        Read().check_shape({"size": 4002})
