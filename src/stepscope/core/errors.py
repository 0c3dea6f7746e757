"""One error tree. Each error carries what a person needs next: what, where, and the next step.

The exit code belongs to the kind of error, so that scripts can tell wrong use from a failed run.
"""

from __future__ import annotations

from collections.abc import Iterable


class ExitCode:
    """What a process ends with; the same for every verb."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REGRESSION = 3
    UNDECIDED = 4
    INTERRUPTED = 130


class StepscopeError(Exception):
    """Something a person can act on; shown as one message, never as a traceback."""

    kind = "error"
    exit_code = ExitCode.FAILED

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        where: str | None = None,
        rank: int | None = None,
        case: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        """The next step, as a command where there is one."""
        self.where = f"rank {rank}" if where is None and rank is not None else where
        """A file, a place in it, an option or a rank."""
        self.rank = rank
        """The rank that is to blame, whichever rank reports it; None where no rank was lost."""
        self.case = case
        """Key of the case that the lost rank was in."""

    def as_dict(self) -> dict[str, str | None]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint, "where": self.where}


class UsageError(StepscopeError):
    """The command line asks for something that cannot be."""

    kind = "usage"
    exit_code = ExitCode.USAGE


def unknown_name(what: str, name: str, known: Iterable[str], *, where: str | None = None) -> UsageError:
    """The error for a name that is not there, with the nearest one that is."""
    return UsageError(f"there is no {what} {name!r}", hint=suggest_name(name, known), where=where)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """The hint for a name that is not there: the nearest one that is, else all of them."""
    from difflib import get_close_matches

    choices = list(known)
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]}?" if near else f"one of: {', '.join(choices)}"


class MissingDependencyError(UsageError):
    """A library that this verb needs is not installed here."""

    kind = "missing_dependency"


class StoreNotWritableError(UsageError):
    """The store's folder cannot be written by this user."""

    kind = "store_not_writable"


class RunNotFoundError(UsageError):
    """No run, or more than one, answers to the name given."""

    kind = "run_not_found"


class RunBusyError(UsageError):
    """Another process is writing this run just now."""

    kind = "run_busy"


class BadInputError(StepscopeError):
    """A file does not hold what it should."""

    kind = "bad_input"
    exit_code = ExitCode.USAGE


class FileError(BadInputError):
    """The system refuses a file that the command needs, for a reason of its own."""

    kind = "file"


class CorruptRunError(BadInputError):
    """A run folder lost or changed part of its evidence."""

    kind = "corrupt_run"


class NewerVersionError(BadInputError):
    """A record was written by a newer Stepscope than this one."""

    kind = "newer_version"


class StoreWriteError(StepscopeError):
    """Evidence could not be written in the middle of a run (a full disk, a lost mount)."""

    kind = "store_write"


class LaunchError(StepscopeError):
    """Ranks could not be started, or one of them was lost."""

    kind = "launch"


class LostRankError(LaunchError):
    """A rank ended or stands still, and the others cannot go on without it."""


class RankDiedError(LostRankError):
    kind = "rank_died"


class RankHungError(LostRankError):
    kind = "rank_hung"


class FirstRankMissingError(RankHungError):
    """Rank 0, which answers for all ranks, never joined; of those that did, this one answers for it."""


class InterruptedRunError(StepscopeError):
    """The user stopped the run; what was finished is kept."""

    kind = "interrupted"
    exit_code = ExitCode.INTERRUPTED


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; its kind where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
