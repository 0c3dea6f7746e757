"""Steps of two real ranks are those of one process on the joined batch: tables sharded, or gradients averaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dlrm_ranks import BATCH, SEED, join_batches, make_fast, make_task, name_joined, read_ranks, start_ranks, step_whole

from stepscope.bench.workloads.models.dlrm.ootb import TableSizes
from stepscope.bench.workloads.models.dlrm.sharded import shard_tables

CONFIGS = ["A.8dev-embed32-fp32", "open-source.1dev-fp32"]
"""Learned weights with bags of one length, and unequal tables with bags of drawn lengths."""
OPTIMIZED = ["A.8dev-embed32-fp32", "default.1dev-fp32", "mlperf.1dev-fp32", "open-source.1dev-fp32"]
"""Learned weights of rows, equal tables, tables of different lengths, bags of different sizes."""
RESNET = "resnet50/ootb/train/1dev-fp32"
GATHERED = [f"dlrm/optimized/train/{name}.1dev-fp32" for name in ("default", "mlperf", "ddp")]
"""Whose backward pass would update the tables itself, were it alone."""
COUNTED = "dlrm/optimized/train/A.1dev-embed32-fp32"
SPARSE = "dlrm/ootb/train/default.1dev-fp32"
JOINED = [
    *(name_joined(one) for one in [*GATHERED, COUNTED, SPARSE, "dlrm/ootb/train/A.1dev-embed32-fp32", RESNET]),
    *(name_joined(one, accumulate=2) for one in (GATHERED[0], SPARSE, RESNET)),
]
HALVES = name_joined(GATHERED[0], "bf16")
"""Sums of rounded gradients depend on their order, so that one process makes other ones."""


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what came of the steps of each rank, by the names of all that is tested here."""
    folder = tmp_path_factory.mktemp("ranks")
    names = {"sharded": CONFIGS, "optimized": OPTIMIZED, "joined": [*JOINED, HALVES]}
    start_ranks(folder, [f"{kind}:{name}" for kind, listed in names.items() for name in listed])
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_of_two_ranks_is_that_of_one(stepped: Path, config: str) -> None:
    found = read_ranks(stepped, f"sharded:{config}")
    task = make_task(config)
    torch.manual_seed(SEED)
    module = task.build()
    optimizer = task.make_optimizer(module)
    batch = join_batches(task.tables, [one["batch"] for one in found])
    loss = task.loss(module, batch)
    loss.backward()
    torch.testing.assert_close(torch.stack([one["loss"] for one in found]).mean(), loss.detach())
    expected = {name: one.grad.to_dense() for name, one in module.named_parameters() if one.grad is not None}
    compare_parts([one["gradients"] for one in found], expected)
    optimizer.step()
    compare_parts([one["weights"] for one in found], module.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(torch.cat([one["chances"] for one in found]), task.infer(module, batch))
    # A second step, of two batches of each rank.
    other = join_batches(task.tables, [one["other"] for one in found])
    optimizer.zero_grad()
    ((task.loss(module, batch) + task.loss(module, other)) / 2).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    compare_parts([one["accumulated"] for one in found], module.state_dict())


@pytest.mark.parametrize("config", OPTIMIZED)
def test_sharded_tables_train_as_one_plain_process_does(stepped: Path, config: str) -> None:
    found = read_ranks(stepped, f"optimized:{config}")
    plain = make_fast(config).plain
    torch.manual_seed(SEED)
    module: Any = plain.build()
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    optimizer = plain.make_optimizer(module)
    whole = [
        join_batches(plain.tables, list(of_ranks)) for of_ranks in zip(*(one["batches"] for one in found), strict=True)
    ]
    for batch in whole:
        optimizer.zero_grad()
        plain.loss(module, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = dict(module.named_parameters())
    together: dict[str, Any] = {}
    for one in found:
        for name, weight in one["weights"].items():
            if name in together:
                assert torch.equal(together[name], weight), f"{name} differs between ranks"
            together[name] = weight
    assert set(together) == set(expected)
    for name, weight in together.items():
        right, moved = expected[name].detach(), expected[name].detach() - before[name]
        assert moved.any() or "tables" in name, name
        off = float((weight - right).norm())
        assert off <= 1e-3 * float(moved.norm()) + 4e-7 * float(right.norm()), name
    with torch.inference_mode():
        chances = plain.infer(module.eval(), whole[0])
    assert torch.allclose(torch.cat([one["chances"] for one in found]), chances, atol=1e-5)


@pytest.mark.parametrize("name", [*JOINED, HALVES])
def test_all_ranks_have_the_same_weights(stepped: Path, name: str) -> None:
    first, second = read_ranks(stepped, f"joined:{name}")
    assert [place for place, one in first.items() if not torch.equal(one, second[place])] == []


@pytest.mark.parametrize("name", JOINED)
def test_ranks_compute_what_one_process_does_with_all_batches(stepped: Path, name: str) -> None:
    found, expected = read_ranks(stepped, f"joined:{name}")[0], step_whole(name)
    assert found.keys() == expected.keys()
    for place, one in found.items():
        torch.testing.assert_close(
            one, expected[place], atol=1e-5, rtol=1e-4, msg=lambda told, place=place: f"{place}: {told}"
        )


def compare_parts(parts: list[dict[str, torch.Tensor]], whole: Mapping[str, torch.Tensor]) -> None:
    """Each table on one rank, everything else on all."""
    for name, expected in whole.items():
        have = [part[name] for part in parts if name in part]
        assert len(have) == (1 if name.startswith("tables.") else len(parts)), name
        for one in have:
            torch.testing.assert_close(one, expected, msg=lambda told, name=name: f"{name}: {told}")


def test_lookups_are_spread_evenly() -> None:
    tables = TableSizes(rows=(10,) * 7, lookups=(9, 1, 1, 1, 4, 4, 4))
    owners = shard_tables(tables, 3)
    carried = [
        sum(one for one, owner in zip(tables.lookups, owners, strict=True) if owner == rank) for rank in range(3)
    ]
    assert max(carried) == 9
    assert set(owners) == {0, 1, 2}


def test_joined_batches_are_whole_bags() -> None:
    """A bag of the joined batch has the lookups it had on its rank."""
    task = make_task("open-source.1dev-fp32")
    batches = [task.make_batch(BATCH, seed=seed, mode="train") for seed in (1, 2)]
    joined = join_batches(task.tables, batches)
    assert list(joined["dense"].shape) == [2 * BATCH, task.sizes["dense_features"]]
    before = 0
    for table, each in enumerate(task.tables.lookups):
        for rank, batch in enumerate(batches):
            first = sum(task.tables.lookups[:table]) * BATCH
            theirs = batch["indices"][first : first + each * BATCH]
            place = before + rank * each * BATCH
            assert torch.equal(joined["indices"][place : place + each * BATCH], theirs)
            begins = joined["offsets"][table, rank * BATCH : (rank + 1) * BATCH]
            assert torch.equal(begins - rank * each * BATCH, batch["offsets"][table])
        before += 2 * each * BATCH
