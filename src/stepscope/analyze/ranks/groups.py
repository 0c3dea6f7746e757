"""Process groups as traces describe them: which ranks belong to one, and how its list of members is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec


class TracedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank's trace describes it."""

    name: str | None = None
    description: str | None = None
    members: str | None = None
    """Global ranks as runs: `0-7`, `0-24:8` (every eighth), `0-1,4`. None: not known."""
    size: int | None = None
    stand_in: str | None = None
    """Set where the trace names no group: what its calls were kept together by (a stream, the host)."""
    note: str | None = None
    """How the members were found where the trace does not list them."""

    def label(self) -> str:
        """For people: description and name, or what stands in for them."""
        if self.stand_in is not None:
            return f"not recorded ({self.stand_in})"
        named = [text for text in (self.description, self.name and f"[{self.name}]") if text]
        return " ".join(named) or f"ranks {self.members or '?'}"


def format_members(ranks: Sequence[int]) -> str:
    """Ranks as runs of equal distance; the order is kept, since it is part of what the group is."""
    runs: list[str] = []
    place = 0
    while place < len(ranks):
        stride = ranks[place + 1] - ranks[place] if place + 1 < len(ranks) else 0
        end = place + 1
        while stride > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
            end += 1
        if end - place < (2 if stride == 1 else 3):  # two ranks far apart are shorter as themselves
            end = place + 1
            runs.append(str(ranks[place]))
        else:
            runs.append(f"{ranks[place]}-{ranks[end - 1]}" + (f":{stride}" if stride != 1 else ""))
        place = end
    return ",".join(runs)


@lru_cache(4096)
def parse_members(text: str) -> tuple[int, ...]:
    """The ranks again. Raises ValueError on anything `format_members` does not write."""
    ranks: list[int] = []
    for run in text.split(",") if text else ():
        span, _, stride = run.partition(":")
        first, _, last = span.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1, int(stride or 1)))
    return tuple(ranks)


def find_members(
    recorded: str | None,
    *,
    size: int | None,
    start: int | None,
    stride: int | None,
    listed: Sequence[int] | None = None,
    world_size: int | None = None,
) -> tuple[str | None, str | None]:
    """Members as runs, and how they were found where the record does not list them all.

    `recorded` is the list as written, shortened with `...` when long; `listed` is the group's list in the file's
    header, which is never shortened.
    """
    shown = [int(number) for number in re.findall(r"\d+", recorded or "")]
    shortened = "..." in (recorded or "") or "…" in (recorded or "")
    if shown and not shortened and size in (None, len(shown)):
        return format_members(shown), None
    if listed and size in (None, len(listed)):
        return format_members(listed), "members taken from the list of groups in the file's header"
    ways = (
        (_rebuild(size, start, stride), "members rebuilt from first rank, stride and size"),
        (_continue(shown, size), "members rebuilt from the shortened list and the size"),
    )
    for members, how in ways:
        if members is not None and set(shown) <= set(members):
            return format_members(members), how
    if not shown and size is not None and size == world_size:
        return format_members(range(size)), "no list: the group has as many members as there are ranks"
    return None, "the list of members is shortened and cannot be rebuilt" if shortened else None


def _rebuild(size: int | None, start: int | None, stride: int | None) -> range | None:
    if size is None or start is None or start < 0 or (size > 1 and (stride is None or stride <= 0)):
        return None
    return range(start, start + size * (stride or 1), stride or 1)


def _continue(shown: Sequence[int], size: int | None) -> range | None:
    """A shortened list shows its first ranks and its last one: with the size, the last one proves the distance."""
    if len(shown) < 3:
        return None
    members = _rebuild(size, shown[0], shown[1] - shown[0])
    return members if members is not None and members[-1] == shown[-1] else None


def listed_groups(metadata: Mapping[str, Any]) -> dict[str, list[int]]:
    """Groups by name from the header of a Kineto file (`distributedInfo`)."""
    distributed = metadata.get("distributed")
    configured = distributed.get("pg_config") if isinstance(distributed, Mapping) else None
    groups: dict[str, list[int]] = {}
    for entry in configured if isinstance(configured, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("ranks"), list):
            ranks = [rank for rank in entry["ranks"] if isinstance(rank, int)]
            if ranks:
                groups[str(entry.get("pg_name"))] = ranks
    return groups
