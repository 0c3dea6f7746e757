"""Fewer bits on the wire than in memory: how float32 values are packed, unpacked, and how far off they may come back.

fp8 and the whole numbers share one float32 scale among a block of values, so that the largest of them fills the range.
Payload and scales of a piece travel in one row of bytes; of 4 and 2 bits several values share a byte.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.bench.comms.data import DTYPE_BYTES, torch_dtype
from stepscope.core.errors import unknown_name
from stepscope.core.lazy_torch import torch

BLOCK = 256
"""Values that share a scale."""
SCALE_BYTES = 4
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: blocks of zeros, and of values near it, have this scale."""
ROUNDING = 2.0**-22
"""What dividing by a scale and multiplying with it may add in float32, relative to the value, with room to spare."""


class Encoding(NamedTuple):
    """The error of a value x in a block of scale s is at most `relative`·|x| + `absolute`·s; s is 1 without scales."""

    name: str
    dtype: str
    relative: float
    absolute: float
    largest: float | None = None
    """What the largest value of a block becomes; None: values are only rounded, without scales."""
    values_per_byte: int = 1
    """More than 1: whole numbers are shifted to start at 0 and packed, the first one into the lowest bits."""

    @property
    def is_whole(self) -> bool:
        return self.dtype in {"int8", "uint8"}

    def used_bytes(self, count: int) -> int:
        """Bytes of `count` values, without filling up."""
        return -(-count // self.values_per_byte) * DTYPE_BYTES[self.dtype]

    def payload_bytes(self, count: int) -> int:
        """Bytes of `count` values; rounded up where scales follow, which lie on whole words."""
        size = self.used_bytes(count)
        return size if self.largest is None else -(-size // SCALE_BYTES) * SCALE_BYTES

    def wire_bytes(self, count: int) -> int:
        """Payload and scales."""
        return self.payload_bytes(count) + (0 if self.largest is None else SCALE_BYTES * count_blocks(count))


ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        # Half a unit in the last place: 11, 8 and 4 significant bits; below the normal range half a fixed step.
        Encoding("fp16", "float16", 2.0**-11, 2.0**-25),
        Encoding("bf16", "bfloat16", 2.0**-8, 2.0**-134),
        Encoding("fp8", "float8_e4m3fn", 2.0**-4, 2.0**-10, 448.0),
        Encoding("int8", "int8", 0.0, 0.5, 127.0),
        Encoding("int4", "uint8", 0.0, 0.5, 7.0, 2),
        Encoding("int2", "uint8", 0.0, 0.5, 1.0, 4),
    )
}


def find_encoding(name: str) -> Encoding:
    if name not in ENCODINGS:
        raise unknown_name("encoding", name, ENCODINGS, where="--wire")
    return ENCODINGS[name]


def count_blocks(count: int) -> int:
    return -(-count // BLOCK)


def bound_error(encoding: Encoding, magnitude: torch.Tensor) -> torch.Tensor:
    """How far off one quantisation may bring each of a row of values, of which at least an upper bound is known."""
    error = (encoding.relative + ROUNDING) * magnitude
    if encoding.largest is None:
        return error + encoding.absolute
    blocks = count_blocks(len(magnitude))
    padded = torch.nn.functional.pad(magnitude, (0, blocks * BLOCK - len(magnitude))).view(blocks, BLOCK)
    scale = (padded.amax(1) / encoding.largest).clamp(min=SMALLEST_SCALE) * (1 + ROUNDING)
    return error + encoding.absolute * scale.repeat_interleave(BLOCK)[: len(magnitude)]


class Coder:
    """Packs rows of `count` float32 values, and unpacks them. Scratch memory is taken once."""

    def __init__(self, encoding: Encoding, rows: int, count: int, device: str) -> None:
        self.encoding, self._rows, self._count = encoding, rows, count
        self._blocks, self._dtype, self._divide = count_blocks(count), torch_dtype(encoding.dtype), torch.div
        self._scratch: torch.Tensor | None = None
        if encoding.largest is not None:
            # The end of the last block stays zero, which moves no scale.
            self._scratch = torch.zeros(rows, self._blocks * BLOCK, device=device)

    @staticmethod
    def needed_bytes(encoding: Encoding, rows: int, count: int) -> int:
        """Scratch, and what taking the largest of each block, or packing, needs meanwhile."""
        return 0 if encoding.largest is None else 2 * rows * count_blocks(count) * BLOCK * 4

    def encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        """`values` (rows, count) float32 into `wire` (rows, bytes)."""
        largest = self.encoding.largest
        payload = self._payload(wire)
        if largest is None or self._scratch is None:
            payload.copy_(values)
            return
        whole = self._scratch.view(self._rows, self._blocks, BLOCK)
        self._scratch[:, : self._count].copy_(values)
        scales = self._scales(wire)
        self._divide(whole.abs().amax(-1), largest, out=scales)
        scales.clamp_(min=SMALLEST_SCALE)
        whole.div_(scales.unsqueeze(-1))
        if self.encoding.is_whole:
            whole.round_()
        if self.encoding.values_per_byte > 1:
            self._pack(self._scratch, payload)
        else:
            payload.copy_(self._scratch[:, : self._count])

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        """Shifted to start at 0; the value at place i of a byte is worth 2^(bits·i)."""
        together = self.encoding.values_per_byte
        codes = numbers.add_(self.encoding.largest or 0.0).to(payload.dtype)
        codes = codes[:, : payload.shape[1] * together]
        payload.copy_(codes[:, ::together])
        for place in range(1, together):
            payload.bitwise_or_(codes[:, place::together] << 8 // together * place)
        numbers[:, self._count :] = 0

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        together = self.encoding.values_per_byte
        bits = 8 // together
        for place in range(together):
            numbers[:, place : payload.shape[1] * together : together].copy_(
                payload >> bits * place & (1 << bits) - 1
            )  # fmt: skip
        numbers[:, : self._count].sub_(self.encoding.largest or 0.0)
        numbers[:, self._count :] = 0

    def decode(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """The other way."""
        payload = self._payload(wire)
        if self._scratch is None:
            values.copy_(payload)
            return
        if self.encoding.values_per_byte > 1:
            self._unpack(payload, self._scratch)
        else:
            self._scratch[:, : self._count].copy_(payload)
        whole = self._scratch.view(self._rows, self._blocks, BLOCK)
        whole.mul_(self._scales(wire).unsqueeze(-1))
        values.copy_(self._scratch[:, : self._count])

    def _payload(self, wire: torch.Tensor) -> torch.Tensor:
        return wire[:, : self.encoding.used_bytes(self._count)].view(self._dtype)

    def _scales(self, wire: torch.Tensor) -> torch.Tensor:
        assert self._scratch is not None
        return wire[:, self.encoding.payload_bytes(self._count) :].view(self._scratch.dtype)
