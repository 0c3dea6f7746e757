"""The sharded model between real ranks: a step is that of the whole model on the joined batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from dlrm_ranks import BATCH, SEED, make_task, read_ranks, start_ranks

from stepscope.bench.workloads.models.dlrm.ootb import Tables
from stepscope.bench.workloads.models.dlrm.sharded import join_batches, shard_tables

CONFIGS = ["A.8dev-embed32-fp32", "open-source.1dev-fp32"]
"""Learned weights with bags of one length, and unequal tables with bags of drawn lengths."""


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what came of a step, of each config on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(folder, "sharded", CONFIGS)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_of_two_ranks_is_that_of_one(stepped: Path, config: str) -> None:
    found = read_ranks(stepped, config)
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


def compare_parts(parts: list[dict[str, torch.Tensor]], whole: Mapping[str, torch.Tensor]) -> None:
    """Each table on one rank, everything else on all."""
    for name, expected in whole.items():
        have = [part[name] for part in parts if name in part]
        assert len(have) == (1 if name.startswith("tables.") else len(parts)), name
        for one in have:
            torch.testing.assert_close(one, expected, msg=lambda told, name=name: f"{name}: {told}")


def test_lookups_are_spread_evenly() -> None:
    tables = Tables(rows=(10,) * 7, lookups=(9, 1, 1, 1, 4, 4, 4))
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
