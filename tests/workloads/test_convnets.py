"""The convolutional networks: sizes, pictures, and that each optimized implementation computes what the plain one
does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.bench.workloads.catalogue import Declared, DeclaredModel, read_catalogue  # noqa: E402
from stepscope.bench.workloads.check import NOISE, check_optimized  # noqa: E402
from stepscope.bench.workloads.findings import (  # noqa: E402
    HIGHEST,
    CheckReport,
    _distance,
)
from stepscope.bench.workloads.models.convnets import choosing, layers, optimized  # noqa: E402
from stepscope.bench.workloads.models.convnets.grouped import Way, convolve_frames, list_ways, merge_groups  # noqa: E402
from stepscope.bench.workloads.models.convnets.layers import Stem  # noqa: E402
from stepscope.bench.workloads.models.convnets.ootb import draw_labels, make_pictures  # noqa: E402
from stepscope.bench.workloads.models.convnets.residual import RegNetY  # noqa: E402
from stepscope.bench.workloads.protocol import EAGER, Mode, Optimized, Setting, Task  # noqa: E402
from stepscope.bench.workloads.steps import TrainStep  # noqa: E402
from stepscope.bench.workloads.verify import format_failures  # noqa: E402

MODELS = ("resnext3d", "regnety", "resnet50", "vgg16", "inception-v3")

REGNETS = {
    "y_400mf": ([1, 3, 6, 6], [48, 104, 208, 440], 8, 4_344_144),
    "y_800mf": ([1, 3, 8, 2], [64, 144, 320, 784], 16, 6_432_512),
    "y_1_6gf": ([2, 6, 17, 2], [48, 120, 336, 888], 24, 11_202_430),
    "y_3_2gf": ([2, 5, 13, 1], [72, 216, 576, 1512], 24, 19_436_338),
    "y_8gf": ([2, 4, 10, 1], [224, 448, 896, 2016], 56, 39_381_472),
    "y_16gf": ([2, 4, 11, 1], [224, 448, 1232, 3024], 112, 83_590_140),
    "y_32gf": ([2, 5, 12, 1], [232, 696, 1392, 3712], 232, 145_046_770),
    "y_128gf": ([2, 7, 17, 1], [528, 1056, 2904, 7392], 264, 644_812_894),
}


def declared(model: str, mode: Mode) -> tuple[DeclaredModel, Declared]:
    found = read_catalogue()[model]
    return found, next(one for one in found.benchmark if one.mode == mode)


def tiny_pair(model: str, mode: Mode, **changed: Any) -> tuple[Task, Optimized, int]:
    found, line = declared(model, mode)
    calm = found.make_task({**line.sizes_at("tiny"), **changed}).deterministic()
    plain = found.make_task(calm)
    return plain, found.make_optimized(plain), line.tiny.batch_size


def check(model: str, mode: Mode, precision: Any = "fp32") -> CheckReport:
    plain, fast, count = tiny_pair(model, mode)
    return check_optimized(
        plain, fast, Setting(mode, precision, "cpu", "eager"), batch_size=count
    )  # fmt: skip


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "STEP", EAGER)


# Sizes.


def count_weights(module: Any) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(one.numel() for one in parameters), len(parameters)


@pytest.mark.parametrize("model", MODELS)
def test_declared_sizes_have_the_published_weights(model: str) -> None:
    found = read_catalogue()[model]
    for line in found.benchmark:
        with torch.device("meta"):
            module = found.make_task(line.sizes).build()
        assert count_weights(module)[0] == line.parameters, line.config


def test_resnext_has_the_published_tensors_and_shapes() -> None:
    found, line = declared("resnext3d", "train")
    with torch.device("meta"):
        module = found.make_task(line.sizes).build()
        assert module(torch.empty(2, 3, 16, 112, 112)).shape == (2, 400)
    assert count_weights(module) == (48_340_816, 314)


@pytest.mark.parametrize("name", REGNETS)
def test_every_regnet_has_the_published_weights(name: str) -> None:
    depths, widths, group_width, weights = REGNETS[name]
    sizes = {"depths": depths, "widths": widths, "group_width": group_width, "stem_width": 32, "classes": 1000}
    with torch.device("meta"):
        assert count_weights(RegNetY(sizes).build())[0] == weights


def test_published_counts_are_declared() -> None:
    declared_counts = {
        (name, line.mode): line.parameters for name in MODELS for line in read_catalogue()[name].benchmark
    }
    assert declared_counts["resnet50", "infer"] == 25_557_032
    assert declared_counts["vgg16", "train"] == 138_357_544
    assert declared_counts["inception-v3", "train"] == 27_161_264
    assert declared_counts["inception-v3", "infer"] == 23_834_568
    configs = {line.config for line in read_catalogue()["regnety"].benchmark}
    assert configs == {"y_16gf.1dev-fp32", "y_128gf.1dev-fp32"}


# Pictures.


@pytest.mark.parametrize("extent", [(64, 64), (8, 48, 48)])
def test_pictures_are_normalised_smooth_and_repeatable(extent: tuple[int, ...]) -> None:
    pictures = make_pictures(16, extent, torch.Generator().manual_seed(3))
    assert pictures.shape == (16, 3, *extent)
    colours = pictures.transpose(0, 1).flatten(1)
    assert colours.mean(1).abs().max() < 0.1
    assert (colours.std(1) - 1).abs().max() < 0.1
    assert pictures.min() > -2.2
    assert pictures.max() < 2.7
    for axis in range(2, pictures.dim()):
        a, b = pictures.narrow(axis, 1, extent[axis - 2] - 1), pictures.narrow(axis, 0, extent[axis - 2] - 1)
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] > 0.6
    assert torch.corrcoef(colours)[0, 1] > 0.5
    again = make_pictures(16, extent, torch.Generator().manual_seed(3))
    assert torch.equal(pictures, again)
    assert not torch.equal(pictures, make_pictures(16, extent, torch.Generator().manual_seed(4)))


def test_labels_are_as_uneven_as_asked() -> None:
    generator = torch.Generator().manual_seed(1)
    even = draw_labels(20_000, 10, generator, skew=1.0).bincount(minlength=10)
    uneven = draw_labels(20_000, 10, generator, skew=4.0).bincount(minlength=10)
    assert even.max() / even.min() < 1.3
    assert 3 < uneven.max() / uneven.min() < 5


def test_batches_hold_what_their_mode_needs() -> None:
    plain, fast, _ = tiny_pair("resnext3d", "train")
    batch = plain.make_batch(3, seed=5, mode="train")
    assert batch["pictures"].shape == (3, 3, 8, 48, 48)
    assert batch["labels"].shape == (3,)
    assert set(plain.make_batch(3, seed=5, mode="infer")) == {"pictures"}
    laid = fast.make_batch(3, seed=5, mode="train")
    assert torch.equal(laid["labels"], batch["labels"])
    assert laid["pictures"].shape == (3, 16, 8, 27, 27)
    assert laid["pictures"].is_contiguous(memory_format=torch.channels_last_3d)


# Parts of the optimized implementations.


@pytest.mark.parametrize("stem", [Stem(7, 2, 3), Stem(3, 2, 1), Stem(3, 2, 0), Stem(3, 1, 1), Stem(5, 3, 2)])
@pytest.mark.parametrize("side", [20, 23])
def test_a_convolution_over_blocks_is_the_same(stem: Stem, side: int) -> None:
    x, weight = torch.randn(2, 3, side, side + 2), torch.randn(8, 3, stem.kernel, stem.kernel)
    expected = torch.conv2d(x, weight, stride=stem.stride, padding=stem.padding)
    got = torch.conv2d(stem.lay_out(x), stem.move_weights(weight))
    assert got.shape == expected.shape
    assert _distance(got, expected) < 1e-5


def test_a_convolution_over_blocks_leaves_time_alone() -> None:
    stem = Stem(7, 2, 3)
    x, weight = torch.randn(2, 3, 5, 20, 20), torch.randn(8, 3, 7, 7, 7)
    expected = torch.conv3d(x, weight, stride=(1, 2, 2), padding=3)
    got = torch.conv3d(stem.lay_out(x), stem.move_weights(weight), padding=(3, 0, 0))
    assert _distance(got, expected) < 1e-5


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("axes", [2, 3])
def test_every_way_of_a_grouped_convolution_is_the_same(axes: int, stride: int) -> None:
    from stepscope.bench.workloads.models.convnets.layers import GroupedConv
    from stepscope.bench.workloads.models.convnets.ootb import CONVOLUTIONS

    conv = CONVOLUTIONS[axes](32, 32, 3, stride=stride, padding=1, groups=8)
    x = torch.randn(2, 32, *(5, 6, 7)[3 - axes :], requires_grad=True)
    expected = conv(x)
    slope = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, conv.weight, conv.bias), slope)
    expected = expected.detach()
    ways = list_ways(8, 4, axes=axes, kernels=True)
    assert {way.kind for way in ways} == {"native", "planar", "merged", "kernel"} | ({"frames"} if axes == 3 else set())
    for way in [*ways, Way("merged", 2), Way("kernel", 4)]:
        module = GroupedConv(conv, way)
        y = module(x)
        assert _distance(y.detach(), expected) < 1e-5, way
        for got, want in zip(torch.autograd.grad(y, (x, conv.weight, conv.bias), slope), wanted, strict=True):
            assert _distance(got, want) < 1e-5, way
        assert way.describe()
        frozen = GroupedConv(copy.deepcopy(conv), way).freeze()
        assert _distance(frozen(x).detach(), expected) < 1e-5, way


def test_merging_groups_fills_with_zeros() -> None:
    weight = torch.randn(8, 2, 3, 3)
    merged = merge_groups(weight, 4, 2)
    assert merged.shape == (8, 4, 3, 3)
    assert torch.equal(merged[:2, :2], weight[:2])
    assert not merged[:2, 2:].any()
    assert torch.equal(merged[2:4, 2:], weight[2:4])


def test_ways_stay_within_reason() -> None:
    assert Way("merged", 32) in list_ways(32, 4, axes=3, kernels=False)
    assert Way("merged", 11) not in list_ways(11, 112, axes=2, kernels=False)
    assert all(11 % way.merged == 0 for way in list_ways(11, 112, axes=2, kernels=True))


def test_frames_are_added_over_time_with_any_padding() -> None:
    x, weight = torch.randn(2, 4, 7, 5, 5), torch.randn(8, 2, 3, 3, 3)
    for stride, padding in (((1, 1, 1), (0, 1, 1)), ((2, 1, 2), (1, 0, 1))):
        expected = torch.conv3d(x, weight, stride=stride, padding=padding, groups=2)
        assert _distance(convolve_frames(x, weight, stride=stride, padding=padding, groups=2), expected) < 1e-5


@pytest.mark.parametrize("frames", [4, 5])
def test_pooling_by_frames_is_the_same(frames: int) -> None:
    from stepscope.bench.workloads.models.convnets.layers import PoolOverTime

    x = torch.randn(2, 3, frames, 9, 8).relu().to(memory_format=torch.channels_last_3d)
    assert torch.equal(PoolOverTime()(x), torch.nn.functional.max_pool3d(x, 3, stride=2, padding=1))


@pytest.mark.parametrize("axes", [2, 3])
def test_folded_norms_keep_their_statistics(axes: int) -> None:
    from stepscope.bench.workloads.models.convnets.ootb import ConvNorm

    layer = ConvNorm(4, 6, 3, axes=axes, eps=1e-3)
    norm: Any = layer.norm
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        tensor.normal_()
    norm.running_var.uniform_(0.5, 2)
    layer.eval()
    x = torch.randn(2, 4, *[5] * axes)
    with torch.no_grad():
        expected = layer(x)
        layers.fold_norms(layer)
        assert _distance(layer(x), expected) < 1e-6


def test_choices_are_made_for_every_grouped_convolution_and_disclosed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast, _ = tiny_pair("resnext3d", "train")
    assert isinstance(fast, optimized.FastPictures)
    trials: dict[Any, Any] = {}
    monkeypatch.setattr(optimized, "TRIALS", trials)

    def choose(layer: choosing.Layer, _: Any, setting: Setting) -> Way:
        trials[layer, setting] = choosing.WayTimes(Way("kernel", 2), {})
        return Way("kernel", 2)

    before = {one.name: one.what for one in fast.changes(mode="train", precision="bf16")}
    assert "CPU" in before["grouped convolutions"]
    monkeypatch.setattr(optimized, "choose_way", choose)
    module = fast.convert(plain.build(), mode="train", precision="bf16")
    from stepscope.bench.workloads.models.convnets.layers import GroupedConv

    assert sum(isinstance(layer, GroupedConv) for layer in module.modules()) == 4
    after = {one.name: one.what for one in fast.changes(mode="train", precision="bf16")}
    assert "16 channels in 4 groups at 4×12×12: Triton kernels, 2 groups as one" in after["grouped convolutions"]
    assert "stride 2" in after["grouped convolutions"]
    _, other, _ = tiny_pair("regnety", "train")
    foreign = {one.name: one.what for one in other.changes(mode="train", precision="bf16")}
    assert "CPU" in foreign["grouped convolutions"], "layers of another network are disclosed"


@pytest.mark.parametrize("model", MODELS)
def test_changes_are_those_of_the_mode(model: str) -> None:
    _, fast, _ = tiny_pair(model, "infer")
    train = {one.name for one in fast.changes(mode="train", precision="bf16")}
    infer = {one.name for one in fast.changes(mode="infer", precision="fp16")}
    assert "fused optimizer" in train - infer
    assert ("folded norms" in infer - train) == (model != "vgg16")
    assert "bf16" in train
    assert "fp16" in infer
    assert not {one.name for one in fast.changes(mode="train", precision="fp32")} & {"bf16", "tf32"}


# Whole networks.


@pytest.mark.parametrize("model", MODELS)
def test_training_learns_its_batch(model: str) -> None:
    plain, _, count = tiny_pair(model, "train", learning_rate=0.02)
    torch.manual_seed(0)
    step = TrainStep(
        plain, plain.build(), [plain.make_batch(count, seed=1, mode="train")], Setting("train", "fp32", "cpu")
    )
    losses = []
    for _ in range(6):
        step()
        assert step.loss is not None
        losses.append(float(step.loss))
    assert losses[-1] < losses[0]


def test_the_auxiliary_classifier_is_for_training_alone() -> None:
    plain, _, count = tiny_pair("inception-v3", "train")
    module, pictures = plain.build(), plain.make_batch(count, seed=1, mode="infer")
    assert isinstance(module(pictures["pictures"]), tuple)
    logits = plain.infer(module.eval(), pictures)
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (count, 10)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("uncompiled")
def test_fast_inference_computes_the_same(model: str) -> None:
    report = check(model, "infer", "bf16")
    assert report.passed, report.failures


def test_fast_inference_compiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "STEP", optimized.STEP._replace(fullgraph=True))
    report = check("regnety", "infer")
    assert report.passed, report.failures


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("uncompiled")
def test_fast_training_computes_the_same(model: str) -> None:
    # Tiny Inception has norms of four channels, whose gradients in bf16 are nothing but rounding.
    report = check(model, "train", "fp32" if model == "inception-v3" else "bf16")
    assert report.passed, report.failures


@pytest.mark.usefixtures("uncompiled")
def test_a_failure_tells_what_rounding_alone_does() -> None:
    report = check("inception-v3", "train", "bf16")
    (gradients,) = report.failures
    assert gradients.noise is not None
    assert NOISE * gradients.noise > HIGHEST["bf16"].gradients
    assert f"where rounding alone makes {gradients.noise:.3g}" in format_failures(report)


def test_fast_training_compiles_with_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "choose_way", lambda *_, **__: Way("kernel", 2))
    monkeypatch.setattr(optimized, "STEP", optimized.STEP._replace(fullgraph=True))
    report = check("resnext3d", "train")
    assert report.passed, report.failures


# Faults.


@pytest.mark.usefixtures("uncompiled")
def test_a_bias_lost_in_folding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.fold_one

    def wrong(conv: Any, norm: Any) -> Any:
        weight, bias = right(conv, norm)
        return weight, torch.zeros_like(bias) if conv.groups > 1 else bias

    monkeypatch.setattr(layers, "fold_one", wrong)
    assert not check("resnext3d", "infer").passed


def convert_spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    right = optimized.FastPictures.convert

    def convert(self: Any, module: Any, **how: Any) -> Any:
        converted = right(self, module, **how)
        spoil(converted)
        return converted

    monkeypatch.setattr(optimized.FastPictures, "convert", convert)
    monkeypatch.setattr(optimized, "STEP", EAGER)


def test_a_shifted_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding off in one layer: the picture keeps its size, but everything lies one pixel aside."""
    from torch.nn.functional import pad

    def shift(module: Any) -> None:
        conv = module.blocks[0].branch[1].conv
        conv.padding = (0, 0)
        conv.register_forward_pre_hook(lambda _, inputs: (pad(inputs[0], (2, 0, 2, 0)),))

    convert_spoilt(monkeypatch, shift)
    assert not check("resnet50", "infer").passed


