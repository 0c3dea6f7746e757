"""The micro suite: rows of Proxy Workloads, each one benchmark over a list of shapes with one score.

As there, a row's score is the work of all its shapes over the time of all of them, and its batch size is the last
shape's. The bytes of an embedding row are those gathered: indices and outputs are not counted, as published.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from stepscope.bench.ops.catalogue import find_operator, find_set
from stepscope.bench.ops.operator import DTYPE_BYTES, Shape
from stepscope.core.errors import unknown_name
from stepscope.core.units import format_significant, scale_score
from stepscope.records import Benchmark, Case
from stepscope.records.kinds import OperatorSpec
from stepscope.store import MeasuredCase

OWNER = "recommendation"


class SuiteRow(NamedTuple):
    """One benchmark of the suite."""

    kind: str
    config: str
    op: str
    preset: str
    unit: str
    description: str
    published: bool = False
    """Whether it is one of the rows that were published; those run where none is named."""

    @property
    def id(self) -> str:
        return f"dlrm/micro/{self.kind}/{self.config}"

    def cases(self, *, dtype: str, device: str, compiled: bool = False) -> list[Case]:
        operator = find_operator(self.op)
        benchmark = Benchmark(
            model="dlrm", implementation="micro", mode=self.kind, config=self.config, owner=OWNER,
            description=self.description,
        )  # fmt: skip
        spec = OperatorSpec(
            op=self.op, direction="forward", shape={}, dtype=dtype, device=device, cache="warm", compile=compiled
        )
        return [
            Case(benchmark=benchmark, spec=msgspec.structs.replace(spec, shape=shape), batch_size=int(shape["batch"]))
            for shape in find_set(operator, self.preset).expand(operator)
        ]


MICRO = (
    SuiteRow("linear", "linear_A.1dev", "mlp_train", "A", "TFLOP/s",
             "18 hidden layers of 1024 or 4096, batch 128 to 4096: training steps", published=True),
    SuiteRow("embedding_bag", "emb_A.1dev", "embedding_bag", "A", "GB/s",
             "14 M and 26 M rows × 128, 30 lookups, batch 512 to 65,536: sum-pooled lookups", published=True),
    SuiteRow("linear", "linear_small.1dev", "mlp_train", "small", "TFLOP/s",
             "18 hidden layers of 1024, batch 128 and 256: training steps"),
    SuiteRow("embedding_bag", "emb_B.1dev", "embedding_bag", "B", "GB/s",
             "4.8 M rows × 56, 34 lookups, batch 2048 to 65,536: sum-pooled lookups"),
    SuiteRow("embedding_bag", "emb_small.1dev", "embedding_bag", "small", "GB/s",
             "4.8 M rows × 56, 34 lookups, batch 2048: sum-pooled lookups"),
    SuiteRow("linear", "linear_tiny.1dev", "mlp_train", "tiny", "TFLOP/s", "a toy, to see the suite run"),
    SuiteRow("embedding_bag", "emb_tiny.1dev", "embedding_bag", "tiny", "GB/s", "a toy, to see the suite run"),
)  # fmt: skip


def find_rows(ids: Sequence[str]) -> list[SuiteRow]:
    """Those named; the published ones where none is."""
    known = {row.id: row for row in MICRO}
    for wanted in ids:
        if wanted not in known:
            raise unknown_name("benchmark", wanted, known, where="--benchmark")
    return [known[wanted] for wanted in dict.fromkeys(ids)] or [row for row in MICRO if row.published]


class RowScore(NamedTuple):
    """One line of the suite's table."""

    id: str
    dtype: str
    batch_size: int | None
    """The last shape's, as published."""
    batch_sizes: list[int]
    """All that the score is over."""
    score: float | None
    """In `unit`; None where no shape of the row was measured."""
    unit: str
    shapes: int
    measured: int
    """Shapes that have a time; a row with fewer than all of them is not the published one."""


def score_rows(cases: Iterable[MeasuredCase]) -> list[RowScore]:
    """One score for each benchmark of the suite and dtype, in the order of the cases."""
    groups: dict[tuple[str, str], list[MeasuredCase]] = {}
    for measured in cases:
        case = measured.result.case
        groups.setdefault((case.benchmark.id, str(case.spec.dtype)), []).append(measured)
    rows = {row.id: row for row in MICRO}
    return [_score(rows[name], dtype, group) for (name, dtype), group in groups.items() if name in rows]


def format_rows(scores: Sequence[RowScore]) -> str:
    """As Proxy Workloads publishes them, one line a benchmark; empty where there are none."""
    lines = []
    for one in scores:
        value = format_significant(one.score) if one.score is not None else "-"
        part = "" if one.measured == one.shapes else f"  (only {one.measured} of its {one.shapes} shapes: not the row)"
        batches = " + ".join(map(str, one.batch_sizes))
        lines.append(f"# suite: {one.id} {one.dtype} batch {batches}: {value} {one.unit}{part}")
    return "\n".join(lines)


def _score(row: SuiteRow, dtype: str, group: Sequence[MeasuredCase]) -> RowScore:
    measured = [(one.result.case.spec, summary.median_s) for one in group if (summary := one.summary()) is not None]
    work = sum(_work(row.op, spec.shape, str(spec.dtype)) for spec, _ in measured if isinstance(spec, OperatorSpec))
    time_s = sum(median_s for _, median_s in measured)
    score = scale_score(work / time_s, row.unit) if time_s > 0 else None
    sizes = [one.result.case.batch_size for one in group]
    batches = list(dict.fromkeys(size for size in sizes if size is not None))
    return RowScore(row.id, dtype, sizes[-1], batches, score, row.unit, len(group), len(measured))


def _work(op: str, shape: Shape, dtype: str) -> float:
    """Operations of training steps, bytes of gathered rows."""
    if op == "mlp_train":
        return find_operator(op).work(shape, dtype, "forward").flops
    size = {"int4": 0.5}.get(dtype) or DTYPE_BYTES[dtype]
    return float(shape["batch"] * shape["pooling"] * shape["dim"] * size)
