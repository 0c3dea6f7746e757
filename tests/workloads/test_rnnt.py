"""RNN-T: sizes as published, synthetic speech as declared, and the optimized implementation against the plain one."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.bench.workloads.catalogue import Declared, read_catalogue  # noqa: E402
from stepscope.bench.workloads.check import check_optimized  # noqa: E402
from stepscope.bench.workloads.models.rnnt import fast_loss, optimized  # noqa: E402
from stepscope.bench.workloads.models.rnnt.lamb import ForeachLamb, Lamb  # noqa: E402
from stepscope.bench.workloads.models.rnnt.ootb import RnntTask, encoded_lengths  # noqa: E402
from stepscope.bench.workloads.models.rnnt.optimized import FastRnnt, Transcriber  # noqa: E402
from stepscope.bench.workloads.models.rnnt.speech import make_utterances  # noqa: E402
from stepscope.bench.workloads.protocol import Mode, Precision, Setting  # noqa: E402
from stepscope.bench.workloads.steps import TrainStep  # noqa: E402


def declared(mode: Mode) -> Declared:
    (found,) = (one for one in read_catalogue()["rnnt"].benchmark if one.mode == mode)
    return found


def tiny(mode: Mode, **other: Any) -> RnntTask:
    task = RnntTask({**declared(mode).sizes_at("tiny"), **other})
    return RnntTask(task.deterministic())


@pytest.mark.parametrize(
    ("mode", "parts"), [("train", [42_967_040, 4_726_272, 1_312_768]), ("infer", [42_967_040, 1_652_480, 703_517])]
)
def test_full_size_has_the_tallied_number_of_weights(mode: Mode, parts: list[int]) -> None:
    with torch.device("meta"):
        network = RnntTask(declared(mode).sizes).build()
    counts = [sum(one.numel() for one in part.parameters()) for part in network.children()]
    assert counts == parts
    assert sum(counts) == declared(mode).parameters


def test_batches_repeat_and_are_padded_to_the_declared_sizes() -> None:
    task = RnntTask(declared("train").sizes)
    batch, again, other = (task.make_batch(3, seed=seed, mode="train") for seed in (1, 1, 2))
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["features"], other["features"])
    assert batch["features"].shape == other["features"].shape == (3, 557, 240)
    assert batch["labels"].shape == (3, 100)
    for i, length in enumerate(batch["frames"].tolist()):
        assert not batch["features"][i, length:].any()
        assert batch["features"][i, :length].any(dim=-1).all()
    assert set(task.make_batch(1, seed=1, mode="infer")) == {"features", "frames"}


@pytest.mark.parametrize(("mode", "rate"), [("train", 4.0), ("infer", 14.0)])
def test_speech_has_the_declared_statistics(mode: Mode, rate: float) -> None:
    sizes = {**declared(mode).sizes, "mel": 2, "stack": 1}
    speech = make_utterances(sizes, 1500, seed=3)
    seconds = speech["frames"] * 0.03
    assert float(seconds.mean()) == pytest.approx(12.1, abs=0.4)
    assert float(seconds.median()) == pytest.approx(13.7, abs=0.4)
    assert int(speech["frames"].max()) <= 557
    assert float((speech["label_lengths"] / seconds).mean()) == pytest.approx(rate, rel=0.08)
    labels, lengths = speech["labels"], speech["label_lengths"]
    inside = torch.arange(1, labels.shape[1]) < lengths[:, None]
    assert not ((labels[:, 1:] == labels[:, :-1]) & inside).any()
    assert int(labels.max()) < sizes["labels"]
    frequencies = torch.bincount(labels[:, 1:][inside], minlength=sizes["labels"])
    assert int(frequencies[0]) > 3 * int(frequencies[sizes["labels"] // 2])


def test_loss_falls() -> None:
    task = tiny("train")
    torch.manual_seed(0)
    batch = task.make_batch(4, seed=1, mode="train")
    step = TrainStep(task, task.build().train(), [batch], Setting("train", "fp32", "cpu"))
    losses = []
    for _ in range(12):
        step()
        assert step.loss is not None
        losses.append(float(step.loss))
    assert losses[-1] < losses[0] - 0.3


@pytest.fixture(scope="module")
def decoded() -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
    task = tiny("infer")
    torch.manual_seed(0)
    network = task.build().eval()
    with torch.inference_mode():
        outputs = task.infer(network, task.make_batch(5, seed=4, mode="infer"))
    assert isinstance(outputs, tuple)
    return make_utterances(task.sizes, 5, seed=4), outputs


def test_wired_network_spells_what_is_said(
    decoded: tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]],
) -> None:
    speech, (encoded, labels, scores, counts) = decoded
    assert encoded.shape == (5, 15, 32)
    assert labels.shape == scores.shape == (5, 20)
    assert torch.equal(counts.long(), speech["label_lengths"])
    for i, said in enumerate(speech["label_lengths"].tolist()):
        assert labels[i, :said].long().tolist() == speech["labels"][i, :said].tolist()
        assert (labels[i, said:] == -1).all()
        assert (scores[i, :said] > 1).all()
        assert not scores[i, said:].any()


@pytest.mark.parametrize(("most_a_frame", "most"), [(1, 20), (3, 20), (3, 4)])
def test_limits_on_symbols_hold_in_both_forms(most_a_frame: int, most: int) -> None:
    """Without a blank every frame writes as often as it may."""
    task = tiny("infer", max_symbols_a_frame=most_a_frame, max_output=most)
    torch.manual_seed(1)
    network = task.build().eval()
    with torch.no_grad():
        network.get_parameter("joint.output.bias")[-1] = -100.0
    batch = task.make_batch(3, seed=2, mode="infer")
    fast = FastRnnt(task)
    with torch.inference_mode():
        expected = task.infer(network, batch)
        got = fast.infer(fast.convert(network, mode="infer", precision="fp32"), batch)
    lengths = encoded_lengths(batch["frames"])
    assert torch.equal(got[3].long(), (lengths * most_a_frame).clamp(max=most))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "precision"), [("train", "bf16"), ("infer", "bf16"), ("infer", "fp32")])
def test_fast_form_computes_the_same(mode: Mode, precision: Precision) -> None:
    task = tiny(mode)
    report = check_optimized(task, FastRnnt(task), Setting(mode, precision, "cpu", "eager"), batch_size=3)
    assert report.passed, report.failures


def test_lattice_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fast_loss.sum_alignments

    def one_frame_short(picked: fast_loss.Picked, transcripts: fast_loss.Transcripts) -> fast_loss.Lattice:
        return right(picked, transcripts._replace(frames=(transcripts.frames - 1).clamp(min=1)))

    monkeypatch.setattr(fast_loss, "ON_CPU", fast_loss.ON_CPU._replace(sum_alignments=one_frame_short))
    task = tiny("train")
    report = check_optimized(task, FastRnnt(task), Setting("train", "fp32", "cpu", "eager"), batch_size=3)
    assert {one.what for one in report.failures} >= {"loss", "gradients"}


def test_loop_without_a_recurrent_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = optimized.decode

    def forgetful(encoded: Any, lengths: Any, weights: dict[str, torch.Tensor], **limits: int) -> Any:
        return right(encoded, lengths, {**weights, "bias_1": torch.zeros_like(weights["bias_1"])}, **limits)

    monkeypatch.setattr(optimized, "decode", forgetful)
    task = tiny("infer")
    report = check_optimized(task, FastRnnt(task), Setting("infer", "fp32", "cpu", "eager"), batch_size=3)
    assert not report.passed


def test_single_layers_do_what_the_stack_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half-precision way through the layers, with its padding and scaling, here in a precision that CPUs have."""
    monkeypatch.setattr(optimized, "_in_half", lambda _: True)
    right = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda kind, **how: right(kind, **{**how, "enabled": False}))
    task = tiny("train")
    torch.manual_seed(2)
    network, batch = task.build(), task.make_batch(2, seed=1, mode="train")
    gradients = []
    for loss in (task.loss, FastRnnt(task).loss):
        network.zero_grad()
        loss(network, batch).backward()
        gradients.append({name: one.grad.clone() for name, one in network.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-5)


def test_transcriber_of_single_layers_encodes_the_same() -> None:
    task = tiny("infer")
    network = task.build().eval()
    features = task.make_batch(2, seed=1, mode="infer")["features"]
    with torch.inference_mode():
        expected = network.get_submodule("encoder")(features)
        got = Transcriber(network, single_layers=True).eval().encode(features)
    torch.testing.assert_close(got, expected)


def test_both_optimizers_take_the_same_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, generator=generator), torch.zeros(5), torch.randn(2, generator=generator)]
    gradients = [[torch.randn(one.shape, generator=generator) for one in start] for _ in range(3)]
    results = []
    for kind in (Lamb, ForeachLamb):
        weights = [torch.nn.Parameter(one.clone()) for one in start]
        optimizer = kind(weights, lr=0.01)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        results.append([one.detach() for one in weights])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)
    # By the trust ratio, the first step of a weight is as long as the learning rate says.
    weight = torch.nn.Parameter(start[0].clone())
    weight.grad = gradients[0][0]
    Lamb([weight], lr=0.01).step()
    assert float((weight.detach() - start[0]).norm() / start[0].norm()) == pytest.approx(0.01, rel=1e-4)


