"""Why a case has no result, or why a run ended early."""

from __future__ import annotations

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """A short word a program can act on: `out_of_memory`, `wrong_result`, `unsupported`, `rank_died` …"""
    message: str
    hint: str | None = None
    """The next step."""
    where: str | None = None
    rank: int | None = None
    case: str | None = None
    """Key of the case in flight."""
    exit_code: int | None = None
    """Of the process; negative is the number of the signal that ended it."""
    last_lines: list[str] = []
    """The end of what the rank wrote."""
    stack: list[str] = []


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that weakens a result without spoiling it; carries its numbers and the next thing to try."""

    kind: str
    message: str
    hint: str | None = None
