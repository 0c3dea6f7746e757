"""How the convolutional networks are made fast: everything here computes the plain network's function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.choosing import TRIAL_BATCH, TRIALS, Layer, choose_way, find_grouped
from stepscope.bench.workloads.models.convnets.layers import LAST, GroupedConv, Stem, StemOnBlocks, fold_norms
from stepscope.bench.workloads.models.convnets.ootb import PictureTask
from stepscope.bench.workloads.protocol import Change, Engine, Mode, Optimized, Precision, Setting

STEP = Engine(compile="default", graph=True, dynamic=False)
"""Blocks differ in their shapes; torch would compile the second one for all shapes, which takes far longer."""
ALGORITHMS = 4
"""That cuDNN times for each shape, those first that it thinks well of; ten, torch's own number, take minutes."""


class FastPictures(Optimized):
    """Optimized `PictureTask`. A network says where its first convolution is and what it looks like."""

    stem: ClassVar[Stem]
    stem_at: ClassVar[str] = "stem.conv"
    """Name of the first convolution in the plain module."""
    has_norms: ClassVar[bool] = True
    has_groups: ClassVar[bool] = False
    own_changes: ClassVar[Sequence[Change]] = ()
    """What `rearrange` does."""

    plain: PictureTask

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        return {**batch, "pictures": self.stem.lay_out(batch["pictures"])}

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        if next(module.parameters()).is_cuda:
            # For the whole process: a backward pass runs outside of whatever could be set around the forward pass.
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.benchmark_limit = ALGORITHMS
        grouped = self._find_grouped(mode) if self.has_groups else {}
        if mode == "infer":
            fold_norms(module)
        conv: Any = module.get_submodule(self.stem_at)
        stem = StemOnBlocks(conv, self.stem)
        module.set_submodule(self.stem_at, stem if mode == "train" else stem.freeze())
        half = mode == "train" and precision == "bf16"
        for name, layer in grouped.items():
            conv = module.get_submodule(name)
            way = choose_way(layer, conv, Setting(mode, precision, str(conv.weight.device)))
            fast = GroupedConv(conv, way, in_bf16=half, tf32=precision != "fp32")
            module.set_submodule(name, fast.freeze() if mode == "infer" else fast)
        self.rearrange(module)
        return _store_channels_last(module)

    def rearrange(self, module: nn.Module) -> None:
        """What one network alone has to offer."""

    def _find_grouped(self, mode: Mode) -> dict[str, Layer]:
        with torch.device("meta"):
            return find_grouped(self.plain.build(), torch.empty(TRIAL_BATCH[mode], 3, *self.plain.extent))

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return self.plain.make_optimizer(module, fused=True)

    def engine(self, mode: Mode) -> Engine:
        return STEP

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        groups = [Change("grouped convolutions", self._describe_groups(mode, precision))] if self.has_groups else []
        return [*super().changes(mode=mode, precision=precision), *groups]

    def list_changes(self, mode: Mode) -> list[Change]:
        norms = [FOLDED_NORMS] if mode == "infer" and self.has_norms else []
        return [*CHANGES, *norms, *self.own_changes, *(TRAIN_CHANGES if mode == "train" else INFER_CHANGES)]

    def _describe_groups(self, mode: Mode, precision: Precision) -> str:
        """As they were chosen in this process, where they were."""
        own = set(self._find_grouped(mode).values())
        made = {
            layer.describe(): trial.way.describe()
            for (layer, setting), trial in TRIALS.items()
            if layer in own and (setting.mode, setting.precision) == (mode, precision)
        }
        rule = "Each is computed in the way that was fastest in a trial on the device before the measurement"
        if not made:
            return f"{rule}; the library's own where no trial is made (CPU)."
        return f"{rule}: {'; '.join(f'{layer}: {way}' for layer, way in made.items())}."


CHANGES = [
    Change("compile", "torch.compile in its default mode fuses norms, activations, sums and pooling."),
    Change("graph", "The whole step is one CUDA graph, replayed; batches are copied to where it reads them."),
    Change("channels last", "Pictures, activations and weights are stored with the channels last."),
    Change(
        "stem on blocks",
        "The loader pads pictures with zeros and lays blocks of pixels out as channels, filled up to a multiple of 8; "
        "the first convolution's weights are moved accordingly.",
    ),
    Change("cudnn benchmark", "cuDNN times four algorithms for each shape and keeps the fastest."),
    Change("tf32", "Matmuls of float32 numbers are rounded to TF32.", ["tf32"]),
]
FOLDED_NORMS = Change("folded norms", "Batch norms are taken into the convolutions before them.")
_AUTOCAST = "Convolutions and matmuls run in {} (autocast); weights and norms stay float32."
TRAIN_CHANGES = [
    Change("fused optimizer", "SGD updates all weights in one kernel (fused=True)."),
    Change("bf16", _AUTOCAST.format("bfloat16"), ["bf16"]),
    Change("fp16", _AUTOCAST.format("float16"), ["fp16"]),
]
INFER_CHANGES = [
    Change("bf16", "Weights, pictures and activations are bfloat16.", ["bf16"]),
    Change("fp16", "Weights, pictures and activations are float16.", ["fp16"]),
]


def _store_channels_last(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() in LAST:
                parameter.data = parameter.data.contiguous(memory_format=LAST[parameter.dim()])
    return module
