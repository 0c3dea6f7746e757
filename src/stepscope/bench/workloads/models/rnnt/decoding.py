"""Greedy decoding of a batch, frame by frame, as a loop on the host. Loads torch."""

from __future__ import annotations

import torch
from torch import Tensor

from stepscope.bench.workloads.models.rnnt.network import Rnnt


def decode_greedily(
    network: Rnnt, encoded: Tensor, lengths: Tensor, *, most_a_frame: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and their logits [batch, most], and how many there are [batch]. In each frame the best class is written
    until it is the blank, at most `most_a_frame` times; the whole loop waits for the slowest of the batch."""
    count, frames, _ = encoded.shape
    labels = torch.full((count, most), -1, dtype=torch.long, device=encoded.device)
    scores = encoded.new_zeros(count, most)
    written = torch.zeros(count, dtype=torch.long, device=encoded.device)
    predicted, (hidden, cell) = network.prediction.begin(count)
    for frame in range(frames):
        open_ones = frame < lengths
        for _ in range(most_a_frame):
            logits = network.joint(encoded[:, frame : frame + 1], predicted)[:, 0, 0]
            score, best = logits.max(dim=-1)
            blank = logits.shape[-1] - 1
            open_ones = open_ones & (best != blank) & (written < most)
            if not open_ones.any():
                break
            labels[open_ones, written[open_ones]] = best[open_ones]
            scores[open_ones, written[open_ones]] = score[open_ones]
            written += open_ones
            after, (new_hidden, new_cell) = network.prediction.advance(best.clamp(max=blank - 1), (hidden, cell))
            predicted = torch.where(open_ones[:, None, None], after, predicted)
            hidden = torch.where(open_ones[None, :, None], new_hidden, hidden)
            cell = torch.where(open_ones[None, :, None], new_cell, cell)
    return labels, scores, written


def mask_frames(encoded: Tensor, lengths: Tensor) -> Tensor:
    """Zeros beyond each length."""
    inside = torch.arange(encoded.shape[1], device=encoded.device) < lengths[:, None]
    return encoded * inside[..., None]
