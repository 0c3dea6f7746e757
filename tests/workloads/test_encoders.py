"""XLM-R, BERT and OSCAR: sizes, data, training, and that the optimized implementations compute the same and faults are
seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepscope.bench.workloads.catalogue import Declared, DeclaredModel, read_catalogue
from stepscope.bench.workloads.check import check_optimized
from stepscope.bench.workloads.findings import CheckReport
from stepscope.bench.workloads.models import xlmr
from stepscope.bench.workloads.models.bert import BREAK, IGNORED, MASK
from stepscope.bench.workloads.models.encoders import fp8, optimized
from stepscope.bench.workloads.models.encoders.ootb import PUBLISHED_LENGTHS, at_percentile, draw_lengths, draw_words
from stepscope.bench.workloads.models.xlmr import BEGIN, END, PAD
from stepscope.bench.workloads.protocol import EAGER, Optimized, Precision, Setting, Task
from stepscope.bench.workloads.steps import TrainStep

MODELS = ("xlmr", "bert-base", "bert-large", "oscar")
ALL = [(model, one) for model in MODELS for one in read_catalogue()[model].benchmark]
NAMES = [f"{model}-{one.mode}-{one.config}" for model, one in ALL]
DIFFERENT = [number for number, (model, one) in enumerate(ALL) if (model, one.mode) != ("bert-large", "train")]
"""Tiny, both BERTs are trained alike."""
REALDIST = "fb-1dev-A-realdist"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compiled forms of one function are counted over the whole process, and past a number nothing is compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def find(model: str, mode: str, config: str | None = None) -> tuple[DeclaredModel, Declared]:
    declared = read_catalogue()[model]
    return declared, next(one for one in declared.benchmark if one.mode == mode and config in (None, one.config))


def make_pair(declared: DeclaredModel, one: Declared) -> tuple[Task, Optimized]:
    """The plain and the optimized implementation, tiny and calm."""
    calm = declared.make_task(declared.make_task(one.sizes_at("tiny")).deterministic())
    return calm, declared.make_optimized(calm)


def run_check(
    model: str, mode: Any, config: str | None = None, *, precision: Precision = "fp32", traced: bool = False
) -> CheckReport:
    """`traced`: through torch.compile's front end, as it is measured; it is slow to start."""
    declared, one = find(model, mode, config)
    plain, fast = make_pair(declared, one)
    engine = fast.engine(one.mode)._replace(fullgraph=True) if traced else EAGER
    fast.engine = lambda mode: engine  # type: ignore[method-assign]
    count = one.tiny.batch_size
    return check_optimized(plain, fast, Setting(mode, precision, "cpu", "eager"), batch_size=count)


@pytest.mark.parametrize("model", MODELS)
def test_full_size_has_the_declared_parameters(model: str) -> None:
    built: dict[str, int] = {}
    for one in read_catalogue()[model].benchmark:
        head = one.sizes.get("head", "")
        if head not in built:
            with torch.device("meta"):
                module = read_catalogue()[model].make_task(one.sizes).build()
            built[head] = sum(parameter.numel() for parameter in module.parameters())
        assert built[head] == one.parameters


def test_published_counts_are_the_ones_declared() -> None:
    assert {one.parameters for one in read_catalogue()["xlmr"].benchmark} == {558_840_832}
    assert {one.parameters for one in read_catalogue()["oscar"].benchmark} == {113_466_681}
    assert find("bert-base", "train")[1].parameters == 110_106_428
    assert find("bert-large", "train")[1].parameters == 336_226_108


