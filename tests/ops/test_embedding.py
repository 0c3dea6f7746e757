from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import full_shape, moved_by_hand, run_and_check

from stepscope.bench.ops.families.embedding import (
    EXACT_RANKS,
    PACKED_ROWS,
    EmbeddingBag,
    EmbeddingBags,
    drawn_lengths,
    spread_ranks,
    zipf_ranks,
)
from stepscope.bench.ops.inputs import SEED, Maker
from stepscope.bench.ops.operator import FLOATS, Operator, Work
from stepscope.core.errors import BadInputError
from stepscope.run.producer import WrongResultError

BOTH = [EmbeddingBag(), EmbeddingBags()]
PASSES = ("forward", "backward")
named = pytest.mark.parametrize("operator", BOTH, ids=lambda one: one.name)


def draw(rows: int, alpha: float, count: int = 50_000, seed: int = 3) -> Any:
    import torch

    return zipf_ranks(count, rows, alpha, torch.Generator().manual_seed(seed))


# Work


def test_work_of_one_table() -> None:
    shape = full_shape(EmbeddingBag(), rows=100, dim=8, pooling=5, batch=6)
    lookups, op = 6 * 5, EmbeddingBag()
    assert op.work(shape, "float32", "forward") == Work(30 * 8, 4 * (30 * 8) + 8 * (30 + 6) + 4 * (6 * 8))
    assert op.work(shape, "float16", "forward") == Work(30 * 8, 2 * (30 * 8) + 8 * (30 + 6) + 2 * (6 * 8))
    cleared, added, upstream = 100 * 8, 2 * lookups * 8, 6 * 8
    dense = Work(30 * 8, 4 * (cleared + added + upstream) + 8 * (30 + 6))
    assert op.work(shape, "float32", "backward") == dense
    sparse = {**shape, "gradient": "sparse"}
    assert op.work(sparse, "float32", "backward") == Work(0, 4 * (6 * 8 + 30 * 8) + 8 * 30)
    assert op.work(sparse, "float32", "forward") == op.work(shape, "float32", "forward")
    assert op.scratch_bytes(sparse, "float32", "backward") == 4 * 30 * 8
    assert op.scratch_bytes(sparse, "float32", "forward") == op.scratch_bytes(shape, "float32", "backward") == 0


def test_work_of_many_tables() -> None:
    shape = full_shape(EmbeddingBags(), tables=3, rows=40, dim=8, pooling=5, batch=4)
    bags, lookups, op = 3 * 4, 3 * 4 * 5, EmbeddingBags()
    forward = Work(60 * 8, 4 * (lookups * 8) + 8 * (lookups + bags) + 4 * (bags * 8))
    assert op.work(shape, "float32", "forward") == forward
    backward = Work(60 * 8, 4 * (3 * 40 * 8 + 2 * lookups * 8 + bags * 8) + 8 * (lookups + bags))
    assert op.work(shape, "float32", "backward") == backward
    assert op.work({**shape, "gradient": "sparse"}, "float32", "backward") == Work(0, 4 * (12 * 8 + 60 * 8) + 8 * 60)


def test_work_of_quantised_tables() -> None:
    shape, op = full_shape(EmbeddingBag(), dim=8, pooling=5, batch=6), EmbeddingBag()
    around = 8 * (30 + 6) + 4 * (6 * 8)
    assert op.work(shape, "int8", "forward") == Work(3 * 30 * 8, 30 * (8 + 8) + around)
    assert op.work(shape, "int4", "forward") == Work(3 * 30 * 8, 30 * (4 + 4) + around)
    assert op.work({**shape, "dim": 7}, "int4", "forward").bytes == 30 * (4 + 4) + 8 * (30 + 6) + 4 * (6 * 7)
    for dtype in ("int8", "int4"):
        with pytest.raises(NotImplementedError, match=f"{dtype} has no backward pass"):
            op.work(shape, dtype, "backward")


