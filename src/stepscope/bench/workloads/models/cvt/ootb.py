"""CvT as `transformers` defines it, for image classification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.encoders.optimizers import make_adamw
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

COARSENESS = 8
"""Neighbouring points of an image are alike: most of it is noise that was enlarged so much."""


class Cvt(Task):
    def build(self) -> nn.Module:
        from transformers import CvtConfig, CvtForImageClassification

        sizes = self.sizes
        config = CvtConfig(
            embed_dim=sizes["widths"],
            depth=sizes["depths"],
            num_heads=sizes["heads"],
            initializer_range=sizes["weight_spread"],
            drop_path_rate=[0.0, 0.0, sizes["drop_path"]],
            num_labels=sizes["classes"],  # type: ignore[call-arg]
        )
        return CvtForImageClassification(config)  # type: ignore[no-untyped-call]

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """Images of mean 0 and spread 1, as normalisation leaves them."""
        import torch
        from torch.nn import functional

        generator, size = torch.Generator().manual_seed(seed), self.sizes["image"]
        coarse = torch.randn(count, 3, size // COARSENESS, size // COARSENESS, generator=generator)
        fine = torch.randn(count, 3, size, size, generator=generator)
        batch = {"pixel_values": functional.interpolate(coarse, size=size, mode="nearest") * 0.8 + fine * 0.6}
        if mode == "train":
            batch["labels"] = torch.randint(self.sizes["classes"], (count,), generator=generator)
        return batch

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", module(**batch).loss)

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", module(pixel_values=batch["pixel_values"]).logits)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_adamw(module, learning_rate=self.sizes["learning_rate"], decay=self.sizes["weight_decay"])

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return [layer for stage in cast("Any", module).cvt.encoder.stages for layer in stage.layers]
