"""The decoders as transformers defines them, trained and run by plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepscope.bench.workloads.generation import Decoder
from stepscope.bench.workloads.models.decoders.data import Lengths, make_prompts, pack_documents
from stepscope.bench.workloads.models.encoders.optimizers import decayed_groups

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.bench.workloads.protocol import Mode


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
            return make_prompts(count, prompts=_lengths(sizes["prompts"]), **common)
        text = pack_documents(count, sizes["sequence_length"], documents=_lengths(sizes["documents"]), **common)
        return {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        logits = module(input_ids=batch["input_ids"], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self._prefill(module, batch).logits[:, -1]
        return logits

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(decayed_groups(module, self.sizes["weight_decay"]), **adam_options(self.sizes))

    def reserve(self, module: nn.Module, batch: Mapping[str, torch.Tensor], new_tokens: int) -> PlainState:
        return PlainState()

    def begin(self, module: nn.Module, batch: Mapping[str, torch.Tensor], state: PlainState) -> None:
        output = self._prefill(module, batch)
        state.cache, state.mask, state.tokens = output.past_key_values, batch["attention_mask"], []
        self._choose(state, output.logits)

    def advance(self, module: nn.Module, state: PlainState) -> None:
        import torch

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
        import torch

        return torch.cat(state.tokens, dim=1)

    def logits(self, state: PlainState) -> torch.Tensor:
        return state.logits

    def force(self, state: PlainState, tokens: torch.Tensor) -> None:
        state.tokens[-1] = tokens[:, None]

    def _prefill(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
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


def _lengths(declared: Mapping[str, Any]) -> Lengths:
    return Lengths(**declared)


def adam_options(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"lr": sizes["learning_rate"], "betas": (0.9, 0.95), "eps": 1e-8}
