"""Data-parallel training: gradients added up in buckets, sharded parameters, parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from msgspec import Meta

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.patterns.sequence import (
    Pattern,
    PatternOptions,
    Scale,
    Step,
    collective,
    compute,
    everybody,
    reduce_buckets,
    require_dtypes,
    require_ranks,
)
from stepscope.core.errors import unknown_name


def _linear(inputs: int, outputs: int) -> list[int]:
    return [inputs * outputs, outputs]


def _norm(width: int) -> list[int]:
    return [width, width]


def resnet50() -> list[int]:
    sizes = [64 * 3 * 7 * 7, *_norm(64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            sizes += [inputs * width, *_norm(width)]
            sizes += [width * width * 9, *_norm(width)]
            sizes += [width * outputs, *_norm(outputs)]
            if block == 0:
                sizes += [inputs * outputs, *_norm(outputs)]
            inputs = outputs
    return sizes + _linear(2048, 1000)


def vgg16() -> list[int]:
    sizes: list[int] = []
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        sizes += [inputs * outputs * 9, outputs]
        inputs = outputs
    return sizes + _linear(512 * 7 * 7, 4096) + _linear(4096, 4096) + _linear(4096, 1000)


def bert(layers: int, hidden: int, vocabulary: int = 30_522) -> list[int]:
    """BertForPreTraining: both heads."""
    sizes = [vocabulary * hidden, 512 * hidden, 2 * hidden, *_norm(hidden)]
    for _ in range(layers):
        sizes += 4 * _linear(hidden, hidden) + _norm(hidden)
        sizes += _linear(hidden, 4 * hidden) + _linear(4 * hidden, hidden) + _norm(hidden)
    pooler, heads = _linear(hidden, hidden), [vocabulary, *_linear(hidden, hidden), *_norm(hidden)]
    return sizes + pooler + heads + _linear(hidden, 2)


def gpt2(layers: int = 12, hidden: int = 768) -> list[int]:
    sizes = [50_257 * hidden, 1024 * hidden]
    for _ in range(layers):
        sizes += _norm(hidden) + _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
        sizes += _norm(hidden) + _linear(hidden, 4 * hidden) + _linear(4 * hidden, hidden)
    return sizes + _norm(hidden)


MODELS: dict[str, Callable[[], list[int]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": lambda: bert(12, 768),
    "bert-large": lambda: bert(24, 1024),
    "gpt2": gpt2,
}


def find_sizes(model: str) -> list[int]:
    if model not in MODELS:
        raise unknown_name("model", model, MODELS, where="--set model=…")
    return MODELS[model]()


def transformer_block(hidden: int) -> int:
    """Parameters of one layer: attention, a feed-forward part four times as wide, biases, two normalisations."""
    return 12 * hidden * hidden + 13 * hidden


def fill_buckets(sizes: Sequence[int], *, element_bytes: int, first_bytes: float, rest_bytes: float) -> list[list[int]]:
    """Sizes in the order in which gradients become ready. A bucket is full when it has reached its limit, so that
    a large tensor may go over it."""
    buckets: list[list[int]] = []
    current: list[int] = []
    for size in sizes:
        current.append(size)
        if sum(current) * element_bytes >= (rest_bytes if buckets else first_bytes):
            buckets.append(current)
            current = []
    return [*buckets, current] if current else buckets


def shrink(elements: int, scale: float) -> int:
    return max(1, round(elements * scale))


ModelName = Annotated[
    str, Meta(description="Model whose parameters are taken: resnet50, vgg16, bert-base, bert-large or gpt2.")
]


class DdpOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = "resnet50"
    scale: Scale = 1.0
    bucket_mib: Annotated[float, Meta(ge=0, description="Size in MiB at which a bucket is full.")] = 25.0
    first_bucket_mib: Annotated[
        float, Meta(ge=0, description="Size in MiB at which the first bucket is full, so that sending begins early.")
    ] = 1.0
    dtype: Annotated[str, Meta(description="Data type of the gradients.")] = "float32"


def build_ddp(options: DdpOptions, world_size: int) -> list[Step]:
    """Buckets are those of the model as it is; `scale` then shrinks each, so that their number stays."""
    require_dtypes(options.dtype)
    buckets = fill_buckets(
        find_sizes(options.model)[::-1],
        element_bytes=DTYPE_BYTES[options.dtype],
        first_bytes=options.first_bucket_mib * 2**20,
        rest_bytes=options.bucket_mib * 2**20,
    )
    elements = [shrink(sum(bucket), options.scale) for bucket in buckets]
    return reduce_buckets("", elements, world_size, flops=options.flops, dtype=options.dtype)


class FsdpOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Annotated[int, Meta(ge=1, description="Number of transformer layers, each a unit of sharding.")] = 4
    hidden: Annotated[int, Meta(ge=1, description="Width of a layer, which has 12·hidden² + 13·hidden parameters.")] = (
        256
    )
    prefetch: Annotated[int, Meta(ge=0, description="Number of layers gathered ahead of the one in use.")] = 1
    dtype: Annotated[str, Meta(description="Data type of gathered parameters.")] = "bfloat16"
    reduce_dtype: Annotated[str, Meta(description="Data type of scattered gradients.")] = "float32"


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


class ServerOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = "resnet50"
    scale: Scale = 1.0
    servers: Annotated[
        int, Meta(ge=1, description="Number of ranks, the last ones, that keep parameters and do not compute.")
    ] = 1
    shards: Annotated[int, Meta(ge=1, description="Equal pieces of the parameters, dealt to the servers in turn.")] = 8
    dtype: Annotated[str, Meta(description="Data type of gradients and parameters.")] = "float32"


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
            collective(push, "incast", ((server, *workers),), shard * len(workers), after=[f"backward.{number}"],
                       dtype=options.dtype),
            compute(f"update.{number}", [server], after=[push]),
            collective(pull, "multicast", ((*workers, server),), shard, after=[push, f"update.{number}"],
                       dtype=options.dtype, root=len(workers)),
        ]  # fmt: skip
    return steps


PATTERNS = (
    Pattern("ddp", "data parallel: gradient buckets of a named model, added up during backward", DdpOptions, build_ddp),
    Pattern("fsdp", "fully sharded: parameters gathered layer by layer, gradients scattered", FsdpOptions, build_fsdp),
)
PARAMETER_SERVERS = Pattern(
    "ps", "parameter servers: workers push gradients, servers send parameters", ServerOptions, build_ps
)
