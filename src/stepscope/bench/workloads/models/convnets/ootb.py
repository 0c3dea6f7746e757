"""What the convolutional networks have in common as tasks: pictures in, one class out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.convnets.images import draw_labels, make_pictures
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

MOMENTUM = 0.9


class PictureTask(Task):
    """Classification. Sizes: `image_size`, `classes`, `learning_rate`, `weight_decay`, and what the network needs;
    `frames` for clips; `label_skew` where the dataset is uneven."""

    @abstractmethod
    def build(self) -> nn.Module: ...

    @property
    def extent(self) -> tuple[int, ...]:
        """Of one picture: frames where it has some, height, width."""
        side = self.sizes["image_size"]
        return (self.sizes["frames"], side, side) if "frames" in self.sizes else (side, side)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        pictures = make_pictures(count, self.extent, generator)
        if mode == "infer":
            return {"pictures": pictures}
        labels = draw_labels(count, self.sizes["classes"], generator, skew=self.sizes.get("label_skew", 1.0))
        return {"pictures": pictures, "labels": labels}

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(module(batch["pictures"]), batch["labels"])

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = module(batch["pictures"])
        return logits

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(
            module.parameters(),
            lr=self.sizes["learning_rate"],
            momentum=MOMENTUM,
            weight_decay=self.sizes["weight_decay"],
        )
