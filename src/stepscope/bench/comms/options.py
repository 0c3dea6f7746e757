"""What a case asks for, read from its parameters. Those that are not there have their usual value, so that the key of a
plain case does not change when a new option is added."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.operations import Operation, Shape, find_operation
from stepscope.records import Case, Parameter

Mode = Literal["blocking", "nonblocking", "graph"]
MODES: tuple[Mode, ...] = ("blocking", "nonblocking", "graph")
DEFAULT_DEPTH = 4


class CallOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size_bytes: int
    dtype: str = "float32"
    device: str = "cpu"
    reduction: str = "sum"
    root: int = 0
    placement: str | None = None
    """`in_place` or `out_of_place`, where it is not the operation's usual."""
    form: str = "tensor"
    pattern: str | None = None
    window: int = 1
    sources: list[int] | None = None
    """Ranks that send, one for each of `targets`, in place of those of the pattern."""
    targets: list[int] | None = None
    skew: float | None = None
    matrix: list[float] | None = None
    """Row by row, one a sender; or a single row, which is every sender's."""
    mode: Mode = "blocking"
    depth: int = 1
    coalesce: int = 1
    wire: str | None = None
    """The encoding in which float32 data travels; None: as it is."""
    groups: str = "world"
    group: int | None = None
    """The only one that acts; None: all at the same time."""
    round: int | None = None
    """Of a search that measures again what it measured before."""

    def shape(self, members: int) -> Shape:
        matrix = None
        if self.matrix is not None:
            matrix = [self.matrix[start : start + members] for start in range(0, len(self.matrix), members)]
        elements = self.size_bytes // DTYPE_BYTES[self.dtype] // self.coalesce
        return Shape(members, elements, self.root, self.skew, matrix, self.pattern, self.window, self.pairs)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.sources or (), self.targets or (), strict=True))

    def is_in_place(self, operation: Operation) -> bool:
        return self.placement == "in_place" if self.placement else operation.in_place


def read_options(case: Case) -> tuple[Operation, CallOptions]:
    options = msgspec.convert(case.parameters, CallOptions, strict=False)
    return find_operation(case.benchmark.model), options


def to_parameters(options: CallOptions) -> dict[str, Parameter]:
    """Size, dtype and device, and what is unusual."""
    usual: dict[str, Any] = msgspec.structs.asdict(CallOptions(size_bytes=0))
    always = ("size_bytes", "dtype", "device")
    return {
        name: value for name, value in msgspec.structs.asdict(options).items() if name in always or value != usual[name]
    }
