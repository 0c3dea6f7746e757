"""GPT-2 and Llama: their sizes, their data, and whether the optimized implementation computes what the plain one
does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from stepscope.bench.workloads.catalogue import Declared, DeclaredModel, read_catalogue
from stepscope.bench.workloads.check import check_optimized
from stepscope.bench.workloads.findings import CheckReport
from stepscope.bench.workloads.models import gpt2
from stepscope.bench.workloads.models.decoders import network, ootb
from stepscope.bench.workloads.models.decoders.ootb import (
    Lengths,
    draw_tokens,
    make_prompts,
    pack_documents,
    pack_prompts,
)
from stepscope.bench.workloads.models.decoders.optimized import OptimizedDecoder
from stepscope.bench.workloads.precision import math_of
from stepscope.bench.workloads.protocol import EAGER, Optimized, Setting, Task
from stepscope.bench.workloads.steps import InferStep, TrainStep

# Dynamo makes an autograd function by itself and means to hide the warning; where warnings are errors it cannot.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    """Dynamo counts compilations by the line of code that asked for them: all tests together would be too many."""
    yield
    torch.compiler.reset()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults show without compilation, which takes most of a check's time."""
    monkeypatch.setattr(OptimizedDecoder, "engine", lambda self, mode: EAGER)


class Entry(NamedTuple):
    model: DeclaredModel
    declared: Declared

    @property
    def name(self) -> str:
        return f"{self.model.model}-{self.declared.mode}-{self.declared.config}"

    def tasks(self) -> tuple[Task, Optimized]:
        """Tiny and calm."""
        plain = self.model.make_task(self.model.make_task(self.declared.sizes_at("tiny")).deterministic())
        return plain, self.model.make_optimized(plain)

    def check(self, precision: Any = "fp32") -> CheckReport:
        plain, fast = self.tasks()
        return check_optimized(plain, fast, Setting(self.declared.mode, precision, "cpu", "eager"), batch_size=4)


ENTRIES = [Entry(read_catalogue()[name], one) for name in ("gpt2", "llama") for one in read_catalogue()[name].benchmark]
TRAIN = [one for one in ENTRIES if one.declared.mode == "train"]
INFER = [one for one in ENTRIES if one.declared.mode == "infer"]
every = pytest.mark.parametrize("entry", ENTRIES, ids=lambda one: one.name)


@every
def test_sizes_are_the_published_ones(entry: Entry) -> None:
    with torch.device("meta"):
        module = entry.model.make_task(entry.declared.sizes).build()
    assert sum(one.numel() for one in module.parameters()) == entry.declared.parameters


@every
def test_batches_are_the_same_for_the_same_seed(entry: Entry) -> None:
    task, mode = entry.model.make_task(entry.declared.sizes), entry.declared.mode
    first, again, other = (task.make_batch(4, seed=seed, mode=mode) for seed in (1, 1, 2))
    for name, one in first.items():
        assert torch.equal(one, again[name])
        assert one.shape == other[name].shape
    assert not torch.equal(first["input_ids"], other["input_ids"])
    assert first["input_ids"].max() < entry.declared.sizes["vocabulary"]


def test_few_tokens_make_most_of_a_text() -> None:
    drawn = draw_tokens(200_000, 50_257, torch.Generator().manual_seed(1))
    share = drawn.bincount(minlength=50_257) / 200_000
    assert float(share[0]) == pytest.approx(2 * float(share[1]), rel=0.05)
    assert float(share[:100].sum()) == pytest.approx(0.46, abs=0.02)  # H(100) / H(50,257)


def test_documents_are_packed_with_marks_between_them() -> None:
    lengths = Lengths(median=50, spread=0.5, shortest=10, longest=200)
    text = pack_documents(64, 255, vocabulary=1000, end_of_text=999, documents=lengths, seed=3)
    assert text.shape == (64, 256)
    ends = (text.flatten() == 999).nonzero().flatten()
    gaps = ends.diff() - 1
    # The mark is also the rarest token of the text: a few documents are cut by it.
    assert float(gaps.float().median()) == pytest.approx(50, rel=0.15)
    assert gaps.max() <= 200
    assert (gaps >= 10).float().mean() > 0.95


def test_prompts_are_padded_on_the_left_and_every_batch_has_the_same_lengths() -> None:
    lengths = Lengths(median=100, spread=0.7, shortest=8, longest=300)
    batches = [make_prompts(33, vocabulary=1000, end_of_text=999, prompts=lengths, seed=seed) for seed in (1, 2)]
    counted = [one["attention_mask"].sum(1) for one in batches]
    assert torch.equal(*(one.sort().values for one in counted))
    assert not torch.equal(*counted)
    assert counted[0].median() == 100
    assert batches[0]["input_ids"].shape[1] == counted[0].max() <= 300
    mask = batches[0]["attention_mask"]
    assert (mask.diff(dim=1) >= 0).all()
    assert (batches[0]["input_ids"][mask == 0] == 999).all()


def test_packed_prompts_hold_the_same_text() -> None:
    lengths = Lengths(median=6, spread=0.7, shortest=2, longest=12)
    batch = make_prompts(5, vocabulary=1000, end_of_text=999, prompts=lengths, seed=1)
    packed = pack_prompts(batch)
    padded = packed["tokens"][packed["spread"]]
    for i in range(5):
        prompt = batch["input_ids"][i][batch["attention_mask"][i] == 1]
        assert packed["lengths"][i] == len(prompt)
        assert torch.equal(padded[i, : len(prompt)], prompt)
        assert packed["tokens"][packed["last"][i]] == prompt[-1]
    assert torch.equal(padded.flatten()[packed["home"]], packed["tokens"])
    assert torch.equal(packed["home"] % padded.shape[1], packed["places"])


