"""Synthetic utterances: lengths, transcripts and features with the statistics that the sizes declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stepscope.bench.workloads.models.encoders.ootb import at_percentile

FRAME_S = 0.03
"""A stacked frame: three hops of 10 ms."""
LEVEL = 3.0
"""By how much a heard label raises its bands, above noise with NOISE of spread; features are normalised."""
NOISE = 0.4
SPEAKERS = 0.15
"""Spread of the rate of speech from one utterance to the next, as a share."""


def make_utterances(sizes: Mapping[str, Any], count: int, *, seed: int) -> dict[str, Tensor]:
    """Padded to the declared maxima: features [count, frames, mel * stack] with lengths, labels [count, symbols] with
    lengths. A label is heard during one pair of frames, and no label follows itself."""
    generator = torch.Generator().manual_seed(seed)
    frames = draw_frames(sizes, count, generator)
    spoken, labels, label_lengths = draw_transcripts(sizes, frames, generator)
    return {
        "features": _draw_features(sizes, frames, spoken, generator),
        "frames": frames,
        "labels": labels,
        "label_lengths": label_lengths,
    }


def draw_frames(sizes: Mapping[str, Any], count: int, generator: torch.Generator) -> Tensor:
    """By the declared percentiles of the length in seconds."""
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    length = at_percentile(sizes["seconds_percentiles"], 100 * drawn)
    return (length / FRAME_S).ceil().long().clamp(2, sizes["max_frames"])


def draw_transcripts(
    sizes: Mapping[str, Any], frames: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """What is spoken in each pair of frames (-1: nothing new), and the same as padded labels with lengths."""
    count, pairs, most = len(frames), (sizes["max_frames"] + 1) // 2, sizes["max_symbols"]
    rate = sizes["symbols_per_second"] * 2 * FRAME_S * (1 + SPEAKERS * torch.randn(count, generator=generator))
    begins = torch.rand(count, pairs, generator=generator) < rate.clamp(0.02, 0.98)[:, None]
    # Half a pair would be half a label.
    begins &= torch.arange(pairs) < (frames // 2)[:, None]
    begins[:, 0] = True
    place = begins.cumsum(1) - 1
    begins &= place < most
    lengths = begins.sum(1)

    labels = _draw_labels(sizes["labels"], (count, most), generator)
    spoken = labels.gather(1, place.clamp(0, most - 1)).masked_fill(~begins, -1)
    labels = labels.masked_fill(torch.arange(most) >= lengths[:, None], 0)
    return spoken, labels, lengths


def _draw_labels(kinds: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Frequencies fall with the rank, as those of letters and word pieces do."""
    weights = 1.0 / (torch.arange(kinds) + 3.0)
    labels = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator).reshape(shape)
    while bool((again := labels[:, 1:] == labels[:, :-1]).any()):
        labels[:, 1:] = (labels[:, 1:] + again) % kinds
    return labels


def _draw_features(sizes: Mapping[str, Any], frames: Tensor, spoken: Tensor, generator: torch.Generator) -> Tensor:
    count, most, mel, stack = len(frames), sizes["max_frames"], sizes["mel"], sizes["stack"]
    raised = torch.zeros(count, spoken.shape[1], mel)
    heard = (spoken >= 0).float()
    half = mel // 2
    raised.scatter_(2, (2 * (spoken.clamp(min=0) % half))[..., None], LEVEL * heard[..., None])
    if sizes["labels"] > half:
        # More labels than bands: a second band tells apart those that share the first.
        second = 2 * (spoken.clamp(min=0) // half % half) + 1
        raised.scatter_(2, second[..., None], LEVEL * heard[..., None])
    features = raised.repeat_interleave(2, dim=1)[:, :most].repeat(1, 1, stack)
    features += NOISE * torch.randn(features.shape, generator=generator)
    return features * (torch.arange(most) < frames[:, None])[..., None]
