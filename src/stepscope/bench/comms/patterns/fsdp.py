"""Fully sharded training: each layer's parameters are gathered before use and its gradients scattered after."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from stepscope.bench.comms.patterns.models import transformer_block
from stepscope.bench.comms.patterns.options import PatternOptions, everybody, require_dtypes
from stepscope.bench.comms.patterns.sequence import Step, collective, compute


class FsdpOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Annotated[int, Meta(ge=1, description="Transformer layers, each a unit of sharding.")] = 4
    hidden: Annotated[int, Meta(ge=1, description="Width: a layer has 12·hidden² + 13·hidden parameters.")] = 256
    prefetch: Annotated[int, Meta(ge=0, description="Layers gathered ahead of the one in use.")] = 1
    dtype: Annotated[str, Meta(description="Of gathered parameters.")] = "bfloat16"
    reduce_dtype: Annotated[str, Meta(description="Of scattered gradients.")] = "float32"


def build_fsdp(options: FsdpOptions, world_size: int) -> list[Step]:
    """A gather waits until the layer that is done long enough has given its memory back: that bounds the prefetch."""
    require_dtypes(options.dtype, options.reduce_dtype)
    world, every, layers = everybody(world_size), range(world_size), options.layers
    # Shards are equally large: what does not divide is padded.
    padded = -(-transformer_block(options.hidden) // world_size) * world_size
    distance = options.prefetch + 1

    def gather(way: str, layer: int, freed_by: str) -> Step:
        return collective(f"gather_{way}.{layer}", "all_gather", world, padded, after=[freed_by] if freed_by else [],
                          dtype=options.dtype)  # fmt: skip

    steps: list[Step] = []
    for layer in range(layers):
        freed_by = f"forward.{layer - distance}" if layer >= distance else ""
        before = [f"forward.{layer - 1}"] if layer else []
        steps += [
            gather("forward", layer, freed_by),
            compute(f"forward.{layer}", every, after=[f"gather_forward.{layer}", *before], flops=options.flops),
        ]
    turn = f"forward.{layers - 1}"
    steps += [gather("backward", layer, turn) for layer in reversed(range(max(0, layers - distance), layers))]
    for layer in reversed(range(layers)):
        before = [f"backward.{layer + 1}"] if layer + 1 < layers else [turn]
        name, ahead = f"backward.{layer}", layer - distance
        steps += [
            compute(name, every, after=[f"gather_backward.{layer}", *before], flops=options.flops),
            # Before the gradients, which nobody waits for: the next layer waits for its parameters.
            *([gather("backward", ahead, name)] if ahead >= 0 else []),
            collective(f"scatter.{layer}", "reduce_scatter", world, padded, after=[name], dtype=options.reduce_dtype),
        ]
    return steps
