"""Sequences of many lengths end to end, without padding; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def pack(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [sequences, longest], each sequence from the left, as the tokens that there are.

    `rows` says for each place of the padded form which token stands there, and `back` is the other way round.
    """
    import torch

    mask = batch["attention_mask"].bool()
    lengths = mask.sum(dim=1)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    column = torch.arange(mask.shape[1])
    rows = starts[:-1, None].long() + torch.minimum(column[None, :], lengths[:, None] - 1)
    return {
        "tokens": batch["input_ids"][mask],
        "places": column.expand_as(mask)[mask],
        "starts": starts,
        "rows": rows,
        "there": mask,
        "back": mask.flatten().nonzero().squeeze(1),
    }


def unpack(packed: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[tokens, width] as [sequences, longest, width] with zeros for padding."""
    return packed[batch["rows"]] * batch["there"].unsqueeze(-1)
