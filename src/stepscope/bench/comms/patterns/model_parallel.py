"""Models cut across ranks: layers (tensor and sequence parallel), stages of a pipeline, experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

from msgspec import Meta

from stepscope.bench.comms.layouts import Layout, skewed_weights
from stepscope.bench.comms.patterns.sequence import (
    Pattern,
    PatternOptions,
    Pieces,
    Step,
    collective,
    compute,
    everybody,
    exchange,
    lines_of,
    message,
    require_dtypes,
    require_ranks,
    transpose,
)
from stepscope.core.errors import UsageError

HALVES = ("attention", "mlp")
"""Halves of a transformer layer; each ends with a sum over the ranks."""


class TensorOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Annotated[int, Meta(ge=1, description="Number of transformer layers.")] = 4
    hidden: Annotated[int, Meta(ge=1, description="Width of the activations.")] = 256
    sequence: Annotated[int, Meta(ge=1, description="Tokens per example.")] = 128
    batch: Annotated[int, Meta(ge=1, description="Examples per step.")] = 4
    degree: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Ranks that share a layer; several such groups work side by side. Usually all ranks."),
    ] = None
    dtype: Annotated[str, Meta(description="Data type of the activations.")] = "bfloat16"


class SequenceOptions(TensorOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    regather: Annotated[
        bool, Meta(description="Gather a layer's input again for its weights' gradient, as it was not kept.")
    ] = True


def build_tp(options: TensorOptions, world_size: int) -> list[Step]:
    """An all_reduce behind each half of a layer, forward; one of its input's gradient, backward."""
    return _build_halves(options, _layout(options, world_size))


def build_sp(options: SequenceOptions, world_size: int) -> list[Step]:
    """Between the halves each rank keeps its part of the sequence: all_gather before, reduce_scatter behind."""
    layout = _layout(options, world_size)
    if options.batch * options.sequence % len(layout[0]):
        raise UsageError(
            f"{options.batch} × {options.sequence} tokens do not divide among {len(layout[0])} ranks",
            hint="choose a sequence that divides",
            where="--set sequence=…",
        )
    return _build_halves(options, layout, gathers=True, regathers=options.regather)


def _build_halves(
    options: TensorOptions, layout: Layout, *, gathers: bool = False, regathers: bool = False
) -> list[Step]:
    """All layers forward, then backward; `gathers`: the inputs of a half lie on all ranks, and its result is to."""
    every = sorted(rank for group in layout for rank in group)
    elements = options.batch * options.sequence * options.hidden
    operation, ending = ("reduce_scatter", "scatter") if gathers else ("all_reduce", "reduce")
    halves = [(layer, half) for layer in range(options.layers) for half in HALVES]
    steps: list[Step] = []
    before: list[str] = []
    for is_backward in (False, True):
        for layer, half in reversed(halves) if is_backward else halves:
            stem, name = (f"{half}_gradient", f"{half}_input_gradient") if is_backward else (half, half)
            name, result = f"{name}.{layer}", f"{stem}_{ending}.{layer}"
            gathered = [f"{stem}_gather.{layer}"] if gathers else []
            again = [f"{half}_regather.{layer}"] if is_backward and regathers else []
            steps += [
                *(collective(one, "all_gather", layout, elements, after=before, dtype=options.dtype)
                  for one in (*gathered, *again)),
                compute(name, every, after=gathered or before, flops=options.flops),
                collective(result, operation, layout, elements, after=[name], dtype=options.dtype),
            ]  # fmt: skip
            if is_backward:  # nobody waits for the weights' gradient: it hides the communication
                weights = f"{half}_weight_gradient.{layer}"
                steps.append(compute(weights, every, after=[name, *again], flops=options.flops))
            before = [result]
    return steps


def _layout(options: TensorOptions, world_size: int) -> Layout:
    require_dtypes(options.dtype)
    return lines_of(options.degree, world_size)


FORWARD_COST, BACKWARD_COST = 1, 2
"""Relative times of one micro-batch in a stage, for putting the steps of all stages into one order."""


class PipelineOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    micro_batches: Annotated[int, Meta(ge=1, description="Micro-batches per step of the job.")] = 8
    batch: Annotated[int, Meta(ge=1, description="Examples per micro-batch.")] = 1
    sequence: Annotated[int, Meta(ge=1, description="Tokens per example.")] = 128
    hidden: Annotated[int, Meta(ge=1, description="Width of the activations.")] = 256
    dtype: Annotated[str, Meta(description="Data type of activations and their gradients.")] = "bfloat16"


class MicroBatchPass(NamedTuple):
    """One micro-batch through one stage."""

    way: str
    stage: int
    micro_batch: int

    @property
    def name(self) -> str:
        return f"{self.way}.{self.stage}.{self.micro_batch}"


def plan_stage(stage: int, stages: int, micro_batches: int) -> list[MicroBatchPass]:
    """Forward until the last stage could have begun to answer, then one forward and one backward in turn."""
    warm_up = min(stages - 1 - stage, micro_batches)
    forwards = [MicroBatchPass("forward", stage, number) for number in range(micro_batches)]
    backwards = [MicroBatchPass("backward", stage, number) for number in range(micro_batches)]
    steady = [work for pair in zip(forwards[warm_up:], backwards, strict=False) for work in pair]
    return forwards[:warm_up] + steady + backwards[micro_batches - warm_up :]


def order_work(plans: Sequence[Sequence[MicroBatchPass]]) -> list[MicroBatchPass]:
    """The work of all stages, by the moment at which each piece would be done."""
    done: dict[MicroBatchPass, int] = {}
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


