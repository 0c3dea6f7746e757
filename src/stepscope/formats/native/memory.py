"""Memory by address, for loops so hot that an array's reference count would cost more than their work.

Texts must have eight more bytes behind their end, whatever they are: a word may be read across it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ONES = np.uint64(0x0101010101010101)
HIGHS = np.uint64(0x8080808080808080)

_BYTE, _WORD, _REAL = ir.IntType(8), ir.IntType(64), ir.DoubleType()


def _reader(kind: Any, result: Any, align: int, *, widen: bool = False) -> Any:
    """A function that gives what lies at an address."""

    @intrinsic
    def read(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            loaded = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))
            loaded.align = align
            return builder.zext(loaded, _WORD) if widen else loaded

        return result(types.int64), generate

    return read


def _writer(kind: Any, value_type: Any, *, narrow: bool = False) -> Any:
    """A function that puts a value there."""

    @intrinsic
    def write(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            stored = builder.trunc(arguments[1], kind) if narrow else arguments[1]
            builder.store(stored, builder.inttoptr(arguments[0], kind.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return write


byte_at: Callable[[int], int] = _reader(_BYTE, types.int64, 1, widen=True)
word_at: Callable[[int], np.uint64] = _reader(_WORD, types.uint64, 1)
"""Eight bytes from there on as one number, the first lowest."""
number_at: Callable[[int], int] = _reader(_WORD, types.int64, 8)
real_at: Callable[[int], float] = _reader(_REAL, types.float64, 8)
put_byte: Callable[[int, int], None] = _writer(_BYTE, types.int64, narrow=True)
put_number: Callable[[int, int], None] = _writer(_WORD, types.int64)
put_real: Callable[[int, float], None] = _writer(_REAL, types.float64)


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


count_trailing_zeros: Callable[[np.uint64], int] = cast(Any, _trailing_zeros)
"""Of a word that is not zero."""
