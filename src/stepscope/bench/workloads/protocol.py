"""What a model of the suite gives: how it is built, fed and stepped; and what its optimized implementation changes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

Mode = Literal["train", "infer"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Batch: TypeAlias = "Mapping[str, torch.Tensor]"
Batches: TypeAlias = "Sequence[Batch]"
Outputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")


class Task(ABC):
    """One model at one size, written as a model engineer would. Instances are cheap: `build` makes the weights."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self.sizes = sizes
        """As the catalogue declares them, those of the chosen scale."""

    @abstractmethod
    def build(self) -> nn.Module:
        """With random weights, on torch's current default device, ready to train."""

    @abstractmethod
    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """So many examples on the host, the same for the same seed on every machine. Never timed."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Forward and loss of a training step: a scalar."""

    @abstractmethod
    def infer(self, module: nn.Module, batch: Batch) -> Outputs:
        """What a caller of the model gets."""

    @abstractmethod
    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer: ...

    def make_late_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """For steps that add gradients up, over batches or ranks, before they use them."""
        return self.make_optimizer(module)

    parts: tuple[str, ...] = ()
    """Names of the modules that are sharded and gathered one by one when the model is spread over ranks; `*` stands for
    the number of a layer. Empty: the module's children."""

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        wanted = re.compile("|".join(re.escape(part).replace(r"\*", r"\d+") for part in self.parts))
        named = [one for name, one in module.named_modules() if wanted.fullmatch(name)]
        return named if self.parts else list(module.children())

    sharded_by = ""
    """The class that is this task as one rank of the process group sees it, its tables spread over all: `module:Class`,
    made of this task. Empty: it has no tables."""

    def deterministic(self) -> Mapping[str, Any]:
        """Sizes with every random part switched off, for comparisons: dropout rates are 0."""
        return {name: 0.0 if "drop" in name else value for name, value in self.sizes.items()}

    def dense(self) -> Mapping[str, Any]:
        """Sizes with which no gradient is sparse: some ways to share a model take none that are."""
        return {name: False if name == "sparse_gradients" else value for name, value in self.sizes.items()}


class Change(NamedTuple):
    """One thing that an optimized implementation does differently; shown with every result."""

    name: str
    what: str
    precisions: Sequence[Precision] = PRECISIONS
    """Those in which it is done."""


class Engine(NamedTuple):
    """How the step of an optimized implementation is run."""

    compile: str | None = None
    """Mode of torch.compile; None: not compiled."""
    graph: bool = False
    """The whole step is captured as one CUDA graph and replayed; shapes must not change from batch to batch."""
    dynamic: bool | None = None
    """Whether torch.compile takes shapes to change."""
    fullgraph: bool = False


EAGER = Engine()


class Setting(NamedTuple):
    """How steps are made: all about them but the model."""

    mode: Mode
    precision: Precision
    device: str
    backend: str = "inductor"
    """What torch.compile compiles with."""


class Optimized(Task):
    """The optimized implementation of a task. What is not said otherwise is done as the plain task does it."""

    repeated: tuple[str, ...] = ()
    """Names of classes in the fast module that are compiled one by one where the engine compiles: layers that are
    alike are compiled once, which takes seconds where the whole takes minutes. Empty: the step is compiled as one."""

    early_change: str | None = None
    """Name of the change by which the backward pass makes updates itself. It cannot where gradients are added up first,
    as what one batch or rank gives is no update yet: `make_late_optimizer` makes them all."""

    def __init__(self, plain: Task) -> None:
        super().__init__(plain.sizes)
        self.plain = plain

    def build(self) -> nn.Module:
        return self.plain.build()

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        """The optimized implementation of a plain module, with its weights, on its device. The plain module is not used
        afterwards."""
        return module

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        """The same examples laid out for the optimized implementation (packed, sorted), as a loader would; on the host,
        not timed."""
        return batch

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        return self.collate(self.plain.make_batch(count, seed=seed, mode=mode), mode=mode)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return self.plain.loss(module, batch)

    def infer(self, module: nn.Module, batch: Batch) -> Outputs:
        return self.plain.infer(module, batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return self.plain.make_optimizer(module)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return super().blocks(module) if self.parts else self.plain.blocks(module)

    def unpack(self, outputs: Outputs, batch: Batch) -> Outputs:
        """Outputs of an arranged batch as the ootb implementation gives them for the plain batch."""
        return outputs

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """By the names and in the shapes of the plain module's parameters."""
        return {
            name.replace("_orig_mod.", ""): parameter.grad
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    def added_rows(self, batch_size: int) -> dict[str, int]:
        """How many rows one step adds to a weight one after the other, by its plain name: each of them is rounded."""
        return {}

    def engine(self, mode: Mode) -> Engine:
        return EAGER

    @abstractmethod
    def list_changes(self, mode: Mode) -> Sequence[Change]:
        """Everything that an owner of the model would have to take over, in any precision."""

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        return [one for one in self.list_changes(mode) if precision in one.precisions]
