"""A step of a recommendation model: embedding tables are spread over the ranks, dense layers are copied to all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from stepscope.bench.comms.kernels import LookupKernel
from stepscope.bench.comms.patterns.data_parallel import fill_buckets
from stepscope.bench.comms.patterns.sequence import (
    Pattern,
    PatternOptions,
    Step,
    compute,
    everybody,
    exchange,
    reduce_buckets,
    transpose,
)
from stepscope.core.errors import UsageError

FP32_BYTES = 4
Widths = tuple[Annotated[int, Meta(ge=1)], ...]


class DlrmOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults are DLRM's for the Criteo Kaggle data."""

    batch: Annotated[int, Meta(ge=1, description="Examples per rank.")] = 128
    tables: Annotated[
        int, Meta(ge=1, description="Number of embedding tables; the first (tables mod ranks) get one more.")
    ] = 26
    shards: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="Tables of each rank, in place of an even split: 5,3,2,2."),
    ] = ()
    embedding: Annotated[int, Meta(ge=1, description="Width of an embedding.")] = 16
    lookups: Annotated[int, Meta(ge=1, description="Pooling factor: rows looked up per example and table.")] = 1
    random_lookups: Annotated[bool, Meta(description="Whether bags have 1 to `lookups` rows, drawn with `seed`.")] = (
        False
    )
    seed: Annotated[int, Meta(ge=0, description="Random seed of lookups.")] = 0
    rows: Annotated[
        int, Meta(ge=0, description="Rows per table: lookups are real embedding_bag calls; 0: they take no time.")
    ] = 0
    distribution: Annotated[
        Literal["uniform", "zipf"], Meta(description="Distribution of the rows that are looked up.")
    ] = "uniform"
    exponent: Annotated[
        float, Meta(gt=0, description="Exponent of zipf: the i-th most wanted row is wanted as i^-exponent.")
    ] = 1.05
    bottom: Annotated[Widths, Meta(min_length=1, description="Widths of the dense layers before the interaction.")] = (
        13, 512, 256, 64, 16,
    )  # fmt: skip
    top: Annotated[Widths, Meta(min_length=1, description="Widths of the dense layers after the interaction.")] = (
        512, 256, 1,
    )  # fmt: skip
    interaction: Annotated[
        Literal["dot", "dot_self", "cat", "projected"],
        Meta(description="How embeddings are combined; sets the first top width."),
    ] = "dot"
    projection: Annotated[int, Meta(ge=1, description="Width of the projected interaction.")] = 32
    bucket_mib: Annotated[
        float, Meta(ge=0, description="Size in MiB up to which dense gradients share an all_reduce; 0: one per matrix.")
    ] = 0.0


def split_tables(options: DlrmOptions, world_size: int) -> list[int]:
    if options.shards:
        if len(options.shards) != world_size or not sum(options.shards):
            raise UsageError(
                f"shards name {sum(options.shards)} tables of {len(options.shards)} ranks, and there are {world_size}",
                hint="give one number of tables a rank, for example shards=5,3,2,2",
                where="--set shards=…",
            )
        return list(options.shards)
    each, more = divmod(options.tables, world_size)
    return [each + (rank < more) for rank in range(world_size)]


def top_input(options: DlrmOptions, tables: int) -> int:
    """Width that the interaction of all embeddings and the bottom's output hands to the first top layer."""
    dense = options.bottom[-1]
    return {
        "dot": (tables + 1) * tables // 2 + dense,
        "dot_self": (tables + 1) * (tables + 2) // 2 + dense,
        "cat": (tables + 1) * dense,
        "projected": (tables + 1) * options.projection + dense,
    }[options.interaction]


def plan_lookups(options: DlrmOptions, tables: Sequence[int]) -> LookupKernel:
    return LookupKernel(
        tables=tuple(tables), rows=options.rows, width=options.embedding, batch=options.batch, pooling=options.lookups,
        random_lengths=options.random_lookups, seed=options.seed,
        zipf=options.exponent if options.distribution == "zipf" else None,
    )  # fmt: skip


def build_dlrm(options: DlrmOptions, world_size: int) -> list[Step]:
    tables, world, every = split_tables(options, world_size), everybody(world_size), range(world_size)
    lengths = [[count * options.batch for count in tables]] * world_size
    pooled = [[options.batch * count * options.embedding] * world_size for count in tables]
    work, lookups = options.flops, plan_lookups(options, tables)
    steps = [
        exchange("lengths", world, lengths, dtype="int64"),
        exchange("indices", world, lookups.count_indices(), after=["lengths"], dtype="int64"),
        compute("lookup", every, after=["indices"], flops=work, lookups=lookups if options.rows else None),
        exchange("forward_exchange", world, pooled, after=["lookup"]),
        compute("bottom_forward", every, flops=work),
        compute("top_forward", every, after=["forward_exchange", "bottom_forward"], flops=work),
    ]
    top = [a * b for a, b in pairwise((top_input(options, sum(tables)), *options.top))]
    bottom = [a * b for a, b in pairwise(options.bottom)]
    steps += _reduce_gradients("top", top, "top_forward", options, world_size)
    last = next(step.name for step in reversed(steps) if not step.communicates)
    steps.append(exchange("backward_exchange", world, transpose(pooled), after=[last]))
    steps += _reduce_gradients("bottom", bottom, last, options, world_size)
    return [*steps, compute("update_tables", every, after=["backward_exchange"], flops=work)]


def _reduce_gradients(
    part: str, weights: Sequence[int], before: str, options: DlrmOptions, world_size: int
) -> list[Step]:
    """The last layer's gradient is ready first."""
    limit = options.bucket_mib * 2**20
    buckets = fill_buckets(weights[::-1], element_bytes=FP32_BYTES, first_bytes=limit, rest_bytes=limit)
    return reduce_buckets(f"{part}_", map(sum, buckets), world_size, before=[before], flops=options.flops)


DLRM = Pattern("dlrm", "recommendation: embeddings exchanged, dense gradients added up", DlrmOptions, build_dlrm)
