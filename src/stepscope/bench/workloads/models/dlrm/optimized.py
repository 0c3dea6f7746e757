"""DLRM as fast as it goes: all tables in one kernel or one matmul, even widths, one graph a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from stepscope.bench.workloads.models.dlrm import fast_network
from stepscope.bench.workloads.models.dlrm.fast_network import FastDlrm, MasterSgd, even
from stepscope.bench.workloads.models.dlrm.ootb import Dlrm, DlrmTask, QuantisedBag
from stepscope.bench.workloads.protocol import Batch, Change, Engine, Mode, Optimized, Precision, Task
from stepscope.core.errors import BadInputError

COUNTED_ROWS_A_LOOKUP = 32
"""Up to so many rows of a table for each lookup of a bag, a matmul with counts costs less than reading row by row:
tensor cores multiply some hundred numbers in the time that memory gives one."""


class DlrmOptimized(Optimized):
    early_change = "update in backward"
    sharded_by = "stepscope.bench.workloads.models.dlrm.sharded:ShardedFastDlrm"
    plain: DlrmTask

    def __init__(self, plain: Task) -> None:
        super().__init__(plain)
        assert isinstance(plain, DlrmTask)
        self.plain = plain

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        plain = cast("Dlrm", module)
        return self.convert_around(self._lay_out_tables(plain, mode), plain, mode=mode, precision=precision)

    def convert_around(self, lookup: nn.Module, plain: Dlrm, *, mode: Mode, precision: Precision) -> FastDlrm:
        device = plain.get_buffer("lower").device
        halves = mode == "train" and precision == "bf16"
        fast = FastDlrm(
            plain,
            self.plain.tables,
            lookup,
            dtype=torch.bfloat16 if halves else torch.float32,
            loss=self.sizes["loss"],
            compiled=mode == "train" and device.type == "cuda",
        )
        return fast.train(plain.training)

    def _lay_out_tables(self, plain: Dlrm, mode: Mode) -> nn.Module:
        tables = list(plain.tables)
        if self._packed:
            return fast_network.PackedTables(cast("list[QuantisedBag]", tables), int(self.sizes["width"]))
        bags = cast("list[nn.EmbeddingBag]", tables)
        if mode == "train" and self._counted:
            return fast_network.CountedTables(bags, self.plain.tables.lookups[0])
        return fast_network.GatheredTables(bags)

    @property
    def _packed(self) -> bool:
        return bool(self.sizes["embedding_bits"] == 4)

    @property
    def _counted(self) -> bool:
        rows, lookups = self.plain.tables
        equal = len(set(rows)) == len(set(lookups)) == 1 and self.sizes["lengths"] == "fixed"
        return equal and rows[0] <= COUNTED_ROWS_A_LOOKUP * lookups[0] and lookups[0] <= 256

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        """Indices count from the first row of all tables together, in 32 bits; offsets from the first lookup."""
        if self._packed or (mode == "train" and self._counted):
            _require_fixed_bags(batch["offsets"], self.plain.tables.lookups)
        features = batch["dense"].shape[1]
        arranged = {name: one for name, one in batch.items() if name == "labels"}
        arranged["dense"] = torch.nn.functional.pad(batch["dense"], (0, even(features) - features))
        if mode == "train" and self._counted:
            return {**arranged, "indices": batch["indices"].int()}
        parts = torch.split(batch["indices"], [len(batch["dense"]) * one for one in self.plain.tables.lookups])
        arranged["indices"] = _join_tables(parts, self.plain.tables.starts)
        if not self._packed:
            arranged["offsets"] = _join_offsets(batch["offsets"], [len(one) for one in parts])
        return arranged

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("FastDlrm", module).loss(batch)

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("FastDlrm", module).infer(batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """From here on the backward pass updates gathered tables itself."""
        fast = cast("FastDlrm", module)
        return self._make_sgd(fast, leave=fast.arm(self._rate))

    def make_late_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        fast = cast("FastDlrm", module)
        return self._make_sgd(fast, leave=fast.arm(None))

    def _make_sgd(self, fast: FastDlrm, *, leave: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        if fast.dtype != torch.float32:
            return MasterSgd(fast, self._rate, leave=leave)
        left = [one for one in fast.parameters() if not any(one is other for other in leave)]
        return torch.optim.SGD(left, lr=self._rate, fused=True)

    @property
    def _rate(self) -> float:
        return float(self.sizes["learning_rate"])

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Gradients of a module that has no optimizer yet: with one, the backward pass leaves none of gathered
        tables."""
        return cast("FastDlrm", module).plain_gradients()

    def added_rows(self, batch_size: int) -> dict[str, int]:
        if self._counted or self.sizes["pooling"] == "learned":
            return {}
        return {f"tables.{i}.weight": batch_size * each for i, each in enumerate(self.plain.tables.lookups)}

    def engine(self, mode: Mode) -> Engine:
        # The dense part is compiled by the module itself: the lookups before it write to their table in backward.
        return Engine(graph=True)

    def list_changes(self, mode: Mode) -> list[Change]:
        if self._packed:
            return [_PACKED, *_DENSE_PART[mode]]
        if mode == "train" and self._counted:
            return [_COUNTED, _COUNTED_HALVES, *_DENSE_PART[mode]]
        return self.list_gathered_changes(mode, _GATHERED)

    def list_gathered_changes(self, mode: Mode, gathered: Change) -> list[Change]:
        update = _WEIGHTED_ONCE if self.sizes["pooling"] == "learned" else _FUSED_UPDATE
        return [gathered, *([update] if mode == "train" else []), *_DENSE_PART[mode]]


