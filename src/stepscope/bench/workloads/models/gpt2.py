"""GPT-2: learned positions, layer norms, tied embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepscope.bench.workloads.models.decoders.network import (
    Attention,
    Block,
    FastDecoder,
    FeedForward,
    Shape,
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


MATRICES = {
    "attention.projection": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed.up": "mlp.c_fc",
    "feed.down": "mlp.c_proj",
}
"""By the names of the fast block; transformers keeps these transposed."""
NORMS = {"before": "ln_1", "between": "ln_2"}


class OptimizedGpt2(OptimizedDecoder):
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

    def translate_block(self, block: Any) -> Block:
        attention, feed, sizes = block.attn, block.mlp, self.sizes
        width = sizes["hidden"] // sizes["heads"]
        shape = Shape(heads=sizes["heads"], key_value_heads=sizes["heads"], width=width, scale=width**-0.5)
        up, down, projection, out = (
            linear(one.weight.t().contiguous(), one.bias)
            for one in (feed.c_fc, feed.c_proj, attention.c_attn, attention.c_proj)
        )
        mixing = Attention(shape, projection, out, sizes["attention_dropout"])
        return Block(block.ln_1, mixing, block.ln_2, FeedForward(up, down), sizes["residual_dropout"])

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        own = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        found = {
            "transformer.wte.weight": own["embedding"][: self.sizes["vocabulary"]],
            "transformer.wpe.weight": own["positions"],
            "transformer.ln_f.weight": own["norm.weight"],
            "transformer.ln_f.bias": own["norm.bias"],
        }
        for i in range(self.sizes["layers"]):
            ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
            for fast, plain in MATRICES.items():
                found[f"{theirs}.{plain}.weight"] = own[f"{ours}.{fast}.weight"].t()
                found[f"{theirs}.{plain}.bias"] = own[f"{ours}.{fast}.bias"]
            for fast, plain in NORMS.items():
                for part in ("weight", "bias"):
                    found[f"{theirs}.{plain}.{part}"] = own[f"{ours}.{fast}.{part}"]
        return found
