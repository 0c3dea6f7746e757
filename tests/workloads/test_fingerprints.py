"""What a benchmark computes may not change without its version."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from make_fingerprints import (
    METHOD,
    Fingerprint,
    benchmarks_to_mark,
    name_versions,
    read_fingerprints,
    take_fingerprint,
)
from stepscope.bench.workloads.models.convnets.ootb import PictureTask
from stepscope.bench.workloads.models.convnets.residual import ResNet50
from stepscope.bench.workloads.models.decoders.ootb import PlainDecoder, PlainState
from stepscope.bench.workloads.models.rnnt.lamb import Lamb
from stepscope.bench.workloads.protocol import Task
from stepscope.bench.workloads.registry import Workload

RULE = "it computes something else: raise its version in the catalogue, then run tools/make_fingerprints.py"
PICTURES = "resnet50/train/1dev-fp32"
PICTURES_SEEN = "resnet50/infer/1dev-fp32"
TEXT = "gpt2/train/small-1dev-fp32"
WRITING = "gpt2/infer/small-1dev-fp32"
SPEECH = "rnnt/train/1dev-fp32"


def take(name: str) -> Fingerprint:
    return take_fingerprint(benchmarks_to_mark()[name])


def changed_parts(before: Fingerprint, after: Fingerprint) -> set[str]:
    return {part for part in before.__struct_fields__ if getattr(before, part) != getattr(after, part)}


def test_every_benchmark_has_a_fingerprint() -> None:
    assert set(read_fingerprints().benchmarks) == set(benchmarks_to_mark())


def test_stored_ones_were_taken_as_they_are_now() -> None:
    assert read_fingerprints().method == METHOD


@pytest.mark.parametrize("name", sorted(benchmarks_to_mark()))
def test_nothing_changes_without_its_version(name: str) -> None:
    stored = read_fingerprints()
    before, now = stored.benchmarks[name], take(name)
    if name_versions() != stored.made_with:
        # Another torch may write the same step with other operators.
        before, now = (msgspec.structs.replace(one, graph="") for one in (before, now))
    assert now == before, RULE


@pytest.mark.parametrize("name", [PICTURES, WRITING, SPEECH])
def test_two_calls_agree_whatever_was_computed_between(name: str) -> None:
    before = take(name)
    torch.manual_seed(7)
    torch.rand(5)
    assert take(name) == before


def test_values_of_weights_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(PICTURES)
    build = ResNet50.build

    def build_other(task: ResNet50) -> nn.Module:
        torch.manual_seed(11)
        return build(task)

    monkeypatch.setattr(ResNet50, "build", build_other)
    assert take(PICTURES) == before


def test_changed_sizes_are_seen() -> None:
    one = benchmarks_to_mark()[PICTURES]
    before = take_fingerprint(one)
    sizes = dict(one.declared.tiny.sizes)
    declared = msgspec.structs.replace(one.declared, sizes={**one.declared.sizes, "classes": 7})
    tiny = msgspec.structs.replace(one.declared.tiny, sizes={**sizes, "classes": 7})
    for other in (declared, msgspec.structs.replace(one.declared, tiny=tiny)):
        after = take_fingerprint(Workload(one.model, other, "ootb"))
        assert after.configuration != before.configuration
        assert after.weights != before.weights or after.graph != before.graph


def test_another_optimizer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(PICTURES)

    def make_optimizer(task: PictureTask, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=task.sizes["learning_rate"])

    monkeypatch.setattr(PictureTask, "make_optimizer", make_optimizer)
    assert changed_parts(before, take(PICTURES)) == {"optimizer", "graph"}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (PICTURES, "weight_decay", 1e-3),
        (PICTURES, "momentum", 0.8),
        (PICTURES, "lr", 1e-5),
        (TEXT, "betas", (0.9, 0.9)),
        (TEXT, "eps", 1e-6),
        (SPEECH, "max_norm", 2.0),
    ],
)
def test_another_option_of_the_optimizer_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, option: str, value: object
) -> None:
    before = take(name)
    kind = type(benchmarks_to_mark()[name].make_ootb("tiny"))
    make_plainly = kind.make_optimizer

    def make_optimizer(task: Task, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = make_plainly(task, module)
        optimizer.param_groups[0][option] = value
        return optimizer

    monkeypatch.setattr(kind, "make_optimizer", make_optimizer)
    assert changed_parts(before, take(name)) == {"optimizer", "graph"}


def test_other_weights_in_a_group_of_the_optimizer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(TEXT)
    make_plainly = PlainDecoder.make_optimizer

    def make_optimizer(task: PlainDecoder, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = make_plainly(task, module)
        decayed, rest = optimizer.param_groups
        decayed["params"].append(rest["params"].pop())
        return optimizer

    monkeypatch.setattr(PlainDecoder, "make_optimizer", make_optimizer)
    assert changed_parts(before, take(TEXT)) == {"optimizer", "graph"}


def test_another_step_of_an_own_optimizer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(SPEECH)
    monkeypatch.setattr("stepscope.bench.workloads.models.rnnt.lamb.EPSILON", 1e-3)
    assert changed_parts(before, take(SPEECH)) == {"graph"}
    monkeypatch.setattr(Lamb, "step", lambda optimizer: None)
    assert changed_parts(before, take(SPEECH)) == {"graph"}


@pytest.mark.parametrize("name", [PICTURES, PICTURES_SEEN])
def test_another_epsilon_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = take(name)
    build = ResNet50.build

    def build_other(task: ResNet50) -> nn.Module:
        module = build(task)
        norm = next(one for one in module.modules() if isinstance(one, nn.BatchNorm2d))
        norm.eps = 0.5
        return module

    monkeypatch.setattr(ResNet50, "build", build_other)
    assert changed_parts(before, take(name)) == {"graph"}


def test_generation_that_does_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(WRITING)
    monkeypatch.setattr(PlainDecoder, "advance", lambda task, module, state: None)
    assert changed_parts(before, take(WRITING)) == {"graph"}


def test_another_choice_of_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(WRITING)

    def choose(task: PlainDecoder, state: PlainState, logits: torch.Tensor) -> None:
        state.logits = logits[:, -1]
        state.tokens.append(state.logits.argmin(dim=-1, keepdim=True))

    monkeypatch.setattr(PlainDecoder, "_choose", choose)
    assert changed_parts(before, take(WRITING)) == {"graph"}
