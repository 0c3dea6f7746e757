"""Whatever the records allow can be shown in every format."""

from __future__ import annotations

import csv
import io
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_structure import check
from report_examples import make_case, make_run, make_system

from stepscope.records import Failure, KernelUse, LatencyTarget, Notice, RankSamples, Reading, Score
from stepscope.report.html import render_html
from stepscope.report.render import render_csv, render_json, render_markdown, render_text
from stepscope.report.table import text_width
from stepscope.report.view import ReportRun, build_report
from stepscope.store.view import MeasuredCase

texts = st.text(max_size=12)
scalars = st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e12, 1e12) | texts
times = st.floats(0, 1e6)
names = st.sampled_from(
    ["gemm/micro/forward/custom", "dlrm/ootb/train/A", "gpt2/ootb/infer/small-1dev-fp32",
     "all_reduce/micro/nccl/x", "gemm/micro/forward/ceiling",
     "memcpy/micro/forward/ceiling"]
)  # fmt: skip
placed = st.sampled_from(
    [{}, {"device": "cpu"}, {"precision": "bf16", "scale": "tiny"}, {"precision": "fp32", "scale": "tiny"},
     {"parallel": "ddp", "data": "1a2b"}, {"device": "cpu", "dtype": "float32", "cache": "cold"}]
)  # fmt: skip
kernels = st.lists(st.builds(KernelUse, name=texts, count=st.floats(0, 1e6), duration_s=times), max_size=2)
work = st.dictionaries(st.sampled_from(["flops", "moved_bytes"]), st.integers(1, 2**40) | scalars)
facts = st.dictionaries(
    st.sampled_from(["size_bytes", "busbw_bytes_per_s", "algbw_bytes_per_s", "bus_factor", "wrong", "x_s"]) | texts,
    scalars,
    max_size=4,
)
served = st.fixed_dictionaries(
    {},
    optional={
        "tokens_per_s": scalars, "serving_requests": scalars, "serving_ttft_p99_s": scalars,
        "serving_longest_queue": scalars, "serving_busy_share": scalars, "serving_missed_latency": scalars,
    },
)  # fmt: skip
notices = st.lists(st.builds(Notice, kind=texts, message=texts, hint=st.none() | texts), max_size=2)
readings = st.lists(
    st.builds(
        Reading, device=texts, at=st.sampled_from(["start", "during", "end"]), clock_hz=st.none() | st.floats(0, 1e10),
        power_w=st.none() | st.floats(0, 1e4), temperature_c=st.none() | st.floats(-50, 150),
    ),
    max_size=2,
)  # fmt: skip
failures = st.builds(Failure, kind=texts, message=texts, hint=st.none() | texts, last_lines=st.lists(texts, max_size=2))


@st.composite
def cases(draw: st.DrawFn) -> MeasuredCase:
    status = draw(st.sampled_from(["ok", "failed", "skipped"]))
    rows = draw(st.lists(st.tuples(times, st.integers(1, 1000), st.booleans()), max_size=12))
    built = make_case(
        draw(names),
        values_s=[1.0],
        parameters=draw(
            st.dictionaries(texts | st.just("size_bytes"), scalars | st.lists(scalars, max_size=3), max_size=3)
        )
        | draw(placed),
        batch_size=draw(st.none() | st.integers(1, 2**20)),
        world_size=draw(st.integers(1, 9)),
        version=draw(st.integers(1, 3)),
        status=status,
        failure=None if status == "ok" else draw(failures),
        score=draw(st.none() | st.builds(Score, unit=st.sampled_from(["TFLOP/s", "GB/s"]), work=st.floats(0, 1e15))),
        latency_target=draw(st.none() | st.builds(LatencyTarget, limit_s=times, percentile=st.floats(0, 100))),
        observed=draw(facts) | draw(work) | draw(served),
        kernels=draw(kernels),
        notices=draw(notices),
        readings=draw(readings),
        timing=draw(st.sampled_from(["own", "slowest_rank", "device"])),
    )
    on_device, extra_s = (
        draw(st.booleans()),
        draw(st.dictionaries(st.sampled_from(["graph", "kernel", "ttft", "tpot"]), st.lists(times))),
    )
    samples = [
        RankSamples(
            case=built.key, rank=rank, process=process, duration_s=[row[0] for row in rows],
            iterations=[row[1] for row in rows], warmup=[row[2] for row in rows],
            device_s=[row[0] / 2 for row in rows] if on_device else None, extra_s=extra_s,
        )
        for process in range(draw(st.integers(0, 2)))
        for rank in range(2)
    ]  # fmt: skip
    return MeasuredCase(built.result, samples)


systems = st.sampled_from([None, make_system(), make_system(gpus=2)])


@st.composite
def report_runs(draw: st.DrawFn) -> ReportRun:
    return make_run(
        draw(st.lists(cases(), max_size=4)), draw(systems), draw(texts), command=draw(st.lists(texts, max_size=3)),
        status=draw(st.sampled_from(["complete", "interrupted", "running"])),
    )  # fmt: skip


def test_times_and_scores_beyond_what_is_read_keep_the_width() -> None:
    """A score of hardly any work beside a time below a picosecond, once wider than the terminal."""
    bare = make_case("gemm/micro/forward/custom", values_s=[1.0], parameters={}, batch_size=1, score=None)
    built = make_case(
        "gemm/micro/forward/custom",
        values_s=[1.0],
        parameters={"": False},
        score=Score(unit="TFLOP/s", work=9.106377006502199e-266),
    )
    for seconds in (2.220446049250313e-16, 1e-13, 2.3e5, 0.99999e-12):
        samples = [
            RankSamples(case=built.key, rank=rank, duration_s=[seconds], iterations=[23], warmup=[False])
            for rank in range(2)
        ]
        report = build_report([make_run([bare, MeasuredCase(built.result, samples)], None, "")])
        text = render_text(report, width=80)
        assert all(text_width(line) <= 80 for line in text.splitlines() if not line.startswith("#")), text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(report_runs(), max_size=3))
def test_any_runs_render_in_every_format(runs: list[ReportRun]) -> None:
    report = build_report(runs)
    number = sum(len(run.cases) for run in runs)
    assert len(report.cases) == number
    rows = [line for line in render_text(report).splitlines() if not line.startswith("#")]
    assert len(rows) == number
    assert all(
        text_width(line) <= 80 for line in render_text(report, width=80).splitlines() if not line.startswith("#")
    )
    assert render_markdown(report).count("\n| ") == number + 2 * sum(bool(system.cases) for system in report.systems)
    assert len(list(csv.DictReader(io.StringIO(render_csv(report), newline="")))) == number
    assert len(json.loads(render_json(report))["systems"]) == len(report.systems)
    assert sum(tag == "tr" and "data-case" in attrs for tag, attrs in check(render_html(report)).found) == number
