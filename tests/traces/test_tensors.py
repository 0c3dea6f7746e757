"""Types and values of recorded arguments."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.dtypes import dtype_bytes
from stepscope.formats.tensors import (
    UNDEFINED,
    Arguments,
    Opaque,
    Tensor,
    ValueType,
    parse_type,
    split_list,
)


def test_types_nest_and_keep_the_undefined_tensor_apart_from_none() -> None:
    found = parse_type("GenericList[None,Tensor(long int),Tensor(nullptr (uninitialized)),Tensor(c10::complex<float>)]")
    assert found.kind == "GenericList"
    assert found.items == (
        ValueType("None"),
        ValueType("Tensor", "int64"),
        ValueType("Undefined"),
        ValueType("Tensor", "complex64"),
    )
    assert parse_type("Tuple[String,GenericList[Int,Int]]").items[1].items == (ValueType("Int"), ValueType("Int"))
    assert parse_type("GenericList[]").items == ()
    assert parse_type("Tensor(c10::NewFloat)").dtype == "c10::NewFloat"


@pytest.mark.parametrize("text", ["GenericList[Int", "Tensor(float", "Int]", "GenericList[Tensor(float]"])
def test_brackets_that_do_not_match_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"bracket|closed"):
        parse_type(text)


KINDS = st.recursive(
    st.sampled_from(["Int", "None", "Tensor(float)", "Tensor(long int)", "Tensor(nullptr (uninitialized))", "Device"]),
    lambda inner: st.builds(
        lambda name, parts: f"{name}[{','.join(parts)}]",
        st.sampled_from(["GenericList", "Tuple"]),
        st.lists(inner, max_size=4),
    ),
    max_leaves=12,
)


@given(KINDS)
def test_every_nest_of_types_is_taken_apart_completely(text: str) -> None:
    def written(kind: ValueType) -> int:
        return 1 + sum(map(written, kind.items))

    names = text.replace("(nullptr (uninitialized))", "").replace("(long int)", "").replace("(float)", "")
    leaves = [part for part in names.replace("[", ",").replace("]", ",").split(",") if part]
    assert written(parse_type(text)) == len(leaves)


@given(st.lists(st.text(alphabet="ab :", min_size=1, max_size=5), max_size=5))
def test_plain_lists_split_at_commas(parts: list[str]) -> None:
    joined = ",".join(parts)
    assert split_list(joined) == (parts if joined.strip() else [])


def test_values_are_told_apart() -> None:
    arguments = Arguments.of(
        [
            ["<None>", [5, 6, 0, 3, 8, "cuda:0"], [9, 0, 0, 0, 0, ""]],
            "<None>",
            "<Generator>",
            "inf",
            "inf",
            [1, 2],
            True,
            "cuda:0",
            [7, 0, 0, 0, 0, ""],
        ],
        [[[], [3], []], [], [], [], [], [[], []], [], [], []],
        [
            "GenericList[None,Tensor(long int),Tensor(nullptr (uninitialized))]",
            "None",
            "Generator",
            "Double",
            "String",
            "GenericList[Int,Int]",
            "Bool",
            "Device",
            "Tensor(nullptr (uninitialized))",
        ],
    )
    indices, none, generator, infinite, word, numbers, flag, device, undefined = arguments
    assert indices == (None, Tensor(5, 6, 0, 3, 8, "cuda:0", "int64", (3,), None), UNDEFINED)
    assert none is None
    assert generator == Opaque("Generator")
    assert infinite == math.inf
    assert (word, numbers, flag, device, undefined) == ("inf", (1, 2), True, "cuda:0", UNDEFINED)
    assert [found.id for found in arguments.tensors()] == [5]


def test_a_kernel_whose_last_argument_has_no_strides() -> None:
    raw = msgspec.json.encode(
        {
            "values": [[5, 6, 0, 4, 4, "cuda:0"], 8, 140],
            "shapes": [[2, 2], [], []],
            "types": ["Tensor(float)", "Int", "Int"],
            "strides": [[2, 1], []],
        }
    )
    first, *rest = Arguments(raw)
    assert first.strides == (2, 1)
    assert rest == [8, 140]


def test_damaged_arguments_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="2 values, but 1 types"):
        Arguments.of([1, 2], [[], []], ["Int"]).parsed()
    with pytest.raises(ValueError, match="recorded as"):
        Arguments.of([[1, "x", 0, 0, 0]], [[]], ["Tensor(float)"]).parsed()
    with pytest.raises(ValueError, match="array"):
        Arguments(b'{"values": 3}').parsed()
    with pytest.raises(ValueError, match="no list"):
        Arguments(tuple(msgspec.Raw(part) for part in (b"what", b"[]", b"[]"))).parsed()


def test_lists_that_python_printed_are_read() -> None:
    parts = (b"[[1, 2, 0, 3, 4, 'cuda:0'], None]", b"[[3], []]", b"['Tensor(float)', 'None']")
    first, second = Arguments(tuple(map(msgspec.Raw, parts)))
    assert (first.shape, second) == ((3,), None)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "expected"),
    [
        ((2, 3), (3, 1), 0, (0, 24)),
        ((2, 3), (8, 1), 5, (20, 20 + 44)),
        ((4,), (0,), 2, (8, 12)),
        ((4,), None, 2, (8, 24)),
        ((), (), 3, (12, 16)),
        ((3,), (-2,), 6, (8, 28)),
    ],
)
def test_ranges_in_the_storage(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int, expected: tuple[int, int]
) -> None:
    assert Tensor(1, 2, offset, math.prod(shape), 4, "cpu", "float32", shape, strides).storage_range() == expected


def test_sizes_of_element_types_in_both_spellings() -> None:
    assert [dtype_bytes(text) for text in ("BFloat16", "c10::BFloat16", "bfloat16", "Long", "long", "what")] == [
        2, 2, 2, 8, 8, None,
    ]  # fmt: skip
