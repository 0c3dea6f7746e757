"""Sum-pooled embedding lookups: one table or many, with declared distributions of indices and bag lengths."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from stepscope.bench.ops.inputs import SEED, Maker
from stepscope.bench.ops.operator import (
    DTYPE_BYTES,
    FLOATS,
    INDEX_BYTES,
    Call,
    Operator,
    Parameter,
    Shape,
    UnsupportedError,
    Work,
)
from stepscope.bench.ops.reference import count_repeats
from stepscope.core.errors import BadInputError
from stepscope.core.lazy_torch import functional, torch

LARGEST_ALPHA = 10.0
EXACT_RANKS = 1024
"""Ranks of a Zipf distribution with exact probabilities; those after them follow the integral of its density, off by
less than 1e-5."""
LARGEST_STRIDE = 1 << 22
"""Keeps rank times stride inside int64 for any table."""
FILE = "file:"
POOLING_TOLERANCE = 0.01
WHOLE_POOLING_TOLERANCE = 0.05
"""Where no other whole number comes nearer."""
PACKED_ROWS = 65_521
"""Rows packed at once; longer quantised tables repeat them. A prime, so that no address error at a power of two lands
on an equal row."""

_DIM = Parameter("dim", "elements", 128, "width of a row")
_POOLING = Parameter("pooling", "lookups", 30, "rows summed into one output, on average")
_OPTIONS = (
    Parameter(
        "lengths", "", "fixed",
        "fixed: `pooling` lookups in each bag; drawn: geometric, given that a table's bags have batch·pooling together",
        ("fixed", "drawn"),
    ),
    Parameter(
        "indices", "", "uniform",
        "uniform; zipf: rank r with a probability ∝ r^−alpha, ranks spread over the table; file:PATH: indices, offsets "
        "and lengths as in Meta's public dlrm_datasets",
    ),
    Parameter("alpha", "", 1.05, "exponent of zipf, 0 to 10"),
    Parameter(
        "lookups", "lookups", 0,
        "all lookups of a file's chosen bags, where their mean is no whole `pooling`; 0: bags·pooling", least=0,
    ),
    Parameter("gradient", "", "dense", "of the table: dense or sparse, one row a lookup", ("dense", "sparse")),
)  # fmt: skip


def drawn_lengths(batch: int, pooling: int, seed: int) -> list[int]:
    """Lengths of `batch` bags with batch·pooling lookups together, each way to share them out equally likely.

    That is a geometric distribution of each length given the sum: short bags are common, long ones exist.
    """
    places = batch * pooling + batch - 1
    bars = sorted(Random(seed).sample(range(places), batch - 1))
    return [right - left - 1 for left, right in pairwise([-1, *bars, places])]


def zipf_ranks(count: int, rows: int, alpha: float, generator: torch.Generator) -> torch.Tensor:
    """Ranks 0 … rows − 1, int64, on the generator's device; rank r with a probability ∝ (r + 1)^−alpha.

    By the inverse of the cumulated probability: exact for the first ranks, by a closed form after them, so that no
    table of all rows is made.
    """
    device = generator.device
    exact = min(rows, EXACT_RANKS)
    cumulated = torch.arange(1, exact + 1, dtype=torch.float64, device=device).pow(-alpha).cumsum(0)
    head, start, bend = float(cumulated[-1]), exact + 0.5, 1 - alpha
    # The mass of x^−alpha from the first rank's edge to the last one's; log1p and expm1 keep it exact near alpha 1.
    reach = math.log((rows + 0.5) / start)
    tail = start**bend * (math.expm1(bend * reach) / bend if bend else reach)
    drawn = torch.rand(count, dtype=torch.float64, device=device, generator=generator) * (head + tail)
    ranks = torch.searchsorted(cumulated, drawn, right=True)
    beyond = (drawn - head).clamp_(min=0) / start**bend
    distance = torch.log1p((bend * beyond).clamp_(min=-1)) / bend if bend else beyond
    far = (start * distance.exp()).clamp_(max=rows).round_().long().clamp_(exact + 1, max(rows, exact + 1)) - 1
    return torch.where(ranks < exact, ranks, far).clamp_(max=rows - 1)


def spread_ranks(ranks: torch.Tensor, rows: int) -> torch.Tensor:
    """A fixed one-to-one map of ranks to rows that puts neighbouring ranks far apart: hot rows do not lie together."""
    stride = max(1, int(0.618 * min(rows, LARGEST_STRIDE)))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return (ranks + 1) * stride % rows


class Bags(NamedTuple):
    """Lookups of one or more tables, table by table."""

    indices: torch.Tensor
    offsets: torch.Tensor
    """Where each bag begins among the indices."""


class _EmbeddingBags(Operator):
    """What one table and many have in common. All tables lie in one weight, one after the other."""

    dtypes = (*FLOATS, "int8", "int4")
    differentiable = ("table",)
    adds_gradients_by = "row"

    @staticmethod
    def tables(shape: Shape) -> range:
        """The tables taken from a file, one or the first of many; without one their number alone matters."""
        return range(shape["tables"]) if "tables" in shape else range(shape["table"], shape["table"] + 1)

    def bags(self, shape: Shape) -> int:
        return len(self.tables(shape)) * int(shape["batch"])

    def lookups(self, shape: Shape) -> int:
        return int(shape["lookups"]) or self.bags(shape) * int(shape["pooling"])

    def check_shape(self, shape: Shape) -> None:
        indices, from_file = shape["indices"], shape["indices"].startswith(FILE)
        if indices not in ("uniform", "zipf") and (not from_file or indices == FILE):
            raise ValueError(f"indices={indices} cannot be: indices is uniform, zipf or {FILE}PATH")
        if not 0 <= shape["alpha"] <= LARGEST_ALPHA:
            raise ValueError(f"alpha={shape['alpha']} cannot be: alpha is 0 to {LARGEST_ALPHA:g}")
        if from_file and shape["lengths"] != "fixed":
            raise ValueError(
                f"lengths={shape['lengths']} cannot be: with indices={FILE}PATH the file gives the lengths"
            )
        for name in ("lookups", "table"):
            if shape.get(name) and not from_file:
                raise ValueError(f"{name}={shape[name]} cannot be: {name} is for indices={FILE}PATH alone")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        lookups, bags, dim = self.lookups(shape), self.bags(shape), shape["dim"]
        if dtype in PACKED and direction != "forward":
            raise UnsupportedError(f"{self.name} in {dtype} has no backward pass: quantised tables do not train")
        if direction == "forward":
            # A quantised element is scaled and shifted before it is added.
            flops = lookups * dim * (3 if dtype in PACKED else 1)
            traffic = lookups * _row_bytes(dtype, dim) + _output_bytes(dtype) * bags * dim
            return Work(flops=flops, bytes=traffic + INDEX_BYTES * (lookups + bags))
        size = DTYPE_BYTES[dtype]
        if shape["gradient"] == "sparse":
            # A row of values is written for each lookup, found by its bag's number; the sparse tensor's indices are
            # those of the forward pass.
            return Work(flops=0, bytes=size * (bags * dim + lookups * dim) + INDEX_BYTES * lookups)
        # The gradient of the whole table is cleared, then each lookup reads and writes a row of it.
        elements = len(self.tables(shape)) * shape["rows"] * dim + 2 * lookups * dim + bags * dim
        return Work(flops=lookups * dim, bytes=size * elements + INDEX_BYTES * (lookups + bags))

    def repeated_bytes(self, shape: Shape, dtype: str, direction: str, inputs: Mapping[str, torch.Tensor]) -> int:
        if direction == "forward":
            return count_repeats(inputs["indices"]) * _row_bytes(dtype, shape["dim"])
        # Rows of a dense gradient were written when it was cleared; a sparse one has a row for each lookup.
        row = int(shape["dim"]) * DTYPE_BYTES[dtype]
        return 0 if shape["gradient"] == "sparse" else 2 * self.lookups(shape) * row

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        """The whole table, of which a call reads only what is looked up."""
        lookups, bags, dim = self.lookups(shape), self.bags(shape), shape["dim"]
        table = len(self.tables(shape)) * shape["rows"] * _row_bytes(dtype, dim)
        return int(table + INDEX_BYTES * (lookups + bags) + _output_bytes(dtype) * bags * dim)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        if dtype in PACKED:
            # Whole repeats of the packed rows, of which the table is the beginning, and the first of them in float32.
            rows = len(self.tables(shape)) * int(shape["rows"])
            count = min(rows, PACKED_ROWS)
            surplus = -(-rows // count) * count - rows
            return surplus * _row_bytes(dtype, shape["dim"]) + DTYPE_BYTES["float32"] * count * int(shape["dim"])
        if direction == "forward" or shape["gradient"] == "dense":
            return 0
        return self.lookups(shape) * _row_bytes(dtype, shape["dim"])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        rows = len(self.tables(shape)) * shape["rows"]
        bags = self._read_bags(shape, maker) if shape["indices"].startswith(FILE) else self._draw_bags(shape, maker)
        if maker.dtype_name in PACKED:
            table = _packed_table(rows, shape["dim"], maker)
        else:
            table = maker.values(rows, shape["dim"])
        return {"table": table, "indices": bags.indices, "offsets": bags.offsets}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        table, indices, offsets = inputs["table"], inputs["indices"], inputs["offsets"]
        if table.dtype == torch.uint8:
            lookup = getattr(torch.ops.quantized, f"embedding_bag_{_packing(table, shape).name}_rowwise_offsets")
            return partial(lookup, table, indices, offsets)
        sparse = shape["gradient"] == "sparse"
        return partial(functional.embedding_bag, indices, table, offsets, mode="sum", sparse=sparse)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Picks each row, then adds it to its bag."""
        table, indices, offsets = inputs["table"], inputs["indices"], inputs["offsets"]
        bags, dim, device = self.bags(shape), shape["dim"], indices.device
        ends = torch.cat([offsets[1:], offsets.new_tensor([len(indices)])])
        bag = torch.repeat_interleave(torch.arange(bags, device=device), ends - offsets)

        def pick() -> torch.Tensor:
            picked = table.index_select(0, indices)
            if table.dtype == torch.uint8:
                unpack = getattr(torch.ops.quantized, f"embedding_bag_{_packing(table, shape).name}_unpack")
                picked = unpack(picked).double()
            return torch.zeros(bags, dim, dtype=torch.float64, device=device).index_add(0, bag, picked)

        return pick

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        # Quantised rows are exact in the reference; what is left is the rounding of float32 sums.
        super().check(shape, inputs, "float32" if dtype in PACKED else dtype, direction)

    def _draw_bags(self, shape: Shape, maker: Maker) -> Bags:
        tables, rows, batch, pooling = len(self.tables(shape)), shape["rows"], shape["batch"], shape["pooling"]
        each = batch * pooling
        if shape["indices"] == "zipf":
            indices = spread_ranks(zipf_ranks(tables * each, rows, shape["alpha"], maker.generator), rows)
        else:
            indices = maker.indices(rows, tables * each)
        indices += (torch.arange(tables, device=maker.device) * rows).repeat_interleave(each)
        if shape["lengths"] == "fixed":
            return Bags(indices, torch.arange(tables * batch, device=maker.device) * pooling)
        drawn = [length for table in range(tables) for length in drawn_lengths(batch, pooling, SEED + table)]
        lengths = maker.tensor(drawn)
        return Bags(indices, lengths.cumsum(0) - lengths)

    def _read_bags(self, shape: Shape, maker: Maker) -> Bags:
        path = Path(shape["indices"].removeprefix(FILE)).expanduser()
        all_indices, all_offsets, all_lengths = load_lookups(path)
        held, held_batch = all_lengths.shape
        tables, batch, rows = self.tables(shape), shape["batch"], shape["rows"]
        if tables.stop > held or batch > held_batch:
            raise BadInputError(
                f"the file holds {held} tables of {held_batch} bags, not table {tables.stop - 1} with {batch} bags",
                where=str(path),
                hint=f"choose among the first {held} tables, and batch={held_batch} or less",
            )
        pieces, lengths = [], []
        for place, table in enumerate(tables):
            edges = all_offsets[table * held_batch : table * held_batch + batch + 1].long()
            taken = all_lengths[table, :batch].long()
            begin, end = int(edges[0]), int(edges[-1])
            fits = 0 <= begin <= end <= len(all_indices) and int(taken.min()) >= 0
            if not fits or not torch.equal(edges.diff(), taken):
                raise _no_layout(path, f"offsets and lengths of table {table} contradict each other")
            piece = all_indices[begin:end].long()
            low, high = (int(piece.min()), int(piece.max())) if len(piece) else (0, 0)
            if low < 0 or high >= rows:
                raise BadInputError(
                    f"table {table} has indices from {low} to {high}; they must be 0 to rows − 1, and rows={rows}",
                    where=str(path),
                    hint=f"give rows={high + 1} or more" if low >= 0 else "choose another table: this one is damaged",
                )
            pieces.append(piece + place * rows)
            lengths.append(taken)
        indices, counts = torch.cat(pieces), torch.cat(lengths)
        self._require_lookups(shape, len(indices), path)
        return Bags(indices.to(maker.device), (counts.cumsum(0) - counts).to(maker.device))

    def _require_lookups(self, shape: Shape, real: int, path: Path) -> None:
        """The work is counted without the file, so what was declared must be what the file holds."""
        declared, bags = self.lookups(shape), self.bags(shape)
        nearest = max(1, round(real / bags))
        allowed = WHOLE_POOLING_TOLERANCE if shape["pooling"] == nearest else POOLING_TOLERANCE
        if shape["lookups"]:
            allowed = 0.0
        if abs(real - declared) > allowed * declared:
            fits = abs(real - nearest * bags) <= WHOLE_POOLING_TOLERANCE * nearest * bags
            raise BadInputError(
                f"the {bags} bags chosen have {real} lookups ({real / bags:.3g} each), not the {declared} declared",
                where=str(path),
                hint=f"give pooling={nearest}" if fits and not shape["lookups"] else f"give lookups={real}",
            )


