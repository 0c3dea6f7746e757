"""Synthetic text for the encoders, with word frequencies and lengths as published, and their optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stepscope.bench.workloads.protocol import Task

PUBLISHED_LENGTHS: tuple[tuple[float, float], ...] = (
    (0, 1), (5, 3), (25, 11), (50, 23), (70, 47), (75, 56), (90, 147), (95, 250), (99, 675), (100, 2462),
)  # fmt: skip
"""Percentile and length in tokens, of XLM-R requests (FAMBench's `realdist`)."""


def name_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers calls what BERT and its relatives are made by."""
    return {
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "intermediate_size": sizes["feed_forward"],
        "max_position_embeddings": sizes["positions"],
        "initializer_range": sizes["weight_spread"],
        "hidden_dropout_prob": sizes["hidden_dropout"],
        "attention_probs_dropout_prob": sizes["attention_dropout"],
    }


def draw_words(shape: Sequence[int], *, first: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Ids from `first` on; the k-th word comes about 1/k as often as the first one, as in natural text."""
    words = vocabulary - first
    ranks = torch.exp(torch.rand(*shape, generator=generator) * math.log(words + 1)) - 1
    return first + ranks.long().clamp_(0, words - 1)


def draw_lengths(count: int, *, longest: int, generator: torch.Generator) -> torch.Tensor:
    """One a sequence, as published, cut to 1..longest."""
    lengths = at_percentile(PUBLISHED_LENGTHS, torch.rand(count, generator=generator, dtype=torch.float64) * 100)
    return lengths.round().long().clamp_(1, longest)


def at_percentile(table: Sequence[tuple[float, float]], percentile: torch.Tensor) -> torch.Tensor:
    """Of values whose percentiles the table says, with straight lines between them."""
    percentiles, values = torch.tensor(table, dtype=torch.float64).t().contiguous().unbind(0)
    upper = torch.searchsorted(percentiles, percentile).clamp_(1, len(table) - 1)
    lower = upper - 1
    share = (percentile - percentiles[lower]) / (percentiles[upper] - percentiles[lower])
    return values[lower] + share * (values[upper] - values[lower])


def decayed_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    trained = [one for one in module.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]


class AdamWTask(Task):
    """Trained by AdamW."""

    def make_optimizer(self, module: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
        how: dict[str, Any] = {"fused": True, "capturable": next(module.parameters()).is_cuda} if fused else {}
        groups = decayed_groups(module, self.sizes["weight_decay"])
        return torch.optim.AdamW(groups, lr=self.sizes["learning_rate"], **how)
