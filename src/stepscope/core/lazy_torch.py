"""torch, loaded when something of it is first used: what producers measure is listed and planned without it.

    from stepscope.core.lazy_torch import functional, torch

Only rooms that may use torch import this. What is timed looks its functions up beforehand: each access costs as much as
a small call, and the compiler has to see torch's own functions.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["functional", "torch"]


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    torch, functional = _LazyModule("torch"), _LazyModule("torch.nn.functional")
