"""Faults that a check must find whatever the model is."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from stepscope.bench.workloads import find_workload, list_workloads
from stepscope.bench.workloads.check import NOISE, _Perturbed, _Side, _Training, _Unchanged, check_optimized
from stepscope.bench.workloads.findings import HIGHEST, TOLERANCES, CheckReport, Finding
from stepscope.bench.workloads.protocol import EAGER, Change, Mode, Optimized, Precision, Setting, Task
from stepscope.records.kinds import WorkloadSpec

WIDTH = 24


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults show without compilation; the tests of the suite check what is compiled."""
    monkeypatch.setattr(_Side, "_engine", lambda self: EAGER)


@cache
def require_right(benchmark_id: str) -> None:
    """That nothing is found in what is not spoilt."""
    assert check(benchmark_id).passed


def check(benchmark_id: str, *, batch_size: int = 16) -> CheckReport:
    workload = find_workload(benchmark_id)
    plain, fast = workload.make_deterministic("tiny")
    return check_optimized(
        plain, fast, Setting(workload.declared.mode, "fp32", "cpu", "eager"), batch_size=batch_size,
    )  # fmt: skip


def failed(report: CheckReport) -> set[str]:
    return {one.what for one in report.failures}


@pytest.mark.parametrize(
    "benchmark_id", ["dlrm/optimized/train/A.1dev-embed32-fp32", "resnet50/optimized/train/1dev-fp32"]
)
def test_an_optimizer_that_does_nothing_is_found(benchmark_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_right(benchmark_id)
    workload = find_workload(benchmark_id)
    fast = type(workload.make_task("tiny"))
    right = fast.make_optimizer

    def idle(self: Any, module: Any) -> Any:
        optimizer = right(self, module)
        optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
        return optimizer

    monkeypatch.setattr(fast, "make_optimizer", idle)
    assert failed(check(benchmark_id)) == {"convergence", "update"}


def spoil_rate(optimizer: Any, module: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def spoil_decay(optimizer: Any, module: Any) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def spoil_clipping(optimizer: Any, module: Any) -> None:
    for group in optimizer.param_groups:
        group["max_norm"] = 1e9


def forget_vectors(optimizer: Any, module: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one.dim() > 1]


def freeze_tables(optimizer: Any, module: Any) -> None:
    module.lookup.rate = 0.0


@pytest.mark.parametrize(
    ("benchmark_id", "spoil"),
    [
        ("cvt/optimized/train/1dev-cvt13-fp32", spoil_rate),
        ("gpt2/optimized/train/small-1dev-fp32", spoil_rate),
        ("oscar/optimized/train/1dev-base-fp32", spoil_decay),
        ("resnet50/optimized/train/1dev-fp32", spoil_decay),
        ("rnnt/optimized/train/1dev-fp32", spoil_clipping),
        ("bert-base/optimized/train/1dev-seq128-fp32", forget_vectors),
        ("llama/optimized/train/1b-1dev-bf16", forget_vectors),
        ("dlrm/optimized/train/mlperf.1dev-fp32", forget_vectors),
        ("dlrm/optimized/train/mlperf.1dev-fp32", freeze_tables),
        ("dlrm/optimized/train/ddp.1dev-fp32", freeze_tables),
    ],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_wrong_update_is_found(benchmark_id: str, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these leaves outputs, loss and gradients as they are, and the loss falls nearly as it should."""
    require_right(benchmark_id)
    fast = type(find_workload(benchmark_id).make_task("tiny"))
    right = fast.make_optimizer

    def make_spoilt(self: Any, module: Any) -> Any:
        optimizer = right(self, module)
        spoil(optimizer, module)
        return optimizer

    monkeypatch.setattr(fast, "make_optimizer", make_spoilt)
    assert "update" in failed(check(benchmark_id))


@pytest.mark.parametrize("benchmark_id", ["resnet50/optimized/train/1dev-fp32", "cvt/optimized/train/1dev-cvt13-fp32"])
def test_norms_that_remember_nothing_are_found(benchmark_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = type(find_workload(benchmark_id).make_task("tiny"))
    right = fast.convert

    def convert(self: Any, module: Any, **how: Any) -> Any:
        converted = right(self, module, **how)
        for part in converted.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.momentum = 0.0
        return converted

    monkeypatch.setattr(fast, "convert", convert)
    assert failed(check(benchmark_id)) == {"statistics"}


def test_rounding_of_rows_that_are_added_one_by_one_is_no_wrong_update() -> None:
    report = check("dlrm/optimized/train/open-source.1dev-fp32", batch_size=256)
    assert report.passed, report.failures


def test_statistics_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.bench.workloads.models.convnets import layers

    right = layers.fold_one

    def forgetful(conv: Any, norm: Any) -> Any:
        norm.running_mean = torch.zeros_like(norm.running_mean)
        norm.running_var = torch.ones_like(norm.running_var)
        return right(conv, norm)

    require_right("resnet50/optimized/infer/1dev-fp32")
    monkeypatch.setattr(layers, "fold_one", forgetful)
    assert failed(check("resnet50/optimized/infer/1dev-fp32")) == {"outputs"}


class Deep(Task):
    """So many batch norms that the last bit of a weight shows in every gradient."""

    def build(self) -> torch.nn.Module:
        parts: list[torch.nn.Module] = []
        for _ in range(self.sizes["depth"]):
            parts += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU()]
        return torch.nn.Sequential(*parts)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))}

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = module(batch["x"]).square().mean()
        return loss

    def infer(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = module(batch["x"])
        return outputs

    def make_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=self.sizes.get("learning_rate", 1e-2))


class OtherOrder(Optimized):
    """Sums in another order."""

    def loss(self, module: Any, batch: Any) -> torch.Tensor:
        hidden = batch["x"]
        for part in module:
            if isinstance(part, torch.nn.Linear):
                halves = zip(hidden.split(WIDTH // 2, dim=1), part.weight.split(WIDTH // 2, dim=1), strict=True)
                hidden = sum(left @ right.t() for left, right in halves) + part.bias
            else:
                hidden = part(hidden)
        return hidden.square().mean()

    def list_changes(self, mode: Mode) -> list[Change]:
        return []


def check_deep(depth: int, fast: type[Optimized] = OtherOrder, count: int = 64, **sizes: Any) -> CheckReport:
    plain = Deep({"depth": depth, **sizes})
    return check_optimized(plain, fast(plain), Setting("train", "fp32", "cpu"), batch_size=count)


def test_a_network_that_amplifies_rounding_beyond_all_measure_passes_no_check() -> None:
    assert check_deep(10).passed
    assert "gradients" in failed(check_deep(80))


class SlightlyWrong(OtherOrder):
    """In its gradients, by less than rounding does in fp32."""

    def loss(self, module: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(module, batch)
        return loss + 1e-3 * (loss - loss.detach())


def test_where_rounding_raises_limits_the_forms_must_agree_in_double_precision() -> None:
    """At some depth rounding makes more than the table allows, and not yet more than can be allowed."""
    calm: dict[str, Any] = {"count": 2048, "learning_rate": 1e-7}
    for depth in (28, 30, 32, 34):
        report = check_deep(depth, **calm)
        exact = {one.what: one.error for one in report.findings if one.precision == "fp64"}
        if exact:
            break
    assert report.passed
    assert set(exact) == {"loss", "gradients"}
    assert max(exact.values()) < 1e-9
    wrong = check_deep(depth, SlightlyWrong, **calm)
    assert {(one.what, one.precision) for one in wrong.failures} == {("gradients", "fp64")}


def make_training(errors: dict[str, float], *, loss: float = 1.0, last: float = 0.5) -> _Training:
    """Gradients of length 1 that are so far from those without errors."""
    gradients = {name: torch.tensor([1.0, error]) for name, error in errors.items()}
    return _Training(loss, gradients, {}, [1.0, 0.9, 0.8, 2.0, 0.7, last])


def judge(errors: dict[str, float], *noises: dict[str, float], precision: Precision = "fp32") -> dict[str, Finding]:
    plain = Deep({"depth": 1})
    side = _Side(plain, OtherOrder(plain), plain.build(), Setting("train", precision, "cpu", "eager"), 4)
    expected = make_training(dict.fromkeys(errors, 0.0))
    got, *rounded = (side._distance(make_training(one), expected) for one in (errors, *noises))
    found = side._judge(got, rounded)
    return {one.what: one for one in found}


def test_rounding_raises_the_limit_of_the_parameter_it_moves_and_of_no_other() -> None:
    noisy = {"deep": 0.5, "calm": 1e-5}
    assert not judge({"deep": 0.6, "calm": 0.0}, precision="bf16")["gradients"].passed
    assert judge({"deep": 0.6, "calm": 0.0}, noisy, precision="bf16")["gradients"].passed
    found = judge({"deep": 0.6, "calm": 0.3}, noisy, precision="bf16")["gradients"]
    assert (found.passed, found.where, found.limit) == (False, "calm", TOLERANCES["bf16"].gradients)


def test_in_fp32_rounding_may_move_any_parameter() -> None:
    """A few signs decide, and which parameter they hit is chance."""
    noisy = {"deep": 0.02, "calm": 1e-5}
    found = judge({"deep": 0.0, "calm": 0.025}, noisy)["gradients"]
    assert found.passed
    assert found.limit == pytest.approx(NOISE * 0.02)
    assert not judge({"deep": 0.0, "calm": 0.035}, noisy)["gradients"].passed


def test_the_furthest_of_several_trials_counts() -> None:
    found = judge({"deep": 0.02}, {"deep": 0.001}, {"deep": 0.016}, {"deep": 0.002})["gradients"]
    assert found.passed
    assert found.limit == pytest.approx(NOISE * 0.016)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_rounding_raises_no_limit_beyond_its_ceiling(precision: Precision) -> None:
    found = judge({"deep": 1.0}, {"deep": 5.0}, precision=precision)["gradients"]
    assert not found.passed
    assert found.limit == HIGHEST[precision].gradients < 1.0


def test_noise_that_is_no_number_allows_nothing() -> None:
    found = judge({"deep": 0.5}, {"deep": float("nan")}, precision="bf16")["gradients"]
    assert not found.passed
    assert found.limit == TOLERANCES["bf16"].gradients


def test_halved_gradients_are_found_in_any_noise() -> None:
    """A halved gradient is no further off than noise may be; but noise does not shrink."""
    plain = Deep({"depth": 1})
    side = _Side(plain, OtherOrder(plain), plain.build(), Setting("train", "bf16", "cpu", "eager"), 4)
    generator = torch.Generator().manual_seed(1)
    right = torch.randn(1000, generator=generator)
    noisy = right + 0.55 * torch.randn(1000, generator=generator)
    losses = make_training({}).losses
    expected, rounded, halved, other = (
        _Training(1.0, {"w": one}, {}, losses)
        for one in (right, noisy, right / 2, right + 0.55 * torch.randn(1000, generator=generator))
    )
    noise = [side._distance(rounded, expected)]
    passed = {one.what: one.passed for one in side._judge(side._distance(halved, expected), noise)}
    assert passed == {"loss": True, "gradients": True, "convergence": True, "size of gradients": False}
    assert all(one.passed for one in side._judge(side._distance(other, expected), noise))


def test_jostled_weights_differ_in_their_last_bit() -> None:
    plain = Deep({"depth": 2})
    before = plain.build()
    after = _Perturbed(plain, 1).convert(copy.deepcopy(before), mode="train", precision="fp32")
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        bits = (old.detach().view(torch.int32) - new.detach().view(torch.int32)).abs()
        assert (bits[old != 0] == 1).all()


def test_a_comparison_that_does_not_fit_takes_fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from stepscope.bench.workloads import verify

    tried: list[int] = []

    def check_if_it_fits(*_: Any, batch_size: int, **__: Any) -> CheckReport:
        tried.append(batch_size)
        if batch_size > 3:
            raise torch.OutOfMemoryError("no memory")
        return CheckReport(findings=[Finding(what="loss", precision="fp32", error=0.0, limit=1.0)])

    monkeypatch.setattr(verify, "check_optimized", check_if_it_fits)
    workload = find_workload("resnet50/optimized/train/1dev-fp32")
    asked: Any = SimpleNamespace(
        workload=workload,
        scale="tiny",
        mode="train",
        precision="fp32",
        batch_size=12,
        case=SimpleNamespace(benchmark=workload.benchmark),
        spec=WorkloadSpec(device="cpu"),
    )
    device: Any = SimpleNamespace(name="cpu", has_events=True)
    assert verify.Verifier(device, "eager").check(asked).check_examples == 3
    assert tried == [12, 6, 3]


class Mixed(Optimized):
    """Right in fp32; below, every example gets the answer of another, or one of them gets none."""

    def __init__(self, plain: Task, fault: str) -> None:
        super().__init__(plain)
        self._fault = fault

    def infer(self, module: Any, batch: Any) -> Any:
        outputs = self.plain.infer(module, batch)
        if next(module.parameters()).dtype == torch.float32:
            return outputs
        if self._fault == "roll":
            return outputs.roll(1, 0)
        wrong = outputs.clone()
        wrong[outputs.double().norm(dim=1).argmax()] = 0
        return wrong

    def list_changes(self, mode: Mode) -> list[Change]:
        return []


@pytest.mark.parametrize(
    ("model", "fault", "found"),
    [
        ("resnet50", "roll", "differences of examples"),
        ("regnety", "roll", "differences of examples"),
        ("vgg16", "roll", "differences of examples"),
        ("inception-v3", "roll", "differences of examples"),
        ("resnet50", "zero", "one example"),
        ("inception-v3", "zero", "one example"),
    ],
)
def test_answers_of_other_examples_are_found_in_any_precision(model: str, fault: str, found: str) -> None:
    """Though all of a network's answers are nearly the same, so that the whole is off by less than rounding may be."""
    workload = next(one for one in list_workloads() if one.benchmark.id.startswith(f"{model}/optimized/infer/"))
    plain, _ = workload.make_deterministic("tiny")
    setting = Setting("infer", "bf16", "cpu", "eager")
    assert check_optimized(plain, _Unchanged(plain), setting, batch_size=16).passed
    assert found in failed(check_optimized(plain, Mixed(plain, fault), setting, batch_size=16))


class LateFault(_Unchanged):
    """Right where each batch is an update, wrong where gradients are added up first."""

    def make_late_optimizer(self, module: Any) -> torch.optim.Optimizer:
        optimizer = self.plain.make_optimizer(module)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return optimizer


def test_the_update_that_is_checked_is_the_one_that_is_timed() -> None:
    plain, _ = find_workload("resnet50/optimized/train/1dev-fp32").make_deterministic("tiny")
    setting = Setting("train", "fp32", "cpu", "eager")
    assert check_optimized(plain, LateFault(plain), setting, batch_size=8).passed
    assert "update" in failed(check_optimized(plain, LateFault(plain), setting, batch_size=8, at_once=2))
    assert check_optimized(plain, _Unchanged(plain), setting, batch_size=8, at_once=2).passed
