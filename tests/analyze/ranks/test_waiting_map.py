"""Waiting by rank and collective: the same numbers as the totals, and a bounded size."""

from __future__ import annotations

import msgspec
import pytest

from stepscope.analyze.ranks.digest import digest
from stepscope.analyze.ranks.ranks_report import RanksReport, explain_ranks
from stepscope.analyze.ranks.waiting import (
    GROUP_ROWS,
    MOST_COLUMNS,
    MOST_ROWS,
    SINGLE_ROWS,
)
from trace_jobs import host_bound, straggling


def explain(ranks: int = 4, calls: int = 8, late: int = 3) -> RanksReport:
    return explain_ranks([digest(draft.build()) for draft in straggling(ranks, calls, late)])


@pytest.mark.parametrize(("ranks", "calls", "late"), [(2, 1, 1), (4, 8, 3), (8, MOST_COLUMNS, 0), (5, 100, 4)])
def test_cells_add_up_to_the_waiting_of_each_rank(ranks: int, calls: int, late: int) -> None:
    report = explain(ranks, calls, late)
    found = report.waiting_map
    assert found is not None
    assert found.collectives == calls
    assert len(found.columns) == min(calls, MOST_COLUMNS)
    assert [row.ranks for row in found.rows] == [[rank] for rank in range(ranks)]
    for row, waiting in zip(found.rows, report.waiting, strict=True):
        assert sum(wait or 0.0 for wait in row.wait_s) == pytest.approx(waiting.wait_s)
    assert {column.last_rank for column in found.columns} == {late}
    assert sum(sum(column.collectives.values()) for column in found.columns) == calls
    assert sum(column.skew_s for column in found.columns) == pytest.approx(report.stragglers.skew_s)
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_collectives_put_together_have_no_size_of_their_own() -> None:
    few, many = explain(calls=3).waiting_map, explain(calls=MOST_COLUMNS + 1).waiting_map
    assert few is not None
    assert many is not None
    assert [column.size_bytes for column in few.columns] == [4 << 20] * 3
    together = [column for column in many.columns if sum(column.collectives.values()) > 1]
    assert len(together) == 1
    assert together[0].size_bytes is None


def test_of_many_ranks_the_latest_keep_a_row_of_their_own() -> None:
    ranks = MOST_ROWS + 30
    found = explain(ranks=ranks, calls=3, late=41).waiting_map
    assert found is not None
    single = [row.ranks[0] for row in found.rows if len(row.ranks) == 1]
    assert 41 in single
    assert len(single) <= SINGLE_ROWS + 1
    grouped = [row for row in found.rows if len(row.ranks) == 2]
    assert len(grouped) <= GROUP_ROWS
    assert (grouped[0].ranks[0], found.rows[-1].ranks[-1]) == (0, ranks - 1)
    of_all = [wait for row in grouped for wait in row.wait_s if wait is not None]
    assert max(of_all) <= max(wait or 0.0 for row in found.rows for wait in row.wait_s)


def test_only_the_step_asked_for_is_mapped() -> None:
    drafts = straggling()
    for draft in drafts:
        draft.step(5000, 6000, number=2)
    digests = [digest(draft.build()) for draft in drafts]
    first, second, everything = (explain_ranks(digests, map_step=step).waiting_map for step in (1, 2, None))
    assert first is not None
    assert everything is not None
    assert (first.step, first.collectives) == (1, 8)
    assert (everything.step, everything.collectives) == (None, 8)
    assert second is None


def test_one_rank_or_no_collective_has_no_map() -> None:
    assert explain(ranks=1, late=0).waiting_map is None
    assert explain_ranks([digest(host_bound().build())]).waiting_map is None
