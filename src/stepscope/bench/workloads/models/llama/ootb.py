"""Llama from transformers, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepscope.bench.workloads.models.decoders.ootb import PlainDecoder

if TYPE_CHECKING:
    from torch import nn


class Llama(PlainDecoder):
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

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return list(module.get_submodule("model.layers").children())


def keep_frequencies(rotary: Any) -> None:
    """Rotary frequencies stay in float32 when the module is cast, as they do when transformers loads a checkpoint in
    half precision: rounded ones would turn late positions by whole radians."""
    for name in ("inv_freq", "original_inv_freq"):
        frequencies = getattr(rotary, name, None)
        if frequencies is not None:
            delattr(rotary, name)
            setattr(rotary, name, frequencies.clone())  # a buffer would be registered again
