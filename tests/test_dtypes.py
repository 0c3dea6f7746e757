"""One table of element types: bytes as torch counts them, spellings of every source."""

from __future__ import annotations

import pytest
import torch

from stepscope.core.dtypes import DTYPE_BYTES, dtype_bytes, dtype_name


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_bytes_are_those_of_torch(name: str) -> None:
    kind = getattr(torch, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    assert DTYPE_BYTES[name] == kind.itemsize
    assert dtype_name(str(kind)) == name


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("float32", ("Float", "float", "f32", "torch.float32")),
        ("float16", ("Half", "c10::Half", "half", "f16", "__half")),
        ("bfloat16", ("BFloat16", "c10::BFloat16", "bf16", "__nv_bfloat16")),
        ("int64", ("Long", "long", "long int", "long long", "s64")),
        ("uint8", ("Byte", "unsigned char", "u8", "uint8")),
        ("complex64", ("ComplexFloat", "c10::complex<float>", "c64")),
        ("float8_e4m3fn", ("c10::Float8_e4m3fn", "fp8_e4m3", "f8e4m3", "f8e4m3fn")),
        ("bool", ("Bool", "pred")),
    ],
)
def test_every_source_spells_the_same_type(name: str, spellings: tuple[str, ...]) -> None:
    assert {dtype_name(spelling) for spelling in (name, *spellings)} == {name}
    assert {dtype_bytes(spelling) for spelling in spellings} == {DTYPE_BYTES[name]}


def test_an_unknown_type_stays_as_it_is() -> None:
    assert (dtype_name("Tensor"), dtype_bytes("Tensor"), dtype_bytes("")) == ("Tensor", None, None)
