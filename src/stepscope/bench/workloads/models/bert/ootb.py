"""BERT as `transformers` defines it: pre-training, and inference as question answering."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.encoders.optimizers import make_adamw
from stepscope.bench.workloads.models.encoders.text import draw_words
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn
    from transformers import BertConfig

    from stepscope.bench.workloads.protocol import Outputs

BEGIN, BREAK, MASK = 101, 102, 103
FIRST_WORD = 104
IGNORED = -100
"""Label of a token that is not to be guessed."""


def make_config(sizes: Mapping[str, Any]) -> BertConfig:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["feed_forward"],
        max_position_embeddings=sizes["positions"],
        initializer_range=sizes["weight_spread"],
        hidden_dropout_prob=sizes["hidden_dropout"],
        attention_probs_dropout_prob=sizes["attention_dropout"],
    )


class Bert(Task):
    """With the head that `sizes["head"]` names: `pretraining` (masked words and next sentence) or `answers` (where an
    answer begins and ends). Every sequence is full."""

    def build(self) -> nn.Module:
        from transformers import BertForPreTraining, BertForQuestionAnswering

        make = BertForPreTraining if self.sizes["head"] == "pretraining" else BertForQuestionAnswering
        return make(make_config(self.sizes))

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        batch = draw_pairs(count, self.sizes["sequence"], self.sizes["vocabulary"], generator)
        if mode == "infer":
            return batch
        if self.sizes["head"] == "pretraining":
            batch |= hide_words(batch["input_ids"], self.sizes["guessed"], self.sizes["vocabulary"], generator)
            batch["next_sentence_label"] = torch.randint(2, (count,), generator=generator)
        else:
            ends = torch.randint(self.sizes["sequence"], (count, 2), generator=generator).sort(dim=1).values
            batch["start_positions"], batch["end_positions"] = ends.unbind(1)
        return batch

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", module(**batch).loss)

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Outputs:
        outputs = module(**batch)
        if self.sizes["head"] == "pretraining":
            return outputs.prediction_logits, outputs.seq_relationship_logits
        return outputs.start_logits, outputs.end_logits

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_adamw(module, learning_rate=self.sizes["learning_rate"], decay=self.sizes["weight_decay"])

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The head stays with the embeddings, whose weights it shares."""
        return list(cast("Any", module).bert.encoder.layer)


def draw_pairs(count: int, tokens: int, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two pieces of text each, the first of them between a quarter and three quarters of the whole."""
    import torch

    ids = draw_words((count, tokens), first=FIRST_WORD, vocabulary=vocabulary, generator=generator)
    breaks = torch.randint(tokens // 4, tokens - tokens // 4, (count, 1), generator=generator)
    ids.scatter_(1, breaks, BREAK)
    ids[:, 0], ids[:, -1] = BEGIN, BREAK
    return {"input_ids": ids, "token_type_ids": (torch.arange(tokens) > breaks).long()}


def hide_words(ids: torch.Tensor, guessed: int, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """So many words of each sequence are to be guessed: 8 of 10 are masked, one is another word, one is left."""
    import torch

    order = torch.rand(ids.shape, generator=generator).masked_fill_(ids < FIRST_WORD, -1.0)
    chosen = order.topk(guessed, dim=1).indices
    words = ids.gather(1, chosen)
    luck = torch.rand(chosen.shape, generator=generator)
    others = draw_words(chosen.shape, first=FIRST_WORD, vocabulary=vocabulary, generator=generator)
    shown = torch.where(luck < 0.8, MASK, torch.where(luck < 0.9, others, words))
    return {
        "input_ids": ids.scatter(1, chosen, shown),
        "labels": torch.full_like(ids, IGNORED).scatter_(1, chosen, words),
    }