@pytest.mark.parametrize("entry", TRAIN, ids=lambda one: one.name)
def test_training_lowers_the_loss(entry: Entry) -> None:
    """With dropout, as it is measured."""
    torch.manual_seed(1)
    task = entry.model.make_task(entry.declared.sizes_at("tiny"))
    for one, precision in ((task, "fp32"), (entry.model.make_optimized(task), "bf16")):
        module = task.build().train()
        if isinstance(one, Optimized):
            module = one.convert(module, mode="train", precision="bf16")
            assert module.training
        batch = one.make_batch(4, seed=1, mode="train")
        step = TrainStep(one, module, [batch], Setting("train", precision, "cpu"))  # type: ignore[arg-type]
        losses = []
        for _ in range(8):
            step()
            assert step.loss is not None
            losses.append(float(step.loss))
        assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("entry", INFER, ids=lambda one: one.name)
def test_inference_gives_the_logits_of_the_next_token(entry: Entry) -> None:
    plain, fast = entry.tasks()
    module = plain.build().eval()
    step = InferStep(plain, module, [plain.make_batch(3, seed=1, mode="infer")], Setting("infer", "fp32", "cpu"))
    step()
    assert isinstance(step.outputs, torch.Tensor)
    assert step.outputs.shape == (3, entry.declared.sizes_at("tiny")["vocabulary"])
    converted = fast.convert(module, mode="infer", precision="fp32")
    with math_of(Setting("infer", "fp32", "cpu")):
        got = fast.infer(converted, fast.make_batch(3, seed=1, mode="infer"))
    torch.testing.assert_close(got, step.outputs)


@every
def test_the_fast_form_computes_the_same(entry: Entry) -> None:
    """In fp32 and in bf16."""
    report = entry.check("bf16")
    assert {one.precision for one in report.findings} == {"fp32", "bf16"}
    assert report.passed, report.failures


@pytest.mark.parametrize("chunk", [50, 64, 4096])
def test_the_loss_in_chunks_is_the_whole_loss(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """192 tokens: with a rest, without one, and in one piece; the last 12 rows of the head fill it up."""
    monkeypatch.setattr(network, "CHUNK_TOKENS", chunk)
    torch.manual_seed(1)
    hidden, labels = torch.randn(192, 16, requires_grad=True), torch.randint(500, (192,))
    head = network.padded_rows(torch.randn(500, 16))
    assert head.shape == (512, 16)
    got = 3 * network.HeadLoss.apply(hidden, head, labels, 500, torch.float32)  # type: ignore[no-untyped-call]
    expected = 3 * torch.nn.functional.cross_entropy(hidden @ head[:500].t(), labels)
    torch.testing.assert_close(got, expected)
    ours = torch.autograd.grad(got, (hidden, head))
    theirs = torch.autograd.grad(expected, (hidden, head))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("entry", [TRAIN[0], INFER[0], INFER[-1]], ids=lambda one: one.name)
def test_a_wrong_scale_of_attention_is_found(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    made = network.DecoderAttention.__init__

    def wrong(self: network.DecoderAttention, shape: network.HeadShape, *given: Any) -> None:
        made(self, shape._replace(scale=1.0 / shape.width), *given)

    monkeypatch.setattr(network.DecoderAttention, "__init__", wrong)
    assert not entry.check().passed


@pytest.mark.usefixtures("uncompiled")
def test_a_dropped_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network.linear
    monkeypatch.setattr(gpt2, "linear", lambda weight, bias=None: made(weight, None if bias is None else bias * 0))
    assert not INFER[0].check().passed


@pytest.mark.usefixtures("uncompiled")
def test_positions_that_count_the_padding_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = ootb.pack_prompts

    def shifted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        right = packed(batch)
        longest = right["spread"].shape[1]
        return {**right, "places": right["home"] % longest + 1}

    monkeypatch.setattr("stepscope.bench.workloads.models.decoders.optimized.pack_prompts", shifted)
    assert not INFER[0].check().passed


def test_rotations_stay_exact_when_the_weights_are_cast() -> None:
    plain, fast = INFER[-1].tasks()
    module = plain.build()
    before = module.get_submodule("model.rotary_emb").inv_freq
    halved = module.to(torch.bfloat16)
    assert halved.get_submodule("model.rotary_emb").inv_freq is before
    converted = fast.convert(plain.build(), mode="infer", precision="bf16").to(torch.bfloat16)
    assert converted.get_submodule("rotary").cosine.dtype == torch.float32
    assert next(converted.parameters()).dtype == torch.bfloat16


@every
def test_changes_are_told_once_each(entry: Entry) -> None:
    _, fast = entry.tasks()
    for precision in entry.declared.precisions:
        names = [one.name for one in fast.changes(mode=entry.declared.mode, precision=precision)]
        assert len(names) == len(set(names))
        assert (precision in names) == (precision != "fp32")
        assert ("static cache" in names) == (entry.declared.mode == "infer")


def test_blocks_are_the_layers() -> None:
    for entry in TRAIN:
        plain, fast = entry.tasks()
        module = plain.build()
        assert len(plain.blocks(module)) == plain.sizes["layers"]
        assert len(fast.blocks(fast.convert(module, mode="train", precision="fp32"))) == plain.sizes["layers"]


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, stepscope.bench.workloads.serving\n"
        "from stepscope.bench.workloads import list_workloads\n"
        "assert [one.make_case(device='cpu', scale='tiny') for one in list_workloads()]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
