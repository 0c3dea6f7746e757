"""Ranks of a workload that fail alone, for test_ranks."""

from __future__ import annotations

from stepscope.bench.workloads import shared
from stepscope.launch import RankSession
from stepscope.run.rank import run_rank


def fail_in_the_second_case(session: RankSession) -> None:
    """Rank 1, in its first step, where the others wait for its gradients."""
    if session.context.rank == 1:
        count, step_once = 0, shared._step_once_round

        def fail(*given: object) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise MemoryError("no room for the second model")
            step_once(*given)  # type: ignore[arg-type]

        shared._step_once_round = fail
    run_rank(session)


def fail_out_of_step(session: RankSession) -> None:
    """All ranks fail in the first case, the first of them after it has begun an exchange."""
    count, step_once = 0, shared._step_once_round

    def fail(*given: object) -> None:
        import torch
        import torch.distributed as dist

        nonlocal count
        count += 1
        if count > 1:
            step_once(*given)  # type: ignore[arg-type]
            return
        if session.context.rank == 0:
            dist.all_reduce(torch.ones(1000), async_op=True)
        raise ValueError("fails after what it began")

    shared._step_once_round = fail
    run_rank(session)
