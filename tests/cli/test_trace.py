"""`stepscope trace` as users call it: what each verb answers, and how it refuses."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run
from stepscope.cli.trace_options import parse_numbers
from stepscope.core.errors import UsageError

DATA = Path(__file__).parents[1] / "traces" / "data"
PAIR = DATA / "h200_dlrm_8t"
KINETO = PAIR / "kineto.json.gz"
SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
SHARES = ("compute", "exposed_comm", "exposed_copy", "host_idle", "sync_idle", "other_idle")


def call(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert run(["trace", *map(str, arguments), "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is (code == 0)
    return answer["data"] if code == 0 else answer["error"]


def test_the_summary_answers_first_and_sums_to_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    data = call(capsys, "summary", KINETO)
    (rank,) = data["ranks"]
    assert rank["rank"] == 0
    assert set(rank["breakdown_s"]) == set(SHARES)
    assert sum(rank["breakdown_s"].values()) == pytest.approx(rank["step_s"], abs=1e-12)
    assert sum(data["detail"]["breakdown"]["breakdown_ns"].values()) == round(rank["step_s"] * 1e9)
    assert rank["device_busy_s"] == pytest.approx(4.85e-3, rel=0.01)
    assert rank["kernels"] == 283
    assert [step["step"] for step in data["steps"]] == [3]
    assert data["profiled"] is True
    assert "profiled step" in data["answer"]["sentence"].lower()
    assert run(["trace", "summary", str(KINETO)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == data["answer"]["sentence"]
    assert len(lines) <= 60


def test_the_page_is_one_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    data = call(capsys, "report", KINETO, "-o", page)
    text = page.read_text()
    assert data["page"] == str(page)
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert data["answer"]["bound_by"] in text


def test_the_critical_path_is_as_long_as_the_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = call(capsys, "critical-path", KINETO)
    assert sum(data["by_kind_s"].values()) == pytest.approx(data["length_s"], abs=1e-9)
    assert data["length_s"] == pytest.approx(call(capsys, "summary", KINETO)["ranks"][0]["step_s"], abs=1e-9)
    assert data["what_if_s"] is None
    same = call(capsys, "critical-path", KINETO, "--what-if", "kernels=1")
    assert same["what_if_s"] == data["length_s"]
    less = call(capsys, "critical-path", KINETO, "--what-if", "host=0.5, launches=0")
    assert 0 < less["what_if_s"] < data["length_s"]
    overlay = tmp_path / "path.json"
    call(capsys, "critical-path", KINETO, "--overlay", overlay)
    events = json.loads(overlay.read_text())["traceEvents"]
    assert any(event.get("pid") == "Critical path" for event in events)


def test_a_bad_edit_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    error = call(capsys, "critical-path", KINETO, "--what-if", "kernel=0.5", code=2)
    assert "kernels" in error["hint"]


def test_a_trace_does_not_differ_from_itself(capsys: pytest.CaptureFixture[str]) -> None:
    data = call(capsys, "diff", KINETO, KINETO)
    assert data["change_ns"] == 0
    assert "no difference" in data["sentence"].lower()


def test_a_slower_kernel_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(KINETO.read_bytes()))
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel" and "EmbeddingBag_updateOutputKernel_sum_mean" in event["name"]:
            event["dur"] *= 20
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(document))
    data = call(capsys, "diff", KINETO, slower)
    changed = [entry for entry in data["kernels"] if entry["verdict"] == "slower"]
    assert "EmbeddingBag_updateOutputKernel_sum_mean" in changed[0]["name"]
    assert run(["trace", "diff", str(KINETO), str(slower)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == data["sentence"]


@pytest.mark.parametrize("name", ["out.json", "out.json.gz", "out.csv", "out.parquet", "out.et"])
def test_every_form_can_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    data = call(capsys, "convert", KINETO, target)
    assert target.stat().st_size == data["size_bytes"] > 0
    if name.startswith("out.json"):
        again = call(capsys, "summary", target)
        assert again["ranks"][0]["breakdown_s"] == call(capsys, "summary", KINETO)["ranks"][0]["breakdown_s"]


def test_converting_cuts_bounds_and_anonymises(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    data = call(capsys, "convert", KINETO, small, "--max-size", "200K")
    assert small.stat().st_size <= 200 * 1024
    assert sum(data["left_out"].values()) > 0
    first = tmp_path / "first.json"
    call(capsys, "convert", KINETO, first, "--time", "0:0.005")
    assert len(json.loads(first.read_text())["traceEvents"]) < 2_000
    hidden = tmp_path / "hidden.json"
    told = call(capsys, "convert", KINETO, hidden, "--anonymise")
    assert told["anonymised"]["times_from_zero"] is True
    error = call(capsys, "convert", KINETO, tmp_path / "x.json", "--steps", "77", code=2)
    assert "3" in error["hint"]


def test_an_unknown_form_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = call(capsys, "convert", KINETO, tmp_path / "out.xyz", code=2)
    assert ".parquet" in error["hint"]


def test_graph_and_timeline_are_linked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = tmp_path / "nodes.jsonl"
    data = call(capsys, "link", PAIR / "et.json.gz", KINETO, "-o", lines)
    assert data["linked_share"] == 1.0
    assert data["device_events"] == 369
    nodes = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sum(len(node["device_events"]) for node in nodes) == 369


def test_files_that_are_no_pair_fail_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    error = call(capsys, "link", PAIR / "et.json.gz", DATA / "event_sync_multi_stream.json.gz", code=2)
    assert "do not belong together" in error["message"]
    assert error["hint"]


def test_a_graph_in_place_of_a_trace_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    error = call(capsys, "summary", PAIR / "et.json.gz", code=2)
    assert "graph" in error["message"]


def test_a_folder_with_both_takes_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(call(capsys, "summary", PAIR)["ranks"]) == 1


def test_the_cache_is_verified(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = tmp_path / "kineto.json.gz"
    copy.write_bytes(KINETO.read_bytes())
    assert call(capsys, "verify", copy)["files"][0]["outcome"] == "absent"
    call(capsys, "summary", copy)
    assert call(capsys, "verify", copy)["files"][0]["outcome"] == "fresh"


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
def test_eight_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    data = call(capsys, "summary", SHARED / "public/param/dlrm8_kineto", "--workers", 2)
    assert [rank["rank"] for rank in data["ranks"]] == list(range(8))
    for rank in data["ranks"]:
        assert sum(rank["breakdown_s"].values()) == pytest.approx(rank["step_s"], abs=1e-12)
    assert data["across"]["matching"]["collectives"] == 8
    path = call(capsys, "critical-path", SHARED / "public/param/dlrm8_kineto")
    assert len(path["by_rank_s"]) == 8


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
@pytest.mark.parametrize(
    ("model", "busy_ms"),
    [
        ("dlrm_26t_b2048", 2.26), ("dlrm_8t_pool32_b4096", 4.85), ("resnet50_b64", 31.04),
        ("bert_base_b16_s128", 16.01), ("gpt2_bf16_b8_s1024", 44.20), ("vit_b_16_b32", 35.19),
    ],
)  # fmt: skip
def test_profiled_steps_against_measured_ones(capsys: pytest.CaptureFixture[str], model: str, busy_ms: float) -> None:
    """Device busy time fits into the measured step; the rest of the profiled step is what profiling costs."""
    data = call(capsys, "summary", SHARED / "h200" / model / "kineto.json.gz")
    rank = data["ranks"][0]
    measured = json.loads((SHARED / "h200" / "measured.json").read_text())["results"][model]
    assert sum(data["detail"]["breakdown"]["breakdown_ns"].values()) == round(rank["step_s"] * 1e9)
    assert rank["device_busy_s"] * 1e3 == pytest.approx(busy_ms, abs=0.006)
    assert rank["device_busy_s"] * 1e3 <= measured["sync_ms_min"]
    assert rank["step_s"] * 1e3 > 2.5 * measured["sync_ms_min"]


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
def test_sums_of_nsys_are_shown_as_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    data = call(capsys, "summary", SHARED / "public/nsys/EPLB_off.csv")
    assert data["total_s"] == pytest.approx(212.53, abs=0.01)
    assert data["by_category_s"]["communication"] == pytest.approx(85.97, abs=0.01)


def cut_kineto(tmp_path: Path, name: str = "cut.json.gz") -> Path:
    packed = KINETO.read_bytes()
    path = tmp_path / name
    path.write_bytes(packed[: len(packed) // 2])
    return path


def test_a_size_that_cannot_be_kept_leaves_what_was_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "keep.json"
    target.write_text("precious")
    error = call(capsys, "convert", KINETO, target, "--max-size", "100", code=2)
    assert error["hint"] == "allow a larger file"
    assert target.read_text() == "precious"


@pytest.mark.parametrize("how", ["itself", "link", "other path", "folder"])
def test_what_is_read_is_not_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str) -> None:
    source = tmp_path / "rank0.json.gz"
    source.write_bytes(KINETO.read_bytes())
    target = source
    if how == "link":
        target = tmp_path / "other.json.gz"
        target.symlink_to(source)
    elif how == "other path":
        (tmp_path / "inner").mkdir()
        target = tmp_path / "inner" / ".." / source.name
    error = call(capsys, "convert", tmp_path if how == "folder" else source, target, code=2)
    assert error["kind"] == "usage"
    assert error["hint"] == "give the result another name"
    assert source.read_bytes() == KINETO.read_bytes()


def test_graphs_that_are_read_are_not_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph = tmp_path / "graph.et"
    call(capsys, "convert", PAIR / "et.json.gz", graph)
    before = graph.read_bytes()
    assert call(capsys, "convert", graph, graph, code=2)["kind"] == "usage"
    assert call(capsys, "link", graph, KINETO, "-o", graph, code=2)["where"] == "--output"
    assert graph.read_bytes() == before


def test_what_was_repaired_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = cut_kineto(tmp_path), tmp_path / "out.json"
    data = call(capsys, "convert", source, target)
    assert any("ends before its end marker" in what for what in data["repairs"])
    assert all(count > 0 for count in data["repairs"].values())
    assert run(["trace", "convert", str(source), str(target)]) == 0
    told = capsys.readouterr().err
    for what in data["repairs"]:
        assert f"repaired: {what}" in told
    joined = call(capsys, "link", PAIR / "et.json.gz", source, "--minimum-share", "0")
    assert joined["repairs"] == data["repairs"]
    assert call(capsys, "convert", KINETO, target)["repairs"] == {}


def test_a_cut_graph_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    packed = (PAIR / "et.json.gz").read_bytes()
    graph = tmp_path / "et.json.gz"
    graph.write_bytes(packed[: len(packed) * 3 // 4])
    data = call(capsys, "convert", graph, tmp_path / "graph.et")
    assert any("complete nodes are kept" in warning for warning in data["warnings"])
    assert run(["trace", "convert", str(graph), str(tmp_path / "graph.et")]) == 0
    assert "complete nodes are kept" in capsys.readouterr().err
    joined = call(capsys, "link", graph, KINETO, "--minimum-share", "0")
    assert any("complete nodes are kept" in warning for warning in joined["warnings"])
    assert run(["trace", "link", str(graph), str(KINETO), "--minimum-share", "0"]) == 0
    assert "complete nodes are kept" in capsys.readouterr().err
    whole = call(capsys, "convert", KINETO, tmp_path / "run.et", "--et", PAIR / "et.json.gz")
    assert (whole["repairs"], whole["warnings"]) == ({}, [])


def test_a_byte_that_is_no_text_does_not_stop_a_conversion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = gzip.decompress((PAIR / "et.json.gz").read_bytes())
    place = data.index(b'"<None>"', data.index(b'"inputs": {"values": [[')) + 2
    graph = tmp_path / "et.json"
    graph.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    for arguments in ((graph, tmp_path / "a.et"), (KINETO, tmp_path / "b.et", "--et", graph)):
        (warning,) = call(capsys, "convert", *arguments)["warnings"]
        assert f"the first at byte {place}" in warning


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--time", "inf:"), ("--time", ":inf"), ("--time", "nan:1"), ("--time", "1e300:"), ("--time", "5:1"),
        ("--time", "1000:1001"), ("--time", "1"), ("--time", "a:b"), ("--steps", "3-1"), ("--steps", "1-9999999999"),
        ("--steps", "9" * 5000), ("--steps", ""), ("--steps", "²"), ("--steps", "x"), ("--ranks", "0-99999999"),
        ("--ranks", "7"),
    ],
)  # fmt: skip
def test_parts_that_are_not_there_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, text: str
) -> None:
    error = call(capsys, "convert", KINETO, tmp_path / "x.json", option, text, code=2)
    assert error["kind"] == "usage"
    assert error["hint"]
    assert not list(tmp_path.glob("*.json"))


def test_numbers_and_ranges() -> None:
    assert parse_numbers("3, 5-7,6", "--steps") == [3, 5, 6, 7]
    assert parse_numbers(None, "--steps") is None
    assert len(parse_numbers("0-99999", "--steps") or []) == 100_000
    with pytest.raises(UsageError, match="more than 100000"):
        parse_numbers("0-99999,100000", "--steps")


def test_tables_need_polars(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    error = call(capsys, "convert", KINETO, tmp_path / "x.parquet", "--no-cache", code=2)
    assert error["kind"] == "missing_dependency"
    assert "pip install" in error["hint"]
