"""Llama 3: rotary positions, grouped queries, gated feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepscope.bench.workloads.models.decoders.network import (
    Attention,
    Block,
    FastDecoder,
    GatedFeedForward,
    Rotary,
    Shape,
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


NORMS = {"before": "input_layernorm", "between": "post_attention_layernorm"}
SINGLE = {"attention.out": "self_attn.o_proj", "feed.down": "mlp.down_proj"}


class OptimizedLlama(OptimizedDecoder):
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

    def translate_block(self, layer: Any) -> Block:
        attention, feed, sizes = layer.self_attn, layer.mlp, self.sizes
        shape = Shape(
            heads=sizes["heads"],
            key_value_heads=sizes["key_value_heads"],
            width=attention.head_dim,
            scale=attention.scaling,
        )
        projection = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up = torch.cat([feed.gate_proj.weight, feed.up_proj.weight])
        mixing = Attention(shape, linear(projection), linear(attention.o_proj.weight), 0.0)
        gated = GatedFeedForward(linear(gate_up), linear(feed.down_proj.weight))
        return Block(_norm(layer.input_layernorm), mixing, _norm(layer.post_attention_layernorm), gated, 0.0)

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        own = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        vocabulary = self.sizes["vocabulary"]
        found = {"model.embed_tokens.weight": own["embedding"][:vocabulary], "model.norm.weight": own["norm.weight"]}
        if not self.sizes["tied"]:
            found["lm_head.weight"] = own["head"][:vocabulary]
        for i in range(self.sizes["layers"]):
            ours, theirs = f"blocks.{i}", f"model.layers.{i}"
            for fast, plain in (NORMS | SINGLE).items():
                found[f"{theirs}.{plain}.weight"] = own[f"{ours}.{fast}.weight"]
            found |= self._split(own[f"{ours}.attention.projection.weight"], f"{theirs}.self_attn", "qkv")
            gate, up = own[f"{ours}.feed.gate_up.weight"].chunk(2)
            found |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
        return found

    def _split(self, fused: torch.Tensor, place: str, letters: str) -> dict[str, torch.Tensor]:
        heads, shared = self.sizes["heads"], self.sizes["key_value_heads"]
        width = fused.shape[0] // (heads + 2 * shared)
        parts = torch.split(fused, [heads * width, shared * width, shared * width])
        return {f"{place}.{letter}_proj.weight": one for letter, one in zip(letters, parts, strict=True)}


def _norm(plain: Any) -> nn.RMSNorm:
    """Over the weight of transformers' own."""
    norm = nn.RMSNorm(plain.weight.shape, eps=plain.variance_epsilon, device="meta")
    norm.weight = nn.Parameter(plain.weight.detach())
    return norm
