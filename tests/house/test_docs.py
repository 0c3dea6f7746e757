"""Documentation that a machine can check."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_reference import format_cli_reference
from reference_tables import format_metrics, format_sql_tables, format_trace_metrics
from stepscope.metrics.traces import TRACE_METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_the_cli_reference_is_current() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == format_cli_reference(), "run `make docs`"


def test_the_page_of_operators_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page = importlib.import_module("operator_page").format_operator_page()
    assert (ROOT / "docs" / "operators.md").read_text() == page, "run `make docs`"


def test_the_table_of_the_suite_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("workload_table")
    table = tool.format_table(tool.read_values())
    assert table.strip() in (ROOT / "docs" / "workloads.md").read_text(), "run `make docs`"
    picture = importlib.import_module("workload_picture").draw_gains(tool.find_lines(tool.read_values()))
    assert picture == (ROOT / "docs" / "images" / "suite-gains.svg").read_text(), "run `make docs`"


def test_the_table_list_is_current() -> None:
    assert format_sql_tables().strip() in (ROOT / "docs" / "store.md").read_text(), "run `make docs`"


def test_the_lists_of_trace_metrics_are_current() -> None:
    page = (ROOT / "docs" / "trace-metrics.md").read_text(encoding="utf-8")
    for analysis in TRACE_METRICS:
        assert format_trace_metrics(analysis) in page, "run `make docs`"


def test_the_list_of_metrics_is_current() -> None:
    assert format_metrics().strip() in (ROOT / "docs" / "metrics.md").read_text(), "run `make docs`"


def test_links_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead


def test_commands_in_the_docs_exist() -> None:
    """Every `stepscope VERB` that a page shows is one, and so are its options."""
    reference = format_cli_reference()
    unknown = []
    for page in PAGES:
        for line in re.findall(r"^ {4}stepscope (.+)$", page.read_text(), flags=re.MULTILINE):
            if f"## `stepscope {line.split('#')[0].split()[0]}`" not in reference:
                unknown.append(f"{page.relative_to(ROOT)}: {line}")
            options = re.findall(r"(?<=\s)--[a-z][a-z-]+", " " + line.split('"')[0])
            unknown += [f"{page.relative_to(ROOT)}: {line}: {option}" for option in options if option not in reference]
    assert not unknown


def test_make_help_lists_the_targets() -> None:
    listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "bench", "docs", "clean"):
        assert re.search(rf"^{target}\s+\S", listed, flags=re.MULTILINE), target


def test_version_and_module_entry() -> None:
    done = subprocess.run([sys.executable, "-m", "stepscope", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"stepscope, version \d+\.\d+\.\d+\n", done.stdout)


PRIVATE_WORDS = re.compile(
    r"telling (rank|one)|played (world|by)|quiet time|on a leash|jostled|sign of life|\bmend(ed|s|ing)?\b|"
    r"in the words of|strangers|goes? away without|without a word|who speaks|\bspoke\b|\bdeadly\b|lie far out|"
    r"ran dry|plain form|fast form",
    re.IGNORECASE,
)
"""Expressions for which the field has words of its own; the glossary has those in use."""


def test_code_and_pages_speak_the_words_of_the_field() -> None:
    sources = [path for folder in ("src", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*sources, *PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
        if not {"decisions", "measured"} & set(path.parts)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE_WORDS.search(line) or '"""Of ' in line
    ]
    assert not found, "\n".join(found)