def test_a_stride_at_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stride in the first 1×1 convolution, as before v1.5, not in the 3×3 one."""

    def swap(module: Any) -> None:
        first, second = (module.blocks[1].branch[place].conv for place in (0, 1))
        first.stride, second.stride = second.stride, first.stride

    convert_spoilt(monkeypatch, swap)
    report = check("resnet50", "train")
    assert {"loss", "gradients"} <= {one.what for one in report.failures}


def test_a_missing_gate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def ungate(module: Any) -> None:
        module.blocks[2].branch[2] = torch.nn.Identity()

    convert_spoilt(monkeypatch, ungate)
    assert not check("regnety", "infer").passed


def test_a_lost_auxiliary_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(module: Any) -> None:
        module.auxiliary = None

    convert_spoilt(monkeypatch, cut)
    assert not check("inception-v3", "train").passed


def test_a_lost_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(module: Any) -> None:
        module.features[2 if isinstance(module.features[2], torch.nn.Conv2d) else 3].bias = None

    convert_spoilt(monkeypatch, drop)
    assert not check("vgg16", "infer").passed


def test_wrongly_merged_groups_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weight: Any, groups: int, merged: int) -> Any:
        return merge_groups(weight.flip(0), groups, merged)

    monkeypatch.setattr(optimized, "choose_way", lambda *_, **__: Way("merged", 2))
    monkeypatch.setattr("stepscope.bench.workloads.models.convnets.layers.merge_groups", wrong)
    monkeypatch.setattr(optimized, "STEP", EAGER)
    assert not check("regnety", "infer").passed


def test_the_fastest_way_that_runs_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = choosing.Layer((2, 128, 4, 7, 7), (128, 4, 3, 3, 3), (1, 1, 1), 32)
    conv = torch.nn.Conv3d(128, 128, 3, padding=1, groups=32, device="meta")
    seconds = {"native": 3.0, "planar": 2.0, "merged": 1.0, "frames": None, "kernel": 1.5}
    monkeypatch.setattr(choosing, "time_way", lambda way, *_, **__: seconds[way.kind])
    monkeypatch.setattr(choosing, "_kernels_available", lambda: True)
    wrong: set[str] = set()
    monkeypatch.setattr(choosing, "is_right", lambda way, *_, **__: way.kind not in wrong)
    trial = choosing.try_ways(layer, conv, Setting("train", "bf16", "cpu"))
    assert trial.way == Way("merged", 16)
    assert {way.kind for way, taken in trial.seconds.items() if taken is None} == {"frames"}
    few = choosing.try_ways(layer, conv, Setting("train", "fp32", "cpu"))
    assert set(few.seconds) == {Way("native"), Way("planar")}
    wrong.update({"merged", "kernel"})
    assert choosing.try_ways(layer, conv, Setting("train", "bf16", "cpu")).way == Way("planar")
    monkeypatch.setattr(choosing, "time_way", lambda *_, **__: None)
    assert choosing.try_ways(layer, conv, Setting("infer", "bf16", "cpu")).way == Way("native")
    assert choosing.choose_way(layer, conv, Setting("infer", "bf16", "cpu")) == Way("native")


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_way_that_computes_something_else_is_not_right(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = choosing.Layer((2, 16, 3, 6, 6), (16, 4, 3, 3, 3), (1, 1, 1), 4)
    conv = torch.nn.Conv3d(16, 16, 3, padding=1, groups=4, bias=False)
    ways = (Way("native"), Way("planar"), Way("merged", 2), Way("frames"), Way("kernel"))
    for way in ways:
        assert choosing.is_right(way, layer, conv, Setting(mode, "bf16", "cpu")), way

    def lose_a_corner(weight: Any, groups: int, merged: int) -> Any:
        kept = merge_groups(weight, groups, merged)
        spoilt = torch.arange(kept.shape[0]).view(-1, 1, 1, 1, 1) == 3
        return kept if merged == 1 else torch.where(spoilt, 0.5 * kept, kept)

    monkeypatch.setattr("stepscope.bench.workloads.models.convnets.layers.merge_groups", lose_a_corner)
    assert not choosing.is_right(Way("merged", 2), layer, conv, Setting(mode, "bf16", "cpu"))


class TurnedBack(torch.autograd.Function):
    """Right forward; the way back takes the slopes of other examples and places."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        return slopes[0].flip(0).flip(3)


def test_a_way_whose_gradients_are_mixed_up_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.bench.workloads.models.convnets.layers import GroupedConv

    right = GroupedConv.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = right(self, x)
        turned: torch.Tensor = TurnedBack.apply(y)  # type: ignore[no-untyped-call]
        return turned if self.way.kind == "merged" else y

    layer = choosing.Layer((2, 16, 3, 6, 6), (16, 4, 3, 3, 3), (1, 1, 1), 4)
    conv = torch.nn.Conv3d(16, 16, 3, padding=1, groups=4, bias=False)
    monkeypatch.setattr(GroupedConv, "forward", forward)
    assert choosing.is_right(Way("planar"), layer, conv, Setting("train", "fp32", "cpu"))
    assert not choosing.is_right(Way("merged", 2), layer, conv, Setting("train", "fp32", "cpu"))
