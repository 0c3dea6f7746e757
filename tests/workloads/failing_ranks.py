"""What ranks of a workload do in test_ranks: cases that differ in what is asked of them, and ranks that fail alone."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.bench.workloads import producer, verify
from stepscope.bench.workloads.findings import CheckReport, Finding
from stepscope.bench.workloads.producer import ModelCase
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
    make_all, open_all = ModelCase.__init__, producer.open_share
    compare_all, count_all = verify.Verifier._compare, ModelCase._count

    def make(self: ModelCase, parsed: ParsedCase, made_by: Any) -> None:
        make_all(self, parsed, made_by)
        check = parsed.spec.parallel == "ddp" and parsed.workload.model.model in {*CHECKED, WRONG}
        self._request = msgspec.structs.replace(self._request, check=check)

    def compare(self: verify.Verifier, parsed: ParsedCase, *given: Any) -> CheckReport:
        if parsed.workload.model.model != WRONG:
            return compare_all(self, parsed, *given)
        return CheckReport(findings=[Finding(what="outputs", precision="fp32", error=1.0, limit=1e-4)])

    def count_some(self: ModelCase) -> WorkloadObserved:
        return count_all(self) if self._parsed.workload.model.model in COUNTED else WorkloadObserved()

    def open_uncompiled(parsed: ParsedCase, *given: Any) -> Any:
        if parsed.workload.implementation == "optimized" and parsed.workload.model.model != COMPILED:
            type(parsed.workload.make_task(parsed.scale)).engine = lambda self, mode: EAGER  # type: ignore[method-assign]
        return open_all(parsed, *given)

    ModelCase.__init__, ModelCase._count = make, count_some  # type: ignore[method-assign]
    producer.open_share = open_uncompiled
    verify.Verifier._compare = compare  # type: ignore[method-assign]
    run_rank(session)


def fail_twice(session: RankSession) -> None:
    """All ranks fail in the first case, rank 0 after it has begun an exchange; in the third one rank 1 fails alone, in
    its first step, where the others wait for its gradients."""
    count, step_once = 0, ModelCase._step_once_round

    def fail(self: ModelCase) -> None:
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
        step_once(self)

    ModelCase._step_once_round = fail  # type: ignore[method-assign]
    run_rank(session)
