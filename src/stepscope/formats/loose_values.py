"""Values from files of strangers, taken only where they are what they should be."""

from __future__ import annotations

import re
from typing import Any

LONGEST_TEXT = 4096
WHOLE_LIMIT = 1 << 62
_LONGEST_IDENTITY = 256
_BYTE = re.compile(r"\(byte (\d+)\)")


def text_of(value: object, longest: int = LONGEST_TEXT) -> str | None:
    return value[:longest] if isinstance(value, str) else None


def whole_of(value: object) -> int | None:
    """A whole number from 0 that fits a column."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < WHOLE_LIMIT else None


def list_of(value: object, most: int | None = None) -> list[Any]:
    """Items of a list or tuple, the first `most` of them; nothing of anything else."""
    return list(value[:most]) if isinstance(value, list | tuple) else []


def identity_of(value: int | str | float | None) -> str:
    """A process or thread as text: 7 and 7.0 are the same."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)[:_LONGEST_IDENTITY]


def damaged_byte(error: BaseException, size: int) -> int:
    """Where a decoder of JSON stopped; a text of this size that simply ends is damaged at its end."""
    found = _BYTE.search(str(error))
    return int(found[1]) if found else size
