"""Synthetic text: token frequencies, documents and prompts with the statistics of real ones."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ZIPF_EXPONENT = 1.0
"""The n-th most frequent token is about n times as rare as the first."""


@lru_cache(maxsize=4)
def cumulated_frequencies(vocabulary: int) -> torch.Tensor:
    import torch

    weights = torch.arange(1, vocabulary + 1, dtype=torch.float64) ** -ZIPF_EXPONENT
    return (weights / weights.sum()).cumsum(0)


def draw_tokens(count: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Ids in the order of frequency, as byte-pair vocabularies nearly are."""
    import torch

    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.searchsorted(cumulated_frequencies(vocabulary), drawn).clamp_(max=vocabulary - 1)


class Lengths(NamedTuple):
    """A log-normal spread of lengths, cut at both ends."""

    median: float
    spread: float
    """Standard deviation of the logarithm."""
    shortest: int
    longest: int


def pack_documents(
    count: int, length: int, *, vocabulary: int, end_of_text: int, documents: Lengths, seed: int
) -> torch.Tensor:
    """[count, length + 1]: documents one after another with an end mark between them, cut into rows. Attention goes
    across the marks, as in the training of GPT-2."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    total = count * (length + 1)
    text = draw_tokens(total, vocabulary, generator)
    lengths = draw_lengths(2 + 2 * total // documents.shortest, documents, generator)
    ends = (lengths + 1).cumsum(0) - 1
    text[ends[ends < total]] = end_of_text
    return text.view(count, length + 1)


def draw_lengths(count: int, lengths: Lengths, generator: torch.Generator) -> torch.Tensor:
    import torch

    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return _at(normal, lengths)


def spread_lengths(count: int, lengths: Lengths) -> torch.Tensor:
    """The middle of each of `count` equally likely parts of the distribution: every batch of a size holds the same
    lengths, so that batches cost the same, and yet they are as mixed as real ones."""
    import torch

    middle = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return _at(math.sqrt(2) * torch.erfinv(2 * middle - 1), lengths)


def _at(normal: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    drawn = (math.log(lengths.median) + lengths.spread * normal).exp()
    return drawn.round().long().clamp_(lengths.shortest, lengths.longest)


def make_prompts(
    count: int, *, vocabulary: int, end_of_text: int, prompts: Lengths, seed: int
) -> dict[str, torch.Tensor]:
    """Padded on the left to the longest, as transformers wants prompts for generation."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = spread_lengths(count, prompts)[torch.randperm(count, generator=generator)]
    width = int(lengths.max())
    mask = torch.arange(width) >= (width - lengths)[:, None]
    text = draw_tokens(count * width, vocabulary, generator).view(count, width)
    return {"input_ids": text.masked_fill(~mask, end_of_text), "attention_mask": mask.long()}


def pack_prompts(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts without their padding, one after another. `spread` says for each place of a batch padded on the right
    which packed token lies there (in the padding: any), `home` where in that batch each packed token lies."""
    import torch

    text, mask = batch["input_ids"], batch["attention_mask"].bool()
    count, width = text.shape
    lengths = mask.sum(1)
    first = lengths.cumsum(0) - lengths
    places = mask.long().cumsum(1)[mask] - 1
    column = torch.arange(width)
    spread = (first[:, None] + column).where(column < lengths[:, None], first[:, None])
    return {
        "tokens": text[mask],
        "places": places,
        "spread": spread,
        "home": torch.arange(count)[:, None].expand(count, width)[mask] * width + places,
        "last": first + lengths - 1,
        "lengths": lengths,
    }
