"""A pipeline of stages, one a rank, in the order one-forward-one-backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from stepscope.bench.comms.patterns.options import PatternOptions, require_dtypes, require_ranks
from stepscope.bench.comms.patterns.sequence import Step, compute, message

FORWARD_COST, BACKWARD_COST = 1, 2
"""Of one micro-batch in a stage, for putting the steps of all stages into one order."""


class PipelineOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    micro_batches: Annotated[int, Meta(ge=1, description="Of one step of the job.")] = 8
    batch: Annotated[int, Meta(ge=1, description="Examples of a micro-batch.")] = 1
    sequence: Annotated[int, Meta(ge=1, description="Tokens of an example.")] = 128
    hidden: Annotated[int, Meta(ge=1, description="Width of the activations.")] = 256
    dtype: Annotated[str, Meta(description="Of activations and their gradients.")] = "bfloat16"


class Work(NamedTuple):
    """One micro-batch through one stage."""

    way: str
    stage: int
    micro_batch: int

    @property
    def name(self) -> str:
        return f"{self.way}.{self.stage}.{self.micro_batch}"


def plan_stage(stage: int, stages: int, micro_batches: int) -> list[Work]:
    """Forward until the last stage could have begun to answer, then one forward and one backward in turn."""
    warm_up = min(stages - 1 - stage, micro_batches)
    forwards = [Work("forward", stage, number) for number in range(micro_batches)]
    backwards = [Work("backward", stage, number) for number in range(micro_batches)]
    steady = [work for pair in zip(forwards[warm_up:], backwards, strict=False) for work in pair]
    return forwards[:warm_up] + steady + backwards[micro_batches - warm_up :]


def order_work(plans: Sequence[Sequence[Work]]) -> list[Work]:
    """Of all stages, by the moment at which each would be done."""
    done: dict[Work, int] = {}
    free, position = [0] * len(plans), [0] * len(plans)
    while len(done) < sum(map(len, plans)):
        for stage, plan in enumerate(plans):
            while position[stage] < len(plan):
                work = plan[position[stage]]
                source = find_source(work, len(plans))
                if source is not None and source not in done:
                    break
                began = max(free[stage], done[source] if source is not None else 0)
                free[stage] = done[work] = began + (FORWARD_COST if work.way == "forward" else BACKWARD_COST)
                position[stage] += 1
    return sorted(done, key=lambda work: (done[work], work.stage))


def find_source(work: Work, stages: int) -> Work | None:
    """Whose result this work needs from another stage; None at both ends of the pipeline."""
    other = work.stage - 1 if work.way == "forward" else work.stage + 1
    return work._replace(stage=other) if 0 <= other < stages else None


def build_pp(options: PipelineOptions, world_size: int) -> list[Step]:
    """A stage posts a receive one piece of work early, so that the message travels while it still computes."""
    require_dtypes(options.dtype)
    require_ranks("pp", world_size, 2, "each is a stage")
    plans = [plan_stage(stage, world_size, options.micro_batches) for stage in range(world_size)]
    elements = options.batch * options.sequence * options.hidden
    before: dict[Work, list[Work]] = {
        work: list(plan[max(0, place - 2) : place]) for plan in plans for place, work in enumerate(plan)
    }
    steps: list[Step] = []
    for work in order_work(plans):
        source, previous = find_source(work, world_size), before[work]
        needs = [previous[-1].name] if previous else []
        if source is not None:
            needs.append(_name_message(source))
        steps.append(compute(work.name, [work.stage], after=needs, flops=options.flops))
        target = work._replace(stage=work.stage + 1 if work.way == "forward" else work.stage - 1)
        if 0 <= target.stage < world_size:
            posted_after = [before[target][0].name] if len(before[target]) == 2 else []
            steps.append(
                message(
                    _name_message(work), work.stage, target.stage, elements, after=[work.name, *posted_after],
                    dtype=options.dtype,
                )
            )  # fmt: skip
    return steps


def _name_message(work: Work) -> str:
    part = "activation" if work.way == "forward" else "gradient"
    return f"{part}.{work.stage}.{work.micro_batch}"
