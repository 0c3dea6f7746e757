"""Layers cut across ranks: tensor parallelism, and sequence parallelism on top of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from stepscope.bench.comms.layouts import Layout
from stepscope.bench.comms.patterns.options import PatternOptions, lines_of, require_dtypes
from stepscope.bench.comms.patterns.sequence import Step, collective, compute
from stepscope.core.errors import UsageError

HALVES = ("attention", "mlp")
"""Of a transformer layer; each ends with a sum over the ranks."""


class TensorOptions(PatternOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Annotated[int, Meta(ge=1, description="Transformer layers.")] = 4
    hidden: Annotated[int, Meta(ge=1, description="Width of the activations.")] = 256
    sequence: Annotated[int, Meta(ge=1, description="Tokens of an example.")] = 128
    batch: Annotated[int, Meta(ge=1, description="Examples.")] = 4
    degree: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Ranks that share a layer; several such groups work side by side. Usually all."),
    ] = None
    dtype: Annotated[str, Meta(description="Of the activations.")] = "bfloat16"


class SequenceOptions(TensorOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    regather: Annotated[
        bool, Meta(description="Gather a layer's input again for its weights' gradient, as it was not kept.")
    ] = True


def build_tp(options: TensorOptions, world_size: int) -> list[Step]:
    """An all_reduce behind each half of a layer, forward; one of its input's gradient, backward."""
    layout, elements = _layout(options, world_size), _activation(options)
    every = range(world_size)
    steps: list[Step] = []
    before: list[str] = []

    def reduce(name: str, producer: str) -> Step:
        return collective(name, "all_reduce", layout, elements, after=[producer], dtype=options.dtype)

    for layer in range(options.layers):
        for half in HALVES:
            name = f"{half}.{layer}"
            steps += [
                compute(name, every, after=before, flops=options.flops),
                reduce(f"{half}_reduce.{layer}", name),
            ]
            before = [f"{half}_reduce.{layer}"]
    for layer in reversed(range(options.layers)):
        for half in reversed(HALVES):
            name = f"{half}_input_gradient.{layer}"
            steps += [
                compute(name, every, after=before, flops=options.flops),
                reduce(f"{half}_gradient_reduce.{layer}", name),
                # Nobody waits for the weights' gradient: it hides the all_reduce.
                compute(f"{half}_weight_gradient.{layer}", every, after=[name], flops=options.flops),
            ]
            before = [f"{half}_gradient_reduce.{layer}"]
    return steps


def build_sp(options: SequenceOptions, world_size: int) -> list[Step]:
    """Between the halves each rank keeps its part of the sequence: all_gather before, reduce_scatter behind."""
    layout, elements = _layout(options, world_size), _activation(options)
    members = len(layout[0])
    if elements // options.hidden % members:
        raise UsageError(
            f"{options.batch} × {options.sequence} tokens do not divide among {members} ranks",
            hint="choose a sequence that divides",
            where="--set sequence=…",
        )
    every = range(world_size)
    steps: list[Step] = []
    before: list[str] = []

    def gather(name: str) -> Step:
        return collective(name, "all_gather", layout, elements, after=before, dtype=options.dtype)

    def scatter(name: str, producer: str) -> Step:
        return collective(name, "reduce_scatter", layout, elements, after=[producer], dtype=options.dtype)

    for layer in range(options.layers):
        for half in HALVES:
            name, gathered = f"{half}.{layer}", f"{half}_gather.{layer}"
            steps += [
                gather(gathered),
                compute(name, every, after=[gathered], flops=options.flops),
                scatter(f"{half}_scatter.{layer}", name),
            ]
            before = [f"{half}_scatter.{layer}"]
    for layer in reversed(range(options.layers)):
        for half in reversed(HALVES):
            name, gathered = f"{half}_input_gradient.{layer}", f"{half}_gradient_gather.{layer}"
            again = [f"{half}_regather.{layer}"] if options.regather else []
            steps += [
                gather(gathered),
                *(gather(one) for one in again),
                compute(name, every, after=[gathered], flops=options.flops),
                scatter(f"{half}_gradient_scatter.{layer}", name),
                compute(f"{half}_weight_gradient.{layer}", every, after=[name, *again], flops=options.flops),
            ]
            before = [f"{half}_gradient_scatter.{layer}"]
    return steps


def _layout(options: TensorOptions, world_size: int) -> Layout:
    require_dtypes(options.dtype)
    return lines_of(options.degree, world_size, where="--set degree=…")


def _activation(options: TensorOptions) -> int:
    return options.batch * options.sequence * options.hidden
