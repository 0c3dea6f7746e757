"""GPT-2 from transformers, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.decoders.ootb import PlainDecoder

if TYPE_CHECKING:
    from torch import nn


class Gpt2(PlainDecoder):
    def build(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = self.sizes
        config = GPT2Config(
            vocab_size=sizes["vocabulary"],
            n_positions=sizes["positions"],
            n_embd=sizes["hidden"],
            n_layer=sizes["layers"],
            n_head=sizes["heads"],
            resid_pdrop=sizes["residual_dropout"],
            embd_pdrop=sizes["embedding_dropout"],
            attn_pdrop=sizes["attention_dropout"],
            initializer_range=sizes["initial_spread"],
            bos_token_id=sizes["end_of_text"],
            eos_token_id=sizes["end_of_text"],
        )
        return GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return list(module.get_submodule("transformer.h").children())
