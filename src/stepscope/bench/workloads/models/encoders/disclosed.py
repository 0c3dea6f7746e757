"""What the fast forms of all encoders change, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.workloads.protocol import Change

if TYPE_CHECKING:
    from stepscope.bench.workloads.protocol import Mode, Precision

ONE_PROJECTION = Change("one projection", "Query, key and value are one product with their weights held as one.")
SKIPPED_LOOKUPS = Change(
    "no position look-up", "Positions are counted, not looked up from the ids: no sequence of the batch is padded."
)
COMPILED = Change("torch.compile", "Norms, sums, dropout and activations are fused by torch.compile.")
WHOLE_GRAPH = Change("CUDA graph", "The whole step is one CUDA graph; shapes must not change.")

_PRECISIONS: dict[Precision, Change] = {
    "tf32": Change("tf32", "Products of fp32 matrices are rounded to tf32."),
    "bf16": Change("bf16", "Products are taken in bf16."),
    "fp16": Change("fp16", "Weights and products are fp16."),
    "fp8": Change(
        "fp8",
        "Products of the layers' linear parts are taken in fp8 (e4m3). Each weight and each input has one scale; those "
        "of inputs are found beforehand on 16 other examples, with half as much again to spare. All else is bf16.",
    ),
}


_TRAINED_FP8 = Change(
    "fp8",
    "Products of the layers' linear parts are taken in fp8, e4m3 forward and with gradients in e5m2. Each tensor has "
    "one scale, found as it comes; weights stay fp32, all else is bf16.",
)


def precision_changes(mode: Mode, precision: Precision) -> list[Change]:
    found = [_PRECISIONS[precision]] if precision in _PRECISIONS else []
    if mode == "train" and precision == "fp8":
        found = [_TRAINED_FP8]
    if mode == "train" and precision in ("bf16", "fp8"):
        found.append(Change("bf16 stream", "What passes from layer to layer is bf16, too; norms are taken in fp32."))
    return found


def fused_optimizer(name: str) -> Change:
    return Change("fused optimizer", f"{name} updates all weights in few kernels.")
