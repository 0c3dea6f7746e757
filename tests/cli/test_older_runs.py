"""What the version before typed kinds stored is continued, compared, exported, queried and verified by the commands."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import pytest
from cli_process import Stepscope

from stepscope.store import StoredRun

FORMAT_2 = Path(__file__).parents[1] / "store" / "data" / "format-2"
KILLED = "20261116-193922-gemm-ccdc8c"
COMPLETE = "20261116-190201-gemm-4f74b4"


def test_a_killed_run_of_an_older_version_is_resumed(
    here: Stepscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "killed"
    store.mkdir()
    shutil.copytree(FORMAT_2 / KILLED, store / KILLED)
    # A run is continued on the machine it began on: here the one that made the fixture, whatever runs this test.
    monkeypatch.setattr("stepscope.run.rank.collect_system", lambda: StoredRun(store / KILLED).system)
    before = here("runs", "show", KILLED, "--store", str(store), "--json").data["cases"]
    resumed = here("runs", "resume", KILLED, "--store", str(store), "--json")
    assert resumed.code == 0, resumed.err
    cases = resumed.data["cases"]
    assert len(cases) == 4
    assert cases[0]["samples_s"] == before[0]["samples_s"]
    assert [case["status"] for case in cases] == ["ok"] * 4
    assert here("runs", "verify", KILLED, "--store", str(store)).code == 0


def test_older_runs_are_compared_exported_and_queried(here: Stepscope) -> None:
    store = ("--store", str(FORMAT_2))
    assert here("compare", COMPLETE, COMPLETE, *store).code in {0, 4}
    exported = list(csv.DictReader(io.StringIO(here("runs", "export", *store).out)))
    assert {row["run_id"] for row in exported} >= {COMPLETE, KILLED}
    shown = here("runs", "show", "20261116-194039-gpt2-f32512", *store, "--json").data["cases"][0]
    assert shown["serving_requests"] == 8
    assert shown["parameters"] == {"device": "cpu", "precision": "fp32", "scale": "tiny"}
    counted = here("runs", "sql", "SELECT count(*) FROM cases WHERE parameters->>'wire' = 'int8'", *store, "--json")
    assert counted.data["rows"] == [[1]]
