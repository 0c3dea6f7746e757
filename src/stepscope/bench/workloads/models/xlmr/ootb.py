"""XLM-R as `transformers` defines it: features of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stepscope.bench.workloads.models.encoders.optimizers import make_sgd
from stepscope.bench.workloads.models.encoders.text import draw_lengths, draw_words
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn
    from transformers import XLMRobertaModel

BEGIN, PAD, END = 0, 1, 2
FIRST_WORD = 4


class Xlmr(Task):
    """Trained by cross-entropy over the width of the features against random classes, one a token."""

    def build(self) -> nn.Module:
        from transformers import XLMRobertaConfig, XLMRobertaModel

        sizes = self.sizes
        config = XLMRobertaConfig(
            vocab_size=sizes["vocabulary"],
            hidden_size=sizes["hidden"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            intermediate_size=sizes["feed_forward"],
            max_position_embeddings=sizes["positions"],
            initializer_range=sizes["weight_spread"],
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            hidden_dropout_prob=sizes["hidden_dropout"],
            attention_probs_dropout_prob=sizes["attention_dropout"],
            pad_token_id=PAD,
        )
        return XLMRobertaModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        longest = self.sizes["sequence"]
        batch = {"input_ids": self._draw_ids(count, longest, generator)}
        if self.sizes.get("sampled_lengths"):
            batch = pad_to_longest(batch["input_ids"], draw_lengths(count, longest=longest, generator=generator))
        if mode == "train":
            classes = (count, batch["input_ids"].shape[1])
            batch["targets"] = torch.randint(self.sizes["hidden"], classes, generator=generator)
        return batch

    def _draw_ids(self, count: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
        ids = draw_words((count, tokens), first=FIRST_WORD, vocabulary=self.sizes["vocabulary"], generator=generator)
        ids[:, 0], ids[:, -1] = BEGIN, END
        return ids

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        features = module(input_ids=batch["input_ids"]).last_hidden_state
        return functional.cross_entropy(features.flatten(0, 1), batch["targets"].flatten())

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Features of every token; those of padding are zeros."""
        if "attention_mask" not in batch:
            return cast("torch.Tensor", module(input_ids=batch["input_ids"]).last_hidden_state)
        mask = batch["attention_mask"]
        features: torch.Tensor = module(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        return features * mask.unsqueeze(-1)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_sgd(module, learning_rate=self.sizes["learning_rate"])

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        model = cast("XLMRobertaModel", module)
        return [model.embeddings, *model.encoder.layer]


def pad_to_longest(ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """As a tokenizer pads a batch: each sequence ends where its length says, the longest decides the width."""
    import torch

    width = int(lengths.max())
    ids, column = ids[:, :width].clone(), torch.arange(width)
    # A sequence of one token is its beginning alone.
    ids[(column == lengths[:, None] - 1) & (column > 0)] = END
    there = column < lengths[:, None]
    return {"input_ids": ids.masked_fill(~there, PAD), "attention_mask": there.long()}
