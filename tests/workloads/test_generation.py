"""Prefill and decode: their times in fake time, and the check that leads an optimized implementation along the plain
one's text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepscope.bench.workloads.catalogue import read_catalogue
from stepscope.bench.workloads.findings import CheckReport
from stepscope.bench.workloads.generation import (
    Decoder,
    DecoderRunner,
    GenerationTimes,
    check_generation,
    time_generation,
)
from stepscope.bench.workloads.models.decoders import network, optimized
from stepscope.bench.workloads.protocol import EAGER, Setting
from stepscope.core.errors import UsageError
from stepscope.measure import FakeClock


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    """Dynamo counts compilations by the line of code that asked for them: all tests together would be too many."""
    yield
    torch.compiler.reset()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults show without compilation, which takes most of a check's time."""
    monkeypatch.setattr(optimized.OptimizedDecoder, "engine", lambda self, mode: EAGER)


class Scripted:
    """Prefill takes 5 ms a prompt token, tokens take 2 ms, then 1 ms more each; work is done on waiting only."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.owed_s = 0.0
        self.waits = 0

    def begin(self, batch: int) -> None:
        self.owed_s += 0.005 * batch
        self.token_s = 0.002

    def advance(self) -> None:
        self.owed_s += self.token_s
        self.token_s += 0.001

    def synchronise(self) -> None:
        self.waits += 1
        self.clock.advance(self.owed_s)
        self.owed_s = 0.0


def time_scripted(*, new_tokens: int, owed_s: float = 0.0) -> tuple[GenerationTimes, Scripted]:
    clock = FakeClock()
    step = Scripted(clock)
    step.owed_s = owed_s
    return time_generation(step, 10, new_tokens=new_tokens, clock=clock, synchronise=step.synchronise), step


def test_first_and_further_tokens_are_timed_apart() -> None:
    time, step = time_scripted(new_tokens=4)
    assert time.ttft_s == pytest.approx(0.05)
    assert time.token_s == pytest.approx([0.002, 0.003, 0.004])
    assert time.duration_s == pytest.approx(0.059)
    assert step.waits == 5


def test_work_left_from_before_is_not_counted() -> None:
    time, _ = time_scripted(new_tokens=1, owed_s=1.0)
    assert time.ttft_s == time.duration_s == pytest.approx(0.05)
    assert time.token_s == []


def test_wrong_use_is_told() -> None:
    plain, _ = tasks("gpt2")
    step = DecoderRunner(plain, torch.nn.Identity(), Setting("infer", "fp32", "cpu"), new_tokens=2)
    with pytest.raises(UsageError, match="no batch was begun"):
        step.advance()
    with pytest.raises(UsageError, match="not an optimized implementation"):
        check_generation(plain, plain, Setting("infer", "fp32", "cpu"), batch_size=1, new_tokens=1)


def tasks(model: str) -> tuple[Decoder, optimized.OptimizedDecoder]:
    found = read_catalogue()[model]
    declared = next(one for one in found.benchmark if one.mode == "infer")
    plain = found.make_task(found.make_task(declared.sizes_at("tiny")).deterministic())
    fast = found.make_optimized(plain)
    assert isinstance(plain, Decoder)
    assert isinstance(fast, optimized.OptimizedDecoder)
    return plain, fast


def check(model: str, precision: Any = "fp32") -> CheckReport:
    plain, fast = tasks(model)
    return check_generation(plain, fast, Setting("infer", precision, "cpu", "eager"), batch_size=4, new_tokens=6)


MODELS = pytest.mark.parametrize("model", ["gpt2", "llama"])


@MODELS
def test_the_fast_form_writes_what_the_plain_one_does(model: str) -> None:
    report = check(model, "bf16")
    assert [one.what for one in report.findings] == ["generation", "differences of sequences", "greedy choice"] * 2
    assert report.passed, report.failures


@pytest.mark.usefixtures("uncompiled")
@MODELS
def test_a_cache_off_by_one_is_found(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last places of the prompts are written over; what is seen stays as it was."""
    written = network.write_one
    monkeypatch.setattr(network, "write_one", lambda cache, fresh, places: written(cache, fresh, places - 1))
    report = check(model)
    assert [one.what for one in report.failures] == ["generation"]
    assert report.failures[0].where != "token 1 of 6"


@pytest.mark.usefixtures("uncompiled")
def test_a_view_that_reaches_into_the_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = network.visible
    monkeypatch.setattr(network, "visible", lambda places, count, dtype: seen(places + 1, count, dtype))
    assert not check("llama").passed


@pytest.mark.usefixtures("uncompiled")
def test_a_choice_that_is_not_the_likeliest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = optimized._choose

    def second_best(state: optimized.StaticState, logits: torch.Tensor) -> None:
        chosen(state, logits)
        second = logits.topk(2).indices[:, 1]
        state.last.copy_(second)
        state.written.index_copy_(1, state.chosen - 1, second[:, None])

    monkeypatch.setattr(optimized, "_choose", second_best)
    assert "greedy choice" in [one.what for one in check("gpt2").failures]


@MODELS
def test_generation_goes_on_from_the_prompt(model: str) -> None:
    """Each chosen token is what the whole text so far, read at once, makes likeliest; the step may be begun again."""
    plain, fast = tasks(model)
    torch.manual_seed(1)
    module = plain.build().eval()
    batch = plain.make_batch(1, seed=3, mode="infer")
    step = DecoderRunner(plain, module, Setting("infer", "fp32", "cpu"), new_tokens=4)
    runs = []
    for _ in range(2):
        step.begin(batch)
        for _ in range(3):
            step.advance()
        runs.append(step.tokens())
    assert torch.equal(*runs)
    text = batch["input_ids"]
    for token in runs[0][0]:
        with torch.no_grad():
            assert module(input_ids=text).logits[0, -1].argmax() == token
        text = torch.cat([text, token.view(1, 1)], dim=1)
    converted = fast.convert(module, mode="infer", precision="fp32")
    quick = DecoderRunner(fast, converted, Setting("infer", "fp32", "cpu"), new_tokens=4)
    for seed in (9, 3):  # the second batch takes the memory of the first, which lay on other tokens
        quick.begin(fast.make_batch(1, seed=seed, mode="infer"))
        for _ in range(3):
            quick.advance()
    assert torch.equal(quick.tokens(), runs[0])
