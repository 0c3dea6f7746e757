"""Embedding lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.ops.gemm import SEED
from stepscope.ops.operator import DTYPE_BYTES, Built, Operator, Shape, ShapeParameter, Work
from stepscope.ops.reference import check_close

if TYPE_CHECKING:
    import torch

INDEX_BYTES = 8


class EmbeddingBag(Operator):
    name = "embedding_bag"
    summary = "sum-pooled lookup in one table: batch bags of `pooling` rows each, uniform indices"
    parameters = (
        ShapeParameter("rows", "rows", 100_000, "rows of the table"),
        ShapeParameter("dim", "elements", 128, "width of a row"),
        ShapeParameter("pooling", "lookups", 30, "rows summed into one output"),
        ShapeParameter("batch", "bags", 512, "outputs"),
    )
    dtypes = ("float32", "float64", "float16", "bfloat16")
    unit = "GB/s"

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        lookups, dim, size = shape["batch"] * shape["pooling"], shape["dim"], DTYPE_BYTES[dtype]
        indices = (lookups + shape["batch"]) * INDEX_BYTES
        additions = lookups * dim
        if direction == "forward":
            return Work(flops=additions, bytes=lookups * dim * size + indices + shape["batch"] * dim * size)
        # The dense gradient is cleared, then each lookup reads and writes a row of it.
        table = shape["rows"] * dim * size
        return Work(flops=additions, bytes=table + 2 * lookups * dim * size + indices + shape["batch"] * dim * size)

    def memory_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        table = shape["rows"] * shape["dim"]
        lookups = shape["batch"] * shape["pooling"]
        copies = DTYPE_BYTES[dtype] * (2 if direction == "backward" else 1) + 8
        return table * copies + lookups * (INDEX_BYTES + shape["dim"] * 8)

    def build(self, shape: Shape, dtype: torch.dtype, device: str, direction: str) -> Built:
        import torch
        from torch.nn.functional import embedding_bag

        rows, dim, pooling, batch = shape["rows"], shape["dim"], shape["pooling"], shape["batch"]
        generator = torch.Generator(device).manual_seed(SEED)
        table = torch.randn(rows, dim, dtype=dtype, device=device, generator=generator)
        indices = torch.randint(rows, (batch * pooling,), device=device, generator=generator)
        offsets = torch.arange(0, batch * pooling, pooling, device=device)

        def forward() -> torch.Tensor:
            return embedding_bag(indices, table, offsets, mode="sum")

        if direction == "forward":
            return Built(
                body=forward,
                check=lambda: check_close(
                    "embedding_bag", forward(), table.double()[indices].reshape(batch, pooling, dim).sum(1)
                ),
            )
        upstream = torch.randn(batch, dim, dtype=dtype, device=device, generator=generator)
        table.requires_grad_()
        pooled = forward()

        def gradient() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(pooled, (table,), upstream, retain_graph=True)

        def check() -> None:
            reference = torch.zeros(rows, dim, dtype=torch.float64, device=device)
            reference.index_add_(0, indices, upstream.double().repeat_interleave(pooling, 0))
            check_close("embedding_bag backward", gradient()[0], reference)

        return Built(body=gradient, check=check)