@pytest.mark.parametrize(("model", "one"), ALL, ids=NAMES)
def test_batches_are_the_same_for_the_same_seed(model: str, one: Declared) -> None:
    task = read_catalogue()[model].make_task(one.sizes_at("tiny"))
    first, again, other = (task.make_batch(8, seed=seed, mode=one.mode) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"][:, :4], other["input_ids"][:, :4])
    if not one.sizes.get("sampled_lengths"):
        assert {name: value.shape for name, value in first.items()} == {n: v.shape for n, v in other.items()}


def test_words_are_as_rare_as_in_text() -> None:
    generator = torch.Generator().manual_seed(1)
    words = draw_words((200_000,), first=4, vocabulary=1004, generator=generator)
    counts = torch.bincount(words, minlength=1004)
    assert counts[:4].sum() == 0
    assert words.max() <= 1003
    # Zipf's law: each doubling of the rank takes the same share, one of about ten here.
    shares = [float(counts[4 + low : 4 + 2 * low].sum()) / len(words) for low in (8, 32, 128)]
    assert all(0.08 < share < 0.12 for share in shares)


def test_lengths_lie_on_the_lines_between_the_percentiles() -> None:
    at = at_percentile(
        PUBLISHED_LENGTHS, torch.tensor([percentile for percentile, _ in PUBLISHED_LENGTHS], dtype=torch.float64)
    )
    assert at.tolist() == [length for _, length in PUBLISHED_LENGTHS]
    between = at_percentile(PUBLISHED_LENGTHS, torch.tensor([2.5, 60.0, 72.5, 99.5], dtype=torch.float64))
    assert between.tolist() == pytest.approx([2.0, 35.0, 51.5, (675 + 2462) / 2])


def test_lengths_have_the_published_percentiles() -> None:
    lengths = draw_lengths(100_000, longest=256, generator=torch.Generator().manual_seed(1)).double()
    assert lengths.min() == 1
    assert lengths.max() == 256
    for percentile, length in PUBLISHED_LENGTHS[2:8]:
        assert float(lengths.quantile(percentile / 100)) == pytest.approx(length, rel=0.05)
    # What packing saves: the mean is less than a quarter of the longest.
    assert 50 < float(lengths.mean()) < 64


def test_sampled_sequences_are_padded_and_masked_each_by_itself() -> None:
    declared, one = find("xlmr", "infer", REALDIST)
    batch = declared.make_task(one.sizes_at("tiny")).make_batch(64, seed=3, mode="infer")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    lengths = mask.sum(dim=1)
    assert ids.shape[1] == lengths.max()
    assert len(lengths.unique()) > 10
    assert torch.equal(ids == PAD, mask == 0)
    assert (ids[:, 0] == BEGIN).all()
    longer = lengths > 1
    assert (ids[longer, lengths[longer] - 1] == END).all()


def test_words_to_guess_have_one_number_in_every_sequence() -> None:
    declared, one = find("bert-base", "train")
    batch = declared.make_task(one.sizes).make_batch(64, seed=3, mode="train")
    guessed = batch["labels"] != IGNORED
    assert (guessed.sum(dim=1) == 19).all()
    assert (batch["labels"][guessed] > MASK).all()
    shown = batch["input_ids"][guessed]
    assert float((shown == MASK).double().mean()) == pytest.approx(0.8, abs=0.05)
    assert ((batch["input_ids"] == BREAK).sum(dim=1) == 2).all()
    assert set(batch["token_type_ids"].unique().tolist()) == {0, 1}


def test_answers_have_the_scores_of_the_data_set() -> None:
    declared, one = find("oscar", "train")
    batch = declared.make_task(one.sizes).make_batch(4, seed=3, mode="train")
    assert batch["regions"].shape == (4, 50, 2054)
    assert batch["regions"].min() >= 0
    assert batch["scores"].shape == (4, 3129)
    assert set(batch["scores"].unique().tolist()) <= {0.0, *torch.tensor([0.3, 0.6, 0.9, 1.0]).tolist()}
    assert (batch["scores"] > 0).sum(dim=1).min() >= 1


@pytest.mark.parametrize("model", MODELS)
def test_loss_falls(model: str) -> None:
    declared, one = find(model, "train")
    torch.manual_seed(1)
    task = declared.make_task(one.sizes_at("tiny"))
    batch = task.make_batch(4, seed=1, mode="train")
    step = TrainStep(task, task.build().train(), [batch], Setting("train", "fp32", "cpu"))
    losses = []
    for _ in range(40):
        step()
        losses.append(float(step.loss))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_outputs_have_the_shapes_of_the_task() -> None:
    shapes = {}
    for model, config in (("xlmr", "fb-1dev-B"), ("bert-large", None), ("oscar", None)):
        declared, one = find(model, "infer", config)
        task = declared.make_task(one.sizes_at("tiny"))
        with torch.inference_mode():
            outputs = task.infer(task.build().eval(), task.make_batch(3, seed=1, mode="infer"))
        shapes[model] = [tuple(each.shape) for each in (outputs if isinstance(outputs, tuple) else [outputs])]
    assert shapes == {"xlmr": [(3, 32, 64)], "bert-large": [(3, 48), (3, 48)], "oscar": [(3, 50)]}


@pytest.mark.parametrize("number", DIFFERENT, ids=lambda number: NAMES[number])
def test_fast_form_computes_the_same(number: int) -> None:
    model, one = ALL[number]
    report = run_check(model, one.mode, one.config, precision="bf16")
    assert report.passed, report.failures


@pytest.mark.parametrize(("model", "config"), [("xlmr", "fb-1dev-A"), ("xlmr", REALDIST), ("bert-large", None)])
@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_fast_form_computes_the_same_in_fewer_bits(model: str, config: str | None, precision: Precision) -> None:
    report = run_check(model, "infer", config, precision=precision)
    assert report.passed, report.failures


@pytest.mark.parametrize("model", ["xlmr", "bert-base", "bert-large"])
def test_training_in_eight_bits_computes_the_same(model: str) -> None:
    report = run_check(model, "train", precision="fp8")
    assert report.passed, report.failures
    rounded = {one.what: one.error for one in report.findings if one.precision == "fp8"}
    assert rounded["gradients"] > 0.01  # it is 8 bits that were compared


def test_products_in_eight_bits_have_the_gradients_of_products() -> None:
    generator = torch.Generator().manual_seed(4)
    linear = torch.nn.Linear(32, 48)
    inputs = torch.randn(3, 16, 32, generator=generator, requires_grad=True)
    slope = torch.randn(3, 16, 48, generator=generator)
    wanted = torch.autograd.grad(linear(inputs), [inputs, linear.weight, linear.bias], slope)
    layer = fp8.Fp8TrainedLinear(linear)
    found = torch.autograd.grad(layer(inputs), [inputs, linear.weight, linear.bias], slope.bfloat16())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).norm() / theirs.norm()) < 0.08


