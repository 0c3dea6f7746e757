"""The tables people read and the rows programs read."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import msgspec
import pytest
from report_examples import make_case, make_comms, make_run, make_system, rich_runs, small_runs

from stepscope.compare.verdict import CaseComparison
from stepscope.records import LatencyTarget, RankSamples, Score
from stepscope.report.render import (
    render_comparison_markdown,
    render_comparison_text,
    render_csv,
    render_json,
    render_markdown,
    render_text,
)
from stepscope.report.view import build_report
from stepscope.store.view import MeasuredCase

FINGERPRINT = make_system().fingerprint

GOLDEN_TEXT = f"""\
# stepscope 0.0.test
#
# system: AMD EPYC 9554, 128 threads ({FINGERPRINT})
# libraries: python 3.11.7, torch 2.6.0
# run 20250301-100000-ab12 (2025-03-01T10:00:00Z): stepscope run dlrm/ootb/train --note 'two words'
# scale: one device; tells trends, and inference, not communication or input from shared storage
#
# Model  Implementation  Mode     Config              Case                 Batch Size    Score   Units    Median     Interval  n    P95    P99  Notices
#                                                                                                           (ms)         (ms)      (ms)   (ms)
  dlrm   ootb            infer    A.1dev-embed4-fp32  -                          1024    46550*  ex/s      22.00  20.00–24.00  5  23.80  23.96        1
  xlmr   ootb            train    tiny                -                             8  skipped   -             -            -  -      -      -        0
  gemm   micro           forward  custom              shape=256x1024x1024           -   0.5369   TFLOP/s   1.000  1.000–1.000  6      -      -        0
  gemm   micro           forward  custom              shape=512x1024x1024           -   0.5369   TFLOP/s   2.000  2.000–2.000  6      -      -        0
# * missed its latency limit, p95 of a batch ≤ 20.00 ms: dlrm/ootb/infer/A.1dev-embed4-fp32
# skipped: xlmr/ootb/train/tiny [batch=8]: unsupported: needs a GPU
#   next: run it on a machine with one
# notice: dlrm/ootb/infer/A.1dev-embed4-fp32 [batch=1024]: interval is ±9.1 % of the median
#   next: measure longer
"""  # noqa: E501

GOLDEN_MARKDOWN = f"""\
# Results

## AMD EPYC 9554, 128 threads

- System: `{FINGERPRINT}`
- Libraries: python 3.11.7, torch 2.6.0
- Run `20250301-100000-ab12` (2025-03-01T10:00:00Z): `stepscope run dlrm/ootb/train --note 'two words'`
- Scale: one device; tells trends, and inference, not communication or input from shared storage

| Model | Implementation | Mode | Config | Case | Batch Size | Score | Units | Median | Interval | n | P95 | P99 | Notices |
| --- | --- | --- | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| dlrm | ootb | infer | A.1dev-embed4-fp32 | - | 1024 | 46550\\* | ex/s | 22.00 ms | 20.00–24.00 ms | 5 | 23.80 ms | 23.96 ms | 1 |
| xlmr | ootb | train | tiny | - | 8 | skipped | - | - | - | - | - | - | 0 |
| gemm | micro | forward | custom | shape=256x1024x1024 | - | 0.5369 | TFLOP/s | 1.000 ms | 1.000–1.000 ms | 6 | - | - | 0 |
| gemm | micro | forward | custom | shape=512x1024x1024 | - | 0.5369 | TFLOP/s | 2.000 ms | 2.000–2.000 ms | 6 | - | - | 0 |

\\* missed its latency limit, p95 of a batch ≤ 20.00 ms: dlrm/ootb/infer/A.1dev-embed4-fp32.

- **notice** dlrm/ootb/infer/A.1dev-embed4-fp32 \\[batch=1024\\]: interval is ±9.1 % of the median Next: measure longer
- **skipped** xlmr/ootb/train/tiny \\[batch=8\\]: unsupported: needs a GPU Next: run it on a machine with one

