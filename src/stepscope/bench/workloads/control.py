"""How ranks that share a model walk through a run together, and what becomes of one that cannot go on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from stepscope.core.errors import RankDiedError
from stepscope.launch import RankSession
from stepscope.launch.join import is_echo, open_store
from stepscope.records import Case, Failure, describe_exception

T = TypeVar("T")
GROUP_EXTRA_S = 30.0
"""A collective waits longer than the watchdog, whose message says more."""
ALONE_S = 30.0
"""How long a rank that failed waits for the others: they may fail as it did, or come to where all gather."""
POLL_S = 0.1
KEPT = "finished cases are kept: continue with --resume"


def die(failure: Failure, rank: int) -> RankDiedError:
    return RankDiedError(failure.message, hint=failure.hint or KEPT, where=f"rank {rank}")


class Groups:
    """Those of the process: one in which models exchange, and beside it one in which the ranks tell each other what to
    do next, so that a rank which gave up in the middle of a model's exchanges is not taken for one that takes part."""

    def __init__(self, session: RankSession) -> None:
        context = session.context
        self.store = open_store(context, session.hang_limit_s, lambda: session.heartbeat.beat("joining"))
        self._joins = 0
        self._how: dict[str, Any] = {
            "backend": str(session.request["backend"]), "rank": context.rank, "world_size": context.world_size,
            "timeout": timedelta(seconds=session.hang_limit_s + GROUP_EXTRA_S),
        }  # fmt: skip
        self.telling = self._join()

    def _join(self) -> Any:
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._joins += 1
        store = PrefixStore(f"groups/{self._joins}", self.store)
        dist.init_process_group(store=store, **self._how)
        return dist.new_group(backend="gloo", timeout=self._how["timeout"])

    def renew(self) -> None:
        """All ranks at once. Exchanges that some have begun and others not would otherwise meet those that follow."""
        import torch.distributed as dist

        # Waits for no exchange, where torch knows how.
        leave = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        leave()
        self.telling = self._join()

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Control:
    """How ranks tell each other what to do next."""

    def __init__(self, session: RankSession, groups: Groups) -> None:
        self.session = session
        self.groups = groups
        self._attempts = 0
        self._is_out_of_step = False

    def begin_case(self) -> None:
        """With groups in which nothing of the case before is under way; its model must be gone."""
        if self._is_out_of_step:
            self.groups.renew()
        self._is_out_of_step = False

    def broadcast(self, value: Any) -> Any:
        """Rank 0's, on every rank."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.groups.telling)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self.groups.telling)
        return found

    def attempt(self, body: Callable[[], T], *, exchanges: bool = False) -> T | Failure:
        """What this rank made, if every rank could; else why the first that could not failed.

        `exchanges`: ranks wait for each other in `body`. Raises RankDiedError with what this rank alone met with, if
        the others then do not come here: they are in an exchange that it has left, and nothing but its end frees them.
        """
        self.session.heartbeat.tick()
        self._attempts += 1
        made: T | None = None
        failure: Failure | None = None
        try:
            made = body()
        except Exception as error:
            failure = describe_exception(error)
            # Whatever becomes of the others: this is why.
            self.session.keep_failure(error)
            if not is_echo(failure.message):
                sys.stderr.write(f"stepscope, rank {self.session.context.rank}: {failure.message}\n")
            if exchanges and not self._see_all_end():
                raise die(failure, self.session.context.rank) from error
        else:
            if exchanges:
                self._say_ended()
        failures: list[Failure] = [one for one in self.gather(failure) if one is not None]
        if not failures:
            return cast("T", made)
        self.session.forget_failure()
        self._is_out_of_step |= exchanges
        return next((one for one in failures if not is_echo(one.message)), failures[0])

    def _say_ended(self) -> None:
        self.groups.store.set(f"attempt/{self._attempts}/{self.session.context.rank}", "1")

    def _see_all_end(self) -> bool:
        """Whether the other ranks came to the end of this attempt, in whatever way, while this one waited."""
        everybody = [f"attempt/{self._attempts}/{rank}" for rank in range(self.session.context.world_size)]
        # Before the watchdogs of the others ring: they know less.
        deadline_s = time.monotonic() + min(ALONE_S, self.session.hang_limit_s / 3)
        try:
            self._say_ended()
            while not self.groups.store.check(everybody):
                if time.monotonic() > deadline_s:
                    return False
                self.session.heartbeat.tick()
                time.sleep(POLL_S)
        except RuntimeError:  # the store is gone, and rank 0 with it
            return False
        return True


class GroupPeers:
    """Ranks that walk through the measuring loop in step."""

    def __init__(self, control: Control, case: Case) -> None:
        self._control = control
        self._case = case

    def agree(self, value: int) -> int:
        return int(self._control.broadcast(value))

    def align(self) -> int:
        import torch.distributed as dist

        self._control.session.heartbeat.beat("measuring", self._case.key)
        dist.barrier()
        return 1
