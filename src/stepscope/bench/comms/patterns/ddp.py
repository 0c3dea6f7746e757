"""Data-parallel training: gradients are added up in buckets while the backward pass goes on."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.patterns.buckets import fill_buckets, shrink
from stepscope.bench.comms.patterns.models import find_sizes
from stepscope.bench.comms.patterns.options import PatternOptions, Scale, everybody, require_dtypes
from stepscope.bench.comms.patterns.sequence import Step, collective, compute

ModelName = Annotated[str, Meta(description="resnet50, vgg16, bert-base, bert-large or gpt2.")]


class DdpOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = "resnet50"
    scale: Scale = 1.0
    bucket_mib: Annotated[float, Meta(ge=0, description="A bucket is full at so many MiB.")] = 25.0
    first_bucket_mib: Annotated[float, Meta(ge=0, description="The first one earlier, so that sending begins.")] = 1.0
    dtype: Annotated[str, Meta(description="Of the gradients.")] = "float32"


def build_ddp(options: DdpOptions, world_size: int) -> list[Step]:
    """Buckets are those of the model as it is; `scale` then shrinks each, so that their number stays."""
    require_dtypes(options.dtype)
    buckets = fill_buckets(
        find_sizes(options.model)[::-1],
        element_bytes=DTYPE_BYTES[options.dtype],
        first_bytes=options.first_bucket_mib * 2**20,
        rest_bytes=options.bucket_mib * 2**20,
    )
    steps: list[Step] = []
    for number, bucket in enumerate(buckets):
        before = [f"backward.{number - 1}"] if number else []
        steps += [
            compute(f"backward.{number}", range(world_size), after=before, flops=options.flops),
            collective(
                f"reduce.{number}",
                "all_reduce",
                everybody(world_size),
                shrink(sum(bucket), options.scale),
                after=[f"backward.{number}"],
                dtype=options.dtype,
            ),
        ]
    return steps