def test_gradients_take_the_kind_that_reaches_further() -> None:
    narrow = fp8._narrow(torch.tensor([[1e-6, 1.0, -2.0]]), fp8.SLOPES)
    assert narrow.values.dtype == torch.float8_e5m2
    assert (narrow.values.float() * narrow.scale).tolist()[0] == pytest.approx([1e-6, 1.0, -2.0], rel=0.13)


# Torch itself makes an instance when it follows an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("mode", "config", "precision"), [("train", None, "fp8"), ("infer", REALDIST, "fp32")])
def test_fast_form_computes_the_same_when_compiled(mode: str, config: str | None, precision: Precision) -> None:
    report = run_check("xlmr", mode, config, precision=precision, traced=True)
    assert report.passed, report.failures


def test_pretraining_head_is_the_same_in_inference() -> None:
    declared, one = find("bert-base", "train")
    plain, fast = make_pair(declared, one)
    fast.engine = lambda mode: EAGER  # type: ignore[method-assign]
    report = check_optimized(plain, fast, Setting("infer", "fp32", "cpu"), batch_size=2)
    assert report.passed, report.failures


@pytest.mark.parametrize("lengths", [[1, 1, 1], [5], [1, 7, 3], [7, 7]])
def test_packing_keeps_every_token_and_puts_it_back(lengths: list[int]) -> None:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.arange(mask.numel()).view(mask.shape)
    packed = optimized.pack({"input_ids": ids, "attention_mask": mask.long()})
    assert packed["tokens"].tolist() == ids[mask].tolist()
    assert packed["places"].tolist() == [place for length in lengths for place in range(length)]
    assert packed["starts"].tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert torch.equal(optimized.unpack(packed["tokens"].float().unsqueeze(1), packed).squeeze(-1), ids * mask)


