"""DLRM of the suite: sizes, data, training and inference at tiny scale, and that the optimized implementation is the
same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.bench.workloads.catalogue import Declared, read_catalogue
from stepscope.bench.workloads.check import check_optimized
from stepscope.bench.workloads.findings import CheckReport
from stepscope.bench.workloads.models.dlrm import fast_network, optimized
from stepscope.bench.workloads.models.dlrm.ootb import DlrmTask, QuantisedBag, WeightedBag, draw_rows, read_tables
from stepscope.bench.workloads.models.dlrm.optimized import DlrmOptimized
from stepscope.bench.workloads.precision import build_module
from stepscope.bench.workloads.protocol import Mode, Precision, Setting
from stepscope.bench.workloads.steps import InferStep, TrainStep

MODEL = read_catalogue()["dlrm"]
TRAINED = [one for one in MODEL.benchmark if one.mode == "train"]
every = pytest.mark.parametrize("declared", MODEL.benchmark, ids=lambda one: f"{one.mode}-{one.config}")
trained = pytest.mark.parametrize("declared", TRAINED, ids=lambda one: one.config)

A_TRAIN, A_INFER, DEFAULT = "A.1dev-embed32-fp32", "A.1dev-embed4-fp16", "default.1dev-fp32"


def find(config: str, mode: Mode = "train") -> Declared:
    [found] = [one for one in MODEL.benchmark if (one.config, one.mode) == (config, mode)]
    return found


def make_tiny(declared: Declared, **other: Any) -> DlrmTask:
    task = MODEL.make_task({**declared.sizes_at("tiny"), **other})
    assert isinstance(task, DlrmTask)
    return task


def check(task: DlrmTask, mode: Mode = "train", precision: Precision = "fp32", *, device: str = "cpu") -> CheckReport:
    calm = DlrmTask(task.deterministic())
    return check_optimized(calm, DlrmOptimized(calm), Setting(mode, precision, device, "eager"), batch_size=256)


# Sizes


def test_all_configs_are_declared() -> None:
    assert {(one.mode, one.config) for one in MODEL.benchmark} == {
        *[("train", f"A.{count}dev-embed32-fp32") for count in (1, 8, 16)],
        ("train", "small.1dev-embed32-fp32"),
        *[("train", f"{name}.1dev-fp32") for name in ("default", "mlperf", "ddp", "open-source", "random")],
        *[("infer", f"A.1dev-embed4-{precision}") for precision in ("fp32", "fp16")],
        ("infer", DEFAULT),
    }


@every
def test_number_of_weights(declared: Declared) -> None:
    with torch.device("meta"):
        module = MODEL.make_task(declared.sizes).build()
    if declared.parameters is not None:
        assert sum(one.numel() for one in module.parameters()) == declared.parameters


def test_weights_of_variant_a() -> None:
    """As tallied: 260,104,693 dense ones and 45,949,440 in tables, beside one for each row."""
    with torch.device("meta"):
        module = DlrmTask(find(A_TRAIN).sizes).build()
    assert sum(one.numel() for name, one in module.named_parameters() if not name.startswith("tables")) == 260_104_693
    assert sum(one.numel() for one in module.top.parameters()) == 252_312_001
    bags = [one for one in module.tables if isinstance(one, WeightedBag)]
    assert sum(one.weight.numel() for one in bags) == 45_949_440
    assert sum(one.row_weights.weight.numel() for one in bags) == 248 * 965


def test_weights_of_variant_a_for_inference() -> None:
    with torch.device("meta"):
        module = DlrmTask(find(A_INFER, "infer").sizes).build()
    bags = [one for one in module.tables if isinstance(one, QuantisedBag)]
    packed = [one.get_buffer("packed") for one in bags]
    assert sum(one.shape[0] * 2 * (one.shape[1] - 4) for one in packed) == 3_254_138_208
    assert sum(one.numel() for one in packed) == 61 * 555_693 * 52


def test_rows_are_cut_to_the_cap() -> None:
    tables = DlrmTask(find("mlperf.1dev-fp32").sizes).tables
    assert len(tables.rows) == 26
    assert max(tables.rows) == 4_000_000
    assert min(tables.rows) == 3
    assert set(tables.lookups) == {1}


def test_drawn_tables_are_skewed_and_the_same_again() -> None:
    sizes = find("random.1dev-fp32").sizes
    assert read_tables(sizes) == read_tables(dict(sizes))
    tasks = [read_tables({**sizes, "table_seed": seed}) for seed in range(40)]
    assert all(9 <= len(one.rows) <= 17 for one in tasks)
    assert len({len(one.rows) for one in tasks}) > 4
    assert all(min(one.lookups) >= 20 for one in tasks[1::2])
    usual = sorted(reads for one in tasks[::2] for reads in one.lookups)
    assert usual[len(usual) // 2] < 12
    assert usual[-1] > 60
    rows = sorted(length for one in tasks for length in one.rows)
    assert rows[-1] > 10 * rows[len(rows) // 2]
    assert rows[-1] <= sizes["row_cap"]


def test_the_small_model_is_what_it_was() -> None:
    module = DlrmTask(find("small.1dev-embed32-fp32").sizes).build()
    shapes = [tuple(one.shape) for one in module.parameters()]
    assert shapes == [
        (64, 13),
        (64,),
        (16, 64),
        (16,),
        *[(1000, 16)] * 8,
        (64, 52),
        (64,),
        (32, 64),
        (32,),
        (1, 32),
        (1,),
    ]
    assert not any(one.sparse for one in module.tables if isinstance(one, torch.nn.EmbeddingBag))


# Data


@every
def test_batches_are_the_same_again_and_have_one_shape(declared: Declared) -> None:
    task = make_tiny(declared)
    first, again, other = (task.make_batch(24, seed=seed, mode=declared.mode) for seed in (1, 1, 2))
    assert ("labels" in first) == (declared.mode == "train")
    for name, one in first.items():
        assert torch.equal(one, again[name])
        assert one.shape == other[name].shape
    assert not torch.equal(first["indices"], other["indices"])
    parts = first["indices"].split([24 * each for each in task.tables.lookups])
    for part, rows in zip(parts, task.tables.rows, strict=True):
        assert int(part.min()) >= 0
        assert int(part.max()) < rows
    assert (first["offsets"].diff(dim=1) >= 0).all()
    assert first["offsets"].shape == (len(task.tables.rows), 24)


@pytest.mark.parametrize(("exponent", "least", "most"), [(0.0, 0.0, 0.004), (1.05, 0.08, 0.16), (1.0, 0.08, 0.16)])
def test_indices_are_as_skewed_as_declared(exponent: float, least: float, most: float) -> None:
    """The share of the most frequent of 1000 rows; all rows are in reach."""
    drawn = draw_rows(200_000, 1000, exponent, torch.Generator().manual_seed(1))
    counts = drawn.bincount(minlength=1000)
    assert least <= int(counts.max()) / 200_000 <= most
    assert len(counts) == 1000
    assert int((counts > 0).sum()) > 990


def test_clicks_depend_on_what_is_seen() -> None:
    batch = make_tiny(find(DEFAULT)).make_batch(4000, seed=3, mode="train")
    taste = batch["dense"].sum(dim=1)
    clicked = batch["labels"] == 1
    assert 0.2 < float(batch["labels"].mean()) < 0.5
    assert float(taste[clicked].mean()) > float(taste[~clicked].mean()) + 1


def test_drawn_lengths_differ_and_fill_the_same_space() -> None:
    task = make_tiny(find("open-source.1dev-fp32"))
    batch = task.make_batch(200, seed=1, mode="train")
    lengths = batch["offsets"].diff(dim=1)
    assert (lengths.max(dim=1).values > 2 * torch.tensor(task.tables.lookups)).all()
    assert len(batch["indices"]) == 200 * sum(task.tables.lookups)


# Plain form


@trained
def test_the_loss_falls(declared: Declared) -> None:
    task = make_tiny(declared, learning_rate=0.05)
    torch.manual_seed(1)
    module = task.build()
    batches = [task.make_batch(128, seed=1, mode="train")]
    step = TrainStep(task, module, batches, Setting("train", "fp32", "cpu"))
    losses = []
    for _ in range(8):
        step()
        assert step.loss is not None
        losses.append(float(step.loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_packed_rows_are_read_as_written(precision: str) -> None:
    bag = QuantisedBag(3, 8, lookups=2, spread=0.1)
    dtype = torch.float32 if precision == "fp32" else torch.float16
    header = torch.tensor([[0.5, -1.0], [2.0, 0.25], [1.0, 0.0]]).half()
    codes = torch.arange(24).reshape(3, 8) % 16
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    bag.get_buffer("packed").copy_(torch.cat([header.view(torch.uint8), packed], dim=1))
    bag.get_buffer("row_weights").copy_(torch.tensor([1.0, 2.0, 0.5]))
    rows = (codes * header[:, :1].float() + header[:, 1:].float()) * torch.tensor([[1.0], [2.0], [0.5]])
    pooled = bag.to(dtype)(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2]))
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.float(), torch.stack([rows[0] + rows[2], 2 * rows[1]]))


@pytest.mark.parametrize("config", [A_INFER, DEFAULT])
def test_inference_gives_chances(config: str) -> None:
    declared = find(config, "infer")
    task = make_tiny(declared)
    module = task.build().eval()
    step = InferStep(task, module, [task.make_batch(7, seed=1, mode="infer")], Setting("infer", "fp32", "cpu"))
    step()
    assert isinstance(step.outputs, torch.Tensor)
    assert step.outputs.shape == (7,)
    assert ((step.outputs > 0) & (step.outputs < 1)).all()
    assert float(step.outputs.std()) > 0.01, "chances that do not depend on the example check nothing"


# Fast form


@every
def test_the_fast_form_is_the_same_model(declared: Declared) -> None:
    report = check(make_tiny(declared), declared.mode, "bf16")
    assert report.passed, report.failures
    assert {one.precision for one in report.findings} == {"fp32", "bf16"}


@pytest.mark.parametrize("config", ["A.1dev-embed4-fp32", DEFAULT])
def test_the_fast_form_in_halves(config: str) -> None:
    assert check(make_tiny(find(config, "infer")), "infer", "fp16").passed


@pytest.mark.parametrize("lengths", ["fixed", "drawn"])
def test_learned_weights_of_long_tables(lengths: str) -> None:
    """Rows are gathered, and no update is made in backward."""
    task = make_tiny(find(DEFAULT), pooling="learned", lengths=lengths)
    module = DlrmOptimized(task).convert(task.build(), mode="train", precision="fp32")
    assert isinstance(module, fast_network.FastDlrm)
    assert isinstance(module.lookup, fast_network.GatheredTables)
    assert module.arm(0.01) == []
    assert check(task).passed


def test_only_an_optimizer_makes_backward_update_the_table() -> None:
    task = make_tiny(find(DEFAULT))
    fast = DlrmOptimized(task)
    module = fast.convert(task.build(), mode="train", precision="fp32")
    batch = fast.make_batch(16, seed=1, mode="train")
    table = module.get_parameter("lookup.weight")
    before = table.detach().clone()
    fast.loss(module, batch).backward()  # type: ignore[no-untyped-call]
    gradient = table.grad
    assert gradient is not None
    assert torch.equal(table, before)
    optimizer = fast.make_optimizer(module)
    module.zero_grad()
    fast.loss(module, batch).backward()  # type: ignore[no-untyped-call]
    assert table.grad is None
    torch.testing.assert_close(table.detach(), before - 0.01 * gradient)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert not any(one is table for one in held)


@trained
def test_accumulated_batches_make_one_update(declared: Declared) -> None:
    """That of their mean loss: the tables, too, stay what they are between the batches."""
    fast = DlrmOptimized(make_tiny(declared, learning_rate=1.0))
    batches = [fast.make_batch(16, seed=seed, mode="train") for seed in (1, 2, 3)]
    stepped, expected = (build_module(fast, Setting("train", "fp32", "cpu"), seed=1) for _ in range(2))
    TrainStep(fast, stepped, batches, Setting("train", "fp32", "cpu"), accumulate=3)()
    torch.stack([fast.loss(expected, batch) for batch in batches]).mean().backward()  # type: ignore[no-untyped-call]
    for name, weight in expected.named_parameters():
        assert weight.grad is not None
        updated = weight.detach() - weight.grad
        torch.testing.assert_close(
            stepped.get_parameter(name).detach(), updated, msg=lambda told, name=name: f"{name}: {told}"
        )


def test_zeros_that_fill_up_stay_zeros() -> None:
    task = make_tiny(find(A_TRAIN), learning_rate=0.5)
    fast = DlrmOptimized(task)
    module = fast.convert(task.build(), mode="train", precision="bf16")
    step = TrainStep(fast, module, [fast.make_batch(64, seed=1, mode="train")], Setting("train", "bf16", "cpu"))
    for _ in range(3):
        step()
    assert isinstance(module, fast_network.FastDlrm)
    for (outputs, inputs), layer in zip(module.top.shapes, module.top.layers, strict=True):
        weight = layer.get_parameter("weight")
        assert not weight[outputs:].any()
        assert not weight[:, inputs:].any()
        assert torch.equal(layer.get_buffer("weight_master").bfloat16(), weight)


@every
def test_changes_say_what_is_done(declared: Declared) -> None:
    fast = DlrmOptimized(make_tiny(declared))
    named = {one.name for one in fast.changes(mode=declared.mode, precision=declared.precision)}
    assert ("lookups as a matmul" in named) == (declared.mode == "train" and declared.config.startswith("A."))
    assert ("one packed table" in named) == ("embed4" in declared.config)
    assert ("bfloat16 weights with masters" in named) is False
    if declared.mode == "train":
        assert "bfloat16 weights with masters" in {one.name for one in fast.changes(mode="train", precision="bf16")}
        full = DlrmOptimized(DlrmTask(declared.sizes))
        assert full.changes(mode="train", precision="fp32") == fast.changes(mode="train", precision="fp32")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
@pytest.mark.parametrize("width", [16, 24, 64, 192])
def test_kernels_of_bags_are_what_the_host_computes(width: int) -> None:
    """Also bags without lookups, and rows that a bag has twice."""
    generator = torch.Generator().manual_seed(1)
    tables, batch, rows = 3, 17, 50
    lengths = torch.randint(0, 40, (tables * batch,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    indices = torch.randint(0, tables * rows, (int(offsets[-1]),), generator=generator).int()
    table = torch.randn(tables * rows, width, generator=generator)
    gradient = torch.randn(batch, tables, width, generator=generator)
    pooled = fast_network.sum_bags(table.cuda(), indices.cuda(), offsets.cuda(), tables=tables, dtype=torch.float32)
    expected = fast_network.sum_bags(table, indices, offsets, tables=tables, dtype=torch.float32)
    torch.testing.assert_close(pooled.cpu(), expected, atol=1e-4, rtol=1e-5)
    updated = table.cuda()
    fast_network.add_to_rows(updated, indices.cuda(), offsets.cuda(), gradient.cuda(), scale=-0.5)
    fast_network.add_to_rows(table, indices, offsets, gradient, scale=-0.5)
    torch.testing.assert_close(updated.cpu(), table, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_counts_and_packed_rows_are_what_the_host_computes(dtype: torch.dtype) -> None:
    counted = make_tiny(find(A_TRAIN))
    lookup = fast_network.CountedTables(list(counted.build().tables), counted.tables.lookups[0])  # type: ignore[arg-type]
    indices = DlrmOptimized(counted).make_batch(64, seed=1, mode="train")["indices"]
    counts = lookup.count(indices, dtype)
    assert torch.equal(lookup.cuda().count(indices.cuda(), dtype).cpu(), counts)
    packed = make_tiny(find(A_INFER, "infer"))
    records = fast_network.PackedTables(list(packed.build().tables), packed.sizes["width"])  # type: ignore[arg-type]
    batch = DlrmOptimized(packed).make_batch(64, seed=1, mode="infer")
    pooled = records(batch, dtype)
    moved = records.cuda()({"indices": batch["indices"].cuda()}, dtype)
    torch.testing.assert_close(moved.cpu(), pooled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
@every
def test_the_fast_form_on_a_gpu(declared: Declared) -> None:
    report = check(make_tiny(declared), declared.mode, "bf16", device="cuda")
    assert report.passed, report.failures


# Faults


def drop_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one but one of each perceptron."""
    make = fast_network.even_linear
    made: list[torch.nn.Linear] = []

    def forgetful(plain: torch.nn.Linear, *options: Any, **named: Any) -> torch.nn.Linear:
        made.append(make(plain, *options, **named))
        if plain.out_features == 50 and len(made) > 3:
            torch.nn.init.zeros_(made[-1].bias)
        return made[-1]

    monkeypatch.setattr(fast_network, "even_linear", forgetful)


