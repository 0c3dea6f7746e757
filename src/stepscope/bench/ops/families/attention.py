"""Attention and the rotary embedding of positions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import (
    DTYPE_BYTES,
    MATRIX_FLOATS,
    Call,
    Operator,
    Parameter,
    Shape,
    Sizes,
    UnsupportedError,
    Work,
)
from stepscope.core.lazy_torch import functional, torch

_BACKENDS = {
    "math": ("MATH", "math"),
    "flash": ("FLASH_ATTENTION", "flash"),
    "efficient": ("EFFICIENT_ATTENTION", "mem_efficient"),
    "cudnn": ("CUDNN_ATTENTION", "cudnn"),
}
"""Our names, torch's, and those of its switches."""
_NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch says that a backend does not serve a case: on a GPU, on a CPU."""

REFERENCE_BLOCK = 1024
"""Queries whose scores the reference computes at a time."""


class Attention(Operator):
    """Two products, 4·head_dim operations for each pair of a query and a key that it may see; softmax is not counted.

    A causal query sees the keys up to its own place, counted from the first of both, as torch aligns them. Backward
    is four products (the gradients of values, probabilities, queries and keys): twice forward. Fused kernels compute
    the scores a second time, which is not counted.
    """

    name = "attention"
    summary = "torch scaled_dot_product_attention: (batch, heads, queries, head_dim), grouped where kv_heads < heads"
    parameters = (
        Parameter("batch", "sequences", 4, "sequences in one call"),
        Parameter("heads", "heads", 16, "heads of the queries"),
        Parameter("kv_heads", "heads", 16, "heads of keys and values; must divide heads"),
        Parameter("queries", "tokens", 1024, "queries of a sequence"),
        Parameter("keys", "tokens", 1024, "keys and values of a sequence"),
        Parameter("head_dim", "elements", 64, "width of a head"),
        Parameter("causal", "", "no", "whether a query sees only keys up to its own place", ("yes", "no")),
        Parameter(
            "backend", "", "auto", "which of torch's implementations must run; auto: the one torch picks",
            ("auto", *_BACKENDS),
        ),
    )  # fmt: skip
    dtypes = MATRIX_FLOATS
    unit = "TFLOP/s"
    differentiable = ("query", "key", "value")
    tiny = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 12, "keys": 12, "head_dim": 16}

    def check_shape(self, shape: Shape) -> None:
        if shape["heads"] % shape["kv_heads"]:
            raise ValueError(f"kv_heads={shape['kv_heads']} must divide heads={shape['heads']}")

    @staticmethod
    def seen_pairs(shape: Shape) -> int:
        """Pairs of a query and a key that it sees, in one head."""
        queries, keys = shape["queries"], shape["keys"]
        if shape["causal"] == "no":
            return int(queries * keys)
        # Query i sees min(i + 1, keys) keys.
        short = min(queries, keys)
        return int(short * (short + 1) // 2 + (queries - short) * keys)

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, heads, width = shape["batch"], shape["heads"], shape["head_dim"]
        products = 4 * batch * heads * self.seen_pairs(shape) * width
        query = batch * heads * shape["queries"] * width
        key = batch * shape["kv_heads"] * shape["keys"] * width
        size = DTYPE_BYTES[dtype]
        if direction == "forward":
            return Work(flops=products, bytes=size * (2 * query + 2 * key))
        # Upstream, query, key and value read, their three gradients written. Fused kernels also read the kept output.
        return Work(flops=2 * products, bytes=size * (3 * query + 4 * key))

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The scores, where they are written out: torch picks a fused kernel, which does not, for all but float64."""
        writes = shape["backend"] == "math" or (shape["backend"] == "auto" and dtype == "float64")
        scores = shape["batch"] * shape["heads"] * shape["queries"] * shape["keys"]
        return int(scores * DTYPE_BYTES[dtype]) if writes else 0

    def sizes(self, shape: Shape) -> Sizes:
        batch, width = shape["batch"], shape["head_dim"]
        key = (batch, shape["kv_heads"], shape["keys"], width)
        return {"query": (batch, shape["heads"], shape["queries"], width), "key": key, "value": key}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        query, key, value = inputs["query"], inputs["key"], inputs["value"]
        causal, grouped = shape["causal"] == "yes", shape["kv_heads"] != shape["heads"]
        attend = partial(
            functional.scaled_dot_product_attention, query, key, value, is_causal=causal, enable_gqa=grouped
        )
        if shape["backend"] == "auto":
            return attend
        only = _on_backend(attend, shape["backend"])
        _require_kernel(only, shape["backend"])
        return only

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Block by block of one head's queries: the scores of long sequences fill no memory, in backward neither."""
        from torch.utils.checkpoint import checkpoint

        query, key, value = inputs["query"], inputs["key"], inputs["value"]
        shared = shape["heads"] // shape["kv_heads"]

        def attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
            scores = q @ k.T / shape["head_dim"] ** 0.5
            if shape["causal"] == "yes":
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
                scores = scores.masked_fill(hidden, float("-inf"))
            powers = (scores - scores.amax(1, keepdim=True)).exp()
            weights: torch.Tensor = powers / powers.sum(1, keepdim=True)
            return weights @ v

        def attend() -> torch.Tensor:
            blocks = [
                checkpoint(
                    attend_block, query[b, h, first : first + REFERENCE_BLOCK], key[b, h // shared],
                    value[b, h // shared], first, use_reentrant=False, preserve_rng_state=False,
                )
                for b in range(shape["batch"])
                for h in range(shape["heads"])
                for first in range(0, shape["queries"], REFERENCE_BLOCK)
            ]  # fmt: skip
            return torch.cat(blocks).view(query.shape)

        return attend


def _on_backend(attend: Call, backend: str) -> Call:
    """With the other backends switched off for the time of each call.

    torch's context manager for this takes as long as several kernel launches, so only the compiler, which knows it, is
    given that; a plain call turns the same switches itself.
    """
    from torch.backends import cuda
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind, is_compiling = getattr(SDPBackend, _BACKENDS[backend][0]), torch.compiler.is_compiling
    turned = [
        (getattr(cuda, f"enable_{switch}_sdp"), name == backend)
        for name, (_, switch) in _BACKENDS.items()
        if getattr(cuda, f"{switch}_sdp_enabled")() != (name == backend)
    ]

    def only() -> Any:
        if is_compiling():
            with sdpa_kernel(kind):
                return attend()
        for turn, wanted in turned:
            turn(wanted)
        try:
            return attend()
        finally:
            for turn, wanted in turned:
                turn(not wanted)

    return only


def _require_kernel(call: Call, backend: str) -> None:
    """One call beforehand: torch gives the reasons for a refusal as warnings, which belong into the error."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_KERNEL):
                raise
            reasons = "; ".join(str(one.message).split(" (Triggered")[0].strip() for one in given)
            raise UnsupportedError(
                f"No available kernel: torch's {backend} attention does not serve this case"
                + f" ({reasons})" * bool(reasons)
            ) from error


class Rope(Operator):
    """3 an element each way: two products and their sum; turning the sign of one half is not counted."""

    name = "rope"
    summary = "rotary embedding in plain torch, x·cos + rotate_half(x)·sin, over (batch, heads, positions, head_dim)"
    parameters = (
        Parameter("batch", "sequences", 4, "sequences in one call"),
        Parameter("heads", "heads", 16, "heads of a sequence"),
        Parameter("positions", "tokens", 1024, "places in a sequence"),
        Parameter("head_dim", "elements", 64, "width of a head; even"),
    )
    differentiable = ("input",)
    tiny = {"batch": 2, "heads": 3, "positions": 5, "head_dim": 8}

    def check_shape(self, shape: Shape) -> None:
        if shape["head_dim"] % 2:
            raise ValueError(f"head_dim={shape['head_dim']} must be even: its halves are turned against each other")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        table = shape["positions"] * shape["head_dim"]
        elements = shape["batch"] * shape["heads"] * table
        # Backward turns the upstream the other way: it needs the two tables, not the input.
        return Work(flops=3 * elements, bytes=DTYPE_BYTES[dtype] * (2 * elements + 2 * table))

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The turned input and the two products."""
        return int(3 * shape["batch"] * shape["heads"] * shape["positions"] * shape["head_dim"] * DTYPE_BYTES[dtype])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        positions, width = shape["positions"], shape["head_dim"]
        places = torch.arange(positions, dtype=torch.float64, device=maker.device)
        turns = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=maker.device) / width)
        angles = torch.outer(places, turns).repeat(1, 2)
        return {
            "input": maker.values(shape["batch"], shape["heads"], positions, width),
            "cos": angles.cos().to(maker.dtype),
            "sin": angles.sin().to(maker.dtype),
        }

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, cos, sin = inputs["input"], inputs["cos"], inputs["sin"]
        half, join = shape["head_dim"] // 2, torch.cat

        def rotate() -> torch.Tensor:
            turned = join((-tensor[..., half:], tensor[..., :half]), -1)
            return tensor * cos + turned * sin

        return rotate

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Each pair of one element of either half is a complex number, multiplied with cos + i·sin."""
        half = shape["head_dim"] // 2
        first, second = inputs["input"][..., :half], inputs["input"][..., half:]
        turn = torch.complex(inputs["cos"][:, :half].contiguous(), inputs["sin"][:, :half].contiguous())

        def rotate() -> torch.Tensor:
            turned = torch.complex(first, second) * turn
            return torch.cat((turned.real, turned.imag), -1)

        return rotate
