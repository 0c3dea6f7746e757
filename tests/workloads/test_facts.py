"""What stands beside a score, and where batches come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.errors import BadInputError  # noqa: E402
from stepscope.workloads import choose_workloads, find_workload  # noqa: E402
from stepscope.workloads.facts import _count_on, count_flops  # noqa: E402
from stepscope.workloads.feed import Feed, Loader, make_clean_context, read_batches  # noqa: E402

PLAIN = [one for one in choose_workloads(implementations=["ootb"]) if one.declared.devices == 1]


@pytest.mark.parametrize("workload", PLAIN, ids=lambda one: one.benchmark.id)
def test_every_benchmark_has_a_number_of_operations(workload: Any) -> None:
    """Followed without values or made for real, it is the same number."""
    task, mode = workload.make_plain("tiny"), workload.declared.mode
    made = _count_on("cpu", task, mode, 2)
    assert made is not None
    assert made > 0
    assert count_flops(task, mode=mode, batch_size=2, device="cpu") == made


def test_what_the_device_cannot_count_is_counted_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy decoding depends on values; `meta` has none, and a device may lack an operator."""
    task = find_workload("rnnt/ootb/infer/1dev-fp32").make_plain("tiny")
    right, tried = _count_on("cpu", task, "infer", 2), []

    def count_on(place: str, *asked: Any) -> int | None:
        tried.append(place)
        return None if place == "cuda" else _count_on(place, *asked)

    monkeypatch.setattr("stepscope.workloads.facts._count_on", count_on)
    assert count_flops(task, mode="infer", batch_size=2, device="cuda") == right
    assert tried == ["meta", "cuda", "cpu"]


def test_generation_is_counted_to_its_last_token() -> None:
    """Twice the weights for each token, and attention over what came before."""
    task = find_workload("gpt2/ootb/infer/small-1dev-fp32").make_plain("tiny")
    sizes = task.sizes
    batch = task.make_batch(3, seed=0, mode="infer")
    prompt = batch["input_ids"].shape[1]
    layer = 12 * sizes["hidden"] ** 2 * sizes["layers"]
    words = sizes["vocabulary"] * sizes["hidden"]
    tokens = prompt + sizes["new_tokens"] - 1
    weights = 2 * 3 * (layer * tokens + words * sizes["new_tokens"])
    pairs = prompt * prompt + sum(range(prompt + 1, tokens + 1))
    attention = 4 * 3 * pairs * sizes["hidden"] * sizes["layers"]
    assert count_flops(task, mode="infer", batch_size=3, device="cpu") == weights + attention


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
    loader = Loader(batches, device="cpu", precision="fp32", mode="train", workers=1)
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

    path = save_batches(tmp_path / "own.pt", workload.make_plain("tiny"), "train", [leave, hide_one_less])
    with pytest.raises(BadInputError, match="replays one graph") as refused:
        read_batches(path, fast, batch_size=2, mode="train")
    assert str(refused.value.where).endswith("batch 1")
    assert "ootb" in str(refused.value.hint)
    save_batches(path, workload.make_plain("tiny"), "train", [leave, leave])
    assert len(read_batches(path, fast, batch_size=2, mode="train")) == 2


def test_padding_where_the_fast_form_knows_none_is_refused(tmp_path: Path) -> None:
    workload = find_workload("xlmr/optimized/infer/fb-1dev-A")

    def pad(batch: Any) -> None:
        batch["input_ids"][1, -3:] = 1

    path = save_batches(tmp_path / "own.pt", workload.make_plain("tiny"), "infer", [leave, pad])
    with pytest.raises(BadInputError, match="holds padding") as refused:
        read_batches(path, workload.make_task("tiny"), batch_size=2, mode="infer")
    assert str(refused.value.where).endswith("batch 1")
