"""Floating-point operations and bytes of a recorded operator, from its shapes alone; None where they do not decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from stepscope.formats.graph import Node

Shape = Sequence[int]


def _matmul(shapes: Sequence[Shape]) -> int | None:
    first, second = shapes[0], shapes[1]
    if len(first) == len(second) == 2 and first[1] == second[0]:
        return 2 * first[0] * first[1] * second[1]
    return None


def _batched(shapes: Sequence[Shape]) -> int | None:
    first, second = shapes[0], shapes[1]
    if len(first) == len(second) == 3 and first[0] == second[0] and first[2] == second[1]:
        return 2 * first[0] * first[1] * first[2] * second[2]
    return None


def _after_bias(rule: Callable[[Sequence[Shape]], int | None]) -> Callable[[Sequence[Shape]], int | None]:
    return lambda shapes: rule(shapes[1:]) if len(shapes) > 2 else None


def _attention(factor: int, *, length_first: bool = False) -> Callable[[Sequence[Shape]], int | None]:
    """Two products of every query with every key; the backward pass has five.

    Shapes are [batch, heads, length, size], or [batch, length, heads, size] in operators without "scaled_dot_product".
    Keys may have fewer heads than queries, which share them.
    """
    length_at, heads_at = (1, 2) if length_first else (2, 1)

    def count(shapes: Sequence[Shape]) -> int | None:
        query, key = (shapes[0], shapes[1]) if factor == 2 else (shapes[1], shapes[2])
        if len(query) != 4 or len(key) != 4:
            return None
        return 2 * factor * query[0] * query[heads_at] * query[length_at] * key[length_at] * query[3]

    return count


_BY_INPUTS: dict[str, Callable[[Sequence[Shape]], int | None]] = {
    "aten::mm": _matmul,
    "aten::addmm": _after_bias(_matmul),
    "aten::_addmm_activation": _after_bias(_matmul),
    "aten::bmm": _batched,
    "aten::baddbmm": _after_bias(_batched),
    "aten::_scaled_dot_product_flash_attention": _attention(2),
    "aten::_scaled_dot_product_efficient_attention": _attention(2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(2),
    "aten::_flash_attention_forward": _attention(2, length_first=True),
    "aten::_efficient_attention_forward": _attention(2, length_first=True),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(5),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(5),
    "aten::_flash_attention_backward": _attention(5, length_first=True),
    "aten::_efficient_attention_backward": _attention(5, length_first=True),
}
_CONVOLUTIONS = frozenset(
    ("aten::cudnn_convolution", "aten::miopen_convolution", "aten::mkldnn_convolution", "aten::_slow_conv2d_forward")
)
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_COUNTED = frozenset((*_BY_INPUTS, *_CONVOLUTIONS, _CONVOLUTION_BACKWARD))


def count_operations(name: str, shapes: Sequence[Shape], out: Shape | None = None) -> int | None:
    """Multiplications and additions of one call. A convolution needs the shape of its result; `out` gives it."""
    try:
        rule = _BY_INPUTS.get(name)
        if rule is not None:
            return rule(shapes)
        if name in _CONVOLUTIONS and out:
            return 2 * prod(out) * prod(shapes[1][1:])
    except (IndexError, TypeError):
        pass
    return None


def count_of_node(node: Node) -> int | None:
    """The same of a node of a graph, convolutions' backward pass included."""
    if node.name not in _COUNTED:  # arguments need not be decoded
        return None
    try:
        shapes = node.inputs.shapes
        if node.name == _CONVOLUTION_BACKWARD:
            transposed, wanted = node.inputs.values[7], node.inputs.values[-1]
            if transposed is not False or not isinstance(wanted, list):
                return None
            return sum(map(bool, wanted[:2])) * int(2 * prod(shapes[0]) * prod(shapes[2][1:]))
        results = node.outputs.shapes
        return count_operations(node.name, shapes, results[0] if results else None)
    except (IndexError, TypeError, ValueError):
        return None


def bytes_of_node(node: Node) -> int | None:
    """Bytes of all tensors that go in and come out; None where the node has none."""
    try:
        tensors = [*node.inputs.tensors(), *node.outputs.tensors()]
    except ValueError:
        return None
    return sum(tensor.size_bytes for tensor in tensors) or None
