"""Ranks of a workload that fail alone, for test_ranks."""

from __future__ import annotations

from stepscope.launch import RankSession
from stepscope.workloads import ranks


def fail_in_the_second_case(session: RankSession) -> None:
    """Rank 1, in its first step, where the others wait for its gradients."""
    if session.context.rank == 1:
        count, step_once = 0, ranks._step_once_round

        def fail(*given: object) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise MemoryError("no room for the second model")
            step_once(*given)  # type: ignore[arg-type]

        ranks._step_once_round = fail
    ranks.run(session)
