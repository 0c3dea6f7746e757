"""Communication runs in the manner of nccl-tests."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_examples import make_case, make_run, make_system

from stepscope.records import (
    Communication,
    CommunicationRequest,
    Failure,
    ImportedFile,
    ImportedRank,
    ImportRequest,
    Notice,
    RankPlace,
    RankSamples,
    Score,
)
from stepscope.report.communication import COLUMNS, fit_number, format_collective_table, has_collectives
from stepscope.report.html import render_html
from stepscope.report.render import render_csv, render_markdown, render_text
from stepscope.report.view import build_report
from stepscope.store.view import MeasuredCase

GOLDEN = """\
# stepscope 0.0.test
# run 20250301-100000-ab12 (2025-03-01T10:00:00Z): stepscope bench comms
# libraries as loaded: torch 2.6.0
# backend gloo: gloo built into torch 2.6.0
# GLOO_SOCKET_IFNAME=eth0
# asked for: device=cpu, processes=1, tag=nightly, hang_timeout=300.0 s, check=sample, device_time=no, per_rank=no, init_only=no
# settings: target_width=0.01000, level=0.9500, min_time=250.0 ms, max_time=3.000 s, min_samples=20, few_samples=5, \
max_samples=20000, min_sample=1.000 ms, resolution_share=0.01000, warmup_min_samples=4, warmup_min_time=0 s, \
warmup_max_time=2.000 s, stable_share=0.03000, window=5
# sizes: K, M, G are powers of 1024; rates: 1 GB/s is 1e9 bytes per second; times are of one call
# times are those of the slowest rank in each iteration
# check: #wrong counts elements over 3 iterations per row that were looked at
# Using devices
#  Rank  0 Pid    100 on     node-1 device cpu
#  Rank  1 Pid    101 on     node-1 device cpu
#
#       size         count      type   redop    root       p50       p95       p99       min       max    algbw    busbw      skew    last  #wrong
#        (B)    (elements)                                (us)      (us)      (us)      (us)      (us)   (GB/s)   (GB/s)      (us)  (rank)
# all_reduce, gloo, 2 ranks, device=cpu
        1024           256   float32     sum      -1     20.00     29.90     30.78     12.00     31.00   0.0512   0.0512      2.00       1       0
     1048576        262144   float32     sum      -1   1600.00   1780.00   1796.00   1500.00   1800.00    0.655    0.655         -       -       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.353