def test_a_large_set_of_published_shapes() -> None:
    """Batch 65,536 of 30 lookups in 14 million rows: 1006.6 MB are gathered, 15.7 MB of indices, 33.6 MB written."""
    shape = full_shape(EmbeddingBag(), rows=14_000_000, dim=128, pooling=30, batch=65_536)
    gathered, indices, offsets, written = 1_006_632_960, 15_728_640, 8 * 65_536, 33_554_432
    assert EmbeddingBag().work(shape, "float32", "forward").bytes == gathered + indices + offsets + written
    assert EmbeddingBag().footprint_bytes(shape, "float32") == 7_168_000_000 + indices + offsets + written


# Results


@named
@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_results(operator: Operator, direction: str, dtype: str, gradient: str) -> None:
    run_and_check(operator, direction, dtype, gradient=gradient)


@named
@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("lengths", ["fixed", "drawn"])
@pytest.mark.parametrize("indices", ["uniform", "zipf"])
def test_distributions(operator: Operator, direction: str, lengths: str, indices: str) -> None:
    run_and_check(operator, direction, lengths=lengths, indices=indices)


@named
@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "int4"])
@pytest.mark.parametrize("lengths", ["fixed", "drawn"])
def test_footprint(operator: Operator, dtype: str, lengths: str) -> None:
    shape = full_shape(operator, lengths=lengths)
    assert operator.footprint_bytes(shape, dtype) == moved_by_hand(operator, dtype, lengths=lengths)


@named
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("lengths", ["fixed", "drawn"])
def test_quantised_tables(operator: Operator, dtype: str, lengths: str) -> None:
    run_and_check(operator, "forward", dtype, lengths=lengths)
    with pytest.raises(RuntimeError, match="floating point dtype can require gradients"):
        run_and_check(operator, "backward", dtype)


def test_quantised_rows_come_near_the_numbers_packed() -> None:
    import torch

    shape = full_shape(EmbeddingBag(), rows=50, dim=32)
    for dtype, step in [("int8", 1 / 255), ("int4", 1 / 15)]:
        maker = Maker(dtype, "cpu")
        table = EmbeddingBag().make_inputs(shape, maker)["table"]
        assert table.shape == (50, {"int8": 32 + 8, "int4": 16 + 4}[dtype])
        ops = torch.ops.quantized
        unpacked = (ops.embedding_bag_byte_unpack if dtype == "int8" else ops.embedding_bag_4bit_unpack)(table)
        assert unpacked.std() == pytest.approx(1, abs=0.1)
        # Rounding spoils a row by half a step of its own range at most (int4 keeps scale and bias in float16).
        spread = unpacked.max(1).values - unpacked.min(1).values
        distances = (unpacked - unpacked.min(1, keepdim=True).values) / (spread[:, None] * step)
        assert torch.allclose(distances, distances.round(), atol=0.02)


def test_int4_needs_pairs() -> None:
    with pytest.raises(NotImplementedError, match="dim is even; dim=7"):
        EmbeddingBag().make_inputs(full_shape(EmbeddingBag(), dim=7), Maker("int4", "cpu"))


def test_long_quantised_tables_repeat() -> None:
    import torch

    shape = full_shape(EmbeddingBag(), rows=PACKED_ROWS + 5, dim=2)
    table = EmbeddingBag().make_inputs(shape, Maker("int8", "cpu"))["table"]
    assert table.shape == (PACKED_ROWS + 5, 2 + 8)
    assert torch.equal(table[PACKED_ROWS:], table[:5])


def test_the_sparse_gradient_holds_a_row_for_each_lookup_and_no_copy_of_the_indices() -> None:
    import torch

    shape = full_shape(EmbeddingBag(), gradient="sparse")
    inputs = EmbeddingBag().make_inputs(shape, Maker("float32", "cpu"))
    table = inputs["table"].requires_grad_()
    output = EmbeddingBag().bind(shape, inputs)()
    (gradient,) = torch.autograd.grad(output, table, torch.ones_like(output))
    assert (gradient.is_sparse, gradient.is_coalesced()) == (True, False)
    assert gradient._values().shape == (6 * 5, 8)
    assert gradient._indices().data_ptr() == inputs["indices"].data_ptr()


