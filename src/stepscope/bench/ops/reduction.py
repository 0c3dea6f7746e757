"""Reductions: sums, means, extremes, norms, over rows, columns or everything.

Operations are counted one for each addition, multiplication, comparison or function (exp, tanh, erf …) of an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from stepscope.bench.ops.operator import (
    DTYPE_BYTES,
    INDEX_BYTES,
    Call,
    Operator,
    Parameter,
    Shape,
    UnsupportedError,
    Work,
)
from stepscope.bench.ops.pointwise import COLS, ROWS
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

    from stepscope.bench.ops.inputs import Maker


class _Reduction(NamedTuple):
    """Operations of one reduction."""

    forward: int
    """An element."""
    result: int
    """A result, on top."""
    backward: int
    """An element; 0: nothing to compute."""
    reads_input: bool
    """Whether backward reads the input."""
    reads_result: bool
    """Whether backward reads the kept result."""


_REDUCTIONS = {
    "sum": _Reduction(1, 0, 0, reads_input=False, reads_result=False),
    "mean": _Reduction(1, 1, 1, reads_input=False, reads_result=False),
    "amax": _Reduction(1, 0, 3, reads_input=True, reads_result=True),
    "argmax": _Reduction(1, 0, 0, reads_input=False, reads_result=False),
    "norm": _Reduction(2, 1, 2, reads_input=True, reads_result=True),
    "cumsum": _Reduction(1, 0, 1, reads_input=False, reads_result=False),
    "var": _Reduction(4, 1, 3, reads_input=True, reads_result=False),
}
"""sum, amax, argmax and cumsum take one an element; norm a square and an addition, then a root; var the mean, then
subtract, square and add. Backward: mean spreads dy/n; amax compares, counts ties and shares out; norm is dy·x/y; var is
the mean anew, x − mean and the scale."""
_NO_BACKWARD = {
    "sum": "the gradient of a sum is the upstream, spread by a view: its backward computes nothing",
    "argmax": "argmax has no derivative",
}
_DIMENSION = {"rows": 0, "cols": 1}
_SUMMED = ("sum", "mean", "cumsum")
_LARGEST_SUM = 2.0**14
"""Of summed inputs: keeps sums of any length inside float16."""


class Reduction(Operator):
    name = "reduction"
    summary = "a reduction or running sum of (rows, cols) along one dimension or over everything"
    parameters = (
        ROWS,
        COLS,
        Parameter("function", "", "sum", "which one; norm is Euclidean, var the sample's (n − 1)", tuple(_REDUCTIONS)),
        Parameter(
            "over", "", "cols", "cols: along each row, one result a row; rows: down each column; all: everything",
            ("rows", "cols", "all"),
        ),
    )  # fmt: skip
    tiny = {"rows": 16, "cols": 24, "function": "norm"}

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        if shape["function"] in _NO_BACKWARD:
            raise UnsupportedError(_NO_BACKWARD[shape["function"]])
        return ("input",)

    @staticmethod
    def _reduced(shape: Shape) -> int:
        """Elements that go into one result."""
        rows, cols = shape["rows"], shape["cols"]
        return int({"rows": rows, "cols": cols, "all": rows * cols}[shape["over"]])

    def _results(self, shape: Shape) -> int:
        elements = int(shape["rows"] * shape["cols"])
        return elements if shape["function"] == "cumsum" else elements // self._reduced(shape)

    def check_shape(self, shape: Shape) -> None:
        if shape["function"] == "var" and self._reduced(shape) < 2:
            raise ValueError(f"var over {shape['over']} needs at least 2 elements a result")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        kind, results = _REDUCTIONS[shape["function"]], self._results(shape)
        elements, size = shape["rows"] * shape["cols"], DTYPE_BYTES[dtype]
        if direction == "forward":
            written = results * (INDEX_BYTES if shape["function"] == "argmax" else size)
            return Work(kind.forward * elements + kind.result * results, size * elements + written)
        self.gradient_names(shape)
        passes = elements * (1 + kind.reads_input) + results * (1 + kind.reads_result)
        return Work(kind.backward * elements, size * passes)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The values that summed inputs were made of."""
        return int(shape["rows"] * shape["cols"] * DTYPE_BYTES[dtype]) if shape["function"] in _SUMMED else 0

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        values = maker.values(shape["rows"], shape["cols"])
        if shape["function"] not in _SUMMED:
            return {"input": values}
        # Positive: a sum that cancels has no relative accuracy to be checked.
        return {"input": values.abs().mul_(min(1.0, _LARGEST_SUM / self._reduced(shape)))}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        import torch

        tensor, function = inputs["input"], shape["function"]
        dim = _DIMENSION.get(shape["over"])
        if function == "cumsum":
            if dim is None:
                flat = tensor.reshape(-1)
                return lambda: torch.cumsum(flat, 0)
            return lambda: torch.cumsum(tensor, dim)
        apply = torch.linalg.vector_norm if function == "norm" else getattr(torch, function)
        if dim is None:
            return lambda: apply(tensor)
        return lambda: apply(tensor, dim=dim)

    def added_terms(self, shape: Shape) -> int:
        return self._reduced(shape)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        import torch

        # What goes into one result is one line.
        tensor, over = inputs["input"], shape["over"]
        lines = {"rows": tensor.T, "cols": tensor, "all": tensor.reshape(1, -1)}[over]
        count = self._reduced(shape)

        def running_sums() -> torch.Tensor:
            after = lines.flip(1).cumsum(1).flip(1) - lines
            sums = lines.sum(1, keepdim=True) - after
            return {"rows": sums.T, "cols": sums, "all": sums.reshape(-1)}[over]

        formulas: dict[str, Call] = {
            "sum": lambda: lines @ torch.ones(count, dtype=lines.dtype, device=lines.device),
            "mean": lambda: lines.sum(1) / count,
            "amax": lambda: lines.amax(1),
            "norm": lambda: lines.square().sum(1).sqrt(),
            "var": lambda: (lines.square().sum(1) - lines.sum(1).square() / count) / (count - 1),
        }
        if shape["function"] == "cumsum":
            return running_sums
        formula = formulas[shape["function"]]
        return (lambda: formula().reshape(())) if over == "all" else formula

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        if shape["function"] != "argmax":
            super().check(shape, inputs, dtype, direction)
            return
        tensor = inputs["input"]
        places = self.bind(shape, inputs)()
        dim = _DIMENSION.get(shape["over"])
        if dim is None:
            found, largest = tensor.flatten()[places], tensor.max()
        else:
            found, largest = tensor.gather(dim, places.unsqueeze(dim)).squeeze(dim), tensor.amax(dim)
        if not bool((found == largest).all()):
            raise WrongResultError(f"argmax in {dtype} points at elements that are not the largest")


OPERATORS: tuple[type[Operator], ...] = (Reduction,)
