"""Events as a table of text."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from same_timeline import NCCL, dlrm_ranks, real_trace, values

from stepscope.core.errors import StoreWriteError, UsageError
from stepscope.formats.timeline import KERNEL, KINDS, OPERATOR, TimelineBuilder
from stepscope.traces.finish import finish
from stepscope.traces.table import write_csv


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_event_is_a_row(tmp_path: Path) -> None:
    builder = TimelineBuilder()
    builder.name_thread(5, 6, "main")
    builder.add(OPERATOR, 'aten::"mm",\nx', 10, 30, thread=(5, 6), shapes="[[1, 2]]")
    builder.add(KERNEL, "gemm_kernel", 20, 25, device=0, stream=7, bytes=4, occupancy=12.5)
    written = write_csv(finish(builder.build(rank=3)), tmp_path / "out.csv")
    first, second = read_rows(tmp_path / "out.csv")
    assert written.rows == 2
    assert written.columns == list(first)
    assert "sequence" not in first, "no event has one"
    assert first["name"] == 'aten::"mm",\nx'
    assert (first["rank"], first["kind"], first["start_ns"], first["duration_ns"]) == ("3", "operator", "10", "20")
    assert (first["process"], first["thread"], first["thread_name"], first["shapes"]) == ("5", "6", "main", "[[1, 2]]")
    assert (first["device"], first["bytes"], first["occupancy"]) == ("", "", "")
    assert (second["category"], second["device"], second["bytes"], second["occupancy"]) == ("gemm", "0", "4", "12.5")


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    trace = real_trace(NCCL)
    written = write_csv(trace, tmp_path / "out.csv.gz", columns=["name", "collective", "end_ns"])
    assert written.columns == ["name", "collective", "end_ns"]
    with gzip.open(tmp_path / "out.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [row[0] for row in rows] == values(trace, "name")
    assert [row[1] or None for row in rows] == values(trace, "collective")
    assert [int(row[2]) for row in rows] == trace.core["end_ns"].tolist()
    with pytest.raises(UsageError, match="no column 'nmae'"):
        write_csv(trace, tmp_path / "out.csv", columns=["nmae"])


def test_ranks_follow_each_other_and_rows_count_in_each(tmp_path: Path) -> None:
    ranks = dlrm_ranks(2)
    write_csv(ranks, tmp_path / "out.csv", columns=["rank", "row", "kind", "parent"])
    rows = read_rows(tmp_path / "out.csv")
    assert [int(row["rank"]) for row in rows] == [0] * len(ranks[0]) + [1] * len(ranks[1])
    assert [int(row["row"]) for row in rows] == [*range(len(ranks[0])), *range(len(ranks[1]))]
    assert [int(row["parent"] or -1) for row in rows] == [
        *ranks[0].core["parent"].tolist(),
        *ranks[1].core["parent"].tolist(),
    ]
    assert {row["kind"] for row in rows} <= set(KINDS)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace to write"):
        write_csv([], tmp_path / "out.csv")
    with pytest.raises(StoreWriteError, match="cannot be written"):
        write_csv(TimelineBuilder().build(), tmp_path / "missing" / "out.csv")
    assert list(tmp_path.iterdir()) == []
