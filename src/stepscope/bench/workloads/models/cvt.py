"""CvT-13: convolutions and attention for image classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workloads.models.convnets.layers import fold_one
from stepscope.bench.workloads.models.encoders.ootb import AdamWTask
from stepscope.bench.workloads.models.encoders.optimized import FastEncoder, Lean, Origins, as_stream, stream_dtype
from stepscope.bench.workloads.protocol import Batch, Change, Mode, Precision

COARSENESS = 8
"""Neighbouring points of an image are alike: most of it is noise that was enlarged so much."""


class Cvt(AdamWTask):
    parts = ("cvt.encoder.stages.*.layers.*",)

    def build(self) -> nn.Module:
        from transformers import CvtConfig, CvtForImageClassification

        sizes = self.sizes
        config = CvtConfig(
            embed_dim=sizes["widths"],
            depth=sizes["depths"],
            num_heads=sizes["heads"],
            initializer_range=sizes["weight_spread"],
            drop_path_rate=[0.0, 0.0, sizes["drop_path"]],
            num_labels=sizes["classes"],  # type: ignore[call-arg]
        )
        return CvtForImageClassification(config)  # type: ignore[no-untyped-call]

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """Images of mean 0 and spread 1, as normalisation leaves them."""
        generator, size = torch.Generator().manual_seed(seed), self.sizes["image"]
        coarse = torch.randn(count, 3, size // COARSENESS, size // COARSENESS, generator=generator)
        fine = torch.randn(count, 3, size, size, generator=generator)
        batch = {"pixel_values": functional.interpolate(coarse, size=size, mode="nearest") * 0.8 + fine * 0.6}
        if mode == "train":
            batch["labels"] = torch.randint(self.sizes["classes"], (count,), generator=generator)
        return batch

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", module(**batch).loss)

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", module(pixel_values=batch["pixel_values"]).logits)


class LeanCvt(Lean):
    def __init__(self, plain: Any, *, mode: Mode, precision: Precision) -> None:
        super().__init__()
        origins, stream = Origins(plain), stream_dtype(mode, precision)
        folded = mode == "infer"
        self.stages = nn.ModuleList(LeanStage(one, stream=stream, folded=folded) for one in plain.cvt.encoder.stages)
        self.norm = plain.layernorm
        self.classifier = plain.classifier
        origins.trace(self)
        self.train(plain.training)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[images, 3, height, width], channels last in memory."""
        image = pixels
        *before, last = self.stages
        for stage in before:
            image = stage(image)
        assert isinstance(last, LeanStage)
        logits: torch.Tensor = self.classifier(self.norm(last.read_class(image)))
        return logits


class LeanStage(nn.Module):
    def __init__(self, plain: Any, *, stream: torch.dtype | None, folded: bool) -> None:
        super().__init__()
        patches = plain.embedding.convolution_embeddings
        self.patches = patches.projection
        self.patches.weight.data = self.patches.weight.data.contiguous(memory_format=torch.channels_last)
        self.patch_norm = patches.normalization
        self.drop = plain.embedding.dropout
        self.blocks = nn.ModuleList(LeanBlock(one, stream=stream, folded=folded) for one in plain.layers)
        self.class_token = plain.cls_token if hasattr(plain, "cls_token") else None
        self.stream = stream
        self.folded = folded

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """An image again, of fewer and wider points; of a stage without class token."""
        tokens, height, width = self._embed(image)
        for block in self.blocks:
            tokens = block(tokens, height, width)
        return as_grid(tokens, height, width).permute(0, 3, 1, 2)

    def read_class(self, image: torch.Tensor) -> torch.Tensor:
        """The class token after the stage, [images, width]."""
        assert self.class_token is not None
        tokens, height, width = self._embed(image)
        token = as_stream(self.class_token, self.stream).expand(len(tokens), -1, -1)
        tokens = torch.cat([token.to(tokens.dtype), tokens], dim=1)
        *before, last = self.blocks
        for block in before:
            tokens = block(tokens, height, width)
        # In training the last block's query convolution keeps its running statistics, so all of it is computed.
        read: torch.Tensor = last(tokens, height, width, first_only=self.folded)
        return read[:, 0]

    def _embed(self, image: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        grid = self.patches(image).permute(0, 2, 3, 1)
        tokens = self.drop(self.patch_norm(grid.flatten(1, 2)))
        return as_stream(tokens, self.stream), grid.shape[1], grid.shape[2]


class LeanBlock(nn.Module):
    def __init__(self, plain: Any, *, stream: torch.dtype | None, folded: bool) -> None:
        super().__init__()
        self.before = plain.layernorm_before
        self.attention = LeanAttention(plain.attention.attention, stream=stream, folded=folded)
        self.mix = plain.attention.output
        self.after = plain.layernorm_after
        self.widen = plain.intermediate.dense
        self.narrow = plain.output.dense
        self.drop = plain.output.dropout
        self.drop_path = plain.drop_path
        self.stream = stream

    def forward(self, tokens: torch.Tensor, height: int, width: int, *, first_only: bool = False) -> torch.Tensor:
        normed = as_stream(self.before(tokens), self.stream)
        attended = self.attention(normed, height, width, first_only=first_only)
        tokens = tokens[:, :1] if first_only else tokens
        tokens = self.drop_path(self.mix.dropout(self.mix.dense(attended))) + tokens
        wide = functional.gelu(self.widen(as_stream(self.after(tokens), self.stream)))
        # The definition drops the sum with the residual, not the branch alone.
        dropped: torch.Tensor = self.drop_path(self.drop(self.narrow(wide)) + tokens)
        return dropped


class LeanAttention(nn.Module):
    def __init__(self, plain: Any, *, stream: torch.dtype | None, folded: bool) -> None:
        super().__init__()
        query = plain.convolution_projection_query.convolution_projection
        key = plain.convolution_projection_key.convolution_projection
        value = plain.convolution_projection_value.convolution_projection
        self.see_query = DepthwiseConvolutions([query], stream=stream, folded=folded)
        self.see_pair = DepthwiseConvolutions([key, value], stream=stream, folded=folded)
        self.query, self.key, self.value = plain.projection_query, plain.projection_key, plain.projection_value
        self.heads = plain.num_heads
        self.scale = plain.embed_dim**-0.5
        self.drop_rate = plain.dropout.p
        self.has_class = plain.with_cls_token

    def forward(self, tokens: torch.Tensor, height: int, width: int, *, first_only: bool) -> torch.Tensor:
        first = tokens[:, :1] if self.has_class else None
        grid = as_grid(tokens[:, 1:] if self.has_class else tokens, height, width)
        asking = first if first_only and first is not None else _join(first, self.see_query(grid)[0])
        keys, values = (_join(first, one) for one in self.see_pair(grid))
        query, key, value = (
            linear(one).view(*one.shape[:-1], self.heads, -1).transpose(1, 2)
            for linear, one in ((self.query, asking), (self.key, keys), (self.value, values))
        )
        rate = self.drop_rate if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, scale=self.scale)
        return attended.transpose(1, 2).flatten(-2)


