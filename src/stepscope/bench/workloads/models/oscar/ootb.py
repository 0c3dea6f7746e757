"""OSCAR, fine-tuned for visual question answering."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.bert.ootb import draw_pairs
from stepscope.bench.workloads.models.encoders.optimizers import make_adamw
from stepscope.bench.workloads.models.encoders.text import draw_words
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

BOX_FEATURES = 6
"""Corners and size of a region, as shares of the image; the last of its features."""
GIVEN_ANSWERS = 3
"""Answers of one question that people agreed on, at most."""
SCORES = (0.3, 0.6, 0.9, 1.0)
"""Of an answer that one, two, three or more of ten people gave."""


class OscarAnswers(Task):
    """Every place is filled: text and tags, then image regions."""

    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.oscar.network import Oscar

        return Oscar(self.sizes)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        import torch

        sizes, generator = self.sizes, torch.Generator().manual_seed(seed)
        batch = draw_pairs(count, sizes["sequence"], sizes["vocabulary"], generator)
        shape = (count, sizes["regions"], sizes["region_features"])
        # What a detector's last layer gives is not negative.
        regions = torch.randn(shape, generator=generator).clamp_(min=0)
        regions[..., -BOX_FEATURES:] = torch.rand(*shape[:-1], BOX_FEATURES, generator=generator)
        batch["regions"] = regions
        if mode == "train":
            batch["scores"] = self._draw_scores(count, generator)
        return batch

    def _draw_scores(self, count: int, generator: torch.Generator) -> torch.Tensor:
        import torch

        answers = self.sizes["answers"]
        which = draw_words((count, GIVEN_ANSWERS), first=0, vocabulary=answers, generator=generator)
        score = torch.tensor(SCORES)[torch.randint(len(SCORES), which.shape, generator=generator)]
        return torch.zeros(count, answers).scatter_(1, which, score)

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Summed over the answers, as the published training does."""
        from torch.nn import functional

        scores = batch["scores"]
        return functional.binary_cross_entropy_with_logits(self.infer(module, batch), scores) * scores.shape[1]

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", module(batch["input_ids"], batch["token_type_ids"], batch["regions"]))

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_adamw(module, learning_rate=self.sizes["learning_rate"], decay=self.sizes["weight_decay"])

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        model = cast("Any", module)
        return [model.bert.embeddings, *model.bert.encoder.layer, model.region_embedding, model.classifier]
