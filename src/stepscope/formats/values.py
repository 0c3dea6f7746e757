"""Values of unknown origin, taken only where they are what they should be, and words for what could not be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
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


INVALID_EVENTS = "events that are no valid JSON were left out"
INVALID_STRETCHES = "stretches between events that are no JSON were left out"
_ENDS_EARLY = "ends too early"
_FIRST_DAMAGE = "(the first damage is at byte"


def ends_early(why: str) -> str:
    return f"the file is damaged or {_ENDS_EARLY} ({why}): the events before were read"


def first_damage(offset: int) -> str:
    return f"{_FIRST_DAMAGE} {offset})"


def describe_damage(repairs: Mapping[str, int]) -> str | None:
    """One sentence on what is missing of a trace; None where nothing is."""
    lost = [
        f"{count:,} {what}" if what in (INVALID_EVENTS, INVALID_STRETCHES) else what
        for what, count in repairs.items()
        if what in (INVALID_EVENTS, INVALID_STRETCHES) or _ENDS_EARLY in what
    ]
    if not lost:
        return None
    place = next((f" {what}" for what in repairs if what.startswith(_FIRST_DAMAGE)), "")
    return f"{'; '.join(lost)}{place}"
