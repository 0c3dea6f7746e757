"""What stands beside a score, and where batches come from."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.bench.workloads import choose_workloads, find_workload  # noqa: E402
from stepscope.bench.workloads.facts import _count_on, count_flops  # noqa: E402
from stepscope.bench.workloads.feed import Feed, Loader, count_round, make_clean_context, read_batches  # noqa: E402
from stepscope.bench.workloads.protocol import Setting  # noqa: E402
from stepscope.core.errors import BadInputError  # noqa: E402

LENGTHS = "xlmr/ootb/infer/fb-1dev-A-realdist"
"""Its batches are as wide as their longest sequence."""
PLAIN = [one for one in choose_workloads(implementations=["ootb"]) if one.declared.devices == 1]


@pytest.mark.parametrize("workload", PLAIN, ids=lambda one: one.benchmark.id)
def test_every_benchmark_has_a_number_of_operations(workload: Any) -> None:
    """Followed without values or made for real, it is the same number."""
    task, mode = workload.make_ootb("tiny"), workload.declared.mode
    batch = task.make_batch(2, seed=0, mode=mode)
    made = _count_on("cpu", task, mode, [batch])
    assert made is not None
    assert made[0] > 0
    assert count_flops(task, [batch], mode=mode, device="cpu") == made[0]


def test_what_the_device_cannot_count_is_counted_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy decoding depends on values; `meta` has none, and a device may lack an operator."""
    task = find_workload("rnnt/ootb/infer/1dev-fp32").make_ootb("tiny")
    batch, tried = task.make_batch(2, seed=0, mode="infer"), []
    right = _count_on("cpu", task, "infer", [batch])

    def count_on(place: str, *asked: Any) -> list[int] | None:
        tried.append(place)
        return None if place == "cuda" else _count_on(place, *asked)

    monkeypatch.setattr("stepscope.bench.workloads.facts._count_on", count_on)
    assert [count_flops(task, [batch], mode="infer", device="cuda")] == right
    assert tried == ["meta", "cuda", "cpu"]
    tried.clear()
    monkeypatch.setattr("stepscope.bench.workloads.facts.MOST_ON_HOST", 10)
    assert count_flops(task, [batch], mode="infer", device="cuda") is None
    assert tried == ["meta", "cuda"]