def test_every_precision_discloses_its_own_changes() -> None:
    fast = FastRnnt(tiny("train"))
    names = {
        (mode, precision): {one.name for one in fast.changes(mode=mode, precision=precision)}
        for mode in ("train", "infer")
        for precision in declared(mode).precisions  # type: ignore[arg-type]
    }
    assert "float16 recurrent layers" in names["train", "bf16"]
    assert "float16 recurrent layers" not in names["train", "fp32"]
    assert "single recurrent layers" in names["infer", "fp16"]
    assert "single recurrent layers" not in names["infer", "bf16"]
    assert all("CUDA graph" in one for one in names.values())
    assert fast.engine("train").graph
    assert fast.engine("infer").graph


def test_decoding_kernel_does_what_torch_does() -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU; TRITON_INTERPRET=1 would run the kernel on the CPU")
    from stepscope.bench.workloads.models.rnnt import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = tiny("infer")
    torch.manual_seed(0)
    transcriber = Transcriber(task.build(), single_layers=False).eval().to(device)
    batch = task.make_batch(2, seed=3, mode="infer")
    lengths = encoded_lengths(batch["frames"]).to(device)
    with torch.inference_mode():
        encoded = transcriber.encode(batch["features"].to(device))
        weights = dict(transcriber.named_buffers(recurse=False))
        projected = torch.nn.functional.linear(encoded, weights["of_encoder"], weights["hidden_bias"])
        for limits in ({"most_a_frame": 30, "most": 20}, {"most_a_frame": 1, "most": 3}):
            expected = optimized.decode(projected, lengths, weights, **limits)
            got = kernels.decode(projected, lengths, weights, **limits)
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
