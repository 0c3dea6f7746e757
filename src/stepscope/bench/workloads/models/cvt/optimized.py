"""CvT made fast: channels last, fused convolutions and attention, compiled and captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.encoders import disclosed
from stepscope.bench.workloads.models.encoders.fast import FastEncoder
from stepscope.bench.workloads.protocol import Change, Mode, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn


class FastCvt(FastEncoder):
    repeated = ("LeanBlock",)
    shifted = True
    """Depthwise convolutions as sums of shifted images; False: by the library."""

    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from stepscope.bench.workloads.models.cvt.network import LeanCvt

        return LeanCvt(module, mode=mode, precision=precision, shifted=self.shifted)

    def arrange(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        import torch

        return {**batch, "pixel_values": batch["pixel_values"].contiguous(memory_format=torch.channels_last)}

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        return functional.cross_entropy(module(batch["pixel_values"]), batch["labels"])

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", module(batch["pixel_values"]))

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return [block for stage in cast("Any", module).stages for block in stage.blocks]

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        found = [
            Change("channels last", "Images and tokens have one layout, so that nothing is turned between the two."),
            Change("fused attention", "Scores are not stored (scaled_dot_product_attention)."),
            disclosed.COMPILED,
            disclosed.WHOLE_GRAPH,
            *disclosed.precision_changes(mode, precision),
        ]
        if self.shifted:
            found.append(
                Change(
                    "convolutions as shifted sums",
                    "Depthwise convolutions are sums of shifted images that the compiler fuses; those of key and value "
                    "read their input once.",
                )
            )
        if mode == "train":
            return [*found, disclosed.fused_optimizer("AdamW")]
        return [
            *found,
            Change("folded batch norms", "Batch norms are part of the weights of the convolutions before them."),
            Change("last block where it is read", "The last block is computed for the class token alone."),
        ]