@pytest.mark.parametrize("gradient", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_thousands_of_lookups_of_a_row_pass_in_short_floats(gradient: str, dtype: str) -> None:
    run_and_check(EmbeddingBag(), "backward", dtype, rows=3, batch=4000, gradient=gradient)


@named
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_wrong_row_is_found(operator: Operator, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker(dtype, "cpu"))
    bind = type(operator).bind

    def bind_with_one_index_off(self: Operator, shape: Any, inputs: Any) -> Any:
        indices = inputs["indices"].clone()
        indices[3] = (indices[3] + 1) % shape["rows"]
        return bind(self, shape, {**inputs, "indices": indices})

    operator.check(shape, inputs, dtype, "forward")
    monkeypatch.setattr(type(operator), "bind", bind_with_one_index_off)
    with pytest.raises(WrongResultError, match=operator.name):
        operator.check(shape, inputs, dtype, "forward")
    if dtype in FLOATS:
        with pytest.raises(WrongResultError, match=rf"{operator.name} backward \(table\)"):
            operator.check(shape, inputs, dtype, "backward")


def test_each_table_has_its_own_rows_and_its_share_of_lookups() -> None:
    shape = full_shape(EmbeddingBags(), lengths="drawn", indices="zipf")
    inputs = EmbeddingBags().make_inputs(shape, Maker("float32", "cpu"))
    assert inputs["table"].shape == (3 * 40, 8)
    for table in range(3):
        own = inputs["indices"][table * 4 * 5 : (table + 1) * 4 * 5]
        assert int(own.min()) >= table * 40
        assert int(own.max()) < (table + 1) * 40
        assert int(inputs["offsets"][table * 4]) == table * 4 * 5
    lengths = drawn_lengths(4, 5, SEED)
    assert inputs["offsets"][:4].tolist() == [sum(lengths[:bag]) for bag in range(4)]
    assert drawn_lengths(4, 5, SEED + 1) != lengths


def test_two_makers_make_the_same_lookups_and_two_sets_differ() -> None:
    import torch

    for indices in ("uniform", "zipf"):
        shape = full_shape(EmbeddingBag(), indices=indices, lengths="drawn")
        maker = Maker("float32", "cpu")
        first, second = (EmbeddingBag().make_inputs(shape, maker) for _ in range(2))
        again = EmbeddingBag().make_inputs(shape, Maker("float32", "cpu"))
        assert torch.equal(first["indices"], again["indices"])
        assert torch.equal(first["offsets"], again["offsets"])
        assert not torch.equal(first["indices"], second["indices"])


# Distributions


@given(batch=st.integers(1, 300), pooling=st.integers(1, 60), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_drawn_lengths_have_the_exact_sum(batch: int, pooling: int, seed: int) -> None:
    lengths = drawn_lengths(batch, pooling, seed)
    assert len(lengths) == batch
    assert sum(lengths) == batch * pooling
    assert min(lengths) >= 0
    assert lengths == drawn_lengths(batch, pooling, seed)


def test_drawn_lengths_are_geometric() -> None:
    """Of mean 10: empty with probability 1 / 11, and longer than 30 with (10 / 11) ** 31."""
    lengths = drawn_lengths(40_000, 10, 1)
    assert sum(length == 0 for length in lengths) / 40_000 == pytest.approx(1 / 11, rel=0.05)
    assert sum(length > 30 for length in lengths) / 40_000 == pytest.approx((10 / 11) ** 31, rel=0.1)


@given(
    rows=st.one_of(st.integers(1, 3 * EXACT_RANKS), st.integers(1, 2**40)),
    alpha=st.one_of(st.floats(0, 10), st.sampled_from([0.0, 1.0, 1 - 1e-12, 1 + 1e-12, 10.0])),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_ranks_are_in_range_and_seeded_and_hotter_ones_come_first(rows: int, alpha: float, seed: int) -> None:
    ranks = draw(rows, alpha, count=2000, seed=seed)
    assert ranks.equal(draw(rows, alpha, count=2000, seed=seed))
    spread = spread_ranks(ranks, rows)
    for drawn in (ranks, spread):
        assert (str(drawn.dtype), len(drawn)) == ("torch.int64", 2000)
        assert 0 <= int(drawn.min()) <= int(drawn.max()) < rows
    # The lower half of the ranks is at least as likely as the upper one; five deviations of 2000 coins are 112.
    assert int((ranks < (rows + 1) // 2).sum()) >= 2000 / 2 - 112


@given(rows=st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_each_rank_has_a_row_of_its_own_and_neighbours_lie_apart(rows: int) -> None:
    import torch

    spread = spread_ranks(torch.arange(rows), rows)
    assert sorted(spread.tolist()) == list(range(rows))
    if rows >= 100:
        apart = (spread[1:] - spread[:-1]).abs()
        assert int(apart.min()) >= rows // 4


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("rows", [7, EXACT_RANKS, EXACT_RANKS + 1, 4000])
def test_ranks_have_the_declared_probabilities(rows: int, alpha: float) -> None:
    """Counts of geometric groups of ranks against the exact sums, within five deviations."""
    import torch

    count = 200_000
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-alpha)
    probabilities = weights / weights.sum()
    counts = torch.bincount(draw(rows, alpha, count=count), minlength=rows)
    begin = 0
    while begin < rows:
        end = min(rows, max(begin + 1, begin * 5 // 4))
        expected = float(probabilities[begin:end].sum())
        deviation = (count * expected * (1 - expected)) ** 0.5
        assert abs(int(counts[begin:end].sum()) - count * expected) <= 5 * deviation + 1
        begin = end


def test_alpha_zero_is_uniform() -> None:
    import torch

    tenths = torch.bincount(draw(26_000_000, 0.0, count=100_000) // 2_600_000, minlength=10)
    assert all(abs(int(one) - 10_000) < 500 for one in tenths)


def test_the_tail_of_a_huge_table_has_its_share() -> None:
    """Half of 1/r over 26 million ranks lies before rank √(26e6)·e^(−γ/2)."""
    rows = 26_000_000
    middle = rows**0.5 * 2.718281828459045 ** (-0.5772156649 / 2)
    assert int((draw(rows, 1.0) < middle).sum()) == pytest.approx(25_000, abs=5 * 112)


def test_a_zipf_case_is_skewed_and_not_by_neighbouring_rows() -> None:
    import torch

    shape = full_shape(EmbeddingBag(), rows=10_000, batch=2000, indices="zipf")
    indices = EmbeddingBag().make_inputs(shape, Maker("float32", "cpu"))["indices"]
    counts = torch.bincount(indices, minlength=10_000)
    hottest = counts.topk(4).indices.sort().values
    assert int(counts.max()) > 50 * 2000 * 5 / 10_000
    assert int(hottest.diff().min()) > 1000


# Parameters


@named
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"indices": "normal"}, r"indices is uniform, zipf or file:PATH"),
        ({"indices": "file:"}, r"indices is uniform, zipf or file:PATH"),
        ({"alpha": -0.1}, "alpha is 0 to 10"),
        ({"alpha": float("nan")}, "alpha is 0 to 10"),
        ({"alpha": 11.0}, "alpha is 0 to 10"),
        ({"lengths": "drawn", "indices": "file:x"}, "the file gives the lengths"),
        ({"lookups": 30}, "lookups is for indices=file:PATH alone"),
    ],
)
def test_what_cannot_be_is_refused(operator: Operator, changes: dict[str, Any], rule: str) -> None:
    operator.check_shape(full_shape(operator))
    with pytest.raises(ValueError, match=rule):
        operator.check_shape(full_shape(operator, **changes))


def test_a_table_of_no_file_is_refused() -> None:
    EmbeddingBag().check_shape(full_shape(EmbeddingBag(), indices="file:x", table=2))
    with pytest.raises(ValueError, match="table is for indices=file:PATH alone"):
        EmbeddingBag().check_shape(full_shape(EmbeddingBag(), table=2))


# Files: two tables of three bags, [[0, 1], [], [2, 2, 3, 9]] and [[4], [5, 6], [7]]

INDICES = [0, 1, 2, 2, 3, 9, 4, 5, 6, 7]
LENGTHS = [[2, 0, 4], [1, 2, 1]]


def write(path: Path, *, indices: Any = None, offsets: Any = None, lengths: Any = None, **options: Any) -> str:
    import torch

    lengths = torch.tensor(LENGTHS) if lengths is None else lengths
    if offsets is None:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    torch.save((torch.tensor(INDICES) if indices is None else indices, offsets, lengths), path, **options)
    return f"file:{path}"


def from_file(operator: Operator, text: str, **changes: Any) -> dict[str, Any]:
    shape = full_shape(operator, indices=text, **{"rows": 10, "dim": 4, **changes})
    operator.check_shape(shape)
    return {name: tensor.tolist() for name, tensor in operator.make_inputs(shape, Maker("float32", "cpu")).items()}


@pytest.mark.parametrize("zipped", [True, False])
def test_bags_of_a_file(tmp_path: Path, zipped: bool) -> None:
    text = write(tmp_path / "lookups.pt", _use_new_zipfile_serialization=zipped)
    first = from_file(EmbeddingBag(), text, batch=3, pooling=2)
    assert (first["indices"], first["offsets"]) == ([0, 1, 2, 2, 3, 9], [0, 2, 2])
    second = from_file(EmbeddingBag(), text, batch=2, pooling=1, lookups=3, table=1)
    assert (second["indices"], second["offsets"]) == ([4, 5, 6], [0, 1])
    both = from_file(EmbeddingBags(), text, tables=2, batch=3, pooling=2, lookups=10)
    assert both["indices"] == [0, 1, 2, 2, 3, 9, 10 + 4, 10 + 5, 10 + 6, 10 + 7]
    assert both["offsets"] == [0, 2, 2, 6, 7, 9]
    fewer = from_file(EmbeddingBags(), text, tables=2, batch=1, pooling=1, lookups=3)
    assert (fewer["indices"], fewer["offsets"]) == ([0, 1, 10 + 4], [0, 2])


@pytest.mark.parametrize("direction", PASSES)
def test_results_with_a_file(tmp_path: Path, direction: str) -> None:
    text = write(tmp_path / "lookups.pt")
    run_and_check(EmbeddingBag(), direction, indices=text, rows=10, batch=3, pooling=2)
    run_and_check(EmbeddingBags(), direction, indices=text, rows=10, batch=3, tables=2, lookups=10)
    shape = {"indices": text, "rows": 10, "batch": 3, "tables": 2, "lookups": 10}
    footprint = EmbeddingBags().footprint_bytes(full_shape(EmbeddingBags(), **shape), "float32")
    assert moved_by_hand(EmbeddingBags(), **shape) == footprint == 4 * (2 * 10 * 8 + 6 * 8) + 8 * (10 + 6)


def test_the_declared_lookups_must_be_those_of_the_file(tmp_path: Path) -> None:
    text = write(tmp_path / "lookups.pt")
    with pytest.raises(BadInputError, match=r"3 bags chosen have 6 lookups \(2 each\), not the 9 declared") as caught:
        from_file(EmbeddingBag(), text, batch=3, pooling=3)
    assert caught.value.where == str(tmp_path / "lookups.pt")
    assert caught.value.hint == "give pooling=2"
    # Four lookups in three bags: the nearest whole pooling is a quarter off.
    with pytest.raises(BadInputError, match="3 bags chosen have 4 lookups") as caught:
        from_file(EmbeddingBag(), text, batch=3, pooling=1, table=1)
    assert caught.value.hint == "give lookups=4"
    with pytest.raises(BadInputError, match="not the 5 declared") as caught:
        from_file(EmbeddingBag(), text, batch=3, lookups=5, table=1)
    assert caught.value.hint == "give lookups=4"


@pytest.mark.parametrize(
    ("longer", "pooling", "passes"), [(4, 10, True), (6, 10, False), (1, 10, True), (90, 20, False)]
)
def test_a_nearest_whole_pooling_may_be_five_percent_off(
    tmp_path: Path, longer: int, pooling: int, passes: bool
) -> None:
    """Ten bags of ten lookups, of which the last is longer."""
    import torch

    lengths = torch.full((1, 10), 10)
    lengths[0, 9] += longer
    text = write(tmp_path / "lookups.pt", lengths=lengths, indices=torch.zeros(100 + longer, dtype=torch.int64))
    if passes:
        assert len(from_file(EmbeddingBag(), text, batch=10, pooling=pooling)["indices"]) == 100 + longer
    else:
        with pytest.raises(BadInputError, match=f"have {100 + longer} lookups"):
            from_file(EmbeddingBag(), text, batch=10, pooling=pooling)


def test_another_pooling_than_the_nearest_may_be_one_percent_off(tmp_path: Path) -> None:
    """A mean of 149.6 is nearest to 150; 149 and 151 are within 1 %, 152 is not."""
    import torch

    lengths = torch.tensor([[150, 150, 150, 149, 149]])
    text = write(tmp_path / "lookups.pt", lengths=lengths, indices=torch.zeros(748, dtype=torch.int64))
    for pooling in (149, 150, 151):
        from_file(EmbeddingBag(), text, batch=5, pooling=pooling)
    with pytest.raises(BadInputError, match="have 748 lookups") as caught:
        from_file(EmbeddingBag(), text, batch=5, pooling=152)
    assert caught.value.hint == "give pooling=150"


def test_a_file_must_have_what_is_asked_for(tmp_path: Path) -> None:
    text = write(tmp_path / "lookups.pt")
    for operator, changes in [
        (EmbeddingBag(), {"table": 2, "batch": 3}),
        (EmbeddingBag(), {"batch": 4}),
        (EmbeddingBags(), {"tables": 3, "batch": 3}),
    ]:
        with pytest.raises(BadInputError, match="the file holds 2 tables of 3 bags") as caught:
            from_file(operator, text, **changes)
        assert "first 2 tables, and batch=3 or less" in str(caught.value.hint)
    with pytest.raises(
        BadInputError, match="table 0 has indices from 0 to 9; they must be 0 to rows − 1, and rows=9"
    ) as caught:
        from_file(EmbeddingBag(), text, batch=3, pooling=2, rows=9)
    assert caught.value.hint == "give rows=10 or more"


def test_a_negative_index_is_refused(tmp_path: Path) -> None:
    import torch

    text = write(tmp_path / "lookups.pt", indices=torch.tensor(INDICES) - 1)
    with pytest.raises(BadInputError, match="indices from -1 to 8"):
        from_file(EmbeddingBag(), text, batch=3, pooling=2)


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "lookups.pt"
    three = torch.tensor([0, 2, 2, 6, 7, 9, 10])
    for changes, reason in [
        ({"indices": torch.ones(10)}, "not of whole numbers"),
        ({"lengths": torch.tensor(LENGTHS).flatten(), "offsets": three}, r"shapes are \(10,\), \(7,\), \(6,\)"),
        ({"offsets": three[:-1]}, r"shapes are \(10,\), \(6,\), \(2, 3\)"),
        ({"offsets": three + 1}, "offsets run from 1 to 11, indices are 10"),
        ({"offsets": three[[0, 2, 1, 3, 4, 5, 6]] + torch.tensor([0, 1, 0, 0, 0, 0, 0])}, "table 0 contradict"),
        ({"indices": torch.tensor(INDICES[:4])}, "offsets run from 0 to 10, indices are 4"),
        ({"lengths": torch.tensor([[7, -5, 4], [1, 2, 1]])}, "table 0 contradict"),
    ]:
        with pytest.raises(BadInputError, match=reason):
            from_file(EmbeddingBag(), write(path, **changes), batch=3, pooling=2)
    for held in [torch.ones(3), (three, three), {"indices": three}, (1, 2, 3)]:
        torch.save(held, path)
        with pytest.raises(BadInputError, match="no tuple of three tensors"):
            from_file(EmbeddingBag(), f"file:{path}")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lookups.pt"
    with pytest.raises(BadInputError, match="cannot be read: No such file") as caught:
        from_file(EmbeddingBag(), f"file:{path}")
    assert caught.value.where == str(path)
    with pytest.raises(BadInputError, match="cannot be read"):
        from_file(EmbeddingBag(), f"file:{tmp_path}")
    whole = write(path)
    content = path.read_bytes()
    for spoiled in [b"", b"rows,dim\n1,2\n", content[: len(content) // 2], b"\x80\x02garbage"]:
        path.write_bytes(spoiled)
        with pytest.raises(BadInputError, match=r"torch\.load does not read it"):
            from_file(EmbeddingBag(), whole)
    packed = tmp_path / "lookups.pt.gz"
    packed.write_bytes(gzip.compress(content))
    with pytest.raises(BadInputError, match=r"torch\.load does not read it") as caught:
        from_file(EmbeddingBag(), f"file:{packed}")
    assert caught.value.hint == "gunzip it first"