def find_source(work: MicroBatchPass, stages: int) -> MicroBatchPass | None:
    """Whose result this work needs from another stage; None at both ends of the pipeline."""
    other = work.stage - 1 if work.way == "forward" else work.stage + 1
    return work._replace(stage=other) if 0 <= other < stages else None


def build_pp(options: PipelineOptions, world_size: int) -> list[Step]:
    """A stage posts a receive one piece of work early, so that the message travels while it still computes."""
    require_dtypes(options.dtype)
    require_ranks("pp", world_size, 2, "each is a stage")
    plans = [plan_stage(stage, world_size, options.micro_batches) for stage in range(world_size)]
    elements = options.batch * options.sequence * options.hidden
    before: dict[MicroBatchPass, list[MicroBatchPass]] = {
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


def _name_message(work: MicroBatchPass) -> str:
    part = "activation" if work.way == "forward" else "gradient"
    return f"{part}.{work.stage}.{work.micro_batch}"


class ExpertOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Annotated[int, Meta(ge=1, description="Number of layers with experts.")] = 2
    tokens: Annotated[int, Meta(ge=1, description="Tokens per rank.")] = 512
    hidden: Annotated[int, Meta(ge=1, description="Width of a token.")] = 256
    experts_per_rank: Annotated[int, Meta(ge=1, description="Experts per rank.")] = 2
    top_k: Annotated[int, Meta(ge=1, description="Experts that each token is sent to.")] = 2
    skew: Annotated[
        float, Meta(ge=0, description="Skew of the routing: the i-th most wanted expert is wanted as (i+1)^-skew.")
    ] = 0.5
    seed: Annotated[int, Meta(ge=0, description="Random seed of the routing.")] = 0
    backward: Annotated[bool, Meta(description="Whether gradients travel the same ways.")] = True
    dtype: Annotated[str, Meta(description="Data type of the tokens.")] = "bfloat16"


def route(options: ExpertOptions, world_size: int, layer: int) -> Pieces:
    """Copies of tokens that rank i sends to the experts of rank j. In each layer other experts are the wanted ones."""
    experts = options.experts_per_rank * world_size
    draw = random.Random(f"{options.seed}/{layer}")
    order = draw.sample(range(experts), experts)
    limits = list(accumulate(skewed_weights(experts, options.skew)))
    counts = []
    for _ in range(world_size):
        row = [0] * world_size
        for _ in range(options.tokens):
            for expert in _choose(draw, order, limits, options.top_k):
                row[expert // options.experts_per_rank] += 1
        counts.append(tuple(row))
    return tuple(counts)


def _choose(draw: random.Random, experts: list[int], limits: list[float], top_k: int) -> set[int]:
    """Different ones."""
    if top_k == len(experts):
        return set(experts)
    chosen: set[int] = set()
    while len(chosen) < top_k:
        chosen.update(draw.choices(experts, cum_weights=limits, k=top_k - len(chosen)))
    return chosen


def build_ep(options: ExpertOptions, world_size: int) -> list[Step]:
    require_dtypes(options.dtype)
    if options.top_k > options.experts_per_rank * world_size:
        raise UsageError(
            f"a token cannot be sent to {options.top_k} of {options.experts_per_rank * world_size} experts",
            hint="lower top_k or raise experts_per_rank",
            where="--set top_k=…",
        )
    world, every, flops = everybody(world_size), range(world_size), options.flops
    routed = [
        tuple(tuple(count * options.hidden for count in row) for row in route(options, world_size, layer))
        for layer in range(options.layers)
    ]
    steps: list[Step] = []
    before: list[str] = []

    def there_and_back(layer: int, forward: bool, after: list[str]) -> list[Step]:
        suffix, work = ("", "experts") if forward else ("_gradient", "experts_backward")
        # Gradients of what came back go out first: to the experts, and from them to where the tokens came from.
        out, back = ("dispatch", "combine") if forward else ("combine", "dispatch")
        return [
            exchange(f"{out}{suffix}.{layer}", world, routed[layer], after=after, dtype=options.dtype),
            compute(f"{work}.{layer}", every, after=[f"{out}{suffix}.{layer}"], flops=flops),
            exchange(
                f"{back}{suffix}.{layer}", world, transpose(routed[layer]), after=[f"{work}.{layer}"],
                dtype=options.dtype,
            ),
        ]  # fmt: skip

    for layer in range(options.layers):
        counts = options.experts_per_rank * world_size
        steps += [
            compute(f"route.{layer}", every, after=before, flops=flops),
            collective(f"counts.{layer}", "all_to_all", world, counts, after=[f"route.{layer}"], dtype="int64"),
            *there_and_back(layer, forward=True, after=[f"counts.{layer}"]),
        ]
        before = [f"combine.{layer}"]
    for layer in reversed(range(options.layers)) if options.backward else ():
        steps += there_and_back(layer, forward=False, after=before)
        before = [f"dispatch_gradient.{layer}"]
    return steps


PATTERNS = (
    Pattern("tp", "tensor parallel: an all_reduce behind each half of a layer", TensorOptions, build_tp),
    Pattern("sp", "sequence parallel: all_gather and reduce_scatter in its place", SequenceOptions, build_sp),
    Pattern("pp", "pipeline: messages between stages, one forward and one backward in turn", PipelineOptions, build_pp),
    Pattern("ep", "experts: tokens dispatched to skewed experts and combined", ExpertOptions, build_ep),
)
