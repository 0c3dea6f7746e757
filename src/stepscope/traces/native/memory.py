"""Memory by address, for loops so hot that an array's reference count would cost more than their work.

Texts must have eight more bytes behind their end, whatever they are: a word may be read across it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ONES = np.uint64(0x0101010101010101)
HIGHS = np.uint64(0x8080808080808080)

_BYTE, _WORD, _REAL = ir.IntType(8), ir.IntType(64), ir.DoubleType()


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


@intrinsic  # type: ignore[untyped-decorator]
def byte_at(typing: Any, address: Any) -> Any:
    """The byte there, as a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(_load(builder, arguments[0], _BYTE, 1), _WORD)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def word_at(typing: Any, address: Any) -> Any:
    """Eight bytes from there on as one number, the first lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0], _WORD, 1)

    return types.uint64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def number_at(typing: Any, address: Any) -> Any:
    """The 64-bit number there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0], _WORD, 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def real_at(typing: Any, address: Any) -> Any:
    """The double there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0], _REAL, 8)

    return types.float64(types.int64), generate


def _store(kind: Any, value_type: Any, narrow: bool = False) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            stored = builder.trunc(arguments[1], kind) if narrow else arguments[1]
            builder.store(stored, builder.inttoptr(arguments[0], kind.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return store


put_byte = _store(_BYTE, types.int64, narrow=True)
put_number = _store(_WORD, types.int64)
put_real = _store(_REAL, types.float64)


@intrinsic  # type: ignore[untyped-decorator]
def count_trailing_zeros(typing: Any, word: Any) -> Any:
    """Of a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate
