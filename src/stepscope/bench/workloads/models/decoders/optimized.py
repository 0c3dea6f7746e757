"""The optimized implementation of every decoder: how it is trained, and how it writes over a cache of fixed size."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from stepscope.bench.workloads.findings import gradients_of
from stepscope.bench.workloads.generation import Decoder
from stepscope.bench.workloads.models.decoders.network import Cache, DecoderBlock, FastDecoder
from stepscope.bench.workloads.models.decoders.ootb import PlainDecoder, pack_prompts
from stepscope.bench.workloads.protocol import Batch, Change, Engine, Mode, Optimized, Precision

_NAME = re.compile(r"(blocks\.(\d+)\.)?(.+?)(?:\.(weight|bias))?")
PLACES_MULTIPLE = 64
"""The cache is filled up to this: attention over it wants aligned rows."""


class StaticState(NamedTuple):
    """All of it on the device and never moved, so that a captured step finds it again."""

    cache: Cache
    positions: torch.Tensor
    """[sequences]: where the token chosen last will go."""
    last: torch.Tensor
    """[sequences]: the tokens chosen last."""
    chosen: torch.Tensor
    """[1]: tokens chosen so far."""
    written: torch.Tensor
    """[sequences, new tokens]."""
    logits: torch.Tensor


class OptimizedDecoder(Optimized, Decoder):
    """Everything but how a plain network becomes a fast one."""

    parts = ("blocks.*",)
    names: ClassVar[Mapping[str, Sequence[str]]]
    """The plain layers whose weights each layer holds, row after row; of those in a block, within the plain one."""

    fusions: Sequence[Change] = ()
    """Matmuls that are one here and several in the ootb implementation."""

    @abstractmethod
    def translate(self, module: Any, loss_dtype: torch.dtype) -> FastDecoder:
        """Takes the weights out of the plain module."""

    @abstractmethod
    def translate_block(self, layer: Any) -> DecoderBlock: ...

    def translate_blocks(self, layers: nn.ModuleList) -> list[DecoderBlock]:
        """Layer by layer: a large model is never there twice."""
        blocks = []
        for i in range(len(layers)):
            blocks.append(self.translate_block(layers[i]))
            layers[i] = nn.Identity()
        return blocks

    @abstractmethod
    def split(self, gradient: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Gradients of the plain weights that one weight of a block holds, from that of the weight."""

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, gradient in gradients_of(module).items():
            block, number, place, kind = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
            layers = self.names[place]
            parts = self.split(gradient, len(layers)) if block else [gradient[: self._rows(place)]]
            within = self.plain.parts[0].replace("*", number) + "." if block else ""
            for layer, part in zip(layers, parts, strict=True):
                found[f"{within}{layer}.{kind or 'weight'}"] = part
        return found

    def _rows(self, place: str) -> int | None:
        """Without those that fill up the vocabulary."""
        return self.sizes["vocabulary"] if place in {"embedding", "head"} else None

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        halves = mode == "train" and precision in ("bf16", "fp8")
        with torch.no_grad():
            fast = self.translate(module, torch.bfloat16 if halves else torch.float32)
        return fast.train(module.training)

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        return batch if mode == "train" else pack_prompts(batch)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return _fast(module).loss(batch["input_ids"], batch["labels"])

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return _fast(module).prefill(batch, None)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        on_cuda = next(module.parameters()).device.type == "cuda"
        return cast("PlainDecoder", self.plain).make_optimizer(module, fused=True, capturable=on_cuda)

    def engine(self, mode: Mode) -> Engine:
        return Engine(compile="default", graph=True, dynamic=False, fullgraph=True)

    def reserve(self, module: nn.Module, batch: Batch, new_tokens: int) -> StaticState:
        network = _fast(module)
        sequences, longest = batch["spread"].shape
        places = -(-(longest + new_tokens) // PLACES_MULTIPLE) * PLACES_MULTIPLE
        weight, lengths = network.embedding, batch["lengths"]
        return StaticState(
            cache=network.make_cache(sequences, places),
            positions=lengths.clone(),
            last=lengths.new_zeros(sequences),
            chosen=lengths.new_zeros(1),
            written=lengths.new_zeros(sequences, new_tokens),
            logits=weight.new_zeros(sequences, network.vocabulary),
        )

    def begin(self, module: nn.Module, batch: Batch, state: StaticState) -> None:
        state.positions.copy_(batch["lengths"])
        state.chosen.zero_()
        _choose(state, _fast(module).prefill(batch, state.cache))

    def advance(self, module: nn.Module, state: StaticState) -> None:
        logits = _fast(module).decode(state.last, state.positions, state.cache)
        state.positions.add_(1)
        _choose(state, logits)

    def tokens(self, state: StaticState) -> torch.Tensor:
        return state.written[:, : int(state.chosen)]

    def logits(self, state: StaticState) -> torch.Tensor:
        return state.logits

    def force(self, state: StaticState, tokens: torch.Tensor) -> None:
        state.last.copy_(tokens)
        state.written[:, int(state.chosen) - 1] = tokens

    def list_changes(self, mode: Mode) -> list[Change]:
        return [*CHANGES, *self.fusions, *(TRAIN_CHANGES if mode == "train" else INFER_CHANGES)]


CHANGES = [
    Change("compiled", "The whole pass goes through torch.compile: norms, rotations, activations are fused."),
    Change("graph", "The step is captured as CUDA graphs and replayed, once for each shape of batch."),
    Change("aligned head", "Rows of zeros fill the vocabulary up to a multiple of 64; they never show."),
    Change("tf32", "Matmuls of float32 are taken with rounded inputs.", ["tf32"]),
    Change("fp16", "Weights, activations and cache in float16.", ["fp16"]),
    Change("fp8", "As bfloat16: no matmul is taken in 8 bits.", ["fp8"]),
]
TRAIN_CHANGES = [
    Change(
        "bf16",
        "Matmuls and attention in bfloat16 by autocast; weights, residuals, norms and losses in float32.",
        ["bf16"],
    ),
    Change("attention", "Called as causal attention without a mask, so that the flash kernel runs."),
    Change("chunked loss", "Head and cross-entropy go through 4,096 tokens at a time, gradients included."),
    Change("fused optimizer", "AdamW updates all weights in a few kernels, with its step counter on the device."),
]
INFER_CHANGES = [
    Change("bf16", "Weights, activations and cache in bfloat16; rotations and norms computed in float32.", ["bf16"]),
    Change("packed prompts", "Prompts lie one after another without padding; only attention sees the padded batch."),
    Change("causal prefill", "Padding lies behind the prompts, so attention needs no mask and the flash kernel runs."),
    Change("static cache", "Keys and values have memory of fixed size, reserved once and written in place."),
    Change("device positions", "Positions, chosen tokens and their count stay on the device between tokens."),
]


def _choose(state: StaticState, logits: torch.Tensor) -> None:
    state.logits.copy_(logits)
    likeliest = logits.argmax(dim=-1)
    state.last.copy_(likeliest)
    state.written.index_copy_(1, state.chosen, likeliest[:, None])
    state.chosen.add_(1)


def _fast(module: nn.Module) -> FastDecoder:
    return module  # type: ignore[return-value]
