"""Rows of whole models: they say what was measured, and what decoders and servers are judged by."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from page_structure import check
from report_examples import make_case, make_run, spread

from stepscope.records import LatencyTarget, RankSamples, Score
from stepscope.report.html import render_html
from stepscope.report.labels import format_fact, name_fact
from stepscope.report.render import render_csv, render_json, render_markdown, render_text
from stepscope.report.view import Report, SystemView, build_report
from stepscope.store.view import MeasuredCase

RESNET = "resnet50/ootb/infer/1dev-fp32"


def view_of(*cases: MeasuredCase) -> SystemView:
    return build_report([make_run(list(cases), None)]).systems[0]


def model(benchmark: str = RESNET, **changes: Any) -> MeasuredCase:
    parameters = {"device": "cpu", "precision": "fp32", "scale": "full"} | changes.pop("parameters", {})
    return make_case(benchmark, values_s=[1.0] * 6, parameters=parameters, **changes)


def labels_of(*cases: MeasuredCase) -> list[str]:
    return [case.difference for case in view_of(*cases).cases]


# What was measured


def test_a_usual_row_says_no_more_than_its_name() -> None:
    usual = view_of(model(), model("dlrm/ootb/train/A.8dev-embed32-fp32", world_size=8, parameters={}))
    assert usual.cases[0].difference == ""
    assert view_of(model()).shared == []


@pytest.mark.parametrize(
    ("benchmark", "precision", "shown"),
    [
        (RESNET, "bf16", "precision=bf16"),
        (RESNET, "fp32", ""),
        ("llama/ootb/infer/1b-1dev-bf16", "bf16", ""),
        ("llama/ootb/infer/1b-1dev-bf16", "fp16", "precision=fp16"),
        # A name that leaves the precision open: only the row can tell.
        ("xlmr/ootb/infer/fb-1dev-A", "fp16", "precision=fp16"),
        ("xlmr/optimized/infer/fb-1dev-A", "fp8", "precision=fp8"),
    ],
)
def test_a_row_names_its_precision_where_the_config_does_not(benchmark: str, precision: str, shown: str) -> None:
    assert labels_of(model(benchmark, parameters={"precision": precision})) == [shown]


def test_another_precision_stands_in_the_row_of_every_format() -> None:
    report = build_report([make_run([model(parameters={"precision": "bf16", "scale": "tiny"})], None)])
    row = next(line for line in render_text(report).splitlines() if line.startswith("  "))
    assert "1dev-fp32  precision=bf16" in row
    assert "| 1dev-fp32 | precision=bf16 |" in render_markdown(report)
    assert '<td class="case text">precision=bf16</td>' in render_html(report)


def test_what_all_rows_share_is_said_once_above_them() -> None:
    cases = [model(parameters={"scale": "tiny", "precision": one}, batch_size=2) for one in ("fp32", "bf16")]
    report = build_report([make_run([*cases, model("vgg16/ootb/infer/1dev-fp32", parameters={"scale": "tiny"})], None)])
    view = report.systems[0]
    assert view.shared == ["scale=tiny"]
    assert [case.difference for case in view.cases] == ["precision=fp32", "precision=bf16", ""]
    text = render_text(report).splitlines()
    assert text[text.index("# all rows: scale=tiny") + 1].startswith("# Model")
    assert sum("scale=tiny" in line for line in text) == 1
    assert "\nAll rows: scale=tiny.\n\n| Model |" in render_markdown(report)
    assert "All rows: scale=tiny." in "".join(check(render_html(report)).text)
    assert json.loads(render_json(report))["systems"][0]["shared"] == ["scale=tiny"]


def test_what_only_some_rows_have_stands_in_those() -> None:
    view = view_of(model(parameters={"scale": "tiny"}), model("vgg16/ootb/infer/1dev-fp32"))
    assert view.shared == []
    assert [case.difference for case in view.cases] == ["scale=tiny", ""]
    # An operator has no scale, so not all rows are tiny.
    mixed = view_of(model(parameters={"scale": "tiny"}), make_case("gemm/micro/forward/custom", values_s=[1.0]))
    assert mixed.shared == []
    assert [case.difference for case in mixed.cases] == ["scale=tiny", ""]


def test_ways_to_run_it_that_were_chosen_are_said() -> None:
    chosen = {"parallel": "ddp", "accumulate": 4, "data": "1a2b3c4d5e6f", "search": "throughput"}
    plain = model("vgg16/ootb/train/1dev-fp32")
    assert labels_of(model(parameters=chosen), plain)[0] == (
        "parallel=ddp search=throughput accumulate=4 data=1a2b3c4d5e6f"
    )
    assert view_of(model(parameters=chosen)).shared == [
        "parallel=ddp", "search=throughput", "accumulate=4", "data=1a2b3c4d5e6f"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ranks", "label", "shared"),
    [
        ("1dev-fp32", 1, "", []),
        ("1dev-fp32", 2, "ranks=2 (declared for 1)", []),
        ("A.8dev-embed32-fp32", 8, "", ["ranks=8"]),
        ("A.8dev-embed32-fp32", 1, "ranks=1 (declared for 8)", []),
        ("A.16dev-embed32-fp32", 8, "ranks=8 (declared for 16)", []),
        ("build", 2, "", ["ranks=2"]),
    ],
)
def test_another_number_of_ranks_than_declared_is_marked(
    config: str, ranks: int, label: str, shared: list[str]
) -> None:
    view = view_of(model(f"dlrm/ootb/train/{config}", world_size=ranks, parameters={"precision": "fp32"}))
    assert view.shared == shared
    shown = view.cases[0].difference.removeprefix("precision=fp32").strip()  # which `build` leaves open
    assert shown == label


def test_operators_and_collectives_show_only_what_differs() -> None:
    parameters = {"precision": "bf16", "scale": "tiny", "parallel": "ddp", "data": "x", "accumulate": 2}
    view = view_of(make_case("gemm/suite/forward/1dev-fp32", values_s=[1.0], parameters=parameters, world_size=4))
    assert (view.cases[0].difference, view.shared) == ("", [])


def test_a_single_row_of_an_operator_names_its_shape() -> None:
    parameters = {"m": 64, "n": 32, "dtype": "float32", "device": "cpu", "cache": "warm"}
    view = view_of(make_case("gemm/micro/forward/custom", values_s=[1.0], parameters=parameters))
    assert (view.cases[0].difference, view.shared) == ("m=64 n=32", ["dtype=float32", "device=cpu"])


# Decoders

SERVED = {
    "serving_requests": 20, "serving_achieved_per_s": 14.5, "serving_offered_per_s": 13.75, "serving_busy_share": 0.148,
    "serving_longest_queue": 3, "serving_above_capacity": False, "serving_missed_latency": False,
    "serving_ttft_p50_s": 0.002, "serving_ttft_p95_s": 0.005, "serving_ttft_p99_s": 0.007,
    "serving_latency_p50_s": 0.009, "serving_latency_p95_s": 0.015, "serving_latency_p99_s": 0.019,
}  # fmt: skip


def decoder(*, limit_s: float = 0.1, ttft_s: float = 0.0125, **observed: Any) -> MeasuredCase:
    times = [0.5] * 6
    built = make_case(
        "gpt2/ootb/infer/small-1dev-fp32", values_s=times, batch_size=4, score=Score(unit="ex/s", work=4),
        latency_target=LatencyTarget(limit_s=limit_s, percentile=99), observed={"tokens_per_s": 3930.0, **observed},
    )  # fmt: skip
    samples = RankSamples(
        case=built.key, duration_s=times, iterations=[1] * 6, warmup=[False] * 6,
        extra_s={"ttft": [ttft_s] * 6, "tpot": [0.0025] * 42},
    )  # fmt: skip
    return MeasuredCase(built.result, [samples])


def cells_of(report: Report) -> dict[str, str]:
    """By their titles, of the last row of the Markdown table."""
    lines = [line for line in render_markdown(report).splitlines() if line.startswith("| ")]
    titles, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[-1]))
    return dict(zip(titles, row, strict=True))


def test_a_decoder_shows_first_token_later_tokens_and_their_rate() -> None:
    report = build_report([make_run([decoder()], None)])
    cells = cells_of(report)
    assert (cells["TTFT"], cells["TTFT P99"], cells["TPOT"]) == ("12.50 ms", "12.50 ms", "2.500 ms")
    assert cells["Tokens/s"] == "3930"
    assert not [title for title in cells if "Served" in title or title in {"Queue", "Requests"}]
    text = render_text(report)
    head = next(line for line in text.splitlines() if line.startswith("# Model"))
    assert "P95    P99   TTFT  TTFT P99   TPOT  Tokens/s" in head
    assert "# P95 and P99 of a model that generates: from the prompts to the last token" in text
    assert "Served" not in text
    page = "".join(check(render_html(report)).text)
    assert "Tokens/s" in page
    assert "on which the latency limit is" in page
    (row,) = csv.DictReader(io.StringIO(render_csv(report)))
    assert (row["ttft_p50_s"], row["ttft_p99_s"], row["tpot_p95_s"]) == ("0.0125", "0.0125", "0.0025")
    assert (row["tokens_per_s"], row["serving_requests"], row["serving_missed_latency"]) == ("3930.0", "", "")


def test_requests_at_a_rate_have_columns_of_their_own() -> None:
    report = build_report([make_run([decoder(**SERVED)], None)])
    cells = cells_of(report)
    assert (cells["Requests"], cells["Offered/s"], cells["Reached/s"]) == ("20", "13.75", "14.50")
    assert (cells["Served TTFT P99"], cells["Served P99"]) == ("7.000 ms", "19.00 ms")
    assert (cells["Queue"], cells["Busy"]) == ("3", "14.8 %")
    assert "# Served: requests that came at their own pace" in render_text(report)
    (row,) = csv.DictReader(io.StringIO(render_csv(report)))
    assert {name: row[name] for name in SERVED if name in row} == {
        name: str(value) if not isinstance(value, bool) else "false"
        for name, value in SERVED.items()
        if name != "serving_above_capacity"
    }


def test_tables_without_generation_have_none_of_its_columns() -> None:
    image = model(latency_target=LatencyTarget(limit_s=2.0), observed={"peak_memory_bytes": 1 << 30})
    text = render_text(build_report([make_run([image], None)]))
    assert "P95" in text
    for word in ("TTFT", "TPOT", "Tokens", "Served", "generates"):
        assert word not in text


def test_the_star_says_what_it_judges() -> None:
    # A generation of 500 ms keeps a limit of 100 ms, as that is on its first token.
    kept = build_report([make_run([decoder()], None)])
    assert "*" not in render_text(kept)
    image = model(latency_target=LatencyTarget(limit_s=0.5), score=Score(unit="ex/s", work=1))
    report = build_report([make_run([decoder(ttft_s=0.2), image], None)])
    text = render_text(report)
    assert "# * missed its latency limit, p99 of TTFT ≤ 100.0 ms: gpt2/ootb/infer/small-1dev-fp32\n" in text
    assert f"# * missed its latency limit, p95 of a batch ≤ 500.0 ms: {RESNET}\n" in text
    assert "\\* missed its latency limit, p99 of TTFT ≤ 100.0 ms: gpt2" in render_markdown(report)
    page = render_html(report)
    assert 'title="Missed its latency target p99 of TTFT ≤ 100.0 ms"' in page
    assert "missed its latency limit, p95 of a batch ≤ 500.0 ms" in "".join(check(page).text)


def test_late_answers_are_marked_where_they_stand() -> None:
    late = decoder(**SERVED | {"serving_missed_latency": True, "serving_ttft_p99_s": 0.25})
    report = build_report([make_run([late], None)])
    cells = cells_of(report)
    assert cells["Score"] == "8.000"
    assert cells["Served TTFT P99"] == "250.0 ms\\*"
    text = render_text(report)
    said = "at Served TTFT: missed p99 of TTFT with waiting ≤ 100.0 ms, or more was offered than full batches do: gpt2"
    assert f"# * {said}/ootb/infer/small-1dev-fp32\n" in text
    row = next(line for line in text.splitlines() if line.startswith("  "))
    head = next(line for line in text.splitlines() if line.startswith("# Model"))
    assert row.index("250.0*") + len("250.0") == head.index("Served TTFT P99") + len("Served TTFT P99")


def test_a_narrow_table_keeps_what_decoders_are_measured_for() -> None:
    text = render_text(build_report([make_run([decoder(**SERVED)], None)]), width=80)
    table = text[text.index("# all rows") : text.index("# left out")]
    assert max(len(line) for line in table.splitlines() if not line.startswith("# all rows")) <= 80
    assert {"TTFT", "TPOT", "Tokens/s", "Reached/s", "Served", "P99"} <= set(table.split())
    assert {"Median", "Interval", "n"} <= set(table.split())
    assert "Queue" in next(line for line in text.splitlines() if "left out for width" in line)


def test_the_page_lists_the_times_of_tokens_and_rates_as_such() -> None:
    page = render_html(build_report([make_run([decoder(**SERVED)], None)]))
    told = dict(zip(*[iter(re.findall(r"<d[td]>(.*?)</d[td]>", page))] * 2, strict=False))
    assert (told["TTFT"], told["TTFT P99"], told["serving ttft p99"]) == ("12.50 ms", "12.50 ms", "7.000 ms")
    assert (name_fact("tokens_per_s"), format_fact("tokens_per_s", 3930.0)) == ("tokens", "3930/s")
    assert format_fact("serving_ttft_p99_s", 0.007) == "7.000 ms"
    assert format_fact("busbw_bytes_per_s", 2e9) == "2.000 GB/s"


def test_a_decoder_that_failed_shows_no_times() -> None:
    failed = make_case(
        "gpt2/ootb/infer/small-1dev-fp32", batch_size=4, latency_target=LatencyTarget(limit_s=0.1, percentile=99)
    )
    report = build_report([make_run([failed, decoder()], None)])
    row = next(line for line in render_markdown(report).splitlines() if "| failed |" in line)
    assert row.count("ms") == 0
    assert "p99 ≤ 100.0 ms" in "".join(check(render_html(report)).text)


def test_rows_stay_in_line_beside_measured_ones() -> None:
    image = make_case(RESNET, values_s=spread(0.01, 20, seed=1), latency_target=LatencyTarget(limit_s=1.0))
    text = render_text(build_report([make_run([image, decoder()], None)]))
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert len({len(row) for row in rows}) == 1
