"""The optimized DLRM with its tables spread over two real ranks computes what one plain process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlrm_fast_ranks as ranks  # noqa: E402

from stepscope.bench.workloads.models.dlrm.sharded import join_batches  # noqa: E402

CONFIGS = ["A.8dev-embed32-fp32", "default.1dev-fp32", "mlperf.1dev-fp32", "open-source.1dev-fp32"]
"""Learned weights of rows, equal tables, tables of different lengths, bags of different sizes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("spread")
    running = [
        subprocess.Popen([sys.executable, ranks.__file__, str(rank), str(made), *CONFIGS])
        for rank in range(ranks.RANKS)
    ]
    try:
        assert [one.wait(timeout=240) for one in running] == [0] * ranks.RANKS
    finally:
        for one in running:
            one.kill()
    return made


@pytest.mark.parametrize("config", CONFIGS)
def test_spread_tables_train_as_one_plain_process_does(folder: Path, config: str) -> None:
    found = [torch.load(folder / f"{config}.{rank}.pt", weights_only=True) for rank in range(ranks.RANKS)]
    plain = ranks.make_fast(config).plain
    torch.manual_seed(ranks.SEED)
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
