"""Ways in which a trace file can be damaged; each gives many variants of a sound one, the same for the same seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

NUMBER = re.compile(rb"(?<=[: \[])-?\d+(?:\.\d+)?")
FIELD = re.compile(rb'"[A-Za-z ]+":\s*(?:"[^"\n]*"|-?\d+(?:\.\d+)?),?')
ODD_VALUES = (
    b"null", b"true", b'"text"', b"[]", b"{}", b"-1", b"-5000000", b"1e9", b"1E400", b"1000000000",
    b"9223372036854775807",
    b"18446744073709551615", b"123456789012345678901234567890", b"0.1234567890123", b"-0.5", b"1e-5", b'"1e9"', b'""',
    b"4294967295", b"NaN", b"Infinity", b"+3", b"007", b".5", b"5.", b"[[[1]]]", b'{"a": {"b": [1, {"c": "}, {"}]}}',
)  # fmt: skip
ODD_BYTES = (
    b"\xff",
    b"\xc3(",
    b"\x00",
    b'"',
    b"\\",
    b"}",
    b"{",
    b"]",
    b"[",
    b",",
    b"\n",
    b"\\u00",
    b"\xed\xa0\x80",
    b"\\ud800",
)

Damage = Callable[[bytes, random.Random], bytes]


def cut_short(text: bytes, dice: random.Random) -> bytes:
    return text[: dice.randrange(len(text))]


def other_values(text: bytes, dice: random.Random) -> bytes:
    """Numbers replaced by values of other types and sizes."""
    for _ in range(dice.randint(1, 4)):
        found = dice.choice(list(NUMBER.finditer(text)))
        text = text[: found.start()] + dice.choice(ODD_VALUES) + text[found.end() :]
    return text


def missing_fields(text: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.randint(1, 6)):
        found = dice.choice(list(FIELD.finditer(text)))
        text = text[: found.start()] + text[found.end() :]
    return text


def flipped_bytes(text: bytes, dice: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(dice.randint(1, 8)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def inserted_bytes(text: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(text))
        text = text[:place] + dice.choice(ODD_BYTES) + text[place:]
    return text


def removed_section(text: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(text))
    return text[:begin] + text[begin + dice.randint(1, 2000) :]


def repeated_section(text: bytes, dice: random.Random) -> bytes:
    """Duplicated ids, keys and half records."""
    begin = dice.randrange(len(text))
    end = begin + dice.randint(1, 3000)
    return text[:end] + text[begin:end] + text[end:]


def gigantic_texts(text: bytes, dice: random.Random) -> bytes:
    place = dice.choice(list(re.finditer(rb'"name": "', text))).end()
    filler = dice.choice((b"x", b"(", b"\\\\", b"\\u00e9", b"}, {", "é".encode()))
    return text[:place] + filler * dice.choice((70_000, 300_000)) + text[place:]


def deep_nesting(text: bytes, dice: random.Random) -> bytes:
    place = dice.choice(list(re.finditer(rb'"args": \{', text))).end()
    depth = dice.choice((500, 5_000, 100_000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return text[:place] + b'"deep": ' + opening * depth + b"1" + closing * depth + b", " + text[place:]


DAMAGES: dict[str, tuple[Damage, int]] = {
    "cut short": (cut_short, 400),
    "other values": (other_values, 600),
    "missing fields": (missing_fields, 400),
    "flipped bytes": (flipped_bytes, 500),
    "inserted bytes": (inserted_bytes, 500),
    "removed section": (removed_section, 300),
    "repeated section": (repeated_section, 300),
    "gigantic texts": (gigantic_texts, 20),
    "deep nesting": (deep_nesting, 30),
}
"""Each with the number of variants that the tests try."""


def variants(text: bytes, name: str, seed: int = 20261115) -> Iterator[bytes]:
    damage, count = DAMAGES[name]
    dice = random.Random(f"{seed} {name}")
    for _ in range(count):
        yield damage(text, dice)