class EmbeddingBag(_EmbeddingBags):
    name = "embedding_bag"
    summary = (
        "torch embedding_bag with sums: batch bags of rows of one table; lookups are counted as batch·pooling, which a "
        "file of indices must match; int8 and int4 tables are quantised by rows"
    )
    parameters = (
        Parameter("rows", "rows", 1_000_000, "rows of the table"),
        _DIM,
        _POOLING,
        Parameter("batch", "bags", 512, "outputs"),
        *_OPTIONS,
        Parameter("table", "", 0, "which table of a file is taken", least=0),
    )
    tiny = {"rows": 100, "dim": 8, "pooling": 5, "batch": 6}


class EmbeddingBags(_EmbeddingBags):
    name = "embedding_bags"
    summary = (
        "many tables in one torch embedding_bag with sums: (tables·batch, dim), table by table; lookups are counted as "
        "tables·batch·pooling, which a file of indices must match"
    )
    parameters = (
        Parameter("tables", "tables", 26, "tables of the same size; of a file the first ones"),
        Parameter("rows", "rows", 100_000, "rows of each table"),
        _DIM,
        _POOLING,
        Parameter("batch", "bags", 512, "outputs of each table"),
        *_OPTIONS,
    )
    tiny = {"tables": 3, "rows": 40, "dim": 8, "pooling": 5, "batch": 4}