def _join_tables(parts: tuple[torch.Tensor, ...], starts: list[int]) -> torch.Tensor:
    return torch.cat([(part + start).int() for part, start in zip(parts, starts, strict=True)])


def _join_offsets(offsets: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[tables · batch + 1]: the end of the last bag is there too."""
    ends = torch.tensor(lengths).cumsum(0)
    begins = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
    return torch.cat([(offsets + begins.unsqueeze(1)).flatten(), ends[-1:]]).int()


_EVEN = Change(
    "even widths",
    "inner widths of both perceptrons, dense inputs and the number of features get zeros up to multiples of 8",
)
_ROUNDED = Change("tf32", "32-bit matmuls are rounded to tf32", ["tf32"])
_DENSE_PART: dict[Mode, list[Change]] = {
    "train": [
        Change("whole-step CUDA graph", "forward, backward and optimizer are captured once and replayed"),
        Change("compiled dense part", "perceptrons, interaction and loss go through torch.compile"),
        _EVEN,
        Change(
            "symmetric interaction gradient",
            "backward of the interaction is one batched matmul with the symmetric gradient instead of a scatter and "
            "two",
        ),
        Change("fused SGD", "one pass over each weight for the update"),
        Change(
            "bfloat16 weights with masters",
            "matmuls read bfloat16 weights; SGD updates 32-bit copies and rounds them in the same pass",
            ["bf16"],
        ),
        _ROUNDED,
    ],
    "infer": [
        Change("whole-batch CUDA graph", "the forward pass is captured once and replayed"),
        _EVEN,
        Change("fused bias and ReLU", "bias and ReLU are added in the matmul's own kernel"),
        Change("half-precision storage", "weights and activations are stored in 16 bits", ["bf16", "fp16"]),
        _ROUNDED,
    ],
}
_GATHERED = Change(
    "one table", "all tables lie in one weight; the loader adds each table's first row to its indices, in 32 bits; one "
    "kernel sums all bags",
)  # fmt: skip
_FUSED_UPDATE = Change(
    DlrmOptimized.early_change,
    "the backward kernel adds the SGD update to the tables' rows by atomic additions; no gradient of them is kept",
)
_WEIGHTED_ONCE = Change("weights folded into rows", "a row's learned weight is multiplied into it once per step")
_COUNTED = Change(
    "lookups as a matmul",
    "all tables lie in one weight; a kernel counts how often each bag has each row, and a batched matmul of counts "
    "and tables pools them; a row's learned weight is multiplied into it once per step; indices have 32 bits",
)
_COUNTED_HALVES = Change(
    "tables rounded for the matmul", "the pooled rows are rounded to bfloat16; updates are not", ["bf16"]
)
_PACKED = Change(
    "one packed table",
    "all 4-bit tables lie in one array of 64-byte-aligned records, scale and offset as 32-bit floats already times the "
    "row's fixed weight; one kernel gathers, unpacks, scales and sums; the loader adds each table's first row to its "
    "indices",
)


def _require_fixed_bags(offsets: torch.Tensor, lookups: Sequence[int]) -> None:
    """The benchmark says how many lookups every bag has, and this form does without their offsets."""
    each = torch.tensor(lookups).unsqueeze(1)
    if not torch.equal(offsets, torch.arange(offsets.shape[1]) * each):
        raise BadInputError(
            "bags have different numbers of lookups; this benchmark says they are all equal",
            hint="give batches with fixed bags, or measure the out-of-the-box implementation",
            where="offsets",
        )
