"""What a collective or a pattern of messages asks for, in the words of the operations."""

from __future__ import annotations

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.operations import Operation, Shape, find_operation
from stepscope.records import Case
from stepscope.records.kinds import CollectiveSpec

DEFAULT_DEPTH = 4


def read_options(case: Case) -> tuple[Operation, CollectiveSpec]:
    assert isinstance(case.spec, CollectiveSpec)
    return find_operation(case.spec.operation), case.spec


def make_shape(spec: CollectiveSpec, members: int) -> Shape:
    matrix = None
    if spec.matrix is not None:
        matrix = [spec.matrix[start : start + members] for start in range(0, len(spec.matrix), members)]
    elements = spec.size_bytes // DTYPE_BYTES[spec.dtype] // spec.coalesce
    return Shape(members, elements, spec.root, spec.skew, matrix, spec.pattern, spec.window, spec.pairs)


def is_in_place(spec: CollectiveSpec, operation: Operation) -> bool:
    return spec.placement == "in_place" if spec.placement else operation.in_place
