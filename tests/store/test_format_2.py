"""A store that the version before typed kinds wrote: complete runs of every kind, and one killed run per launcher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from builders import make_result, make_samples
from stepscope.compare.verdict import compare_cases
from stepscope.core.errors import CorruptRunError
from stepscope.metrics.sql import query_runs
from stepscope.records.kinds import OtherSpec
from stepscope.store import RunWriter, StoredRun, list_runs, verify_run

FORMAT_2 = Path(__file__).with_name("data") / "format-2"
KILLED = {
    "20261116-193922-gemm-ccdc8c": 3,
    "20261116-191055-all_reduce-99ac5f": 6,
    "20261116-191106-broadcast-0c6073": 6,
    "20261116-191108-dlrm-f434b6": 2,
    "20261116-191116-dlrm-583ac3": 2,
    "20261116-191129-gemm-c04000": 1,
}
"""With the number of cases that each still lacks."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def test_every_run_is_read_and_whole() -> None:
    runs, damaged = list_runs(FORMAT_2)
    assert damaged == []
    assert {run.id for run in runs if run.status == "interrupted"} == KILLED.keys()
    for run in runs:
        assert verify_run(run) == []
        stored = json.loads((run.folder / "plan.json").read_bytes())["cases"]
        assert [case.parameters for case in run.plan.cases] == [case["parameters"] for case in stored]
        lines = read_lines(run.folder / "journal.jsonl")
        for measured, line in zip(run.cases(), lines, strict=True):
            assert line["schema_version"] == 2
            case, result = measured.result.case, measured.result
            assert not isinstance(case.spec, OtherSpec)
            assert case.parameters == line["case"]["parameters"]
            assert result.facts == line["observed"]
            assert result.observed is None or not result.observed.other
            assert {samples.case for samples in measured.samples} <= {case.key}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_goes_on(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(FORMAT_2 / name, tmp_path / name)
    before = StoredRun(folder).journal
    with RunWriter(folder) as writer:
        if StoredRun(folder).system is None:  # of single processes: its parts have one each
            writer.write_system(StoredRun(FORMAT_2 / "20261116-193922-gemm-ccdc8c").system)  # type: ignore[arg-type]
        assert len(writer.remaining()) == KILLED[name]
        for case in writer.remaining():
            writer.append(make_result(case), [make_samples(case, [0.5])])
        writer.finish()
    run = StoredRun(folder)
    assert run.results[: len(before.results)] == before.results
    assert {line["schema_version"] for line in read_lines(folder / "journal.jsonl")} == (
        {2, 3} if before.results else {3}
    )
    assert (run.is_verified, verify_run(run), len(run.cases())) == (True, [], len(run.plan.cases))


def test_a_changed_byte_of_a_killed_run_is_found(tmp_path: Path) -> None:
    for file in ("plan.json", "journal.jsonl", "system.json"):
        folder = shutil.copytree(FORMAT_2 / "20261116-191055-all_reduce-99ac5f", tmp_path / file)
        content = bytearray((folder / file).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / file).write_bytes(content)
        with pytest.raises(CorruptRunError):
            StoredRun(folder).cases()


def test_old_runs_are_compared_and_asked_in_sql() -> None:
    runs, _ = list_runs(FORMAT_2)
    for run in runs:
        verdicts = compare_cases(run.cases(), run.cases())
        assert not verdicts.only_a
        assert not verdicts.only_b
    asked = "SELECT run, observed->>'check' FROM cases WHERE observed->>'check' IS NOT NULL"
    found = query_runs(runs, asked)
    assert (found.damaged, found.rows) == ([], [("20261116-190706-dlrm-a54f93", "passed")])