def load_lookups(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices, offsets and lengths of a file; raises BadInputError for what has another layout."""
    try:
        # Real files hold gigabytes of which one case needs little; only the newer, zipped form can be mapped.
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise BadInputError(
            f"the file cannot be read: {error.strerror or error}",
            where=str(path),
            hint=f"check the path in indices={FILE}PATH",
        ) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError) as error:
        raise _no_layout(path, "torch.load does not read it") from error
    if not isinstance(held, tuple | list) or len(held) != 3 or not all(isinstance(one, torch.Tensor) for one in held):
        raise _no_layout(path, "it is no tuple of three tensors")
    indices, offsets, lengths = held
    if not all(one.dtype in (torch.int64, torch.int32) for one in held):
        raise _no_layout(path, "a tensor in it is not of whole numbers")
    if (indices.dim(), offsets.dim(), lengths.dim()) != (1, 1, 2) or len(offsets) != lengths.numel() + 1:
        raise _no_layout(path, f"the shapes are {', '.join(str(tuple(one.shape)) for one in held)}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(indices):
        raise _no_layout(path, f"offsets run from {int(offsets[0])} to {int(offsets[-1])}, indices are {len(indices)}")
    return indices, offsets, lengths


def _no_layout(path: Path, reason: str) -> BadInputError:
    return BadInputError(
        f"the file holds no lookups: {reason}; it must hold indices, tables·bags + 1 offsets, tables × bags lengths",
        where=str(path),
        hint="gunzip it first" if path.suffix == ".gz" else "save the three tensors with torch.save, table by table",
    )


class Packing(NamedTuple):
    """How torch keeps rows of a quantised table."""

    name: str
    """In the names of torch's operators."""
    per_byte: int
    """Elements in a byte."""
    scale_bytes: int
    """Scale and bias of a row."""

    def row_bytes(self, dim: int) -> int:
        return -(-dim // self.per_byte) + self.scale_bytes


PACKED = {"int8": Packing("byte", 1, 8), "int4": Packing("4bit", 2, 4)}


def _row_bytes(dtype: str, dim: int) -> int:
    return PACKED[dtype].row_bytes(dim) if dtype in PACKED else DTYPE_BYTES[dtype] * dim


def _output_bytes(dtype: str) -> int:
    """Sums of quantised rows are float32."""
    return 4 if dtype in PACKED else DTYPE_BYTES[dtype]


def _packing(table: torch.Tensor, shape: Shape) -> Packing:
    return next(one for one in PACKED.values() if one.row_bytes(shape["dim"]) == table.shape[1])


def _packed_table(rows: int, dim: int, maker: Maker) -> torch.Tensor:
    packing = PACKED[maker.dtype_name]
    if dim % packing.per_byte:
        raise UnsupportedError(f"torch packs {maker.dtype_name} rows only where dim is even; dim={dim}")
    pack = getattr(torch.ops.quantized, f"embedding_bag_{packing.name}_prepack")
    count = min(rows, PACKED_ROWS)
    packed: torch.Tensor = pack(torch.randn(count, dim, device=maker.device, generator=maker.generator))
    return packed.repeat(-(-rows // count), 1)[:rows]
