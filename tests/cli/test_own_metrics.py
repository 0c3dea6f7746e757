"""A metric is added by one file: it is a column, a field of CSV and JSON, a column in SQL and a row of the docs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from cli_process import Stepscope

from builders import make_case, make_folder, make_result, make_samples, make_system
from reference_tables import format_metrics
from stepscope.core.errors import UsageError
from stepscope.metrics import (
    CaseInput,
    Failed,
    NotApplicable,
    forget_metrics,
    list_metrics,
    load_metrics_file,
)
from stepscope.store import MeasuredCase, RunWriter

OWN = """
from stepscope.metrics import CaseInput, NotApplicable, metric

@metric("noise_fraction", "Noise", "fraction", "p95 over median, minus one", better="lower", column="shown")
def noise_fraction(case):
    if case.summary.n < 3:
        return NotApplicable("too few samples")
    return case.summary.p95_s / case.summary.median_s - 1

@metric("broken", "Broken", "count", "always fails", column="none", needs_times=False)
def broken(case):
    return 1 // 0
"""
CASES = [make_case(m=m, dtype="float32", device="cpu") for m in (1, 2)]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def run(store: Path) -> Path:
    folder = make_folder(store, CASES)
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(make_result(CASES[0]), [make_samples(CASES[0], [1.0, 1.0, 1.0, 1.0, 2.0])])
        writer.append(make_result(CASES[1]), [make_samples(CASES[1], [1.0])])
        writer.finish()
    return folder


def test_one_file_adds_a_metric_everywhere(here: Stepscope, run: Path, own: Path) -> None:
    given = ("--metrics", str(own))
    before = dict(list_metrics())
    text = here("report", *given).out
    assert "Noise" in text
    assert "80.0 %" in text
    assert "Noise" in here("report", "--format", "html", *given).out
    for kind in ("text", "markdown", "html"):
        said = here("report", "--format", kind, *given).out
        assert "metric broken failed in 2 of 2 cases, for example gemm/" in said, kind
        assert "ZeroDivisionError" in said, kind
    rows = list(csv.DictReader(io.StringIO(here("runs", "export", *given).out)))
    assert float(rows[0]["noise_fraction"]) == pytest.approx(0.8)
    assert rows[1]["noise_fraction"] == ""
    shown = here("runs", "show", run.name, "--json", *given).data["cases"]
    assert [case["noise_fraction"] for case in shown] == [pytest.approx(0.8), None]
    assert "ZeroDivisionError" in shown[0]["failed_metrics"]["broken"]
    cases = here("report", "--json", *given).data["systems"][0]["cases"]
    assert cases[0]["noise_fraction"] == pytest.approx(0.8)
    asked = here("runs", "sql", "SELECT noise_fraction FROM cases ORDER BY 1", "--json", *given)
    assert asked.data["rows"] == [[pytest.approx(0.8)], [None]]
    assert dict(list_metrics()) == before, "they hold for one command"
    assert "Noise" not in here("report").out


def test_what_a_file_prints_is_no_part_of_the_answer(here: Stepscope, run: Path, own: Path) -> None:
    function = "def noise_fraction(case):\n"
    own.write_text(
        "print('own.py is loaded')\n" + OWN.replace(function, f"{function}    print('noise_fraction is computed')\n")
    )
    answer = here("report", "--json", "--metrics", str(own))
    assert answer.data["systems"]
    assert "own.py is loaded" in answer.err
    assert "noise_fraction is computed" in answer.err


def test_the_docs_list_it_and_outcomes_are_told_apart(own: Path) -> None:
    added = load_metrics_file(own)
    try:
        assert "| `noise_fraction` | Noise | – | lower | all | p95 over median, minus one |" in format_metrics()
        noise, broken = added
        short = CaseInput(MeasuredCase(make_result(CASES[0]), [make_samples(CASES[0], [1.0])]))
        assert noise.evaluate(short) == NotApplicable("too few samples")
        assert isinstance(noise.evaluate(CaseInput(MeasuredCase(make_result(CASES[0]), []))), NotApplicable)
        assert isinstance(broken.evaluate(short), Failed)
        with pytest.raises(UsageError, match="two metrics"):
            load_metrics_file(own)
    finally:
        forget_metrics([one.name for one in added])


@pytest.mark.parametrize(
    ("content", "said"),
    [("x = 1", "registers no metric"), ("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError")],
)
def test_a_file_that_adds_nothing_is_refused(here: Stepscope, run: Path, own: Path, content: str, said: str) -> None:
    own.write_text(content)
    answer = here("report", "--metrics", str(own))
    assert answer.code == 2
    assert said in answer.err
    assert str(own) in answer.err
    assert here("report", "--metrics", str(own.with_name("none.py"))).code == 2


def test_an_installed_package_adds_metrics(stepscope: Stepscope, run: Path, own: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    info = packages / "noise_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noise-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stepscope.metrics]\nnoise = noise_package\n")
    own.rename(packages / "noise_package.py")
    query = ("runs", "sql", "SELECT round(max(noise_fraction), 3) AS noise FROM cases")
    assert stepscope(*query, PYTHONPATH=str(packages)).out.split() == ["noise", "0.8"]
    assert stepscope(*query).code == 2