Made by stepscope 0.0.test.
"""  # noqa: E501


@pytest.fixture(autouse=True)
def fixed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.report.view.__version__", "0.0.test")


def test_text_table_looks_as_agreed() -> None:
    assert render_text(build_report(small_runs())) == GOLDEN_TEXT


def test_markdown_table_looks_as_agreed() -> None:
    assert render_markdown(build_report(small_runs())) == GOLDEN_MARKDOWN


def test_a_narrow_text_table_drops_detail_and_says_so() -> None:
    wide, narrow = (render_text(build_report(small_runs()), width=width).splitlines() for width in (None, 120))
    rows = [line for line in narrow if line.startswith("  ")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 120 < max(len(line) for line in wide if line.startswith("  "))
    assert "# left out for width: P95, P99, Notices" in narrow
    # What names a row, its median, interval and n stay, however narrow.
    narrowest = render_text(build_report(small_runs()), width=10)
    titles = " ".join(line.removeprefix("#") for line in narrowest.splitlines() if line.startswith("#")).split()
    assert {"Case", "Median", "Interval", "n"} <= set(titles)
    assert "46550*" in narrowest


def test_systems_never_share_a_table() -> None:
    report = build_report(rich_runs())
    assert [len({case.run_id for case in system.cases}) for system in report.systems] == [2, 1]
    text = render_text(report)
    first, second = text.split("# system 2 of 2")
    assert "20250303-120000-ef56" not in first
    assert "all_reduce" not in second
    assert [x.split()[0] for x in second.splitlines() if x.startswith("  ")] == ["gemm"]
    assert sum(line.startswith("# Model") for line in text.splitlines()) == 2
    assert render_markdown(report).count("| Model |") == 2


def test_runs_without_a_system_stand_alone() -> None:
    runs = [make_run([make_case(values_s=[1.0])], None, name) for name in ("one", "two")]
    report = build_report(runs)
    assert [system.fingerprint for system in report.systems] == [None, None]
    assert [system.runs[0].id for system in report.systems] == ["one", "two"]


def test_one_case_of_two_runs_gives_two_neighbouring_rows_with_their_run() -> None:
    system = make_system()
    cases = [make_case(values_s=[1.0]), make_case("gemm/micro/forward/custom", values_s=[2.0])]
    report = build_report([make_run(cases, system, "first"), make_run(cases, system, "second")])
    rows = [(case.benchmark.model, case.run_id) for case in report.systems[0].cases]
    assert rows == [("dlrm", "first"), ("dlrm", "second"), ("gemm", "first"), ("gemm", "second")]
    data = [line.split() for line in render_text(report).splitlines() if line.startswith("  ")]
    assert [row[-1] for row in data] == ["first", "second", "first", "second"]


@pytest.mark.parametrize(("limit_s", "shown"), [(0.9, "1.000*"), (1.1, "1.000")])
def test_star_marks_a_missed_latency_target_only(limit_s: float, shown: str) -> None:
    case = make_case(
        values_s=[1.0] * 6, score=Score(unit="ex/s", work=1.0), latency_target=LatencyTarget(limit_s=limit_s)
    )
    row = next(x for x in render_text(build_report([make_run([case], None)])).splitlines() if x.startswith("  "))
    assert row.split()[5] == shown


def test_case_column_names_only_what_differs() -> None:
    cases = [
        make_case("bmm/micro/forward/x", values_s=[1.0], parameters={"m": m, "dtype": "half"}, world_size=ranks)
        for m, ranks in ((1, 1), (2, 1), (2, 4))
    ]
    alone = make_case("emb/micro/forward/x", values_s=[1.0], parameters={"rows": 5})
    view = build_report([make_run([*cases, alone], None)]).systems[0]
    assert [case.difference for case in view.cases] == ["m=1 ranks=1", "m=2 ranks=1", "m=2 ranks=4", "rows=5"]


def test_collectives_show_size_bandwidths_and_wrong_elements() -> None:
    cases = make_comms(0)
    text = render_text(build_report([make_run(cases, None)]))
    header = next(line for line in text.splitlines() if line.startswith("# Model"))
    assert "Case" not in header  # the size has its own column, and nothing else differs
    for title in ("Size", "AlgBW", "BusBW", "Wrong"):
        assert title in header
    assert "256 MiB" in text


def test_bandwidths_are_derived_where_only_the_bus_factor_was_kept() -> None:
    case = make_case(
        "all_reduce/micro/gloo/x",
        values_s=[0.5] * 6,
        observed={"size_bytes": 1000, "bus_factor": 1.5, "wrong": 0},
        parameters={"size_bytes": 1000, "dtype": "float32", "device": "cpu"},
    )
    view = build_report([make_run([case], None)]).cases[0]
    assert (view.value("algbw_bytes_per_s"), view.value("busbw_bytes_per_s")) == (2000.0, 3000.0)


def test_csv_keeps_values_exactly() -> None:
    runs = rich_runs()
    rows = list(csv.DictReader(io.StringIO(render_csv(build_report(runs)))))
    by_place = {(row["run_id"], row["case_key"]): row for row in rows}
    measured = [(run, case) for run in runs for case in run.cases]
    assert len(by_place) == len(rows) == len(measured)
    for run, case in measured:
        row, summary = by_place[run.id, case.key], case.summary()
        assert row["status"] == case.result.status
        assert json.loads(row["parameters"]) == case.result.case.parameters
        assert row["system_fingerprint"] == (run.system.fingerprint if run.system else "")
        if summary is None:
            assert row["median_s"] == row["n"] == row["score"] == ""
            assert row["failure_kind"] == (case.result.failure.kind if case.result.failure else None)
        else:
            assert (float(row["median_s"]), int(row["n"])) == (summary.median_s, summary.n)
            assert (float(row["ci_low_s"]), float(row["ci_high_s"])) == (summary.ci_low_s, summary.ci_high_s)
            assert float(row["score"]) == case.score()
            assert row["unit"] == (case.result.score.unit if case.result.score else "")


def test_json_holds_the_view_and_states_thinning() -> None:
    case = make_case(values_s=[1.0 + i / 1e4 for i in range(5000)], warmups_s=[9.0])
    content = json.loads(render_json(build_report([make_run([case], make_system())])))
    assert content["record"] == "report"
    view = content["systems"][0]["cases"][0]
    assert view["series"]["total"] == 5001
    assert len(view["series"]["seconds"]) == 2000
    assert (view["series"]["positions"][0], view["series"]["positions"][-1]) == (0, 5000)
    assert view["series"]["warmup"].count(True) == 1
    assert sum(view["timing"]["histogram"]["counts"]) == 5000
    assert view["timing"]["summary"]["n"] == 5000


def test_series_folds_ranks_to_the_slowest_and_keeps_warmups() -> None:
    case = make_case(values_s=[1.0])
    ranks = [
        RankSamples(case=case.key, rank=rank, duration_s=times, iterations=[2, 2, 2], warmup=[True, False, False])
        for rank, times in enumerate(([8.0, 2.0, 6.0], [4.0, 4.0, 4.0]))
    ]
    result = make_case(values_s=[1.0], timing="slowest_rank").result
    view = build_report([make_run([MeasuredCase(result, ranks)], None)]).cases[0]
    assert view.series.seconds == [4.0, 2.0, 3.0]
    assert view.series.warmup == [True, False, False]


def test_far_outliers_are_counted_beside_the_histogram() -> None:
    case = make_case(values_s=[1.0 + i / 1000 for i in range(50)] + [40.0, 50.0])
    timing = build_report([make_run([case], None)]).cases[0].timing
    assert timing is not None
    assert timing.histogram.high_s < 1.1
    assert (timing.histogram.below, sum(timing.histogram.counts), timing.histogram.above) == (0, 50, 2)
    assert timing.summary.outliers == 2


def test_control_characters_cannot_break_text_or_markdown() -> None:
    cases = [
        make_case("x/micro/a/b", values_s=[1.0], parameters={"p": value}) for value in ("\x1b[31mred\nline", "a|b`<b>")
    ]
    report = build_report([make_run(cases, None)])
    text, markdown = render_text(report), render_markdown(report)
    assert "\x1b" not in text + markdown
    assert sum(line.startswith("  ") for line in text.splitlines()) == 2
    assert "p=\\x1b[31mred\\nline" in text
    assert "a\\|b\\`&lt;b&gt;" in markdown


def test_a_run_that_still_runs_has_no_rows_yet() -> None:
    text = render_text(build_report([make_run([], make_system(), status="running")]))
    assert "# no finished cases" in text
    assert "running" in text
    assert render_text(build_report([])) == "# stepscope 0.0.test\n# no runs\n"


def compared(label: str, **said: Any) -> CaseComparison:
    return CaseComparison(**{"key": label, "label": label, "benchmark": "gemm", "reason": "", **said})


COMPARED = [
    compared(
        "gemm [m=1]", verdict="worse", statistic="p10", ratio=1.25, ci_low=1.2, ci_high=1.3, time_a_s=1e-3,
        time_b_s=1.25e-3, n_a=30, n_b=31, processes_a=5, processes_b=6,
    ),
    compared("emb", verdict="not enough data", reason="no samples in B", n_a=30, processes_a=5),
    compared(
        "wild", verdict="not enough data", statistic="p95", ratio=2.0, ci_low=0.0, ci_high=math.inf, time_a_s=1e-3,
        time_b_s=2e-3, n_a=9, n_b=9, processes_a=1, processes_b=1,
    ),
]  # fmt: skip


def test_comparison_text() -> None:
    assert render_comparison_text(COMPARED) == (
        "# Case        Of          A         B     B/A       Interval      n  Processes  Verdict\n"
        "  gemm [m=1]  p10  1.000 ms  1.250 ms  1.250×  1.200×–1.300×  30/31        5/6  worse\n"
        "  emb         -           -         -       -              -   30/0        5/0  not enough data\n"
        "  wild        p95  1.000 ms  2.000 ms  2.000×       0.000×–∞    9/9        1/1  not enough data\n"
        "# emb: no samples in B\n"
        "# 3 cases: 2 not enough data, 1 worse\n"
    )


def test_a_narrow_comparison_breaks_names_and_no_title() -> None:
    label = "dlrm/ootb/train/small.1dev-embed32-fp32[device=cpu,precision=fp32,scale=tiny]"
    row = msgspec.structs.replace(COMPARED[0], label=label, ci_low=0.261, ci_high=math.inf, verdict="not enough data")
    for width in (72, 80, 100):
        text = render_comparison_text([row], width=width)
        assert max(map(len, text.splitlines())) <= width
        assert all(f" {title}" in text for title in ("Case", "A", "B", "B/A", "Interval", "n", "Verdict")), width


def test_comparison_markdown() -> None:
    lines = render_comparison_markdown(COMPARED).splitlines()
    assert lines[0] == "| Case | Of | A | B | B/A | Interval | n | Processes | Verdict |"
    assert lines[3] == "| emb | - | - | - | - | - | 30/0 | 5/0 | not enough data |"
    assert lines[-1] == "3 cases: 2 not enough data, 1 worse"
