"""Parameter servers: workers push gradients to the server of each shard and pull its parameters back."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from stepscope.bench.comms.patterns.buckets import shrink
from stepscope.bench.comms.patterns.ddp import ModelName
from stepscope.bench.comms.patterns.models import find_sizes
from stepscope.bench.comms.patterns.options import PatternOptions, Scale, require_dtypes, require_ranks
from stepscope.bench.comms.patterns.sequence import Step, compute, rooted


class ServerOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = "resnet50"
    scale: Scale = 1.0
    servers: Annotated[int, Meta(ge=1, description="Ranks, the last ones, that keep parameters and do not work.")] = 1
    shards: Annotated[int, Meta(ge=1, description="Equal pieces of the parameters, dealt to the servers in turn.")] = 8
    dtype: Annotated[str, Meta(description="Of gradients and parameters.")] = "float32"


def build_ps(options: ServerOptions, world_size: int) -> list[Step]:
    """Gradients of the last shard are ready first. Pushing and pulling go through groups of their own, so that neither
    has to wait for the other's turn."""
    require_dtypes(options.dtype)
    require_ranks("ps", world_size, options.servers + 1, f"{options.servers} serve, and somebody has to work")
    workers = tuple(range(world_size - options.servers))
    parameters = shrink(sum(find_sizes(options.model)), options.scale)
    shard = max(1, -(-parameters // options.shards))
    steps: list[Step] = []
    for number in range(options.shards):
        server = len(workers) + number % options.servers
        before = [f"backward.{number - 1}"] if number else []
        push, pull = f"push.{number}", f"pull.{number}"
        steps += [
            compute(f"backward.{number}", workers, after=before, flops=options.flops),
            rooted(push, "incast", (server, *workers), server, shard * len(workers), after=[f"backward.{number}"],
                   dtype=options.dtype),
            compute(f"update.{number}", [server], after=[push]),
            rooted(pull, "multicast", (*workers, server), server, shard, after=[push, f"update.{number}"],
                   dtype=options.dtype),
        ]  # fmt: skip
    return steps
