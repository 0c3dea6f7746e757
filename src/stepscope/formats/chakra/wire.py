"""Chakra's nodes as bytes, column by column: a message object for each of some hundred thousand nodes takes seconds.

Only what the fields of a node need: whole numbers, texts and number attributes. Field numbers are those of
`chakra_schema`; a test reads the bytes back with protobuf.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stepscope.formats.timeline import Integers

ID, TYPE, START, DURATION = b"\x08", b"\x18", b"\x30", b"\x38"
"""Tags of fields that hold one number: 1, 3, 6 and 7."""
NAME, CTRL_DEPS, DATA_DEPS, INPUTS, OUTPUTS, ATTRIBUTE = b"\x12", b"\x22", b"\x2a", b"\x42", b"\x4a", b"\x52"
"""Tags of fields that hold a text, packed numbers or a message: 2, 4, 5, 8, 9 and 10."""
_INT64_VALUE = b"\x48"


def encode_number(value: int) -> bytes:
    """Seven bits a byte, lowest first; also the length before a message."""
    if value < 0x80:
        return _SMALL[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SMALL = [bytes([value]) for value in range(0x80)]


class Ragged(NamedTuple):
    """A column of fields: the bytes of each from the left, and how many of them count."""

    data: Integers
    length: Integers

    def only(self, wanted: Integers) -> Ragged:
        """Nothing where it is not wanted."""
        return Ragged(self.data, self.length * wanted)


def encode_numbers(values: Integers) -> Ragged:
    """`encode_number` of a whole column; negative numbers as 64-bit two's complement."""
    left = np.asarray(values, np.int64).astype(np.uint64)
    length = np.ones(len(left), np.int64)
    width = max(1, -(-int(left.max()).bit_length() // 7)) if len(left) else 1
    data = np.empty((len(left), width), np.uint8)
    for place in range(width):
        data[:, place] = left & np.uint64(0x7F)
        left = left >> np.uint64(7)
        more = left > 0
        data[:, place] |= more.view(np.uint8) << np.uint8(7)
        length += more
    return Ragged(data, length)


def behind(prefix: bytes, column: Ragged) -> Ragged:
    """The same bytes before each."""
    head = np.broadcast_to(np.frombuffer(prefix, np.uint8), (len(column.length), len(prefix)))
    return Ragged(np.concatenate((head, column.data), axis=1), column.length + len(prefix))


def with_length(tag: bytes, column: Ragged) -> Ragged:
    """Fields of less than 128 bytes, each behind the tag and its length."""
    data = np.empty((len(column.length), column.data.shape[1] + 2), np.uint8)
    data[:, 0], data[:, 1], data[:, 2:] = ord(tag), column.length, column.data
    return Ragged(data, column.length + 2)


def number_attributes(name: str, values: Integers) -> Ragged:
    """An int64 attribute of this (short) name for each number."""
    inner = b"\x0a" + encode_number(len(name)) + name.encode() + _INT64_VALUE
    return with_length(ATTRIBUTE, behind(inner, encode_numbers(values)))


def pick(texts: list[bytes], which: Integers) -> Ragged:
    """A column of a few short texts that come again and again."""
    data = np.zeros((len(texts), max(map(len, texts))), np.uint8)
    for row, text in zip(data, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return Ragged(data[which], np.array([len(text) for text in texts])[which])


def joined(*columns: Ragged) -> tuple[list[bytes], Integers]:
    """The fields that stand side by side in one piece, and its length."""
    data = np.concatenate([column.data for column in columns], axis=1)
    counting = np.concatenate([_counting(column) for column in columns], axis=1)
    length = np.sum([column.length for column in columns], axis=0)
    return cut(data[counting], length), length


def packed(column: Ragged, bounds: Integers) -> tuple[Integers, Integers]:
    """The bytes of all numbers in a row, and how many lie between each bound and the next."""
    end = np.concatenate(([0], np.cumsum(column.length)))[bounds]
    return column.data[_counting(column)], end[1:] - end[:-1]


def spread(data: Integers, length: Integers) -> Ragged:
    """Bytes in a row as a column, by the length of each field; for short ones."""
    column = Ragged(np.zeros((len(length), max(1, int(length.max(initial=0)))), np.uint8), length)
    column.data[_counting(column)] = data
    return column


def _counting(column: Ragged) -> Integers:
    """Which of the bytes count."""
    return np.arange(column.data.shape[1]) < column.length[:, None]


def cut(data: Integers, length: Integers) -> list[bytes]:
    """Bytes in a row as pieces of these lengths."""
    row, ends = data.tobytes(), length.cumsum().tolist()
    return [row[begin:end] for begin, end in pairwise((0, *ends))]


def text_field(tag: bytes, text: bytes) -> bytes:
    return tag + encode_number(len(text)) + text


def arguments_field(tag: bytes, values: Any, shapes: Any, types: Any) -> bytes:
    """Inputs or outputs: three texts, given as anything that holds bytes."""
    first, second, third = len(values), len(shapes), len(types)
    head, middle, last = b"\x0a" + encode_number(first), b"\x12" + encode_number(second), b"\x1a" + encode_number(third)
    size = len(head) + first + len(middle) + second + len(last) + third
    return b"".join((tag, encode_number(size), head, values, middle, shapes, last, types))
