"""CvT: size, data, training, and that the optimized implementation computes the same and faults are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.bench.workloads.catalogue import Declared, read_catalogue
from stepscope.bench.workloads.check import check_optimized
from stepscope.bench.workloads.findings import CheckReport
from stepscope.bench.workloads.models import cvt
from stepscope.bench.workloads.models.cvt import FastCvt
from stepscope.bench.workloads.protocol import EAGER, Precision, Setting
from stepscope.bench.workloads.steps import TrainStep

CVT = read_catalogue()["cvt"]
TRAIN, INFER = CVT.benchmark


def run_check(one: Declared, *, precision: Precision = "fp32", traced: bool = False) -> CheckReport:
    calm = CVT.make_task(CVT.make_task(one.sizes_at("tiny")).deterministic())
    fast = FastCvt(calm)
    engine = fast.engine(one.mode)._replace(fullgraph=True) if traced else EAGER
    fast.engine = lambda mode: engine  # type: ignore[method-assign]
    count = one.tiny.batch_size
    return check_optimized(calm, fast, Setting(one.mode, precision, "cpu", "eager"), batch_size=count)


def test_full_size_has_the_published_parameters() -> None:
    with torch.device("meta"):
        module = CVT.make_task(TRAIN.sizes).build()
    counts = [parameter.numel() for parameter in module.parameters()]
    assert (len(counts), sum(counts)) == (342, 19_997_480)
    assert TRAIN.parameters == INFER.parameters == 19_997_480


def test_images_are_normalised_and_the_same_for_the_same_seed() -> None:
    task = CVT.make_task(TRAIN.sizes)
    first, again, other = (task.make_batch(2, seed=seed, mode="train") for seed in (1, 1, 2))
    pixels = first["pixel_values"]
    assert pixels.shape == (2, 3, 224, 224)
    assert torch.equal(pixels, again["pixel_values"])
    assert not torch.equal(pixels, other["pixel_values"])
    assert float(pixels.std()) == pytest.approx(1, abs=0.05)
    # Neighbours are alike.
    assert float((pixels[..., 1:] * pixels[..., :-1]).mean()) > 0.4
    assert "labels" not in task.make_batch(2, seed=1, mode="infer")


def test_loss_falls_with_dropped_paths() -> None:
    torch.manual_seed(1)
    task = CVT.make_task({**TRAIN.sizes_at("tiny"), "drop_path": 0.1})
    batch = task.make_batch(4, seed=1, mode="train")
    step = TrainStep(task, task.build().train(), [batch], Setting("train", "fp32", "cpu"))
    losses = []
    for _ in range(20):
        step()
        losses.append(float(step.loss))
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("one", [TRAIN, INFER], ids=["train", "infer"])
def test_fast_form_computes_the_same(one: Declared) -> None:
    report = run_check(one, precision="bf16")
    assert report.passed, report.failures


def test_fast_form_computes_the_same_in_fp16() -> None:
    assert run_check(INFER, precision="fp16").passed


def test_fast_form_computes_the_same_when_compiled() -> None:
    torch._dynamo.reset()
    report = run_check(INFER, traced=True)
    assert report.passed, report.failures


def test_dropped_paths_are_those_of_the_definition() -> None:
    """With the same random numbers the optimized implementation drops the same images."""
    task = CVT.make_task({**TRAIN.sizes_at("tiny"), "drop_path": 0.9})
    torch.manual_seed(1)
    module = task.build().train()
    batch = task.make_batch(16, seed=1, mode="train")
    losses = []
    for use, one in ((task, module), (fast := FastCvt(task), fast.convert(module, mode="train", precision="fp32"))):
        torch.manual_seed(2)
        losses.append(float(use.loss(one, batch).detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_running_statistics_are_kept() -> None:
    task = CVT.make_task(TRAIN.sizes_at("tiny"))
    calm, fast = CVT.make_task(task.deterministic()), FastCvt(CVT.make_task(task.deterministic()))
    torch.manual_seed(1)
    plain = calm.build().train()
    torch.manual_seed(1)
    lean = fast.convert(calm.build().train(), mode="train", precision="fp32")
    batch = calm.make_batch(4, seed=1, mode="train")
    calm.loss(plain, batch)
    fast.loss(lean, batch)
    ours, theirs = (sorted(float(b.double().sum()) for _, b in one.named_buffers()) for one in (lean, plain))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("height", [6, 7])
def test_shifted_sums_are_convolutions(stride: int, height: int) -> None:
    generator = torch.Generator().manual_seed(1)
    grid, weights = torch.randn(2, height, 5, 4, generator=generator), torch.randn(2, 4, 1, 3, 3, generator=generator)
    ours = cvt.convolve_by_shifts(grid, weights, stride=stride, padding=1)
    for a, weight in zip(ours, weights, strict=True):
        b = torch.nn.functional.conv2d(grid.permute(0, 3, 1, 2), weight, stride=stride, padding=1, groups=4)
        torch.testing.assert_close(a, b.permute(0, 2, 3, 1))


def test_every_change_is_told_once() -> None:
    fast = FastCvt(CVT.make_task(TRAIN.sizes))
    for one in (TRAIN, INFER):
        names = [change.name for change in fast.changes(mode=one.mode, precision="bf16")]
        assert len(set(names)) == len(names)
        assert ("folded batch norms" in names) == (one is INFER)
        assert "convolutions as shifted sums" in names


# Faults that the check must see.


@pytest.mark.parametrize("one", [TRAIN, INFER], ids=["train", "infer"])
def test_wrong_attention_scale_is_found(one: Declared, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the width of a head, as everywhere else: the definition takes that of all heads."""
    make = cvt.LeanAttention.__init__

    def make_wrong(self: Any, plain: Any, **how: Any) -> None:
        make(self, plain, **how)
        self.scale = (plain.embed_dim // plain.num_heads) ** -0.5

    monkeypatch.setattr(cvt.LeanAttention, "__init__", make_wrong)
    assert not run_check(one).passed


def test_batch_norm_folded_without_its_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fold = cvt.fold_one

    def fold_wrong(*parts: Any) -> Any:
        weight, bias = fold(*parts)
        return weight, torch.zeros_like(bias)

    monkeypatch.setattr(cvt, "fold_one", fold_wrong)
    assert not run_check(INFER).passed


def test_key_and_value_exchanged_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = cvt.convolve_by_shifts
    monkeypatch.setattr(cvt, "convolve_by_shifts", lambda *a, **how: shift(*a, **how)[::-1])
    assert not run_check(TRAIN).passed
