"""Ranks that walk through a run together, and what becomes of one that cannot go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from stepscope.core.errors import RankDiedError, StepscopeError, UsageError
from stepscope.launch.join import describe_request, find_difference, is_peer_disconnect, wait_until
from stepscope.launch.watch import KEPT, find_causes
from stepscope.launch.watchdog import read_rank_failure
from stepscope.launch.worker import Session
from stepscope.records import Case, Failure, describe_exception
from stepscope.run.control import Control
from stepscope.store import RANKS_FOLDER

T = TypeVar("T")
ALONE_S = 30.0
"""How long a rank that failed waits for the others: they may fail as it did, or come to where all gather."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a case has no samples."""

    status: Literal["skipped", "failed"]
    failure: Failure


class CaseEndedError(Exception):
    """Every rank gives up the case, for the same reason."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.failure.message)
        self.refusal = refusal


class CaseSkipped(Exception):  # noqa: N818 - a skip is a result, not an error
    """Raised while a case is prepared: it cannot run here, and that is a result with a reason."""

    def __init__(
        self, kind: str, message: str, hint: str | None = None, *, rank: int | None = None, stack: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, hint=hint, rank=rank, stack=list(stack))


def describe_refusal(error: BaseException) -> Refusal:
    if isinstance(error, CaseEndedError):
        return error.refusal
    if isinstance(error, CaseSkipped):
        return Refusal(status="skipped", failure=error.failure)
    return Refusal(status="failed", failure=describe_exception(error))


def die(failure: Failure, rank: int) -> RankDiedError:
    return RankDiedError(failure.message, hint=failure.hint or KEPT, rank=rank)


class Ranks:
    """This rank among the others."""

    def __init__(self, session: Session, control: Control) -> None:
        self.session, self.control = session, control
        self.rank, self.size = control.rank, control.size
        self._attempts = 0
        self._is_out_of_step = False

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.control.broadcast_value(value)

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, on rank 0."""
        return self.control.gather_values(value)

    def share(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        shared: list[T] = self.broadcast(self.gather(value))
        return shared

    def require_same_request(self) -> None:
        """Rank 0 compares, all ranks raise the same error."""
        everybody = self.gather(describe_request(self.session.request, self.session.cases))
        verdict = self.broadcast(find_difference(everybody) if everybody is not None else None)
        if verdict:
            raise UsageError(
                verdict,
                hint="start all ranks with the same command and the same version",
                where="arguments of the ranks",
            )

    def begin_case(self) -> bool:
        """With groups in which nothing of the case before is under way; what it used must be gone. True: new ones."""
        renewed, self._is_out_of_step = self._is_out_of_step, False
        if renewed:
            self.control.renew()
        return renewed

    def together(self, body: Callable[[], T], *, exchanges: bool = False) -> T:
        """What this rank made, if every rank could. Raises CaseEndedError on all of them where one could not.

        `exchanges`: ranks wait for each other in `body`. Raises RankDiedError with what this rank alone met with, if
        the others then do not come here: they are in an exchange that it has left, and nothing but its end frees them.
        """
        if self.size == 1:
            return body()
        self.session.heartbeat.tick()
        self._attempts += 1
        refusal: Refusal | None = None
        try:
            made = body()
        except Exception as error:
            refusal = describe_refusal(error)
            if refusal.status == "failed":
                # Whatever becomes of the others: this is why.
                self.session.keep_failure(error)
                if not is_peer_disconnect(refusal.failure.message):
                    sys.stderr.write(f"stepscope, rank {self.rank}: {refusal.failure.message}\n")
            if exchanges and not self._see_all_end():
                raise die(refusal.failure, self.rank) from error
        else:
            if exchanges:
                self._say_ended()
        agreed = self._agree(refusal)
        if agreed is None:
            return made
        self.session.forget_failure()
        self._is_out_of_step |= exchanges
        raise CaseEndedError(agreed)

    def _agree(self, mine: Refusal | None) -> Refusal | None:
        """The first rank's that has one; a rank that only lost another knows less."""
        found = self.gather(mine)
        refusals = [one for one in found or [] if one is not None]
        causes = [one for one in refusals if not is_peer_disconnect(one.failure.message)]
        agreed: Refusal | None = self.broadcast(next(iter([*causes, *refusals]), None))
        return agreed

    def _say_ended(self) -> None:
        self.control.set_mark(f"attempt/{self._attempts}/{self.rank}")

    def _see_all_end(self) -> bool:
        """Whether the other ranks came to the end of this attempt, in whatever way, while this one waited."""
        everybody = [f"attempt/{self._attempts}/{rank}" for rank in range(self.size)]
        # Before the watchdogs of the others ring: they know less.
        limit_s = min(ALONE_S, self.session.hang_limit_s / 3)
        try:
            self._say_ended()
            return wait_until(lambda: self.control.has_marks(everybody), limit_s, self.session.heartbeat.tick)
        except RuntimeError:  # the store is gone, and rank 0 with it
            return False

    def explain_loss(self, error: Exception) -> StepscopeError | None:
        """Why rank 0 cannot go on: what another rank left behind, else what it met with itself. None: another rank
        is gone and left nothing, and may have been killed for reasons that have nothing to do with the case."""
        folder = self.session.folder
        causes = find_causes(folder / RANKS_FOLDER, self.size, {})[0] if folder else []
        for rank in causes:
            left = read_rank_failure(folder / RANKS_FOLDER, rank) if folder else None
            if left is not None and rank:
                return die(left, rank)
        if is_peer_disconnect(str(error)):
            return None
        return error if isinstance(error, StepscopeError) else die(describe_exception(error), 0)


class BarrierPeers:
    """Ranks meet before each sample; rank 0 decides when there are enough."""

    def __init__(self, ranks: Ranks, case: Case) -> None:
        self._ranks, self._case = ranks, case

    def agree(self, value: int) -> int:
        return int(self._ranks.broadcast(value))

    def align(self) -> int:
        self._ranks.session.heartbeat.beat("measuring", self._case.key)
        self._ranks.control.barrier()
        return 1
