"""Operator schemas."""

from __future__ import annotations

import pytest

from stepscope.formats.tensors import parse_schema


def test_arguments_aliases_and_defaults() -> None:
    schema = parse_schema(
        'aten::add.out(Tensor self, Tensor? other, int[2] dims=[0, 1], *, str mode="a,b", Tensor(a!) out) -> Tensor(a!)'
    )
    assert schema is not None
    assert (schema.name, schema.overload) == ("aten::add", "out")
    assert [argument.name for argument in schema.arguments] == ["self", "other", "dims", "mode", "out"]
    assert [argument.type for argument in schema.arguments] == ["Tensor", "Tensor?", "int[2]", "str", "Tensor"]
    assert [argument.keyword_only for argument in schema.arguments] == [False, False, False, True, True]
    assert schema.arguments[2].default == "[0, 1]"
    assert schema.arguments[3].default == '"a,b"'
    assert schema.arguments[4].is_written
    assert schema.returns[0].alias == {"a"}


@pytest.mark.parametrize(
    ("text", "written", "results"),
    [
        ("aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other, *, Scalar x=1) -> ()", [True, False, False], 0),
        ("aten::split.Tensor(Tensor(a -> *) self, SymInt size, int dim=0) -> Tensor(a)[]", [False, False, False], 1),
        ("aten::max.dim(Tensor self, int dim) -> (Tensor values, Tensor indices)", [False, False], 2),
        ("fbgemm::f(Tensor(a!)? x, (int, int) pair) -> ((int, int))", [True, False], 1),
    ],
)
def test_lists_optionals_and_tuples(text: str, written: list[bool], results: int) -> None:
    schema = parse_schema(text)
    assert schema is not None
    assert [argument.is_written for argument in schema.arguments] == written
    assert len(schema.returns) == results


@pytest.mark.parametrize("text", ["", "aten::add", "aten::add(Tensor self", "aten::add(int[ a)) -> x"])
def test_what_is_no_schema(text: str) -> None:
    assert parse_schema(text) is None
