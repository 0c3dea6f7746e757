"""Jobs of several ranks compared: which rank is looked at, and that this is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_trace_diff import steps_with

from stepscope.analyze.diff.compare import choose_ranks, diff_traces, step_time_s
from stepscope.cli.main import run
from stepscope.formats.chrome import write_chrome

US = 1_000


def write_job(folder: Path, kernel_us: Mapping[int, int]) -> Path:
    folder.mkdir()
    for rank, length in kernel_us.items():
        timeline = replace(steps_with([[length * US, 50 * US]] * 4), rank=rank)
        write_chrome([timeline], folder / f"rank{rank}.json")
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert run(["trace", "diff", *map(str, arguments), "--no-cache", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    return answer["data"] if code == 0 else answer["error"]


def test_the_rank_whose_step_changed_most_is_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a = write_job(tmp_path / "a", {0: 900, 1: 500, 2: 500})
    b = write_job(tmp_path / "b", {0: 905, 1: 505, 2: 700})
    data = call(capsys, a, b)
    assert (data["rank_a"], data["rank_b"], data["verdict"]) == (2, 2, "longer")
    assert [one["rank"] for one in data["ranks"]] == [0, 1, 2]
    assert [one["change_s"] for one in data["ranks"]] == pytest.approx([5e-6, 5e-6, 200e-6])
    assert data["ranks"][2]["a_s"] == data["step_a_s"]
    assert data["notes"][0] == "rank 2 is compared: of 3 ranks the one whose step changed most"
    named = call(capsys, a, b, "--rank", 1)
    assert (named["rank_a"], named["rank_b"], named["ranks"]) == (1, 1, [])
    assert "ranks here: 0, 1, 2" in call(capsys, a, b, "--rank", 7, code=2)["hint"]
    assert run(["trace", "diff", str(a), str(b), "--no-cache"]) == 0
    text = capsys.readouterr().out
    assert "A (rank 2) 550.1 µs, B (rank 2) 750.1 µs" in text
    assert "+200.0 µs  rank 2: 550.1 µs, 750.1 µs" in text


def test_jobs_of_different_ranks_are_compared_by_the_slowest_of_both(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a = write_job(tmp_path / "a", {0: 300, 2: 500, 3: 100})
    b = write_job(tmp_path / "b", {0: 300, 1: 900, 2: 200, 3: 600})
    data = call(capsys, a, b)
    assert (data["rank_a"], data["rank_b"]) == (2, 3)
    assert data["ranks"][1]["a_s"] is None
    assert data["notes"][0] == "rank 2 of A is compared with rank 3 of B: the slowest of the 3 ranks that both have"


def test_ranks_are_chosen() -> None:
    assert choose_ranks({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})[:2] == (0, 0)
    assert choose_ranks({0: 1.0, 1: 2.0}, {0: 1.1, 1: 1.0})[:2] == (1, 1)
    assert choose_ranks({0: 1.0, 1: 2.0}, {4: 1.1, 5: 1.0})[:2] == (1, 4)
    only = choose_ranks({0: 1.0, 1: 2.0}, {0: 1.1})
    assert (only.rank_a, only.rank_b, only.why) == (0, 0, "the only rank that both have")


def test_a_rank_without_the_step_asked_for_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a = write_job(tmp_path / "a", {0: 300, 1: 400})
    b = write_job(tmp_path / "b", {0: 300})
    write_chrome([replace(steps_with([[900 * US]]), rank=1)], b / "rank1.json")
    data = call(capsys, a, b, "--steps-b", "2,3")
    assert (data["rank_a"], data["rank_b"]) == (0, 0)
    assert data["ranks"][1]["b_s"] is None
    assert "has no step 9" in call(capsys, a, b, "--steps-b", "9", code=2)["message"]


def test_the_step_of_a_rank_is_that_of_the_comparison() -> None:
    trace = steps_with([[300_000], [200_000], [250_000], [900_000], [100_000], [400_000]])
    diff = diff_traces(trace, trace, None, [1, 2, 3])
    assert (step_time_s(trace), step_time_s(trace, [1, 2, 3])) == (diff.step_a_s, diff.step_b_s)