def as_grid(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return tokens.view(tokens.shape[0], height, width, tokens.shape[2])


def _join(first: torch.Tensor | None, grid: torch.Tensor) -> torch.Tensor:
    tokens = grid.flatten(1, 2)
    return tokens if first is None else torch.cat([first.to(tokens.dtype), tokens], dim=1)


class DepthwiseConvolutions(nn.Module):
    """Of one input, each with its batch norm; folded, for inference, the norms are part of weights and biases."""

    def __init__(self, plain: Sequence[Any], *, stream: torch.dtype | None, folded: bool) -> None:
        super().__init__()
        self.stride, self.padding = plain[0].convolution.stride[0], plain[0].convolution.padding[0]
        self.stream, self.folded = stream, folded
        if folded:
            both = [fold_one(one.convolution, one.normalization) for one in plain]
            self.register_buffer("weights", torch.stack([weight for weight, _ in both]))
            self.register_buffer("biases", torch.stack([bias for _, bias in both]))
        else:
            self.convolutions = nn.ModuleList(one.convolution for one in plain)
            self.norms = nn.ModuleList(one.normalization for one in plain)

    def forward(self, grid: torch.Tensor) -> list[torch.Tensor]:
        if self.folded:
            seen = convolve_by_shifts(grid, self.get_buffer("weights"), stride=self.stride, padding=self.padding)
            return [one + bias for one, bias in zip(seen, self.get_buffer("biases").unbind(0), strict=True)]
        weights = torch.stack([one.get_parameter("weight") for one in self.convolutions])
        seen = convolve_by_shifts(grid, weights, stride=self.stride, padding=self.padding)
        return [self._norm(norm, as_stream(one, self.stream)) for norm, one in zip(self.norms, seen, strict=True)]

    def _norm(self, norm: nn.Module, seen: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = norm(seen.permute(0, 3, 1, 2))
        return normed.permute(0, 2, 3, 1)


def convolve_by_shifts(
    grid: torch.Tensor, weights: torch.Tensor, *, stride: int, padding: int
) -> tuple[torch.Tensor, ...]:
    """[images, height, width, channels] by [kernels, channels, 1, size, size]: an image of that layout for each kernel.

    A sum of shifted images, which a compiler makes one pass over memory.
    """
    size = weights.shape[-1]
    padded = functional.pad(grid, (0, 0, padding, padding, padding, padding))
    # One more than the last place that a window begins at.
    bottom, right = (stride * ((length - size) // stride) + 1 for length in padded.shape[1:3])
    points = weights.flatten(2).permute(2, 0, 1)[:, :, None, None, None, :].unbind(0)
    total: torch.Tensor | None = None
    for down in range(size):
        band = padded[:, down : down + bottom : stride]
        for across in range(size):
            part = band[:, :, across : across + right : stride] * points[down * size + across]
            total = part if total is None else total + part
    assert total is not None
    return total.unbind(0)


class FastCvt(FastEncoder):
    repeated = ("LeanBlock",)
    parts = ("stages.*.blocks.*",)

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        return LeanCvt(module, mode=mode, precision=precision)

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        return {**batch, "pixel_values": batch["pixel_values"].contiguous(memory_format=torch.channels_last)}

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(module(batch["pixel_values"]), batch["labels"])

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", module(batch["pixel_values"]))

    def list_changes(self, mode: Mode) -> list[Change]:
        return [*CHANGES, *super().list_changes(mode), *([] if mode == "train" else INFER_CHANGES)]


CHANGES = [
    Change("channels last", "Images and tokens have one layout, so that nothing is turned between the two."),
    Change("fused attention", "Scores are not stored (scaled_dot_product_attention)."),
    Change(
        "convolutions as shifted sums",
        "Depthwise convolutions are sums of shifted images that the compiler fuses; those of key and value read their "
        "input once.",
    ),
]
INFER_CHANGES = [
    Change("folded batch norms", "Batch norms are part of the weights of the convolutions before them."),
    Change("last block where it is read", "The last block is computed for the class token alone."),
]
