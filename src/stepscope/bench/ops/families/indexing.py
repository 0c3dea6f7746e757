"""Rows and elements picked by index, put back by index, sorted and selected."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, INDEX_BYTES, Call, Operator, Parameter, Shape, Sizes, Work
from stepscope.bench.ops.reference import WRONG_LIBRARY, check_close, count_repeats, seeded_like, widen
from stepscope.core.lazy_torch import functional, torch
from stepscope.run.producer import WrongResultError

_ROWS = Parameter("rows", "rows", 100_000, "rows of the table, indices uniform over them")
_DIM = Parameter("dim", "elements", 128, "width of a row")
_COUNT = Parameter("count", "rows", 65_536, "rows picked, repeats allowed")


class _Indexed(Operator):
    """Whole rows (of width `dim`), or single elements (of `columns`), that an index names."""

    @staticmethod
    def _by_rows(shape: Shape) -> bool:
        return "dim" in shape

    def _width(self, shape: Shape) -> int:
        return int(shape["dim" if self._by_rows(shape) else "columns"])

    def _index_size(self, shape: Shape) -> tuple[int, ...]:
        return (shape["count"],) if self._by_rows(shape) else (shape["count"], shape["columns"])

    def _index_bytes(self, shape: Shape) -> int:
        return INDEX_BYTES * prod(self._index_size(shape))

    def _places(self, shape: Shape, index: torch.Tensor) -> torch.Tensor:
        """The rows that are named, or the places of the single elements in the table laid out flat."""
        if self._by_rows(shape):
            return index
        flat: torch.Tensor = index * shape["columns"] + torch.arange(shape["columns"], device=index.device)
        return flat

    def _repeated_elements(self, shape: Shape, index: torch.Tensor) -> int:
        """Elements that are named by more than one index, without the first time."""
        return count_repeats(self._places(shape, index)) * (self._width(shape) if self._by_rows(shape) else 1)


class _Pick(_Indexed):
    """Elements of a (rows, width) table picked by index. The gradient adds up where an index repeats."""

    differentiable = ("table",)

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        width, size, index = self._width(shape), DTYPE_BYTES[dtype], self._index_bytes(shape)
        picked = shape["count"] * width
        if direction == "forward":
            return Work(flops=0, bytes=2 * size * picked + index)
        # The table's gradient is cleared, then each element of the upstream is added to a place in it.
        return Work(flops=picked, bytes=size * (shape["rows"] * width + 3 * picked) + index)

    def repeated_bytes(self, shape: Shape, dtype: str, direction: str, inputs: Mapping[str, torch.Tensor]) -> int:
        if direction == "forward":
            return self._repeated_elements(shape, inputs["index"]) * DTYPE_BYTES[dtype]
        # What is added to was written when it was cleared.
        return 2 * int(shape["count"]) * self._width(shape) * DTYPE_BYTES[dtype]

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        elements = (shape["rows"] + shape["count"]) * self._width(shape)
        return int(DTYPE_BYTES[dtype] * elements) + self._index_bytes(shape)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        table = maker.values(shape["rows"], self._width(shape))
        return {"table": table, "index": maker.indices(shape["rows"], *self._index_size(shape))}

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        table, places = inputs["table"], self._places(shape, inputs["index"])
        return lambda: (table if self._by_rows(shape) else table.reshape(-1))[places]


class Gather(_Pick):
    adds_gradients_by = "element"
    name = "gather"
    summary = "torch.gather along dim 0: each of (count, columns) elements from its own row of (rows, columns)"
    parameters = (
        _ROWS,
        Parameter("columns", "elements", 64, "width of the table and of the result"),
        Parameter("count", "rows", 65_536, "rows of the result"),
    )
    tiny = {"rows": 50, "columns": 6, "count": 40}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.gather, inputs["table"], 0, inputs["index"])


class _Put(_Indexed):
    """A copy of a (rows, width) base of which some elements are then added to, or replaced."""

    @staticmethod
    def _adds(shape: Shape) -> bool:
        return bool(shape.get("accumulate", "yes") == "yes")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        width, size, index = self._width(shape), DTYPE_BYTES[dtype], self._index_bytes(shape)
        base, put, adds = shape["rows"] * width, shape["count"] * width, self._adds(shape)
        if direction == "forward":
            # The copy reads and writes the base; each value is read, and its place written (and read, to add).
            return Work(flops=put if adds else 0, bytes=size * (2 * base + (3 if adds else 2) * put) + index)
        # The values' gradient is picked from the upstream. The base's is the upstream itself where values were added;
        # where they replaced, it is a copy of the upstream with zeros put in their places.
        return Work(flops=0, bytes=size * (2 * put + (0 if adds else 2 * base + put)) + index)

    def repeated_bytes(self, shape: Shape, dtype: str, direction: str, inputs: Mapping[str, torch.Tensor]) -> int:
        put, adds = int(shape["count"]) * self._width(shape), self._adds(shape)
        if direction == "forward":
            return (2 if adds else 1) * put * DTYPE_BYTES[dtype]  # the places were written by the copy
        return (self._repeated_elements(shape, inputs["index"]) if adds else put) * DTYPE_BYTES[dtype]

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        elements = (2 * shape["rows"] + shape["count"]) * self._width(shape)
        return int(DTYPE_BYTES[dtype] * elements) + self._index_bytes(shape)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        rows, count, width = shape["rows"], shape["count"], self._width(shape)
        inputs = {
            name: maker.values(size, width) for name, size in zip(self.differentiable, (rows, count), strict=True)
        }
        if self._adds(shape):
            return {**inputs, "index": maker.indices(rows, *self._index_size(shape))}
        # Each row once. Cloned: a slice of a permutation keeps all of it in memory.
        return {**inputs, "index": maker.own(maker.permutation(rows)[:count])}

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        base, values = (inputs[name] for name in self.differentiable)
        places = self._places(shape, inputs["index"])
        if not self._adds(shape):
            return lambda: base.index_copy(0, places, values)
        if self._by_rows(shape):
            return lambda: base.index_add(0, places, values)
        return lambda: base.reshape(-1).index_add(0, places.reshape(-1), values.reshape(-1)).view(base.shape)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        """Sums are taken of −1, 0 and 1: they are exact in every dtype."""
        if self._adds(shape):
            inputs = {name: one.sign() if name in self.differentiable else one for name, one in inputs.items()}
        super().check(shape, inputs, dtype, direction)


class Scatter(_Put):
    name = "scatter"
    summary = (
        "torch.scatter_add along dim 0, out of place: a copy of (rows, columns), then (count, columns) added to it"
    )
    parameters = (
        Parameter("rows", "rows", 100_000, "rows of what is added to, indices uniform over them"),
        Parameter("columns", "elements", 64, "width of both tensors"),
        Parameter("count", "rows", 65_536, "rows added"),
    )
    differentiable = ("base", "source")
    tiny = {"rows": 50, "columns": 6, "count": 40}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.scatter_add, inputs["base"], 0, inputs["index"], inputs["source"])


class _PickRows(_Pick):
    adds_gradients_by = "row"
    parameters = (_ROWS, _DIM, _COUNT)
    tiny = {"rows": 50, "dim": 8, "count": 40}


class IndexSelect(_PickRows):
    name = "index_select"
    summary = "torch.index_select: count rows of a (rows, dim) table"

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.index_select, inputs["table"], 0, inputs["index"])


class Embedding(_PickRows):
    name = "embedding"
    summary = "torch.nn.functional.embedding: count rows of a (rows, dim) table, dense gradient"

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(functional.embedding, inputs["index"], inputs["table"])


class IndexPut(_Put):
    name = "index_put"
    summary = "torch.index_put, out of place: a copy of (rows, dim), then count rows of it replaced or added to"
    parameters = (
        Parameter("rows", "rows", 100_000, "rows of what is changed"),
        _DIM,
        Parameter("count", "rows", 65_536, "rows put; at most `rows` where they replace, so that none is put twice"),
        Parameter("accumulate", "", "no", "yes: rows are added, uniform with repeats; no: they replace", ("yes", "no")),
    )
    differentiable = ("base", "values")
    tiny = {"rows": 50, "dim": 8, "count": 40}

    def check_shape(self, shape: Shape) -> None:
        if shape["accumulate"] == "no" and shape["count"] > shape["rows"]:
            raise ValueError(
                f"count={shape['count']} rows cannot replace rows={shape['rows']} once each: "
                "count is at most rows with accumulate=no"
            )

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        base, values, adds = inputs["base"], inputs["values"], self._adds(shape)
        return partial(torch.index_put, base, (inputs["index"],), values, accumulate=adds)


class _Ordered(Operator):
    """Values in order, and where they stood. Equal values may stand in any order, so indices are checked by what they
    point at."""

    differentiable = ("table",)

    def _found(self, shape: Shape) -> int:
        """Values that one row gives."""
        return int(shape.get("k", shape["columns"]))

    def _comparisons(self, shape: Shape) -> int:
        """Comparisons per element."""
        return 1 if "k" in shape else int(shape["columns"] - 1).bit_length()

    def sizes(self, shape: Shape) -> Sizes:
        return {"table": (shape["rows"], shape["columns"])}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        elements, found, size = shape["rows"] * shape["columns"], shape["rows"] * self._found(shape), DTYPE_BYTES[dtype]
        if direction == "forward":
            flops = elements * self._comparisons(shape)
            return Work(flops=flops, bytes=size * (elements + found) + INDEX_BYTES * found)
        # The gradient is cleared, then each element of the upstream is written to its place.
        return Work(flops=0, bytes=size * (elements + 2 * found) + INDEX_BYTES * found)

    def repeated_bytes(self, shape: Shape, dtype: str, direction: str, inputs: Mapping[str, torch.Tensor]) -> int:
        # Places that are written were written when they were cleared.
        return 0 if direction == "forward" else int(shape["rows"]) * self._found(shape) * DTYPE_BYTES[dtype]

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        table = inputs["table"].detach()
        with torch.no_grad():
            values, index = self.bind(shape, {"table": table})()
            reference = self.bind_reference(shape, widen({"table": table}))()
        check_close(f"{self.name} values", values, reference, dtype)
        seen = torch.zeros(table.shape, dtype=torch.bool, device=table.device).scatter_(1, index, True)
        if not torch.equal(table.gather(1, index), values) or int(seen.sum()) != index.numel():
            raise WrongResultError(
                f"{self.name} gives indices that do not point at its values, once each",
                hint=WRONG_LIBRARY,
            )
        if direction == "backward":
            leaf = table.detach().requires_grad_()
            with torch.enable_grad():
                result, places = self.bind(shape, {"table": leaf})()
            (upstream,) = seeded_like([result])
            (gradient,) = torch.autograd.grad(result, leaf, upstream)
            expected = torch.zeros(table.shape, dtype=torch.float64, device=table.device)
            expected[torch.arange(len(table), device=table.device)[:, None], places] = upstream.double()
            check_close(f"{self.name} backward", gradient, expected, dtype)


class Sort(_Ordered):
    name = "sort"
    summary = "torch.sort of each row, ascending: values and int64 indices; columns·⌈log2 columns⌉ comparisons a row"
    parameters = (
        Parameter("rows", "rows", 1024, "rows, each sorted for itself"),
        Parameter("columns", "elements", 4096, "elements of a row"),
    )
    tiny = {"rows": 5, "columns": 20}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.sort, inputs["table"], dim=1)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Values alone."""
        table = inputs["table"]
        return lambda: torch.topk(table, shape["columns"], dim=1).values.flip(1)


class TopK(_Ordered):
    name = "topk"
    summary = "torch.topk of each row, largest first: k values and int64 indices; one comparison an element"
    parameters = (
        Parameter("rows", "rows", 1024, "rows, each searched for itself"),
        Parameter("columns", "elements", 4096, "elements of a row"),
        Parameter("k", "elements", 8, "elements found in a row; at most `columns`"),
    )
    tiny = {"rows": 5, "columns": 20, "k": 3}

    def check_shape(self, shape: Shape) -> None:
        if shape["k"] > shape["columns"]:
            raise ValueError(f"k={shape['k']} is more than columns={shape['columns']}: k is at most columns")

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.topk, inputs["table"], shape["k"], dim=1)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Values alone."""
        table, k = inputs["table"], shape["k"]
        return lambda: torch.sort(table, dim=1, descending=True).values[:, :k]
