"""GPT-2: learned positions, layer norms, tied embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.decoders.network import (
    DecoderAttention,
    DecoderBlock,
    FastDecoder,
    FeedForward,
    HeadShape,
    linear,
    padded_rows,
)
from stepscope.bench.workloads.models.decoders.ootb import PlainDecoder
from stepscope.bench.workloads.models.decoders.optimized import OptimizedDecoder


class Gpt2(PlainDecoder):
    parts = ("transformer.h.*",)

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


class OptimizedGpt2(OptimizedDecoder):
    names: ClassVar = {
        "embedding": ["transformer.wte"],
        "positions": ["transformer.wpe"],
        "norm": ["transformer.ln_f"],
        "before": ["ln_1"],
        "attention.projection": ["attn.c_attn"],
        "attention.out": ["attn.c_proj"],
        "between": ["ln_2"],
        "feed.up": ["mlp.c_fc"],
        "feed.down": ["mlp.c_proj"],
    }

    def translate(self, module: Any, loss_dtype: torch.dtype) -> FastDecoder:
        body = module.transformer
        return FastDecoder(
            embedding=padded_rows(body.wte.weight),
            positions=nn.Parameter(body.wpe.weight.detach()),
            blocks=self.translate_blocks(body.h),
            norm=body.ln_f,
            vocabulary=self.sizes["vocabulary"],
            dropout=self.sizes["embedding_dropout"],
            loss_dtype=loss_dtype,
        )

    def translate_block(self, block: Any) -> DecoderBlock:
        attention, feed, sizes = block.attn, block.mlp, self.sizes
        width = sizes["hidden"] // sizes["heads"]
        shape = HeadShape(heads=sizes["heads"], key_value_heads=sizes["heads"], width=width, scale=width**-0.5)
        up, down, projection, out = (
            linear(one.weight.t().contiguous(), one.bias)
            for one in (feed.c_fc, feed.c_proj, attention.c_attn, attention.c_proj)
        )
        mixing = DecoderAttention(shape, projection, out, sizes["attention_dropout"])
        return DecoderBlock(block.ln_1, mixing, block.ln_2, FeedForward(up, down), sizes["residual_dropout"])

    def split(self, gradient: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Transformers keeps matrices transposed."""
        return [gradient.t()]