def test_a_step_waits_for_its_own_batch_not_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is received waits for all that was sent before."""
    task = find_workload("resnet50/ootb/infer/1dev-fp32").make_ootb("tiny")
    seen: list[str] = []
    for name in ("_send", "_receive"):
        original = getattr(Loader, name)

        def watch(self: Loader, batch: Any, *, name: str = name, original: Any = original) -> Any:
            seen.append(name)
            return original(self, batch)

        monkeypatch.setattr(Loader, name, watch)
    loader = Loader([task.make_batch(1, seed=0, mode="infer")], Setting("infer", "fp32", "cpu"), workers=0)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert seen == ["_send", "_receive", "_send", "_receive", "_send"]


@pytest.mark.parametrize("implementation", ["ootb", "optimized"])
def test_prompts_of_a_user_may_be_of_any_length(implementation: str, tmp_path: Path) -> None:
    workload = find_workload(f"gpt2/{implementation}/infer/small-1dev-fp32")
    plain, task = workload.make_ootb("tiny"), workload.make_task("tiny")
    batch = plain.make_batch(2, seed=0, mode="infer")
    shorter = {name: one[:, 3:] for name, one in batch.items()}
    torch.save([batch, shorter], tmp_path / "prompts.pt")
    found = read_batches(tmp_path / "prompts.pt", task, batch_size=2, mode="infer", any_shape=True)
    assert len(found) == 2


def test_operations_are_the_mean_over_batches_and_equal_shapes_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = find_workload(LENGTHS).make_ootb("tiny")
    batches = [task.make_batch(1, seed=seed, mode="infer") for seed in (727, 728, 728, 729)]
    assert [one["input_ids"].shape[1] for one in batches] == [48, 10, 10, 14]
    one_by_one = _count_on("cpu", task, "infer", batches)
    assert one_by_one is not None
    counted = []

    def count_on(place: str, task: Any, mode: Any, several: Any) -> list[int] | None:
        counted.append(len(several))
        return _count_on(place, task, mode, several)

    monkeypatch.setattr("stepscope.bench.workloads.facts._count_on", count_on)
    assert count_flops(task, batches, mode="infer", device="cpu") == sum(one_by_one) // 4
    assert set(counted) == {3}
    assert count_flops(task, batches[:1] * 4, mode="infer", device="cpu") == one_by_one[0]
    assert counted[-1] == 1


def test_a_round_is_over_when_every_batch_was_taken_equally_often() -> None:
    same = [{"x": torch.zeros(3)}] * 4
    other = [*same, {"x": torch.zeros(2)}, {"x": torch.zeros(3)}]
    assert count_round(same, at_once=3) == 1
    assert [count_round(other, at_once=at_once) for at_once in (1, 2, 4, 6, 12)] == [6, 3, 3, 1, 1]


def test_generation_is_counted_to_its_last_token() -> None:
    """Twice the weights for each token, and attention over what came before."""
    task = find_workload("gpt2/ootb/infer/small-1dev-fp32").make_ootb("tiny")
    sizes = task.sizes
    batch = task.make_batch(3, seed=0, mode="infer")
    prompt = batch["input_ids"].shape[1]
    layer = 12 * sizes["hidden"] ** 2 * sizes["layers"]
    words = sizes["vocabulary"] * sizes["hidden"]
    tokens = prompt + sizes["new_tokens"] - 1
    weights = 2 * 3 * (layer * tokens + words * sizes["new_tokens"])
    pairs = prompt * prompt + sum(range(prompt + 1, tokens + 1))
    attention = 4 * 3 * pairs * sizes["hidden"] * sizes["layers"]
    assert count_flops(task, [batch], mode="infer", device="cpu") == weights + attention


def test_a_step_goes_back_to_its_own_batches_and_others_are_closed() -> None:
    own: list[Any] = [{"x": torch.tensor(number)} for number in range(2)]
    ended = []

    def others() -> Iterator[Any]:
        try:
            while True:
                yield {"x": torch.tensor(9)}
        finally:
            ended.append(True)

    feed = Feed(own)
    assert int(feed.take()["x"]) == 0
    with feed.of(others()):
        assert [int(feed.take()["x"]) for _ in range(3)] == [9, 9, 9]
        assert not ended
    assert ended == [True]
    assert int(feed.take()["x"]) == 1


@pytest.mark.parametrize("clean", [False, True])
def test_a_loader_gives_every_batch_in_turn(clean: bool) -> None:
    """`clean`: as beside a GPU, from processes that were not forked off this one."""
    batches = [{"x": torch.full((3,), float(number))} for number in range(4)]
    loader = Loader(batches, Setting("train", "fp32", "cpu"), workers=1)
    if clean:
        loader._context = make_clean_context()
    source = iter(loader)
    seen = [float(next(source)["x"][0]) for _ in range(6)]
    source.close()  # type: ignore[attr-defined]
    assert seen == [0, 1, 2, 3, 0, 1]


def save_batches(path: Path, task: Any, mode: Any, changes: list[Any]) -> Path:
    batches = [task.make_batch(2, seed=seed, mode=mode) for seed in range(len(changes))]
    for batch, change in zip(batches, changes, strict=True):
        change(batch)
    torch.save(batches, path)
    return path


def leave(batch: Any) -> None:
    pass


def test_own_batches_that_one_graph_cannot_hold_are_refused(tmp_path: Path) -> None:
    workload = find_workload("bert-base/optimized/train/1dev-seq128-fp32")
    fast = workload.make_task("tiny")

    def hide_one_less(batch: Any) -> None:
        labels = batch["labels"]
        labels.view(-1)[int((labels.flatten() != -100).nonzero()[0])] = -100

    path = save_batches(tmp_path / "own.pt", workload.make_ootb("tiny"), "train", [leave, hide_one_less])
    with pytest.raises(BadInputError, match="replays one graph") as refused:
        read_batches(path, fast, batch_size=2, mode="train")
    assert str(refused.value.where).endswith("batch 1")
    assert "ootb" in str(refused.value.hint)
    save_batches(path, workload.make_ootb("tiny"), "train", [leave, leave])
    assert len(read_batches(path, fast, batch_size=2, mode="train")) == 2


def test_padding_where_the_fast_form_knows_none_is_refused(tmp_path: Path) -> None:
    workload = find_workload("xlmr/optimized/infer/fb-1dev-A")

    def pad(batch: Any) -> None:
        batch["input_ids"][1, -3:] = 1

    path = save_batches(tmp_path / "own.pt", workload.make_ootb("tiny"), "infer", [leave, pad])
    with pytest.raises(BadInputError, match="holds padding") as refused:
        read_batches(path, workload.make_task("tiny"), batch_size=2, mode="infer")
    assert str(refused.value.where).endswith("batch 1")


def make_words(examples: int, width: int) -> dict[str, Any]:
    ones = torch.ones((examples, width), dtype=torch.int64)
    return {"input_ids": 7 * ones, "attention_mask": ones}


@pytest.mark.parametrize("implementation", ["ootb", "optimized"])
@pytest.mark.parametrize("examples", [1, 32])
def test_only_axes_that_never_vary_are_demanded(tmp_path: Path, implementation: str, examples: int) -> None:
    """Of many examples one is always as long as any may be: the width of such batches varies, but does not show it."""
    task = find_workload(LENGTHS.replace("ootb", implementation)).make_task("tiny")
    torch.save([make_words(examples, width) for width in (3, 11, 40)], tmp_path / "own.pt")
    assert len(read_batches(tmp_path / "own.pt", task, batch_size=examples, mode="infer")) == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (make_words(2, 8) | {"attention_mask": make_words(2, 9)["attention_mask"]},
         "attention_mask must be torch.int64 of shape [2, n], n = 8 as in the inputs before"),
        ({"input_ids": torch.ones((3, 8), dtype=torch.int64)}, "input_ids must be torch.int64 of shape [2, n]"),
        ({"input_ids": torch.ones((2, 0), dtype=torch.int64)}, "input_ids must be torch.int64 of shape [2, n]"),
        ({"input_ids": torch.ones((2, 8, 1), dtype=torch.int64)}, "input_ids must be torch.int64 of shape [2, n]"),
        ({"input_ids": torch.ones((2, 8))}, "input_ids must be torch.int64 of shape [2, n]"),
        ({"more": torch.ones((2, 8))}, "must hold the inputs attention_mask, input_ids"),
    ],
)  # fmt: skip
def test_what_does_not_vary_is_demanded(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    torch.save([make_words(2, 5), make_words(2, 8) | change], tmp_path / "own.pt")
    with pytest.raises(BadInputError) as refused:
        read_batches(tmp_path / "own.pt", find_workload(LENGTHS).make_task("tiny"), batch_size=2, mode="infer")
    assert refused.value.message.startswith(told)
    assert str(refused.value.where).endswith("batch 1")
    assert "input_ids torch.int64[2, n], attention_mask torch.int64[2, n]; n may differ" in str(refused.value.hint)


def test_a_width_that_is_fixed_stays_demanded(tmp_path: Path) -> None:
    workload = find_workload("xlmr/ootb/infer/fb-1dev-A")
    width = workload.make_ootb("tiny").sizes["sequence"]
    torch.save([{"input_ids": make_words(2, width - 1)["input_ids"]}], tmp_path / "own.pt")
    with pytest.raises(BadInputError, match=rf"of shape \[2, {width}\]"):
        read_batches(tmp_path / "own.pt", workload.make_task("tiny"), batch_size=2, mode="infer")


def test_what_was_there_before_a_model_is_not_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.bench.workloads.facts import PeakMemory

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    assert PeakMemory("cuda").read_bytes() == 700


def test_a_measured_model_is_gone_after_clearing_up() -> None:
    import weakref

    from stepscope.bench.workloads.steps import clear_up
    from stepscope.measure import freeze_libraries, no_garbage_collection

    freeze_libraries()
    module = torch.nn.Linear(2, 2)
    module.itself = module
    alive = weakref.ref(module)
    with no_garbage_collection():
        pass
    del module
    assert alive() is not None, "it refers to itself"
    clear_up("cpu")
    assert alive() is None


def test_libraries_that_cases_load_leave_the_collectors_sight_and_garbage_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import weakref

    from stepscope.measure import freeze_libraries, freeze_new_libraries, loop

    freeze_libraries()
    loop._freeze_again.cache_clear()
    freeze_new_libraries()
    loaded = [types.ModuleType(f"loaded_{i}") for i in range(loop.MANY_MODULES)]
    freeze_new_libraries()
    assert any(one is loaded[0] for one in gc.get_objects()), "nothing was imported"
    module = torch.nn.Linear(2, 2)
    module.itself = module
    alive = weakref.ref(module)
    for one in loaded:
        monkeypatch.setitem(sys.modules, one.__name__, one)
    freeze_new_libraries()
    assert not any(one is loaded[0] for one in gc.get_objects()), "later collections pass over it"
    del module
    gc.collect()
    assert alive() is not None, "it was taken for a library"
    loop._freeze_again.cache_clear()
    freeze_new_libraries()
    assert alive() is None, "it was looked at again"
