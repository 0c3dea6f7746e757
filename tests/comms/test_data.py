from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.comms.data import (
    DTYPE_BYTES,
    LARGEST_EXACT,
    PERIOD,
    REDUCTIONS,
    Recipe,
    average_unit,
    count_wrong,
    is_average_exact,
    make_values,
    spoil,
    torch_dtype,
)

FUNCTIONS = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "prod": torch.prod, "avg": torch.mean}


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("members", [2, 4, 16])
def test_values_are_exact_in_their_dtype_and_so_are_their_reductions(dtype: str, reduction: str, members: int) -> None:
    if reduction == "avg" and not torch_dtype(dtype).is_floating_point:
        pytest.skip("averages of whole numbers are no whole numbers")
    recipe = Recipe(dtype, members, reduction, seed=7)
    inputs = [make_values(recipe, member, 0, 2000).double() for member in range(members)]
    assert not torch.equal(inputs[0], inputs[1])
    for values in inputs:
        assert torch.equal(values, values.round())
        assert values.unique().numel() > 1
        assert values.max() <= max(LARGEST_EXACT[dtype], average_unit(recipe) if reduction == "avg" else 0)
    if reduction is None:
        return
    wanted = FUNCTIONS[reduction](torch.stack(inputs), dim=0)
    if dtype == "bool":
        wanted = wanted.clamp(max=1)
    expected = make_values(recipe, None, 0, 2000).double()
    if reduction == "avg":
        assert torch.equal(expected, wanted.to(torch_dtype(dtype)).double())
    else:
        assert torch.equal(expected, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_sums_stay_exact_whatever_the_order(dtype: str) -> None:
    """Partial sums of 16 members in the dtype itself, forwards and backwards."""
    if dtype.startswith("float8"):
        pytest.skip("torch adds no float8 on the CPU")
    recipe = Recipe(dtype, 16, "sum")
    inputs = [make_values(recipe, member, 0, 500) for member in range(16)]
    expected = make_values(recipe, None, 0, 500)
    for order in (range(16), range(15, -1, -1)):
        total = torch.zeros(500, dtype=torch_dtype(dtype))
        for member in order:
            total += inputs[member]
        assert torch.equal(total, expected)


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 3 * PERIOD), count=st.integers(0, 500), member=st.integers(0, 3))
def test_values_at_a_place_do_not_depend_on_where_one_begins(start: int, count: int, member: int) -> None:
    recipe = Recipe("int32", 4)
    whole = make_values(recipe, member, 0, start + count)
    assert torch.equal(whole[start:], make_values(recipe, member, start, count))


def test_cases_and_calls_have_data_of_their_own() -> None:
    one, other = (make_values(Recipe("float32", 2, "sum", seed), 0, 0, 100) for seed in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_what_nobody_wrote_is_wrong(dtype: str) -> None:
    recipe = Recipe(dtype, 2)
    expected = make_values(recipe, 0, 0, 200)
    result = expected.clone()
    assert count_wrong(result, expected, recipe) == 0
    spoil(result, dtype)
    found = count_wrong(result, expected, recipe)
    assert found == (int((~expected).sum()) if dtype == "bool" else 200)
    assert found > 0


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("place", [0, 99, 199])
def test_one_wrong_element_is_counted(dtype: str, place: int) -> None:
    recipe = Recipe(dtype, 2)
    expected = make_values(recipe, 0, 0, 200)
    result = expected.clone()
    result[place] = result[place] == 0
    assert count_wrong(result, expected, recipe) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("members", [2, 3, 4, 7, 8, 16, 128, 300])
def test_averages_are_exact_whichever_comes_first(dtype: str, members: int) -> None:
    """Sum then division, division then sum; and zeros, or a small error everywhere, are never right."""
    recipe = Recipe(dtype, members, "avg", seed=3)
    kind = torch_dtype(dtype)
    expected = make_values(recipe, None, 0, 2000)
    inputs = [make_values(recipe, member, 0, 2000).float() for member in range(members)]
    last = (sum(inputs) / members).to(kind)  # type: ignore[union-attr]
    first = torch.zeros(2000)
    for values in inputs:
        first = (first + (values / members).to(kind).float()).to(kind).float()
    for result in (last, first.to(kind)):
        assert count_wrong(result, expected, recipe) == 0
    nonzero = int((expected.float() != 0).sum())
    assert nonzero > 50
    assert count_wrong(torch.zeros_like(expected), expected, recipe) == nonzero
    factor = 1.3 if is_average_exact(recipe) else 2.2
    assert count_wrong((expected.float() * factor).to(kind), expected, recipe) > 0.9 * nonzero


def test_a_shift_or_a_swap_of_pieces_is_wrong() -> None:
    """What equal values could never show."""
    recipe = Recipe("float32", 4)
    expected = torch.cat([make_values(recipe, member, 0, 64) for member in range(4)])
    assert count_wrong(expected.roll(1), expected, recipe) > 200
    swapped = torch.cat([make_values(recipe, member, 0, 64) for member in (1, 0, 2, 3)])
    assert count_wrong(swapped, expected, recipe) > 100
