"""The decoders as transformers defines them, trained and run by plain loops, and the text they read."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stepscope.bench.workloads.generation import Decoder
from stepscope.bench.workloads.models.encoders.ootb import decayed_groups
from stepscope.bench.workloads.protocol import Batch, Mode

ZIPF_EXPONENT = 1.0
"""The n-th most frequent token is about n times as rare as the first."""


@lru_cache(maxsize=4)
def cumulated_frequencies(vocabulary: int) -> torch.Tensor:
    weights = torch.arange(1, vocabulary + 1, dtype=torch.float64) ** -ZIPF_EXPONENT
    return (weights / weights.sum()).cumsum(0)


def draw_tokens(count: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Ids in the order of frequency, as byte-pair vocabularies nearly are."""
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
    generator = torch.Generator().manual_seed(seed)
    total = count * (length + 1)
    text = draw_tokens(total, vocabulary, generator)
    lengths = draw_lengths(2 + 2 * total // documents.shortest, documents, generator)
    ends = (lengths + 1).cumsum(0) - 1
    text[ends[ends < total]] = end_of_text
    return text.view(count, length + 1)


def draw_lengths(count: int, lengths: Lengths, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return _at(normal, lengths)


def spread_lengths(count: int, lengths: Lengths) -> torch.Tensor:
    """The middle of each of `count` equally likely parts of the distribution: every batch of a size holds the same
    lengths, so that batches cost the same, and yet they are as mixed as real ones."""
    middle = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return _at(math.sqrt(2) * torch.erfinv(2 * middle - 1), lengths)


def _at(normal: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    drawn = (math.log(lengths.median) + lengths.spread * normal).exp()
    return drawn.round().long().clamp_(lengths.shortest, lengths.longest)


def make_prompts(
    count: int, *, vocabulary: int, end_of_text: int, prompts: Lengths, seed: int
) -> dict[str, torch.Tensor]:
    """Padded on the left to the longest, as transformers wants prompts for generation."""
    generator = torch.Generator().manual_seed(seed)
    lengths = spread_lengths(count, prompts)[torch.randperm(count, generator=generator)]
    width = int(lengths.max())
    mask = torch.arange(width) >= (width - lengths)[:, None]
    text = draw_tokens(count * width, vocabulary, generator).view(count, width)
    return {"input_ids": text.masked_fill(~mask, end_of_text), "attention_mask": mask.long()}


def pack_prompts(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts without their padding, one after another. `spread` says for each place of a batch padded on the right
    which packed token lies there (in the padding: any), `home` where in that batch each packed token lies."""
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


class PlainState:
    """A growing cache, and the tokens so far."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.mask: torch.Tensor
        self.logits: torch.Tensor
        self.tokens: list[torch.Tensor] = []


class PlainDecoder(Decoder):
    """Everything but the definition of the network."""

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        sizes = self.sizes
        common = {"vocabulary": sizes["vocabulary"], "end_of_text": sizes["end_of_text"], "seed": seed}
        if mode == "infer":
            return make_prompts(count, prompts=Lengths(**sizes["prompts"]), **common)
        text = pack_documents(count, sizes["sequence_length"], documents=Lengths(**sizes["documents"]), **common)
        return {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        logits = module(input_ids=batch["input_ids"], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self._prefill(module, batch).logits[:, -1]
        return logits

    def make_optimizer(self, module: nn.Module, **how: Any) -> torch.optim.Optimizer:
        groups = decayed_groups(module, self.sizes["weight_decay"])
        return torch.optim.AdamW(groups, lr=self.sizes["learning_rate"], betas=(0.9, 0.95), eps=1e-8, **how)

    def reserve(self, module: nn.Module, batch: Batch, new_tokens: int) -> PlainState:
        return PlainState()

    def begin(self, module: nn.Module, batch: Batch, state: PlainState) -> None:
        output = self._prefill(module, batch)
        state.cache, state.mask, state.tokens = output.past_key_values, batch["attention_mask"], []
        self._choose(state, output.logits)

    def advance(self, module: nn.Module, state: PlainState) -> None:
        state.mask = torch.cat([state.mask, torch.ones_like(state.mask[:, :1])], dim=1)
        output = module(
            input_ids=state.tokens[-1],
            attention_mask=state.mask,
            position_ids=state.mask.sum(1, keepdim=True) - 1,
            past_key_values=state.cache,
            use_cache=True,
        )
        self._choose(state, output.logits)

    def tokens(self, state: PlainState) -> torch.Tensor:
        return torch.cat(state.tokens, dim=1)

    def logits(self, state: PlainState) -> torch.Tensor:
        return state.logits

    def force(self, state: PlainState, tokens: torch.Tensor) -> None:
        state.tokens[-1] = tokens[:, None]

    def _prefill(self, module: nn.Module, batch: Batch) -> Any:
        mask = batch["attention_mask"]
        return module(
            input_ids=batch["input_ids"],
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )

    def _choose(self, state: PlainState, logits: torch.Tensor) -> None:
        state.logits = logits[:, -1]
        state.tokens.append(state.logits.argmax(dim=-1, keepdim=True))
