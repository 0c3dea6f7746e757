"""What of a trace could not be read, in the words that readers count in `repairs`; other repairs lose nothing."""

from __future__ import annotations

from collections.abc import Mapping

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
