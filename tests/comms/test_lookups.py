"""Lookups of the DLRM pattern: as many rows as indices travel, right sums, and the distributions that are named."""

from __future__ import annotations

import pytest
import torch
from test_trial import try_out

from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.kernels import EmbeddingTables, LookupKernel, draw_rows
from stepscope.bench.comms.patterns.registry import find_pattern, make_case, read_options
from stepscope.records.kinds import PatternObserved

SMALL = LookupKernel(
    tables=(2, 1), rows=50, width=4, batch=3, pooling=5, random_lengths=False, zipf=None, seed=1
)  # fmt: skip
RANDOM = SMALL._replace(random_lengths=True, zipf=1.2)


@pytest.mark.parametrize("lookups", [SMALL, RANDOM])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_looks_up_what_the_others_send_it(lookups: LookupKernel, rank: int) -> None:
    bags = lookups.list_bags(rank)
    assert [len(table) for table in bags] == [6] * lookups.tables[rank], "one bag per example of all ranks"
    assert sum(map(sum, bags)) == sum(row[rank] for row in lookups.count_indices())
    read, sums = sum(map(sum, bags)), 6 * lookups.tables[rank]
    assert lookups.list_moved_bytes()[rank] == read * (4 * 4 + 8) + sums * 4 * 4
    if lookups.random_lengths:
        assert {length for table in bags for length in table} <= set(range(1, 6))
        assert len({length for table in bags for length in table}) > 2


@pytest.mark.parametrize("lookups", [SMALL, RANDOM])
def test_sums_are_compared_with_float64(lookups: LookupKernel) -> None:
    tables = EmbeddingTables(lookups, 0)
    assert tables.needed_bytes() > 2 * 50 * 4 * 4
    run = tables.open("cpu")
    assert tables.count_wrong() == 2 * 6 * 4, "nothing was looked up yet"
    run()
    assert tables.count_wrong() == 0
    tables._results[1][5, 2] += 1e-3
    assert tables.count_wrong() == 1
    tables.refresh()
    assert tables.count_wrong() == 2 * 6 * 4
    tables.close()


def test_uniform_and_zipf_are_as_named() -> None:
    rows, count = 20, 200_000
    even = torch.bincount(draw_rows(count, rows, None, 3), minlength=rows).double() / count
    assert even.sub(1 / rows).abs().max() < 0.005
    for exponent in (0.5, 1.05, 2.0):
        wanted = torch.arange(1, rows + 1).double().pow(-exponent)
        found = torch.bincount(draw_rows(count, rows, exponent, 3), minlength=rows).double() / count
        assert found.sort(descending=True).values.sub(wanted / wanted.sum()).abs().max() < 0.005
        assert found.argmax() != 0 or exponent != 2.0, "the most wanted row is anywhere"
    assert torch.equal(draw_rows(99, rows, 1.1, 5), draw_rows(99, rows, 1.1, 5))


def test_a_step_looks_up_and_says_what_it_moved() -> None:
    pattern = find_pattern("dlrm")
    text = {"batch": "4", "tables": "3", "embedding": "8", "lookups": "6", "rows": "100", "distribution": "zipf"}
    options = read_options(pattern, {**text, "exponent": "1.3"})
    case = make_case(pattern, options, overlap=True, backend="fake", world_size=2, device="cpu")
    done = try_out(case, FakeWorld(2))
    assert done.wrong == 0
    observed = done.facts.observed
    assert isinstance(observed, PatternObserved)
    (lookup,) = observed.lookups
    assert (lookup.name, lookup.tables, lookup.rows) == ("lookup", 2, 100)
    assert lookup.moved_bytes == 2 * 4 * 2 * (6 * (8 * 4 + 8) + 8 * 4)
    assert observed.facts()["lookup_moved_bytes"] == lookup.moved_bytes
    plain = make_case(pattern, read_options(pattern, text | {"rows": "0"}), overlap=True, backend="fake", world_size=2,
                      device="cpu")  # fmt: skip
    assert not try_out(plain, FakeWorld(2)).facts.observed.facts().keys() & {"lookup_rows"}


def test_a_lookup_that_does_not_run_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = EmbeddingTables.open
    monkeypatch.setattr(EmbeddingTables, "open", lambda self, device: opens(self, device) and (lambda: None))
    pattern = find_pattern("dlrm")
    options = read_options(pattern, {"rows": "10", "batch": "2", "tables": "2"})
    case = make_case(pattern, options, overlap=True, backend="fake", world_size=2, device="cpu")
    assert try_out(case, FakeWorld(2)).wrong > 0
