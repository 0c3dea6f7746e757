"""What a table of results can and cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders import case_of, make_folder, make_result, make_samples, make_system
from stepscope.records import Benchmark, Case, Communication, RankPlace
from stepscope.report.html import render_html
from stepscope.report.labels import find_coverage
from stepscope.report.render import read_report_runs, render_json, render_markdown, render_text
from stepscope.report.view import build_report
from stepscope.store import RunWriter, StoredRun


def make_case(implementation: str, *, ranks: int = 1) -> Case:
    benchmark = Benchmark(model="dlrm", implementation=implementation, mode="train", config="A")
    return case_of(benchmark, {}, world_size=ranks)


def make_hosts(*hosts: str) -> Communication:
    ranks = [RankPlace(rank=i, host=host, pid=i, local_rank=0, device="cpu") for i, host in enumerate(hosts)]
    return Communication(backend="gloo", library={}, ranks=ranks)


@pytest.mark.parametrize(
    ("runs", "scope"),
    [
        ([([make_case("micro", ranks=64)], make_hosts("a", "b"))], "operators only"),
        ([([make_case("micro", ranks=64), make_case("ootb")], None)], "one device"),
        ([([make_case("ootb"), make_case("optimized", ranks=2)], make_hosts("a", "a"))], "one node"),
        ([([make_case("ootb", ranks=2)], make_hosts("a", "b"))], "cluster"),
        ([([make_case("micro", ranks=2)], make_hosts("a", "b")), ([make_case("ootb")], None)], "one device"),
    ],
)
def test_the_widest_model_decides(runs: list[tuple[list[Case], Communication | None]], scope: str) -> None:
    found = find_coverage(([make_result(case) for case in cases], carried) for cases, carried in runs)
    assert found is not None
    assert found.scope == scope


def test_without_cases_nothing_is_said() -> None:
    assert find_coverage([([], None)]) is None


def test_every_kind_of_report_says_it(tmp_path: Path) -> None:
    case = make_case("ootb")
    folder = make_folder(tmp_path, [case])
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(make_result(case), [make_samples(case, [0.1] * 8)])
        writer.finish()
    report = build_report(read_report_runs([StoredRun(folder)]))
    said = "one device; tells trends, and inference, not communication or input from shared storage"
    assert f"# scale: {said}" in render_text(report)
    assert f"- Scale: {said}" in render_markdown(report)
    assert '"scope":"one device"' in render_json(report)
    assert f"<p>Scale: {said}.</p>" in render_html(report)
