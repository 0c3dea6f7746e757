"""Llama 3: rotary positions, grouped queries, gated feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.decoders.network import (
    DecoderAttention,
    DecoderBlock,
    FastDecoder,
    GatedFeedForward,
    HeadShape,
    Rotary,
    linear,
    padded_rows,
)
from stepscope.bench.workloads.models.decoders.ootb import PlainDecoder
from stepscope.bench.workloads.models.decoders.optimized import OptimizedDecoder
from stepscope.bench.workloads.protocol import Change


class Llama(PlainDecoder):
    parts = ("model.layers.*",)

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = self.sizes
        config = LlamaConfig(
            vocab_size=sizes["vocabulary"],
            max_position_embeddings=sizes["positions"],
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["feed_forward"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["key_value_heads"],
            rms_norm_eps=sizes["norm_epsilon"],
            rope_parameters=dict(sizes["rotary"]),
            tie_word_embeddings=sizes["tied"],
            initializer_range=sizes["initial_spread"],
            bos_token_id=sizes["end_of_text"],
            eos_token_id=sizes["end_of_text"],
        )
        module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        keep_frequencies(module.model.rotary_emb)
        return module


def keep_frequencies(rotary: Any) -> None:
    """Rotary frequencies stay in float32 when the module is cast, as they do when transformers loads a checkpoint in
    half precision: rounded ones would turn late positions by whole radians."""
    for name in ("inv_freq", "original_inv_freq"):
        frequencies = getattr(rotary, name, None)
        if frequencies is not None:
            delattr(rotary, name)
            setattr(rotary, name, frequencies.clone())  # a buffer would be registered again


class OptimizedLlama(OptimizedDecoder):
    names: ClassVar = {
        "embedding": ["model.embed_tokens"],
        "norm": ["model.norm"],
        "head": ["lm_head"],
        "before": ["input_layernorm"],
        "attention.projection": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.out": ["self_attn.o_proj"],
        "between": ["post_attention_layernorm"],
        "feed.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "feed.down": ["mlp.down_proj"],
    }
    fusions = (
        Change("fused projections", "Queries, keys and values come from one matmul; so do gate and up."),
        Change("shared keys", "Queries that share a key are taken together; keys and values are not repeated."),
    )

    def translate(self, module: Any, loss_dtype: torch.dtype) -> FastDecoder:
        body, sizes = module.model, self.sizes
        rotary = Rotary(
            body.rotary_emb.inv_freq.to(body.norm.weight.device), sizes["positions"], body.rotary_emb.attention_scaling
        )
        return FastDecoder(
            embedding=padded_rows(body.embed_tokens.weight),
            rotary=rotary,
            blocks=self.translate_blocks(body.layers),
            norm=_norm(body.norm),
            head=None if sizes["tied"] else padded_rows(module.lm_head.weight),
            vocabulary=sizes["vocabulary"],
            loss_dtype=loss_dtype,
        )

    def translate_block(self, layer: Any) -> DecoderBlock:
        attention, feed, sizes = layer.self_attn, layer.mlp, self.sizes
        shape = HeadShape(
            heads=sizes["heads"],
            key_value_heads=sizes["key_value_heads"],
            width=attention.head_dim,
            scale=attention.scaling,
        )
        projection = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up = torch.cat([feed.gate_proj.weight, feed.up_proj.weight])
        mixing = DecoderAttention(shape, linear(projection), linear(attention.o_proj.weight), 0.0)
        gated = GatedFeedForward(linear(gate_up), linear(feed.down_proj.weight))
        return DecoderBlock(_norm(layer.input_layernorm), mixing, _norm(layer.post_attention_layernorm), gated, 0.0)

    def split(self, gradient: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        if count < 3:
            return gradient.chunk(count)
        heads, shared = self.sizes["heads"], self.sizes["key_value_heads"]
        width = gradient.shape[0] // (heads + 2 * shared)
        return torch.split(gradient, [heads * width, shared * width, shared * width])


def _norm(plain: Any) -> nn.RMSNorm:
    """Over the weight of transformers' own."""
    norm = nn.RMSNorm(plain.weight.shape, eps=plain.variance_epsilon, device="meta")
    norm.weight = nn.Parameter(plain.weight.detach())
    return norm
