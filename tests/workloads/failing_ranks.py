"""What ranks of a workload do in test_ranks: cases that differ in what is asked of them, and ranks that fail alone."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.bench.workloads import shared, verify
from stepscope.bench.workloads.findings import CheckReport, Finding
from stepscope.bench.workloads.protocol import EAGER
from stepscope.bench.workloads.request import ParsedCase
from stepscope.launch import RankSession
from stepscope.records.kinds import WorkloadObserved
from stepscope.run.rank import run_rank

CHECKED = ("dlrm", "gpt2")
"""Models whose optimized implementation is checked where gradients are averaged, in the run of `measure_by_case`."""
WRONG = "vgg16"
"""Its check finds a fault on the first rank, which alone checks."""
COUNTED = ("dlrm", "resnet50")
"""Models whose operations are counted: the tests of facts count those of all."""
COMPILED = "gpt2"
"""The others run without torch.compile, which takes most of their time."""


def measure_by_case(session: RankSession) -> None:
    verify_all, open_all = shared._verify, shared.open_share
    compare_all, count_all = verify.Verifier._compare, shared._count

    def verify_some(parsed: ParsedCase, parallel: str, device: Any, request: Any) -> Any:
        check = parallel == "ddp" and parsed.workload.model.model in {*CHECKED, WRONG}
        return verify_all(parsed, parallel, device, msgspec.structs.replace(request, check=check))

    def compare(self: verify.Verifier, parsed: ParsedCase, *given: Any) -> CheckReport:
        if parsed.workload.model.model != WRONG:
            return compare_all(self, parsed, *given)
        return CheckReport(findings=[Finding(what="outputs", precision="fp32", error=1.0, limit=1e-4)])

    def count_some(parsed: ParsedCase, device: Any) -> WorkloadObserved:
        return count_all(parsed, device) if parsed.workload.model.model in COUNTED else WorkloadObserved()

    def open_uncompiled(parsed: ParsedCase, *given: Any) -> Any:
        if parsed.workload.implementation == "optimized" and parsed.workload.model.model != COMPILED:
            type(parsed.workload.make_task(parsed.scale)).engine = lambda self, mode: EAGER  # type: ignore[method-assign]
        return open_all(parsed, *given)

    shared._verify, shared.open_share, shared._count = verify_some, open_uncompiled, count_some
    verify.Verifier._compare = compare  # type: ignore[method-assign]
    run_rank(session)


def fail_twice(session: RankSession) -> None:
    """All ranks fail in the first case, rank 0 after it has begun an exchange; in the third one rank 1 fails alone, in
    its first step, where the others wait for its gradients."""
    count, step_once = 0, shared._step_once_round

    def fail(*given: object) -> None:
        import torch
        import torch.distributed as dist

        nonlocal count
        count += 1
        if count == 1:
            if session.context.rank == 0:
                dist.all_reduce(torch.ones(1000), async_op=True)
            raise ValueError("fails after what it began")
        if count == 3 and session.context.rank == 1:
            raise MemoryError("no room for the third model")
        step_once(*given)  # type: ignore[arg-type]

    shared._step_once_round = fail
    run_rank(session)