# Last to begin        : rank 1 in 1 of 1 rows
"""  # noqa: E501


@pytest.fixture(autouse=True)
def fixed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.report.communication.__version__", "0.0.test")


def make_collective(
    size: int = 1024,
    seconds: list[list[float]] | None = None,
    *,
    operation: str = "all_reduce",
    factor: float = 1.0,
    arrivals: list[list[float]] | None = None,
    observed: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    **changes: Any,
) -> MeasuredCase:
    """One list of times a rank."""
    ranks = seconds or [[10e-6, 20e-6, 30e-6], [12e-6, 18e-6, 31e-6]]
    facts = {"size_bytes": size, "bus_factor": factor, "members": len(ranks), "count": size // 4, "wrong": 0,
             "checked": 3, **(observed or {})}  # fmt: skip
    built = make_case(
        f"{operation}/micro/gloo/{len(ranks)}ranks", values_s=ranks[0], world_size=len(ranks), timing="slowest_rank",
        parameters={"size_bytes": size, "dtype": "float32", "device": "cpu", **(parameters or {})},
        score=Score(unit="GB/s", work=size * factor),
        observed={name: value for name, value in facts.items() if value is not None},
        **changes,
    )  # fmt: skip
    samples = [
        RankSamples(
            case=built.key, rank=rank, duration_s=values, iterations=[1] * len(values), warmup=[False] * len(values),
            extra_s={"arrival": arrivals[rank]} if arrivals else {},
        )
        for rank, values in enumerate(ranks)
    ]  # fmt: skip
    return MeasuredCase(built.result, samples)


def make_communication() -> Communication:
    return Communication(
        backend="gloo",
        library={"name": "gloo", "version": "built into torch 2.6.0"},
        settings={"GLOO_SOCKET_IFNAME": "eth0"},
        ranks=[RankPlace(rank=r, host="node-1", pid=100 + r, local_rank=r, device="cpu") for r in range(2)],
    )


def table(*cases: MeasuredCase, **changes: Any) -> str:
    return format_collective_table([make_run(list(cases), make_system(), **changes)])


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def test_the_whole_table() -> None:
    cases = [
        make_collective(1024, arrivals=[[0.0, 0.0, 0.0], [1e-6, 2e-6, 3e-6]]),
        make_collective(1 << 20, [[1.5e-3, 1.6e-3, 1.7e-3], [1.4e-3, 1.6e-3, 1.8e-3]]),
    ]
    text = table(
        *cases, communication=make_communication(), command=["stepscope", "bench", "comms"],
        request=CommunicationRequest(tag="nightly"),
    )  # fmt: skip
    assert text == GOLDEN


def test_cells_stand_under_their_names() -> None:
    text = table(make_collective())
    titles = next(line for line in text.splitlines() if " size " in line)
    row = next(line for line in text.splitlines() if not line.startswith("#"))
    end = 0
    for column in COLUMNS:
        end += column.width
        assert titles[:end].endswith(column.title)
        assert row[end - 1] != " "
        end += 2
    assert len(rows(text)[0]) == len(COLUMNS)


def test_parameters_without_a_column_begin_a_section() -> None:
    cases = [
        make_collective(),
        make_collective(parameters={"placement": "out_of_place"}),
        make_collective(2048, parameters={"placement": "out_of_place", "reduction": "max"}),
        make_collective(operation="broadcast", parameters={"root": 1, "mode": "nonblocking", "depth": 4}),
        make_collective(operation="all_gather"),
    ]
    text = table(*cases)
    sections = [line for line in text.splitlines() if "2 ranks, device" in line]
    assert sections == [
        "# all_reduce, gloo, 2 ranks, device=cpu",
        "# all_reduce, gloo, 2 ranks, device=cpu, placement=out_of_place",
        "# broadcast, gloo, 2 ranks, device=cpu, mode=nonblocking, depth=4",
        "# all_gather, gloo, 2 ranks, device=cpu",
    ]
    assert [row[3:5] for row in rows(text)] == [
        ["sum", "-1"], ["sum", "-1"], ["max", "-1"], ["none", "1"], ["none", "-1"],
    ]  # fmt: skip


def test_wrong_elements_fail_the_table() -> None:
    failure = Failure(kind="wrong_result", message="7 elements are not what all_reduce must give", hint="try again")
    bad = make_collective(2048, observed={"wrong": 7}, status="failed", failure=failure)
    text = table(make_collective(), bad)
    assert "# Out of bounds values : 7 FAILED" in text
    assert [row[-1] for row in rows(text)] == ["0", "7"]
    assert "# failed: wrong_result: 7 elements" in text
    assert "#   next: try again" in text


def test_what_was_not_checked_is_not_called_right() -> None:
    text = table(make_collective(observed={"wrong": None}))
    assert rows(text)[0][-1] == "N/A"
    assert "# Out of bounds values : N/A" in text


def test_skipped_cases_keep_a_row_with_their_cause() -> None:
    failure = Failure(kind="does_not_fit", message="needs 8 TiB")
    skipped = make_case(
        "all_reduce/micro/gloo/2ranks", status="skipped", failure=failure, world_size=2,
        parameters={"size_bytes": 1 << 40, "dtype": "float32", "device": "cpu"},
    )  # fmt: skip
    benchmark = msgspec.structs.replace(skipped.result.case.benchmark, owner="communication")
    case = msgspec.structs.replace(skipped.result.case, benchmark=benchmark)
    skipped = MeasuredCase(msgspec.structs.replace(skipped.result, case=case), [])
    text = table(make_collective(), skipped)
    assert rows(text)[1] == [str(1 << 40), "-", "float32", "sum", "-1", *["-"] * 10]
    assert "# skipped: does_not_fit: needs 8 TiB" in text


def test_one_averaged_sample_has_no_percentiles() -> None:
    """An imported row: what the tool told of single iterations stands in their place."""
    single = make_collective(seconds=[[20e-6]], observed={"iteration_min_s": 18e-6, "iteration_p99_s": 25e-6})
    assert rows(table(single))[0][5:10] == ["20.00", "-", "25.00", "18.00", "-"]


def test_a_barrier_moves_nothing() -> None:
    cells = rows(table(make_collective(0, operation="barrier", factor=0.0)))[0]
    assert (cells[0], cells[10], cells[11]) == ("0", "-", "-")


def test_ranks_come_from_the_request_where_it_has_them() -> None:
    ranks = [ImportedRank(rank=0, group=1, pid=7, host="a", device=3, name="NVIDIA H100", pci_address="0000:06:00")]
    source = ImportedFile(tool="nccl-tests", format="text", file="a.txt", sha256="0" * 64)
    request = ImportRequest(imported_from=source, ranks=ranks)
    text = table(make_collective(), communication=make_communication(), request=request)
    assert "#  Rank  0 Group  1 Pid      7 on          a device  3 [0000:06:00] NVIDIA H100\n" in text
    assert "Pid    101" not in text


def test_without_ranks_hosts_are_named() -> None:
    assert "#  Host node-1: AMD EPYC 9554" in table(make_collective())
    gpus = format_collective_table([make_run([make_collective()], make_system(gpus=8))])
    assert "#  Host node-1: 8 × NVIDIA H100 80GB HBM3" in gpus
    assert "#  not known" in format_collective_table([make_run([make_collective()], None)])


def test_other_cases_are_left_out_and_counted() -> None:
    other = make_case("gemm/micro/forward/custom", values_s=[1e-3])
    text = table(make_collective(), other)
    assert len(rows(text)) == 1
    assert "# left out: 1 case that is no communication" in text
    assert not has_collectives(make_run([other], None))
    assert has_collectives(make_run([make_collective()], None))


def test_notices_are_told_once_a_kind() -> None:
    notices = [Notice(kind="unstable", message=f"interval is ±{n} %", hint="longer") for n in (7, 9)]
    cases = [make_collective(size, notices=[notice]) for size, notice in zip((1024, 2048), notices, strict=True)]
    text = table(*cases)
    assert "# notice: 2 rows, for example: interval is ±7 %" in text
    assert text.count("#   next: longer") == 1


def test_several_runs_follow_each_other() -> None:
    runs = [make_run([make_collective()], make_system(), name) for name in ("first", "second")]
    text = format_collective_table(runs)
    assert text.count("# stepscope") == 2
    assert text.index("run first") < text.index("run second")


def test_control_characters_cannot_leave_their_line() -> None:
    text = table(make_collective(parameters={"pattern": "\x1b[31m\nx"}), request=CommunicationRequest(tag="a\nb"))
    assert "\x1b" not in text
    assert len(rows(text)) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "-"), (0.0, "0.00"), (20.019, "20.02"), (1.0, "1.00"), (0.5, "0.500"), (0.0511, "0.0511"),
     (0.0000042, "0.00000"), (123456.78, "123456.8"), (1234567.8, "1234568"), (999999.99, "1000000"),
     (123456789.0, "123456789")],
)  # fmt: skip
def test_numbers_shrink_to_fit(value: float | None, text: str) -> None:
    assert fit_number(value, 1.0, 8 if value is None or value > 1 else 7) == text


@given(st.floats(1e-12, 1e12), st.integers(6, 10))
def test_numbers_fit_or_are_whole(value: float, width: int) -> None:
    text = fit_number(value, 1.0, width)
    assert len(text) <= width or "." not in text
    assert float(text) == pytest.approx(value, rel=0.01, abs=0.51 * 10.0 ** -(width - 2))


@given(st.lists(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_times_make_a_table(seconds: list[list[float]]) -> None:
    shortest = min(map(len, seconds))
    cells = rows(table(make_collective(seconds=[values[:shortest] for values in seconds])))[0]
    assert len(cells) == len(COLUMNS)


# The other formats


def test_arrivals_fill_columns_of_every_format() -> None:
    with_arrivals = make_collective(arrivals=[[0.0, 0.0, 0.0], [1e-6, 2e-6, 3e-6]])
    report = build_report([make_run([with_arrivals, make_collective(2048)], make_system())])
    text, markdown, page = render_text(report), render_markdown(report), render_html(report)
    assert "P95" in text
    assert "rank 1 (100 %)" in text
    assert "| P95 | Skew | Straggler |" in markdown
    assert "| 29.90 µs | 2.000 µs | rank 1 (100 %) |" in markdown
    assert "rank 1 (100 %)" in page
    names = ("skew_s", "straggler_rank", "straggler_share")
    first, second = ([row[name] for name in names] for row in csv.DictReader(io.StringIO(render_csv(report))))
    assert first == ["2e-06", "1", "1.0"]
    assert second == ["", "", ""]


def test_without_arrivals_there_are_no_such_columns() -> None:
    markdown = render_markdown(build_report([make_run([make_collective()], make_system())]))
    assert "Skew" not in markdown
    assert "P95" not in markdown


def test_columns_of_arrivals_give_way_to_the_width() -> None:
    case = make_collective(arrivals=[[0.0, 0.0, 0.0], [1e-6, 2e-6, 3e-6]])
    text = render_text(build_report([make_run([case], make_system())]), width=80)
    assert "# left out for width:" in text
    assert "Straggler" in text.split("# left out for width:")[1]


# Several runs in one plot


def make_sweep() -> list[MeasuredCase]:
    return [make_collective(1 << power, [[power * 1e-6] * 3] * 2) for power in (10, 12, 14)]


def test_two_runs_of_a_benchmark_are_two_lines_of_one_plot() -> None:
    runs = [make_run(make_sweep(), make_system(), name) for name in ("first", "second")]
    report = build_report(runs)
    (sweep,) = report.systems[0].sweeps
    assert [line.label for line in sweep.series] == ["first", "second"]
    assert [len(line.points) for line in sweep.series] == [3, 3]
    assert report.sweeps == []
    page = render_html(report)
    assert page.count('<path class="line s0"') == 2
    assert page.count('<path class="line s1"') == 2
    assert '<i class="s1"></i>second' in page


def test_runs_of_several_systems_meet_in_a_plot_but_in_no_table() -> None:
    runs = [
        make_run(make_sweep(), make_system(), "first"),
        make_run([*make_sweep(), make_collective(256)], make_system(gpus=8), "second"),
    ]
    report = build_report(runs)
    assert len(report.systems) == 2
    (sweep,) = report.sweeps
    assert [line.label for line in sweep.series] == [
        "AMD EPYC 9554, 128 threads, first",
        "8× NVIDIA H100 80GB HBM3, second",
    ]
    page = render_html(report)
    assert '<h2 id="across">Across systems</h2>' in page
    assert page.count('<path class="line s1"') == 2


def test_lines_across_systems_are_told_apart_by_what_differs_between_them() -> None:
    other = [make_collective(1 << p, parameters={"dtype": "float16"}) for p in (10, 12)]
    runs = [make_run(make_sweep(), make_system(), "a"), make_run(other, make_system(gpus=8), "b")]
    labels = [line.label for line in build_report(runs).sweeps[0].series]
    assert "dtype=float32" in labels[0]
    assert "dtype=float16" in labels[1]


def test_small_rates_have_labels_that_fit_the_axis() -> None:
    page = render_html(build_report([make_run(make_sweep(), make_system())]))
    assert "100 MB/s" in page
    assert "0.1 GB/s" not in page