def test_packed_sequences_do_not_see_each_other() -> None:
    """Each alone gives what it gives among others."""
    lengths = [3, 1, 6]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    packed = optimized.pack({"input_ids": torch.zeros(3, 6, dtype=torch.long), "attention_mask": mask.long()})
    query, key, value = torch.randn(3, 10, 2, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    got = optimized.attend_packed(query, key, value, packed, scale=0.5)
    for start, end in ((0, 3), (3, 4), (4, 10)):
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        alone = torch.softmax(q @ k.transpose(1, 2) * 0.5, dim=-1) @ v
        torch.testing.assert_close(got[start:end], alone.transpose(0, 1))


def test_fp8_layers_survive_a_cast_and_multiply_as_the_library_does() -> None:
    linear = torch.nn.Linear(32, 48)
    inputs = torch.randn(5, 7, 32, dtype=torch.bfloat16)
    layer = fp8.Fp8Linear(linear.weight, linear.bias, largest_input=inputs.abs().amax()).to(torch.bfloat16)
    scales = {name: layer.get_buffer(name).view(torch.float32) for name in ("input_scale_bits", "scale_bits")}
    values = fp8.quantise(inputs.reshape(-1, 32), scales["input_scale_bits"])
    back = values.float() * scales["input_scale_bits"]
    torch.testing.assert_close(back, inputs.reshape(-1, 32).float(), rtol=0.07, atol=1e-3)
    with torch.inference_mode():
        got, exact = layer(inputs), linear(inputs.float())
    assert got.dtype == torch.bfloat16
    assert got.shape == (5, 7, 48)
    assert ((got.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.06
    library = torch._scaled_mm(
        values, layer.get_buffer("weight_bits").view(fp8.KIND).t(), scale_a=scales["input_scale_bits"],
        scale_b=scales["scale_bits"], bias=layer.bias, out_dtype=torch.bfloat16,
    )  # fmt: skip
    torch.testing.assert_close(got.reshape(-1, 48), library, rtol=2e-2, atol=2e-2)


def test_fp8_inputs_beyond_their_range_are_cut_off_not_lost() -> None:
    linear = torch.nn.Linear(16, 16)
    layer = fp8.Fp8Linear(linear.weight, linear.bias, largest_input=torch.tensor(1.0)).to(torch.bfloat16)
    far, edge = (torch.full((1, 16), value, dtype=torch.bfloat16) for value in (100.0, fp8.HEADROOM))
    with torch.inference_mode():
        assert torch.equal(layer(far), layer(edge))
        assert layer(far).isfinite().all()


def test_ranges_are_those_of_the_inputs_and_leave_no_trace() -> None:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    module = torch.nn.Sequential(first, second)
    batches = [torch.tensor([[1.0, -3.0, 2.0, 0.0]]), torch.tensor([[0.5, 0.0, -1.0, 0.0]])]
    ranges = fp8.find_largest_inputs(module, lambda: [module(batch) for batch in batches])
    assert float(ranges[first]) == 3.0
    assert float(ranges[second]) == pytest.approx(max(float(first(one).detach().abs().max()) for one in batches))
    assert not first._forward_pre_hooks


@pytest.mark.parametrize(("model", "one"), ALL, ids=NAMES)
def test_every_change_is_told_once(model: str, one: Declared) -> None:
    _, fast = make_pair(read_catalogue()[model], one)
    for precision in one.precisions:
        names = [change.name for change in fast.changes(mode=one.mode, precision=precision)]
        assert len(set(names)) == len(names)
        assert (precision in names) == (precision != "fp32")
        assert ("CUDA graph" in names) == fast.engine(one.mode).graph
        assert ("fused optimizer" in names) == (one.mode == "train")


# Faults that the check must see.


@pytest.mark.parametrize(("model", "mode"), [("xlmr", "infer"), ("bert-base", "train"), ("oscar", "train")])
def test_wrong_attention_scale_is_found(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = optimized.LeanLayer.__init__

    def make_wrong(self: Any, plain: Any, **how: Any) -> None:
        make(self, plain, **how)
        self.scale = 1.0 / self.width**0.5

    monkeypatch.setattr(optimized.LeanLayer, "__init__", make_wrong)
    assert not run_check(model, mode).passed


@pytest.mark.parametrize(("model", "mode"), [("xlmr", "train"), ("bert-large", "infer"), ("oscar", "infer")])
def test_dropped_bias_of_the_projection_is_found(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = optimized._hold

    def make_wrong(weight: Any, bias: Any) -> Any:
        bias.data.zero_()
        return make(weight, bias)

    monkeypatch.setattr(optimized, "_hold", make_wrong)
    assert not run_check(model, mode).passed


def test_mask_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = optimized.pack

    def pack_without_mask(batch: Any) -> Any:
        packed = pack(batch)
        return {**packed, "there": torch.ones_like(packed["there"])}

    monkeypatch.setattr(xlmr, "pack", pack_without_mask)
    monkeypatch.setattr(xlmr, "unpack", lambda outputs, batch: outputs[batch["rows"]] * _there(batch["rows"]))
    report = run_check("xlmr", "infer", REALDIST)
    assert [one.what for one in report.failures] == ["outputs"]


def _there(rows: Any) -> Any:
    """Where the padded form has a token of its own: padding repeats the last one."""
    fresh = torch.ones_like(rows, dtype=torch.bool)
    fresh[:, 1:] = rows[:, 1:] != rows[:, :-1]
    return fresh.unsqueeze(-1)


def test_mask_that_is_kept_passes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault above is in the attention alone: with the mask, its way of unpacking is right."""
    monkeypatch.setattr(xlmr, "unpack", lambda outputs, batch: outputs[batch["rows"]] * _there(batch["rows"]))
    assert run_check("xlmr", "infer", REALDIST).passed


def test_positions_that_do_not_begin_anew_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = optimized.pack
    monkeypatch.setattr(xlmr, "pack", lambda batch: {**(p := pack(batch)), "places": p["places"].flip(0)})
    assert not run_check("xlmr", "infer", REALDIST).passed


def test_words_guessed_at_wrong_places_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.bench.workloads.models.bert import FastBert

    arrange = FastBert.collate

    def arrange_wrong(self: FastBert, batch: Any, *, mode: Any) -> Any:
        arranged = arrange(self, batch, mode=mode)
        return {**arranged, "hidden_at": arranged["hidden_at"] - 1}

    monkeypatch.setattr(FastBert, "collate", arrange_wrong)
    assert not run_check("bert-base", "train").passed


def test_last_layer_of_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = optimized.LeanLayer.first_token
    monkeypatch.setattr(optimized.LeanLayer, "first_token", lambda self, hidden: first(self, hidden.roll(1, dims=1)))
    assert not run_check("oscar", "infer").passed
