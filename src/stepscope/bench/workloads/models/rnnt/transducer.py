"""The transducer loss as one writes it with torch alone. Loads torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

IMPOSSIBLE = -1e30
"""Log-probability of what cannot be. Not infinite: infinities leave gradients that are no numbers."""


def transducer_loss(logits: Tensor, labels: Tensor, frames: Tensor, label_lengths: Tensor) -> Tensor:
    """Minus the log-probability of each transcript, summed over all alignments, as a mean over the batch.

    logits: [batch, frames, labels + 1, classes], the last class is the blank; labels: [batch, labels]. What lies beyond
    the lengths is not read into the result. Gradients by autograd.
    """
    blank, label = pick_log_probs(logits.float() if logits.dtype in HALVES else logits, labels)
    return lattice_costs(blank, label, frames, label_lengths).mean()


HALVES = (torch.float16, torch.bfloat16)


def pick_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of a blank and of the next label in each cell, both [batch, frames, labels + 1]; after the last label no other
    follows."""
    log_probs = F.log_softmax(logits, dim=-1)
    frames = logits.shape[1]
    chosen = labels[:, None, :, None].expand(-1, frames, -1, 1)
    label = log_probs[:, :, :-1].gather(3, chosen).squeeze(3)
    return log_probs[..., -1], F.pad(label, (0, 1), value=IMPOSSIBLE)


def lattice_costs(blank: Tensor, label: Tensor, frames: Tensor, label_lengths: Tensor) -> Tensor:
    """α(t, u) = logaddexp(α(t−1, u) + blank(t−1, u), α(t, u−1) + label(t, u−1)), one anti-diagonal t + u at a time: its
    cells need only the one before. Cost: −(α(T−1, U) + blank(T−1, U)), [batch]."""
    blank_by_diagonal, label_by_diagonal = skew(blank), skew(label)
    alpha = torch.full_like(blank[:, 0], IMPOSSIBLE)
    alpha[:, 0] = 0.0
    alphas = [alpha]
    for diagonal in range(blank_by_diagonal.shape[1] - 1):
        stays = alpha + blank_by_diagonal[:, diagonal]
        moves = F.pad((alpha + label_by_diagonal[:, diagonal])[:, :-1], (1, 0), value=IMPOSSIBLE)
        alpha = torch.logaddexp(stays, moves)
        alphas.append(alpha)
    batch = torch.arange(len(frames), device=frames.device)
    last = frames - 1 + label_lengths
    ends = torch.stack(alphas, dim=1)[batch, last, label_lengths]
    return -(ends + blank[batch, frames - 1, label_lengths])


def skew(cells: Tensor) -> Tensor:
    """[batch, t, u] as [batch, t + u, u]; cells outside of the lattice are impossible."""
    _, frames, positions = cells.shape
    u = torch.arange(positions, device=cells.device)
    t = torch.arange(frames + positions - 1, device=cells.device)[:, None] - u
    skewed = cells[:, t.clamp(0, frames - 1), u]
    return torch.where((t >= 0) & (t < frames), skewed, IMPOSSIBLE)
