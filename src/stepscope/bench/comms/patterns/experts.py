"""Expert parallelism: tokens travel to the ranks of the experts they are routed to, and back."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Annotated

from msgspec import Meta

from stepscope.bench.comms.patterns.options import PatternOptions, everybody, require_dtypes
from stepscope.bench.comms.patterns.sequence import Pieces, Step, collective, compute, exchange, transpose
from stepscope.bench.comms.splits import skewed_weights
from stepscope.core.errors import UsageError


class ExpertOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Annotated[int, Meta(ge=1, description="Layers with experts.")] = 2
    tokens: Annotated[int, Meta(ge=1, description="Tokens of a rank.")] = 512
    hidden: Annotated[int, Meta(ge=1, description="Width of a token.")] = 256
    experts_per_rank: Annotated[int, Meta(ge=1, description="Experts that live on a rank.")] = 2
    top_k: Annotated[int, Meta(ge=1, description="Experts a token is sent to.")] = 2
    skew: Annotated[float, Meta(ge=0, description="The i-th most wanted expert is wanted as (i+1)^-skew.")] = 0.5
    seed: Annotated[int, Meta(ge=0, description="Of the routing.")] = 0
    backward: Annotated[bool, Meta(description="Gradients travel the same ways.")] = True
    dtype: Annotated[str, Meta(description="Of the tokens.")] = "bfloat16"


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
