"""Which weights of a plain module the weights of its fast form are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn


class Lean(nn.Module):
    """A fast form that shares its weights with a plain module, or holds several of them in one, row after row."""

    origins: dict[str, list[str]]

    def plain_gradients(self) -> dict[str, torch.Tensor]:
        """By the plain module's names and in its shapes."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                names = self.origins[name]
                found.update(zip(names, parameter.grad.chunk(len(names)), strict=True))
        return found


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return cast(Lean, module).plain_gradients()


class Origins:
    """Keeps the names of a plain module's weights while its fast form is made."""

    def __init__(self, plain: nn.Module) -> None:
        # The weights are kept as well: what is freed could give its id to another.
        self._known = {id(one): ([name], one) for name, one in plain.named_parameters()}

    def join(self, parts: Sequence[nn.Parameter]) -> nn.Parameter:
        """One weight with the rows of all."""
        joined = nn.Parameter(torch.cat([one.detach() for one in parts]))
        self._known[id(joined)] = ([name for one in parts for name in self._known[id(one)][0]], joined)
        return joined

    def trace(self, lean: Lean) -> None:
        """Weights that are not the plain module's own (of inference, where nothing is trained) have no origin."""
        named = ((name, self._known.get(id(one))) for name, one in lean.named_parameters())
        lean.origins = {name: known[0] for name, known in named if known is not None}
