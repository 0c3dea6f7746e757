"""Work of operators from their shapes."""

from __future__ import annotations

import pytest

from stepscope.traces.operators import count_operations

BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 8, 16, 48, 4
PRODUCT = 2 * BATCH * HEADS * QUERIES * KEYS * SIZE


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize(
    ("name", "length_first"),
    [
        ("aten::_scaled_dot_product_flash_attention", False),
        ("aten::_scaled_dot_product_efficient_attention", False),
        ("aten::_scaled_dot_product_cudnn_attention", False),
        ("aten::_flash_attention_forward", True),
        ("aten::_efficient_attention_forward", True),
    ],
)
def test_attention_by_the_layout_of_its_operator(name: str, length_first: bool, key_heads: int) -> None:
    """Two products forward, five backward, also where heads share their keys."""

    def shape(heads: int, length: int) -> list[int]:
        return [BATCH, length, heads, SIZE] if length_first else [BATCH, heads, length, SIZE]

    query, key = shape(HEADS, QUERIES), shape(key_heads, KEYS)
    assert count_operations(name, [query, key, key]) == 2 * PRODUCT
    backward = f"{name.removesuffix('_forward')}_backward"
    if "cudnn" not in name:
        assert count_operations(backward, [query, query, key, key]) == 5 * PRODUCT
    assert count_operations(name, [query[1:], key[1:], key[1:]]) is None
