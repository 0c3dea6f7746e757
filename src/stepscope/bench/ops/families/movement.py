"""Moving data unchanged: other orders, joins, copies, fills and plain reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import permutations
from math import prod
from typing import ClassVar

from stepscope.bench.ops.inputs import WHOLE_HIGH, Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, Call, Operator, Parameter, Shape, Sizes, UnsupportedError, Work
from stepscope.bench.ops.reference import WRONG_LIBRARY
from stepscope.core.lazy_torch import torch
from stepscope.run.producer import WrongResultError

ORDERS = tuple("".join(order) for order in permutations("0123"))[1:]
"""All but the first, which moves nothing to another place."""
COPIES = ("d2d", "h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable")

_SIZE = Parameter("size", "bytes", 1 << 26, "bytes in one call")


class _Move(Operator):
    """Every input is read once and written once to another place; backward, where there is one, moves as much back."""

    passes: ClassVar[tuple[str, ...]] = ("forward",)

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        return Work(flops=0, bytes=2 * DTYPE_BYTES[dtype] * sum(map(prod, self.sizes(shape).values())))


class _Reorder(_Move):
    """A copy with the dimensions in another order. Its gradient is a view, so that there is no backward pass."""

    def order(self, shape: Shape) -> tuple[int, ...]:
        """Which dimension of the input comes first, second …"""
        raise NotImplementedError

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        (tensor,) = inputs.values()
        # What `contiguous` does, but also where a single row or column would make it return the view itself.
        return partial(torch.clone, tensor.permute(self.order(shape)), memory_format=torch.contiguous_format)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        (tensor,), order = inputs.values(), self.order(shape)
        letters = "abcd"[: len(order)]
        return partial(torch.einsum, f"{letters}->{''.join(letters[place] for place in order)}", tensor)


class Transpose(_Reorder):
    name = "transpose"
    summary = "batch matrices (m, n) copied as (n, m); its gradient is a view, so that there is no backward pass"
    parameters = (
        Parameter("batch", "matrices", 128, "matrices in one call"),
        Parameter("m", "rows", 512, "rows of a matrix"),
        Parameter("n", "columns", 512, "columns of a matrix"),
    )
    tiny = {"batch": 2, "m": 5, "n": 7}

    def sizes(self, shape: Shape) -> Sizes:
        return {"matrices": (shape["batch"], shape["m"], shape["n"])}

    def order(self, shape: Shape) -> tuple[int, ...]:
        return 0, 2, 1


class Permute(_Reorder):
    name = "permute"
    summary = "an (a, b, c, d) tensor copied with its dimensions in another order; its gradient is a view"
    parameters = (
        Parameter("a", "elements", 32, "dimension 0"),
        Parameter("b", "elements", 128, "dimension 1"),
        Parameter("c", "elements", 16, "dimension 2"),
        Parameter("d", "elements", 64, "dimension 3"),
        Parameter("order", "", "0213", "which dimension of the input comes first, second, third, last", ORDERS),
    )
    tiny = {"a": 2, "b": 3, "c": 4, "d": 5}

    def sizes(self, shape: Shape) -> Sizes:
        return {"tensor": tuple(shape[name] for name in "abcd")}

    def order(self, shape: Shape) -> tuple[int, ...]:
        return tuple(map(int, shape["order"]))


class Concat(_Move):
    name = "concat"
    summary = "torch.cat of parts (batch, rows, columns) along the last dimension; its gradients are views"
    parameters = (
        Parameter("batch", "matrices", 512, "outermost dimension of each part"),
        Parameter("rows", "rows", 16, "rows of each part"),
        Parameter("columns", "columns", 128, "columns of each part"),
        Parameter("parts", "tensors", 2, "tensors joined"),
    )
    tiny = {"batch": 2, "rows": 3, "columns": 5, "parts": 4}

    def sizes(self, shape: Shape) -> Sizes:
        size = (shape["batch"], shape["rows"], shape["columns"])
        return {f"part{i}": size for i in range(shape["parts"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.cat, list(inputs.values()), dim=-1)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return lambda: torch.stack(list(inputs.values()), dim=2).flatten(2)


class Split(_Move):
    name = "split"
    summary = (
        "torch.split of (rows, columns) along the last dimension and a copy of each part: split alone moves nothing"
    )
    parameters = (
        Parameter("rows", "rows", 8192, "rows"),
        Parameter("columns", "columns", 1024, "columns of the whole; a multiple of `parts`"),
        Parameter("parts", "tensors", 2, "tensors made"),
    )
    passes = ("forward", "backward")
    differentiable = ("whole",)
    tiny = {"rows": 3, "columns": 20, "parts": 4}

    def check_shape(self, shape: Shape) -> None:
        if shape["columns"] % shape["parts"]:
            raise ValueError(
                f"columns={shape['columns']} do not split into parts={shape['parts']} equal ones: "
                "columns is a multiple of parts"
            )

    def sizes(self, shape: Shape) -> Sizes:
        return {"whole": (shape["rows"], shape["columns"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        whole, width = inputs["whole"], shape["columns"] // shape["parts"]
        kept, split = torch.contiguous_format, torch.split
        return lambda: [part.clone(memory_format=kept) for part in split(whole, width, dim=-1)]

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        whole, parts = inputs["whole"], shape["parts"]
        return lambda: whole.reshape(shape["rows"], parts, -1).unbind(1)


class _Bytes(Operator):
    """Writes `destination`: a copy of `source`, or zeros where there is none."""

    dtypes = ("int8",)
    passes = ("forward",)
    tiny = {"size": 1000}

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        """Byte for byte, after the destination was filled with what it must not hold."""
        destination = inputs["destination"].fill_(WHOLE_HIGH + 1)
        expected = inputs.get("source", torch.zeros_like(destination))
        self.bind(shape, inputs)()
        for tensor in (destination, expected):
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        wrong = int((destination.to(expected.device) != expected).sum())
        if wrong:
            message = f"{self.name} leaves {wrong} of {expected.numel()} bytes wrong"
            raise WrongResultError(message, hint=WRONG_LIBRARY)


class MemCopy(_Bytes):
    name = "memcpy"
    summary = "Tensor.copy_ of bytes into memory that is already there; over the host link each byte is counted once"
    parameters = (
        _SIZE,
        Parameter(
            "kind", "", "d2d",
            "d2d: on the device; h2d: host to device; d2h: device to host; pinned: page-locked, not waited for", COPIES,
        ),
    )  # fmt: skip

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        return Work(flops=0, bytes=shape["size"] * (2 if shape["kind"] == "d2d" else 1))

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        return 2 * int(shape["size"])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        size, kind = shape["size"], shape["kind"]
        if kind != "d2d" and maker.device == "cpu":
            raise UnsupportedError(f"kind={kind} copies between a host and its device: the CPU has only d2d")
        source = maker.values(size)
        if kind == "d2d":
            return {"source": source, "destination": maker.empty(size)}
        on_host = torch.empty(size, dtype=maker.dtype, pin_memory=kind.endswith("pinned"))
        if kind.startswith("h2d"):
            return {"source": on_host.copy_(source), "destination": maker.empty(size)}
        return {"source": source, "destination": on_host}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        source, destination = inputs["source"], inputs["destination"]
        pinned = shape["kind"].endswith("pinned")

        def copy() -> None:
            destination.copy_(source, non_blocking=pinned)

        return copy


class MemSet(_Bytes):
    name = "memset"
    summary = "Tensor.zero_ of bytes: a pure write"
    parameters = (_SIZE,)

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        return Work(flops=0, bytes=shape["size"])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        return {"destination": maker.empty(shape["size"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        destination = inputs["destination"]

        def clear() -> None:
            destination.zero_()

        return clear


class Read(Operator):
    name = "read"
    summary = "torch.sum of all numbers to one: a pure read"
    parameters = (Parameter("size", "bytes", 1 << 26, "bytes in one call; a multiple of 4"),)
    dtypes = ("float32",)
    passes = ("forward",)
    tiny = {"size": 4000}

    def check_shape(self, shape: Shape) -> None:
        if shape["size"] % DTYPE_BYTES["float32"]:
            raise ValueError(f"size={shape['size']} bytes are no whole float32 numbers: size is a multiple of 4")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        return Work(flops=shape["size"] // 4, bytes=shape["size"] + 4)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The numbers before they were made positive."""
        return int(shape["size"])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        # Of one sign: a sum near zero would make rounding look like an error.
        return {"numbers": maker.values(shape["size"] // 4).abs()}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.sum, inputs["numbers"])
