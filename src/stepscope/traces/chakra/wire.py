"""Chakra's nodes as bytes, column by column: a message object for each of some hundred thousand nodes takes seconds.

Only what the fields of a node need: whole numbers, texts and number attributes. Field numbers are those of
`chakra_schema`; a test reads the bytes back with protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.traces.timeline import Integers

ID, TYPE, START, DURATION = b"\x08", b"\x18", b"\x30", b"\x38"
"""Tags of fields that hold one number: 1, 3, 6 and 7."""
NAME, CTRL_DEPS, DATA_DEPS, INPUTS, OUTPUTS, ATTRIBUTE = b"\x12", b"\x22", b"\x2a", b"\x42", b"\x4a", b"\x52"
"""Tags of fields that hold a text, packed numbers or a message: 2, 4, 5, 8, 9 and 10."""
_INT64_VALUE = b"\x48"


def encode_number(value: int) -> bytes:
    """Seven bits a byte, lowest first; also the length before a message."""
    if value < 0x80:
        return _SMALL[value]
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SMALL = [bytes([value]) for value in range(0x80)]


def encode_numbers(values: Integers) -> list[bytes]:
    """The same of a whole column; negative numbers as 64-bit two's complement."""
    import numpy as np

    left = np.asarray(values, np.int64).astype(np.uint64)
    digits = np.zeros((len(left), 10), np.uint8)
    length = np.ones(len(left), np.int64)
    for place in range(10):
        digits[:, place] = (left & np.uint64(0x7F)).astype(np.uint8)
        left = left >> np.uint64(7)
        more = left > 0
        if not more.any():
            break
        digits[more, place] |= 0x80
        length[more] = place + 2
    data = digits.tobytes()
    return [
        data[begin : begin + size] for begin, size in zip(range(0, 10 * len(length), 10), length.tolist(), strict=True)
    ]


def number_attributes(name: str, numbers: Iterable[bytes]) -> list[bytes]:
    """An int64 attribute of this name for each encoded number."""
    inner = b"\x0a" + encode_number(len(name)) + name.encode() + _INT64_VALUE
    heads = [ATTRIBUTE + encode_number(len(inner) + size) + inner for size in range(11)]
    return [heads[len(number)] + number for number in numbers]


def text_field(tag: bytes, text: bytes) -> bytes:
    return tag + encode_number(len(text)) + text


def packed_field(tag: bytes, numbers: Sequence[bytes]) -> bytes:
    """A repeated number; nothing where there is none."""
    if not numbers:
        return b""
    packed = b"".join(numbers)
    return tag + encode_number(len(packed)) + packed


def arguments_field(tag: bytes, values: Any, shapes: Any, types: Any) -> bytes:
    """Inputs or outputs: three texts, given as anything that holds bytes."""
    first, second, third = len(values), len(shapes), len(types)
    head, middle, last = b"\x0a" + encode_number(first), b"\x12" + encode_number(second), b"\x1a" + encode_number(third)
    size = len(head) + first + len(middle) + second + len(last) + third
    return b"".join((tag, encode_number(size), head, values, middle, shapes, last, types))
