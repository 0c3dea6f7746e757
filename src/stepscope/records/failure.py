"""Why a case has no result, or why a run ended early."""

from __future__ import annotations

import traceback

import msgspec

from stepscope.core.errors import StepscopeError

STACK_LINES = 40
OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


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


def is_out_of_memory(error: BaseException) -> bool:
    """Of whatever library, on a host or a device: not all have an exception of their own for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)


def describe_exception(error: BaseException) -> Failure:
    """An exception as evidence: its kind, its message, and the stack for what nobody foresaw."""
    if isinstance(error, StepscopeError):
        return Failure(kind=error.kind, message=error.message, hint=error.hint, where=error.where)
    stack = "".join(traceback.format_exception(error)).splitlines()[-STACK_LINES:]
    text = str(error).strip()
    message = text.splitlines()[0] if text else type(error).__name__
    if is_out_of_memory(error):
        return Failure(kind="out_of_memory", message=message, hint="use a smaller shape or batch", stack=stack)
    return Failure(kind="exception", message=f"{type(error).__name__}: {message}", stack=stack)
