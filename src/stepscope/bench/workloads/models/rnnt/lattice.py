"""What the parts of the fast transducer loss hand to each other, on a CPU and on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Transcripts(NamedTuple):
    """What a batch is to say, and how long it is."""

    labels: Tensor
    """[batch, labels]."""
    frames: Tensor
    label_lengths: Tensor


class Lattice(NamedTuple):
    """Sums over alignments, [batch, frames, positions] each, and minus the log-probability of all, [batch]."""

    alpha: Tensor
    """Sum over all ways to a cell."""
    beta: Tensor
    """Sum over all ways from a cell to the end."""
    costs: Tensor


class Picked(NamedTuple):
    """What the lattice needs of the log-softmax of every cell, [batch, frames, positions]."""

    normaliser: Tensor
    blank: Tensor
    label: Tensor
