"""The interaction of a recommendation model: products of all feature pairs, and their triangle."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, INDEX_BYTES, MATRIX_FLOATS, Call, Operator, Parameter, Shape, Work
from stepscope.core.lazy_torch import torch


def triangle_pairs(features: int, diagonal: int) -> int:
    """Elements of a square's triangle whose first `diagonal` diagonals, the main one first, are left out."""
    side = features - diagonal
    return side * (side + 1) // 2


class TrilIndex(Operator):
    name = "tril_index"
    summary = "a triangle of each of batch (features, features) matrices, by two index tensors, into (batch, pairs)"
    parameters = (
        Parameter("batch", "matrices", 2048, "matrices in one call"),
        Parameter("features", "rows", 27, "rows and columns of a matrix"),
        Parameter("diagonal", "diagonals", 1, "left out, the main one first; 0 takes the whole triangle", least=0),
        Parameter("part", "", "lower", "the triangle below or above the main diagonal", ("lower", "upper")),
    )
    differentiable = ("matrices",)
    adds_gradients_by = "element"
    tiny = {"batch": 3, "features": 5}

    def check_shape(self, shape: Shape) -> None:
        if shape["diagonal"] >= shape["features"]:
            raise ValueError(
                f"diagonal={shape['diagonal']} leaves nothing of features={shape['features']}: "
                "diagonal is less than features"
            )

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, features, size = shape["batch"], shape["features"], DTYPE_BYTES[dtype]
        pairs = triangle_pairs(features, shape["diagonal"])
        indices = 2 * INDEX_BYTES * pairs
        if direction == "forward":
            return Work(flops=0, bytes=size * 2 * batch * pairs + indices)
        # The gradient is cleared, then each element of the upstream is added to its place.
        elements = batch * features**2 + 3 * batch * pairs
        return Work(flops=batch * pairs, bytes=size * elements + indices)

    def repeated_bytes(self, shape: Shape, dtype: str, direction: str, inputs: Mapping[str, torch.Tensor]) -> int:
        if direction == "forward":
            return 0
        # What is added to was written when it was cleared.
        return int(2 * shape["batch"] * triangle_pairs(shape["features"], shape["diagonal"]) * DTYPE_BYTES[dtype])

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        pairs = triangle_pairs(shape["features"], shape["diagonal"])
        elements = shape["batch"] * (shape["features"] ** 2 + pairs)
        return int(DTYPE_BYTES[dtype] * elements + 2 * INDEX_BYTES * pairs)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        features, diagonal = shape["features"], shape["diagonal"]
        rows, columns = torch.tril_indices(features, features, -diagonal, device=maker.device)
        if shape["part"] == "upper":
            rows, columns = torch.triu_indices(features, features, diagonal, device=maker.device)
        return {"matrices": maker.values(shape["batch"], features, features), "rows": rows, "columns": columns}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        matrices, rows, columns = inputs["matrices"], inputs["rows"], inputs["columns"]
        return lambda: matrices[:, rows, columns]

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        matrices, diagonal = inputs["matrices"], shape["diagonal"]
        square = torch.ones(matrices.shape[1:], dtype=torch.bool, device=matrices.device)
        mask = square.tril(-diagonal) if shape["part"] == "lower" else square.triu(diagonal)
        return lambda: matrices.masked_select(mask).view(len(matrices), -1)


class DotInteraction(Operator):
    name = "dot_interaction"
    summary = "DLRM's: products of all feature pairs by torch.bmm, those below the diagonal after the first feature"
    parameters = (
        Parameter("batch", "samples", 2048, "samples in one call"),
        Parameter("features", "features", 27, "vectors of a sample; the first is the dense one, kept in the result"),
        Parameter("dim", "elements", 128, "width of a feature"),
    )
    dtypes = MATRIX_FLOATS
    unit = "TFLOP/s"
    differentiable = ("features",)
    tiny = {"batch": 3, "features": 5, "dim": 8}

    def check_shape(self, shape: Shape) -> None:
        if shape["features"] < 2:
            raise ValueError(f"features={shape['features']} makes no pair: features is at least 2")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, features, dim = shape["batch"], shape["features"], shape["dim"]
        pairs, size = triangle_pairs(features, 1), DTYPE_BYTES[dtype]
        product = 2 * batch * features * features * dim
        given, result, indices = batch * features * dim, batch * (dim + pairs), 2 * INDEX_BYTES * pairs
        if direction == "forward":
            # The whole square is multiplied, though half of it is kept.
            return Work(flops=product, bytes=size * (given + result) + indices)
        # A product for each side of the square, their sum, and the dense feature's own gradient added to it.
        return Work(flops=2 * product + given + batch * dim, bytes=size * (result + 2 * given) + indices)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        squares = shape["batch"] * shape["features"] ** 2
        given = shape["batch"] * shape["features"] * shape["dim"]
        # Backward: the squares and their gradient, and the gradients of both sides before they are added.
        return int(DTYPE_BYTES[dtype] * (squares if direction == "forward" else 2 * squares + 2 * given))

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        places = torch.tril_indices(shape["features"], shape["features"], -1, device=maker.device)
        features = maker.values(shape["batch"], shape["features"], shape["dim"])
        return {"features": features, "rows": places[0], "columns": places[1]}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        features, rows, columns = inputs["features"], inputs["rows"], inputs["columns"]
        multiply, join = torch.bmm, torch.cat

        def interact() -> torch.Tensor:
            products = multiply(features, features.transpose(1, 2))
            return join([features[:, 0], products[:, rows, columns]], dim=1)

        return interact

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        features = inputs["features"]
        below = torch.ones(shape["features"], shape["features"], dtype=torch.bool, device=features.device).tril(-1)

        def interact() -> torch.Tensor:
            products = torch.einsum("bid,bjd->bij", features, features)
            return torch.cat([features[:, 0], products.masked_select(below).view(len(features), -1)], dim=1)

        return interact