@pytest.mark.parametrize(
    ("config", "mode"), [(A_TRAIN, "train"), (DEFAULT, "train"), (A_INFER, "infer"), (DEFAULT, "infer")]
)
def test_a_dropped_bias_is_found(monkeypatch: pytest.MonkeyPatch, config: str, mode: Mode) -> None:
    drop_a_bias(monkeypatch)
    report = check(make_tiny(find(config, mode)), mode)
    assert "outputs" in {one.what for one in report.failures} or "gradients" in {one.what for one in report.failures}


@pytest.mark.parametrize(("config", "mode"), [(DEFAULT, "train"), (A_INFER, "infer"), (DEFAULT, "infer")])
def test_a_wrong_table_offset_is_found(monkeypatch: pytest.MonkeyPatch, config: str, mode: Mode) -> None:
    """Of one table, by one row."""
    join = optimized._join_tables

    def shifted(parts: tuple[torch.Tensor, ...], starts: list[int]) -> torch.Tensor:
        return join(parts, [*starts[:2], starts[2] - 1, *starts[3:]])

    monkeypatch.setattr(optimized, "_join_tables", shifted)
    report = check(make_tiny(find(config, mode)), mode)
    assert not report.passed
    assert any(one.where.startswith("tables.") for one in report.failures) or mode == "infer"


def test_a_row_counted_once_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    count = fast_network.CountedTables.count

    def generous(self: fast_network.CountedTables, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        counts = count(self, indices, dtype)
        counts[1, :, 3] += 1
        return counts

    monkeypatch.setattr(fast_network.CountedTables, "count", generous)
    assert not check(make_tiny(find(A_TRAIN))).passed


def test_an_update_of_the_wrong_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are right, but the step that is timed makes 40 times the update of the tables."""
    add = fast_network.add_to_rows

    def hasty(*tensors: torch.Tensor, scale: float) -> None:
        add(*tensors, scale=scale if scale > 0 else 40 * scale)

    monkeypatch.setattr(fast_network, "add_to_rows", hasty)
    report = check(make_tiny(find(DEFAULT)))
    assert {one.what for one in report.failures} == {"convergence", "update"}
