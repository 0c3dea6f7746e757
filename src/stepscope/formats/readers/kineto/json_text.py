"""JSON by address: where strings, lists and records end, and whether a text is what it should be. Compiled.

Addresses, because these loops are so hot that an array's reference count would cost more than their work. Texts must
have eight more bytes behind their end, whatever they are: a word may be read across it.
What is sound but rare (exponents, halves of surrogate pairs, very long or deep values) is left to the tolerant parser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stepscope.formats.machine_code import part
from stepscope.formats.readers.kineto.text import DEEPEST

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
put_byte: Callable[[int, int], None] = _writer(_BYTE, types.int64, narrow=True)
put_number: Callable[[int, int], None] = _writer(_WORD, types.int64)
put_real: Callable[[int, float], None] = _writer(_REAL, types.float64)


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


count_trailing_zeros: Callable[[np.uint64], int] = cast(Any, _trailing_zeros)
"""Number of zero bits at the end of a word that is not zero."""


QUOTE, BACKSLASH, COMMA, COLON, POINT, MINUS = 34, 92, 44, 58, 46, 45
BRACE, BRACE_END, BRACKET, BRACKET_END, ZERO, SPACE, NEWLINE = 123, 125, 91, 93, 48, 32, 10
_TIME_LIMIT = 1 << 62

# Where `is_json` stands.
WANTS_VALUE, WANTS_KEY, AFTER_OPENING, AFTER_VALUE = range(4)

_LONGEST_VALUE = 1 << 16
_DEEPEST_VALUE = 64
"""Values beyond these are given away with their record: checking them takes one look, not one for each key."""

_QUOTES = np.uint64(QUOTE) * ONES
_BACKSLASHES = np.uint64(BACKSLASH) * ONES
_SPACES = np.uint64(SPACE) * ONES
# `[`, `]`, `{` and `}` have these bits in common, with four other characters.
_BRACKET_BITS = np.uint64(0xD9) * ONES
_BRACKETS = np.uint64(0x59) * ONES

_FOUR_BYTES = np.uint64(0xFFFFFFFF)

_TRUE, _NULL, _ALSE = (np.uint64(int.from_bytes(word, "little")) for word in (b"true", b"null", b"alse"))
_NOTHING = np.uint64(0)


@part
def zero_bytes(word: np.uint64) -> np.uint64:
    """High bits where a byte is zero; above the lowest of them others may be wrong."""
    return (word - ONES) & ~word & HIGHS


@part
def skip_space(place: int, size: int) -> int:
    while place < size and byte_at(place) in (SPACE, NEWLINE, 13, 9):
        place += 1
    return place


@part
def string_end(place: int, size: int) -> tuple[int, int]:
    """From behind the opening quote to the closing one (none: ~ of where it breaks off); and whether there are
    escapes."""
    escaped = 0
    while place < size:
        word = word_at(place)
        # A quote, a backslash or a byte below a space, which no JSON string may hold.
        found = zero_bytes(word ^ _QUOTES) | zero_bytes(word ^ _BACKSLASHES) | ((word - _SPACES) & ~word & HIGHS)
        if found == _NOTHING:
            place += 8
            continue
        place += count_trailing_zeros(found) >> 3
        if place >= size:
            break
        byte = byte_at(place)
        if byte == QUOTE:
            return place, escaped
        if byte != BACKSLASH:
            return ~place, 0
        escaped = 1
        place += 2
    return ~size, 0


@part
def _follows_comma(place: int) -> bool:
    while byte_at(place - 1) in (SPACE, NEWLINE, 13, 9):
        place -= 1
    return byte_at(place - 1) == COMMA


@part
def record_end(place: int, size: int) -> tuple[int, int]:
    """From the opening brace of a record to behind its closing one (−1: none), and how far that was looked for: the
    rules of `read_records` in the module text."""
    depth = 0
    while place < size:
        byte = byte_at(place)
        place += 1
        if byte == QUOTE:
            place, _ = string_end(place, size)
            if place < 0:
                return -1, min(~place + 1, size)
            place += 1
            if place < size and byte_at(place) not in (SPACE, NEWLINE, 13, 9, COMMA, COLON, BRACE_END, BRACKET_END):
                return -1, place
        elif byte in (BRACE, BRACKET):
            if depth == DEEPEST or (depth == 1 and _follows_comma(place - 1)):
                return -1, place
            depth += 1
        elif byte in (BRACE_END, BRACKET_END):
            depth -= 1
            if depth == 0:
                return place, place
    return -1, size


@part
def nested_end(place: int, size: int) -> int:
    """From the opening bracket of a value to behind its closing one (−1: none, or too far for a usual value)."""
    depth = 0
    size = min(size, place + _LONGEST_VALUE)
    while place < size:
        word = word_at(place)
        found = zero_bytes(word ^ _QUOTES) | zero_bytes((word & _BRACKET_BITS) ^ _BRACKETS)
        if found == _NOTHING:
            place += 8
            continue
        place += count_trailing_zeros(found) >> 3
        if place >= size:
            return -1
        byte = byte_at(place)
        if byte == QUOTE:
            place, _ = string_end(place + 1, size)
            if place < 0:
                return -1
        elif byte in (BRACE, BRACKET):
            depth += 1
            if depth == _DEEPEST_VALUE:
                return -1
        elif byte in (BRACE_END, BRACKET_END):
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return -1


@part
def parse_number(begin: int, size: int) -> tuple[int, int, int]:
    """Digits with at most one point: the digits as one number, how many stand behind the point (−1: no point) and where
    they end (−1: not such a number, or one that may not fit 64 bits)."""
    place = begin
    negative = place < size and byte_at(place) == MINUS
    if negative:
        place += 1
    first = place
    number = 0
    point = -1
    while place < size:
        byte = byte_at(place)
        digit = byte - ZERO
        if 0 <= digit <= 9:
            number = number * 10 + digit
        elif byte == POINT and point < 0:
            point = place
        else:
            break
        place += 1
    decimals = place - point - 1 if point >= 0 else -1
    digits = place - first - (1 if point >= 0 else 0)
    if digits == 0 or digits > 19 or decimals == 0 or point == first:
        return 0, 0, -1
    if digits == 19 and byte_at(first) > ZERO + 8:
        return 0, 0, -1
    if byte_at(first) == ZERO and place - first > 1 and point != first + 1:
        return 0, 0, -1  # JSON knows no leading zeros
    if place < size:
        byte = byte_at(place)
        if byte > SPACE and byte not in (COMMA, BRACE_END, BRACKET_END, QUOTE):
            return 0, 0, -1
    return (-number if negative else number), decimals, place


@part
def _simple_end(place: int, size: int) -> int:
    """Behind a number or one of the words of JSON (−1: none of these)."""
    byte = byte_at(place)
    if byte in (116, 110):  # true, null
        return place + 4 if word_at(place) & _FOUR_BYTES in (_TRUE, _NULL) else -1
    if byte == 102:  # false
        return place + 5 if word_at(place + 1) & _FOUR_BYTES == _ALSE else -1
    _, _, end = parse_number(place, size)
    return end


@part
def is_utf8(place: int, end: int) -> bool:
    """As Python decodes it: no overlong forms, no surrogates, nothing beyond the last code point."""
    while place < end:
        if place + 8 <= end and word_at(place) & HIGHS == _NOTHING:
            place += 8
            continue
        byte = byte_at(place)
        place += 1
        if byte < 0x80:
            continue
        if not 0xC2 <= byte <= 0xF4:
            return False
        more = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
        if place + more > end:
            return False
        second = byte_at(place)
        least = 0xA0 if byte == 0xE0 else 0x90 if byte == 0xF0 else 0x80
        most = 0x9F if byte == 0xED else 0x8F if byte == 0xF4 else 0xBF
        if not least <= second <= most:
            return False
        for i in range(1, more):
            if byte_at(place + i) & 0xC0 != 0x80:
                return False
        place += more
    return True


@part
def _is_hexadecimal(byte: int) -> bool:
    return 48 <= byte <= 57 or 65 <= byte <= 70 or 97 <= byte <= 102


@part
def has_sound_escapes(place: int, end: int) -> bool:
    """Whether JSON knows all of them; halves of surrogate pairs are left to the tolerant parser."""
    while place < end:
        if byte_at(place) != BACKSLASH:
            place += 1
            continue
        letter = byte_at(place + 1)
        if letter == 117:  # u
            if place + 6 > end or byte_at(place + 2) in (68, 100):  # D, d
                return False
            for i in range(2, 6):
                if not _is_hexadecimal(byte_at(place + i)):
                    return False
        elif letter not in (QUOTE, BACKSLASH, 47, 98, 102, 110, 114, 116):  # / b f n r t
            return False
        place += 2
    return True


@part
def is_json(place: int, end: int) -> bool:
    """Whether a list or object, less deep than a number has bits, is sound; one with an exponent is not judged here."""
    objects = np.uint64(0)  # a bit for each open bracket, the innermost lowest: 1 for an object
    depth = 0
    state = WANTS_VALUE
    while place < end:
        byte = byte_at(place)
        if byte in (SPACE, NEWLINE, 13, 9):
            place += 1
        elif byte in (BRACE_END, BRACKET_END):
            wanted = BRACE_END if objects & np.uint64(1) else BRACKET_END
            if depth == 0 or byte != wanted or state not in (AFTER_VALUE, AFTER_OPENING):
                return False
            objects >>= np.uint64(1)
            depth -= 1
            place += 1
            if depth == 0:
                return place == end
            state = AFTER_VALUE
        elif state == AFTER_VALUE:
            if byte != COMMA:
                return False
            state = WANTS_KEY if objects & np.uint64(1) else WANTS_VALUE
            place += 1
        elif depth and objects & np.uint64(1) and state != WANTS_VALUE:
            if byte != QUOTE:
                return False
            key = place + 1
            place, escaped = string_end(key, end)
            if place < 0 or (escaped and not has_sound_escapes(key, place)):
                return False
            place = skip_space(place + 1, end)
            if place >= end or byte_at(place) != COLON:
                return False
            place += 1
            state = WANTS_VALUE
        elif byte in (BRACE, BRACKET):
            objects = (objects << np.uint64(1)) | np.uint64(byte == BRACE)
            depth += 1
            state = AFTER_OPENING
            place += 1
        else:
            if byte == QUOTE:
                text = place + 1
                place, escaped = string_end(text, end)
                if place < 0 or (escaped and not has_sound_escapes(text, place)):
                    return False
                place += 1
            else:
                place = _simple_end(place, end)
                if place < 0:
                    return False
            state = AFTER_VALUE
    return False


@part
def value_end(place: int, size: int) -> int:
    """Behind a value of any kind (−1: none, or one that only the tolerant parser can judge)."""
    if place >= size:
        return -1
    byte = byte_at(place)
    if byte == QUOTE:
        end, escaped = string_end(place + 1, size)
        return end + 1 if end >= 0 and escaped == 0 else -1
    if byte in (BRACE, BRACKET):
        end = nested_end(place, size)
        return end if end >= 0 and is_json(place, end) else -1
    return _simple_end(place, size)


@part
def is_whole(begin: int, end: int, size: int) -> bool:
    _, decimals, reached = parse_number(begin, size)
    return reached == end and decimals < 0


@part
def parse_time(begin: int, size: int) -> tuple[int, int]:
    """Decimal microseconds with up to three decimals as nanoseconds, and the end (−1: none of these)."""
    number, decimals, end = parse_number(begin, size)
    if end < 0 or decimals > 3:
        return 0, -1
    decimals = max(decimals, 0)
    while decimals < 3:
        if number > _TIME_LIMIT // 10 or number < -_TIME_LIMIT // 10:
            return 0, -1
        number *= 10
        decimals += 1
    return (number, end) if -_TIME_LIMIT < number < _TIME_LIMIT else (0, -1)


_MIX = np.uint64(0x9E3779B97F4A7C15)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
UNKNOWN_KEY = -1


@part
def _first_bytes(word: np.uint64, count: int) -> np.uint64:
    """The first `count` (1 to 8) bytes of a word, the others zero."""
    return word & (_ALL >> (np.uint64(8) * np.uint64(8 - count)))


@part
def hash_text(begin: int, end: int) -> int:
    total = np.uint64(end - begin) * _MIX
    while begin + 8 <= end:
        total = (total ^ word_at(begin)) * _MIX
        total ^= total >> np.uint64(29)
        begin += 8
    if begin < end:
        total = (total ^ _first_bytes(word_at(begin), end - begin)) * _MIX
        total ^= total >> np.uint64(32)
    return np.int64(total >> np.uint64(16))  # type: ignore[return-value]


@part
def same_bytes(one: int, other: int, length: int) -> bool:
    while length >= 8:
        if word_at(one) != word_at(other):
            return False
        one += 8
        other += 8
        length -= 8
    return length == 0 or _first_bytes(word_at(one) ^ word_at(other), length) == _NOTHING


@part
def find_key(begin: int, end: int, tables: int) -> int:
    """Number of a known word; −1 for an unknown one. `tables` is where its slots, mask, bytes and bounds are noted."""
    slots, mask = number_at(tables), number_at(tables + 8)
    words, bounds = number_at(tables + 16), number_at(tables + 24)
    length = end - begin
    place = hash_text(begin, end) & mask
    while True:
        key = number_at(slots + 8 * place) - 1
        if key < 0:
            return UNKNOWN_KEY
        known = number_at(bounds + 8 * key)
        if number_at(bounds + 8 * key + 8) - known == length and same_bytes(begin, words + known, length):
            return key
        place = (place + 1) & mask
