"""Operators that do no work of their own: they make views, allocate, or ask for properties."""

from __future__ import annotations

_WITHOUT_WORK = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "t", "transpose", "permute", "expand",
    "expand_as", "detach", "detach_", "alias", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
    "unbind", "unsqueeze", "squeeze", "unflatten", "flatten", "contiguous", "to", "diagonal", "unfold", "real",
    "imag", "view_as", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resolve_conj", "resolve_neg", "result_type", "is_same_size", "size", "stride", "set_data",
    "requires_grad_", "retain_grad", "resize_output_", "_resize_output_", "swapaxes", "movedim", "numpy_T",
    "is_complex", "is_floating_point",
})  # fmt: skip
"""On the host these are rows like others; on a device they launch nothing."""


def does_no_work(name: str) -> bool:
    """Whether an operator (`aten::as_strided`, with or without its overload) only makes a view or allocates."""
    return name.partition("::")[2].partition(".")[0] in _WITHOUT_WORK
