"""Output of nccl-tests: read as it is, and made into runs that everything else can read."""

from __future__ import annotations

import csv
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nccl_writing import (
    Line,
    Side,
    fit,
    format_json,
    format_line,
    format_parameters,
    format_rank,
    format_text,
    format_titles,
    make_device,
    make_line,
)

from builders import case_of
from stepscope.compare.verdict import compare_cases, describe_comparison
from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.nccl_import import find_operation, parse_nccl_output, prepare_import, write_import
from stepscope.formats.nccl_tests import OPERATIONS, NcclOutput, format_version_code
from stepscope.records import Benchmark
from stepscope.store import (
    StoredRun,
    run_folders,
    verify_run,
)

OUTPUTS = Path(__file__).parent / "nccl_outputs"
PUBLIC = Path(__file__).parents[2].parent / "shared" / "data" / "collectives" / "all_reduce_public.csv"


def import_nccl_tests(path: Path, store: Path, *, name: str | None = None, **options: Any) -> StoredRun:
    return write_import(prepare_import(path, **options), store, name=name)


def read(name: str, *, partial: bool = False) -> NcclOutput:
    return parse_nccl_output((OUTPUTS / name).read_text(), where=name, partial=partial)


def refused(text: str, where: str = "x.txt") -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        parse_nccl_output(text, where=where)
    return caught.value


# Text


def test_a_text_with_debug_lines_in_between() -> None:
    output = read("all_reduce_16_ranks.txt")
    assert (output.format, output.tool, output.tool_version) == ("text", "nccl-tests", "2.18.3")
    assert (output.program, output.library_version, output.cuda_version) == ("all_reduce", "2.28.9", "13.0")
    assert output.headers_version == "2.30.3"
    assert (output.world_size, output.members, output.groups) == (16, 16, 1)
    assert (output.ranks[9].host, output.ranks[9].device, output.ranks[9].pid) == ("node-2", 1, 4109)
    assert output.ranks[9].name == "NVIDIA H100 80GB HBM3"
    assert output.parameters["warmup_iterations"] == 1
    assert output.parameters["iterations"] == 20
    assert len(output.rows) == 10
    first, second = output.rows[:2]
    assert (first.placement, second.placement) == ("out_of_place", "in_place")
    assert (first.size_bytes, first.count, first.dtype, first.redop, first.root) == (1024, 256, "float", "sum", -1)
    assert first.time_s == pytest.approx(20.02e-6)
    assert output.rows[-2].busbw_bytes_per_s == pytest.approx(111.5e9)
    assert {row.wrong for row in output.rows} == {0}
    assert (output.out_of_bounds, output.remarks) == (0, [])
    assert output.average_busbw_bytes_per_s == pytest.approx(55.5364e9)


def test_columns_of_single_iterations_and_unchecked_placements() -> None:
    output = read("sendrecv_per_iteration.txt")
    assert output.program == "sendrecv"
    first, second = output.rows[:2]
    assert first.iteration_stats["min_s"] == pytest.approx(20.04e-6)
    assert first.iteration_stats["cv"] == pytest.approx(0.015)
    assert (first.wrong, second.wrong) == (0, None)


def test_an_old_table_has_other_columns() -> None:
    """No version, no program, no group, no root, and the largest deviation where newer ones count elements."""
    output = read("reduce_scatter_old.txt")
    assert (output.program, output.tool_version, output.library_version) == (None, None, None)
    assert [row.wrong for row in output.rows] == [0, 0, None, 0, None, None]
    assert [row.is_wrong for row in output.rows] == [False] * 5 + [True]
    assert find_operation(output, None, where="x").name == "reduce_scatter"


def test_a_reduction_that_is_printed_as_nothing() -> None:
    output = read("gather_blank_redop.txt")
    assert {(row.redop, row.root) for row in output.rows} == {("none", 0)}


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", "0: ", " 0:  "])
def test_labels_of_launchers_are_taken_off(label: str) -> None:
    text = (OUTPUTS / "all_reduce_16_ranks.txt").read_text()
    labelled = "\n".join(label + line for line in text.split("\n"))
    assert parse_nccl_output(labelled, where="x").rows == read("all_reduce_16_ranks.txt").rows


def test_windows_line_ends_and_indentation_do_not_matter() -> None:
    text = (OUTPUTS / "all_reduce_16_ranks.txt").read_text()
    indented = "\r\n".join(f"    {line}" for line in text.split("\n"))
    assert parse_nccl_output(indented, where="x").rows == read("all_reduce_16_ranks.txt").rows


def test_timestamps_and_host_time() -> None:
    line = format_line(make_line(1 << 20, 40.0, 1.75))
    titles = format_titles(time="cputime")
    titles[2] += "  timestamp"
    text = "\n".join(
        [
            *(format_rank(rank) for rank in range(8)),
            *titles,
            f"{line}  2026-07-01 12:00:01",
            "# Out of bounds values : 0 OK",
        ]
    )
    output = parse_nccl_output(text, where="x")
    assert output.host_time
    assert output.rows[1].wrong == 0


def test_rccl_tests_speak_the_same_language() -> None:
    text = format_text(
        "all_reduce_perf", [format_rank(0), format_rank(1)], [make_line(1 << 20, 40.0, 1.0)], version=None
    )
    text = (
        f"rccl-tests: Version develop:40b1b17\nRCCL version : 2.26.6-heads/drop:c3b8de4\nall_reduce_perf -g 2\n{text}"
    )
    output = parse_nccl_output(text, where="x")
    assert (output.tool, output.tool_version, output.library_version) == ("rccl-tests", "develop:40b1b17", "2.26.6")
    assert output.program == "all_reduce"


def test_groups_of_a_split() -> None:
    ranks = [format_rank(rank, group=rank % 2) for rank in range(8)]
    output = parse_nccl_output(format_text("all_reduce_perf", ranks, [make_line(1 << 24, 400.0, 1.5)]), where="x")
    assert (output.world_size, output.groups, output.members, output.describe_groups()) == (8, 2, 4, "split:2")
    ranks = [format_rank(rank, group=rank // 4) for rank in range(8)]
    output = parse_nccl_output(format_text("all_reduce_perf", ranks, [make_line(1 << 24, 400.0, 1.5)]), where="x")
    assert output.describe_groups() == "colours:0,0,0,0,1,1,1,1"


@pytest.mark.parametrize(("code", "version"), [(23003, "2.30.3"), (21805, "2.18.5"), (2708, "2.7.8")])
def test_version_codes(code: int, version: str) -> None:
    assert format_version_code(code) == version


# What is refused


def test_a_truncated_text_names_the_line_and_why_the_test_died() -> None:
    error = refused((OUTPUTS / "all_reduce_truncated.txt").read_text())
    assert error.where == "x.txt:21"
    assert "8 cells" in error.message
    assert "Test NCCL failure" in error.message
    assert "--partial" in str(error.hint)


def test_a_text_without_its_end_is_truncated_too() -> None:
    text = (OUTPUTS / "all_reduce_16_ranks.txt").read_text()
    error = refused(text[: text.index("# Out of bounds")])
    assert error.where is not None
    assert "no end" in error.message
    assert text.split("\n")[int(error.where.split(":")[1]) - 1].lstrip().startswith("134217728")


def test_partial_keeps_whole_rows_and_says_so() -> None:
    output = read("all_reduce_truncated.txt", partial=True)
    assert [row.size_bytes for row in output.rows[::2]] == [1 << 20, 1 << 22, 1 << 24]
    assert ["line 21 was left out" in output.remarks[0], "no end" in output.remarks[1]] == [True, True]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "empty"),
        ("hello\nworld\n", "no line of column names"),
        ("# size count type\n", "no `time`"),
        ("\n".join(format_titles()), "no whole row"),
        ('{"cases": []}', "missing required field `results`"),
        ('{"results": [{"size": "a"}]}', "$.results[0].size"),
        ('{"results": []', "not whole"),
        ('{"results": []}', "no whole result"),
    ],
)
def test_foreign_files_are_refused_with_the_rule(text: str, rule: str) -> None:
    assert rule in refused(text).message


def test_two_tests_in_one_file_are_refused_at_the_second() -> None:
    text = (OUTPUTS / "all_reduce_wrong.txt").read_text()
    error = refused(text + text)
    assert "listed twice" in error.message
    without_ranks = "\n".join(line for line in text.split("\n") if "Rank" not in line)
    error = refused(text + without_ranks)
    assert "second table" in error.message
    titles = [number for number, line in enumerate((text + without_ranks).split("\n"), 1) if " size " in line]
    assert error.where == f"x.txt:{titles[1]}"


@pytest.mark.parametrize("cell", ["nan", "0.00", "inf", "x"])
def test_a_time_that_is_none_breaks_its_row(cell: str) -> None:
    text = format_text("all_reduce_perf", [format_rank(0), format_rank(1)], [make_line(1 << 20, 40.0, 1.0)])
    error = refused(text.replace("  40.00", f"  {cell:>5}"))
    assert error.where is not None
    assert error.where.startswith("x.txt:")
    assert "no number" in error.message or "not a number" in error.message


# JSON


def test_json_without_single_iterations() -> None:
    output = read("all_reduce.json")
    assert (output.format, output.program, output.library_version) == ("json", "all_reduce", "2.28.9")
    assert (len(output.ranks), output.world_size, output.members) == (1, 8, 8)
    assert output.parameters["average"] == "mean over ranks"
    assert output.environment == {"NCCL_ALGO": "Ring"}
    assert (output.rows[0].root, output.rows[0].wrong, output.rows[0].iterations) == (-1, 0, 20)
    assert output.count_averaged(output.rows[0]) == 20


def test_json_with_every_iteration() -> None:
    output = read("all_reduce_per_iteration.json")
    assert output.parameters["average"] == "slowest rank"
    assert output.world_size == 16
    assert all(len(row.iteration_s) == 12 for row in output.rows)
    assert output.rows[0].iteration_s[0] == pytest.approx(37.48e-6)


def test_json_that_was_cut_off() -> None:
    text = (OUTPUTS / "all_reduce.json").read_text()
    cut = text[: text.rindex('"in_place"') + 20]
    assert "not whole" in refused(cut, "x.json").message
    output = parse_nccl_output(cut, where="x.json", partial=True)
    assert [row.size_bytes for row in output.rows] == [1 << 20, 1 << 20, 1 << 24, 1 << 24]
    assert "cut off" in output.remarks[0]
    with pytest.raises(BadInputError, match="before its results"):
        parse_nccl_output(text[:100], where="x.json", partial=True)


def test_json_of_a_test_that_was_ended() -> None:
    content = json.loads((OUTPUTS / "all_reduce.json").read_text())
    del content["out_of_bounds"]
    error = refused(json.dumps(content), "x.json")
    assert error.where == "x.json: results[2]"
    assert "did not come to its end" in error.message
    assert parse_nccl_output(json.dumps(content), where="x", partial=True).remarks


@pytest.mark.parametrize("change", [{"time": "nan"}, {"time": None}, {"time": -1.0}])
def test_a_json_time_that_is_none_is_refused_with_its_place(change: dict[str, Any]) -> None:
    content = json.loads((OUTPUTS / "all_reduce.json").read_text())
    content["results"][1]["in_place"] |= change
    assert refused(json.dumps(content), "x.json").where == "x.json: results[1].in_place"


def test_ranks_of_processes_with_several_gpus() -> None:
    """JSON lists the first rank of each process only."""
    lines = [make_line(1 << 24, 300.0, 1.75)]
    text = format_json("all_reduce_perf", [make_device(0), make_device(4)], lines, config={"nthreads": 2, "ngpus": 2})
    output = parse_nccl_output(text, where="x")
    assert (output.world_size, output.members) == (8, 8)


# Round trips


def sides(per_iteration: bool) -> st.SearchStrategy[Side]:
    rates = st.floats(0, 9999, allow_subnormal=False)
    times = st.floats(0.01, 1e9)
    return st.builds(
        Side,
        time_us=times,
        algbw=rates,
        busbw=rates,
        wrong=st.none() | st.integers(0, 10**5),
        iterations_us=st.lists(times, min_size=2, max_size=4).map(tuple) if per_iteration else st.just(()),
    )


def lines(per_iteration: bool) -> st.SearchStrategy[list[Line]]:
    line = st.builds(
        Line,
        size=st.integers(0, 2**44),
        count=st.integers(0, 2**42),
        dtype=st.sampled_from(["float", "half", "bfloat16", "int8", "f8e4m3", "uint64"]),
        redop=st.sampled_from(["sum", "prod", "none", "mulsum", ""]),
        root=st.integers(-1, 99999),
        out_of_place=sides(per_iteration),
        in_place=sides(per_iteration),
    )
    return st.lists(line, min_size=1, max_size=5)


def check_round_trip(output: NcclOutput, written: list[Line], close: float) -> None:
    assert len(output.rows) == 2 * len(written)
    for place, line in enumerate(written):
        for row, side in zip(output.rows[2 * place :], (line.out_of_place, line.in_place), strict=False):
            assert (row.size_bytes, row.count, row.dtype, row.root) == (line.size, line.count, line.dtype, line.root)
            assert row.redop == (line.redop or "none")
            assert row.wrong == side.wrong
            assert row.time_s == pytest.approx(side.time_us * 1e-6, rel=close, abs=0.006e-6)
            for got, put in ((row.algbw_bytes_per_s, side.algbw), (row.busbw_bytes_per_s, side.busbw)):
                assert got == pytest.approx(put * 1e9, rel=close, abs=0.006e9)


@given(st.data(), st.booleans(), st.integers(1, 20))
def test_text_reads_back(data: st.DataObject, per_iteration: bool, ranks: int) -> None:
    written = data.draw(lines(per_iteration))
    text = format_text(
        "all_reduce_perf", [format_rank(rank) for rank in range(ranks)], written, per_iteration=per_iteration
    )
    output = parse_nccl_output(text, where="x")
    assert (output.world_size, output.program) == (ranks, "all_reduce")
    check_round_trip(output, written, close=0.06)


@given(st.data(), st.booleans())
def test_json_reads_back(data: st.DataObject, per_iteration: bool) -> None:
    written = data.draw(lines(per_iteration))
    output = parse_nccl_output(format_json("all_reduce_perf", [make_device(0)], written), where="x")
    check_round_trip(output, written, close=1e-9)
    if per_iteration:
        assert output.rows[0].iteration_s == pytest.approx(
            [time * 1e-6 for time in written[0].out_of_place.iterations_us]
        )


@given(st.data(), st.integers(0, 10**6), st.booleans())
def test_wherever_a_file_is_cut_it_is_refused_or_whole(data: st.DataObject, place: int, as_json: bool) -> None:
    """Never a traceback, never a row that was not there."""
    written = [make_line(1 << power, 40.0 + power, 1.0) for power in (10, 12, 14)]
    ranks = [format_rank(rank) for rank in range(2)]
    whole = (
        format_json("all_reduce_perf", [make_device(0), make_device(1)], written)
        if as_json
        else format_text("all_reduce_perf", ranks, written)
    )
    cut = whole[: place % len(whole)]
    rows = parse_nccl_output(whole, where="x").rows
    for partial in (False, True):
        try:
            output = parse_nccl_output(cut, where="x", partial=partial)
        except BadInputError:
            continue
        assert output.rows == rows[: len(output.rows)]
        if not partial:
            assert len(output.rows) == len(rows)
        elif len(output.rows) < len(rows):
            assert output.remarks


@given(st.text(max_size=300))
def test_any_text_is_refused_or_read(text: str) -> None:
    for partial in (False, True):
        with suppress(BadInputError):
            parse_nccl_output(text, where="x", partial=partial)


@given(st.lists(st.text("0123456789 .-#N/Aesizcount\t", max_size=60), max_size=6))
def test_odd_lines_inside_a_table_are_refused_or_read(inserted: list[str]) -> None:
    text = format_text("all_reduce_perf", [format_rank(0)], [make_line(1 << 20, 40.0, 0.0)])
    at = text.index("     1048576")
    with suppress(BadInputError):
        assert parse_nccl_output(text[:at] + "\n".join(inserted) + "\n" + text[at:], where="x", partial=True).rows


@given(st.floats(0, 1e12), st.sampled_from([6, 7]))
def test_the_writer_of_these_tests_shrinks_as_nccl_tests_does(value: float, width: int) -> None:
    assert len(fit(value, width)) <= width + 1


def test_shrinking_examples() -> None:
    assert [fit(value, 7) for value in (0.0, 20.019, 12345.678, 123456.78, 1234567.8)] == [
        "   0.00", "  20.02", "12345.7", " 123457", "1234568",
    ]  # fmt: skip


# Which operation


def test_the_operation_is_told_by_numbers_where_they_can_tell() -> None:
    def guess(factor: float, ranks: int = 8, **more: Any) -> str:
        line = make_line(1 << 24, 300.0, factor, **more)
        text = format_text("x", [format_rank(rank) for rank in range(ranks)], [line], version=None)
        return find_operation(parse_nccl_output(text, where="x"), None, where="x").name

    assert guess(1.75) == "all_reduce"
    assert guess(0.875) == "reduce_scatter"
    assert guess(1.0, redop="sum", root=0) == "reduce"
    assert guess(1.0, redop="none", root=0) == "broadcast"
    assert guess(1.0, redop="none") == "send_recv"
    with pytest.raises(UsageError, match="all_gather or all_to_all"):
        guess(0.875, redop="none")
    with pytest.raises(UsageError, match="gather or scatter"):
        guess(0.875, redop="none", root=0)
    with pytest.raises(UsageError, match="all_reduce or send_recv"):
        guess(1.0, ranks=2)
    with pytest.raises(UsageError, match="none that is known"):
        guess(3.0)


def test_the_operation_asked_for_must_fit() -> None:
    output = read("all_gather_unnamed.txt")
    for name in ("all_gather", "all_gather_perf"):
        assert find_operation(output, name, where="x").name == "all_gather"
    with pytest.raises(UsageError, match="no operation"):
        find_operation(output, "all_gathr", where="x")
    with pytest.raises(UsageError, match="the file is of all_reduce"):
        find_operation(read("all_reduce.json"), "all_gather", where="x")
    with pytest.raises(BadInputError, match="bus bandwidth is"):
        prepare_import(OUTPUTS / "all_gather_unnamed.txt", operation="all_reduce")


def test_ranks_that_are_not_listed_are_not_guessed() -> None:
    text = format_text("all_reduce_perf", [], [make_line(1 << 24, 300.0, 1.75)])
    with pytest.raises(BadInputError, match="how many ranks"):
        find_operation(parse_nccl_output(text, where="x"), None, where="x")


# Runs


def test_an_imported_run_is_whole(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "all_reduce_16_ranks.txt", tmp_path)
    assert (run.status, verify_run(run)) == ("complete", [])
    assert run.plan.command == ["stepscope", "runs", "import", "all_reduce_16_ranks.txt"]
    assert (run.plan.verb, run.plan.launcher, run.plan.world_size) == ("import", "nccl-tests", 16)
    assert run.plan.request.imported_from.file == "all_reduce_16_ranks.txt"
    assert msgspec.structs.asdict(run.plan.request.ranks[9]) == {
        "rank": 9, "group": 0, "pid": 4109, "host": "node-2", "device": 1, "name": "NVIDIA H100 80GB HBM3",
        "pci_address": "0000:18:00",
    }  # fmt: skip
    cases = run.cases()
    assert len(cases) == 10
    out_of_place, in_place = cases[0], cases[1]
    assert in_place.result.case.parameters == {"size_bytes": 1024, "dtype": "float32", "device": "cuda"}
    assert out_of_place.result.case.parameters["placement"] == "out_of_place"
    assert in_place.result.case.benchmark.id == "all_reduce/micro/nccl/16ranks"
    assert (in_place.result.case.world_size, in_place.result.timing) == (16, "own")
    assert in_place.samples[0].iterations == [20]
    assert in_place.samples[0].duration_s == [pytest.approx(20 * 19.62e-6)]
    assert in_place.seconds() == [pytest.approx(19.62e-6)]
    observed = in_place.result.facts
    assert observed == {"size_bytes": 1024, "bus_factor": 1.875, "members": 16, "count": 256, "wrong": 0}
    assert "mean over ranks" in in_place.result.notices[0].message
    assert cases[-2].score() == pytest.approx(111.5, rel=1e-3)


def test_the_system_of_an_imported_run_is_what_the_header_tells(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "all_reduce_16_ranks.txt", tmp_path)
    assert run.system is not None
    assert [host.name for host in run.system.hosts] == ["node-1", "node-2"]
    assert {gpu.name for host in run.system.hosts for gpu in host.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert run.system.libraries == {"nccl": "2.28.9", "cuda": "13.0", "nccl-tests": "2.18.3"}
    assert run.communication is not None
    assert run.communication.library == {"name": "NCCL", "version": "2.28.9"}
    assert [place.local_rank for place in run.communication.ranks] == [*range(8), *range(8)]


def test_the_same_case_has_the_key_of_a_run_of_ours(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "all_reduce_16_ranks.txt", tmp_path)
    benchmark = Benchmark(
        model="all_reduce", implementation="micro", mode="nccl", config="16ranks", owner="communication"
    )
    ours = case_of(benchmark, {"size_bytes": 1024, "dtype": "float32", "device": "cuda"}, world_size=16)
    assert ours.key in {case.key for case in run.cases()}


def test_every_iteration_is_a_sample_where_the_file_has_them(tmp_path: Path) -> None:
    case = import_nccl_tests(OUTPUTS / "all_reduce_per_iteration.json", tmp_path).cases()[0]
    assert case.samples[0].iterations == [1] * 12
    assert len(set(case.seconds())) > 1
    assert case.result.facts["average_s"] == pytest.approx(37.476e-6, rel=1e-3)
    assert case.result.notices[0].kind == "imported"


def test_wrong_elements_make_a_failed_case_with_its_samples(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "all_reduce_wrong.txt", tmp_path)
    failed = [case for case in run.cases() if case.result.status == "failed"]
    assert len(failed) == 1
    assert failed[0].result.failure is not None
    assert "3 elements" in failed[0].result.failure.message
    assert failed[0].samples[0].duration_s
    old = import_nccl_tests(OUTPUTS / "reduce_scatter_old.txt", tmp_path)
    assert [case.result.status for case in old.cases()].count("failed") == 1


def test_unchecked_rows_have_no_count(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "alltoall_in_place_unchecked.txt", tmp_path)
    by_placement = {case.result.case.parameters.get("placement", "usual"): case for case in run.cases()}
    assert by_placement["usual"].result.facts["wrong"] == 0
    assert "wrong" not in by_placement["in_place"].result.facts
    assert run.cases()[0].result.case.benchmark.model == "all_to_all"


def test_roots_and_types_are_parameters(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "broadcast_all_roots.txt", tmp_path)
    found = {(case.result.case.parameters["dtype"], case.result.case.parameters.get("root", 0)) for case in run.cases()}
    assert found == {("float16", 0), ("float16", 1), ("float32", 0), ("float32", 1)}
    assert run.cases()[0].samples[0].iterations == [50]


def test_rows_of_the_same_case_become_its_samples(tmp_path: Path) -> None:
    """Sizes below 16 bytes a rank all become 0, and cycles repeat the table."""
    run = import_nccl_tests(OUTPUTS / "all_gather_unnamed.txt", tmp_path, operation="all_gather")
    empty = next(case for case in run.cases() if case.result.facts["size_bytes"] == 0)
    assert len(empty.seconds()) == 2
    assert len(run.cases()) == 6


def test_a_partial_import_says_so_on_every_case(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "all_reduce_truncated.txt", tmp_path, partial=True)
    for case in run.cases():
        assert [notice.kind for notice in case.result.notices].count("partial") == 2


def test_graph_launches_and_aggregation_count_as_iterations(tmp_path: Path) -> None:
    ranks = [format_rank(rank) for rank in range(8)]
    path = tmp_path / "graph.txt"
    parameters = format_parameters(iters=10, agg=3, graph=2)
    path.write_text(format_text("all_reduce_perf", ranks, [make_line(1 << 20, 40.0, 1.75)], parameters=parameters))
    assert import_nccl_tests(path, tmp_path).cases()[0].samples[0].iterations == [60]


def test_reductions_groups_and_host_time_never_pair_with_plain_cases(tmp_path: Path) -> None:
    ranks = [format_rank(rank, group=rank % 2) for rank in range(8)]
    text = format_text("all_reduce_perf", ranks, [make_line(1 << 24, 400.0, 1.5, redop="max")])
    path = tmp_path / "groups.txt"
    path.write_text(text.replace(" time ", " cputime "))
    parameters = import_nccl_tests(path, tmp_path).cases()[1].result.case.parameters
    assert parameters == {
        "size_bytes": 1 << 24, "dtype": "float32", "device": "cuda", "reduction": "max", "groups": "split:2",
        "clock": "issue",
    }  # fmt: skip


def test_a_file_that_is_refused_leaves_no_run(tmp_path: Path) -> None:
    for name in ("all_reduce_truncated.txt", "all_gather_unnamed.txt", "not_there.txt"):
        with pytest.raises((BadInputError, UsageError)):
            import_nccl_tests(OUTPUTS / name, tmp_path / "store")
    with pytest.raises(UsageError, match="cannot be part"):
        import_nccl_tests(OUTPUTS / "all_reduce.json", tmp_path / "store", name="../x")
    assert run_folders(tmp_path / "store") == []


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInputError, match="cannot read pipe: is a pipe, not a file"):
        prepare_import(tmp_path / "pipe")


def test_a_full_disk_leaves_no_half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("stepscope.store.writer.RunWriter.finish", fail)
    with pytest.raises(OSError, match="disk full"):
        import_nccl_tests(OUTPUTS / "all_reduce.json", tmp_path)
    assert run_folders(tmp_path) == []


def test_imported_runs_can_be_compared(tmp_path: Path) -> None:
    single = import_nccl_tests(OUTPUTS / "all_reduce_16_ranks.txt", tmp_path)
    many = import_nccl_tests(OUTPUTS / "all_reduce_per_iteration.json", tmp_path)
    other = import_nccl_tests(OUTPUTS / "all_reduce.json", tmp_path)
    with_itself = compare_cases(many.cases(), many.cases())
    assert {row.ratio for row in with_itself.rows} == {1.0}
    assert {(row.verdict, row.processes_needed) for row in with_itself.rows} == {("not enough data", 5)}
    too_few = compare_cases(single.cases(), many.cases())
    assert len(too_few.rows) == 4
    assert all("5 are needed" in row.reason for row in too_few.rows)
    nothing = compare_cases(many.cases(), other.cases())
    assert nothing.rows == []
    assert "share no case" in describe_comparison(nothing)


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public results are not beside this checkout")
def test_public_results_keep_their_bandwidths(tmp_path: Path) -> None:
    """Times and rates that others published come out as they went in."""
    with PUBLIC.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == "8xH100_DGX_NVLink4_NVLS"]
    written = [
        Line(int(row["bytes"]), int(row["bytes"]) // 4, "float", "sum", -1, side, side)
        for row in rows
        for side in [Side(float(row["time_us"]), float(row["algbw_GBps"]), float(row["busbw_GBps"]))]
    ]
    path = tmp_path / "public.txt"
    path.write_text(format_text("all_reduce_perf", [format_rank(rank) for rank in range(8)], written))
    run = import_nccl_tests(path, tmp_path)
    large = [case for case in run.cases() if case.result.case.parameters["size_bytes"] == 4194304]
    assert [case.score() for case in large] == [pytest.approx(135.45, rel=2e-3)] * 2


def test_every_program_has_an_operation_that_bench_comms_could_name() -> None:
    assert {operation.name for operation in OPERATIONS.values()} >= {
        "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "all_to_allv", "gather",
        "scatter", "send_recv",
    }  # fmt: skip
    assert all(0 <= operation.bus_factor(n) <= 2 for operation in OPERATIONS.values() for n in (1, 2, 8))


def test_reading_back_needs_nothing_but_the_folder(tmp_path: Path) -> None:
    run = import_nccl_tests(OUTPUTS / "all_reduce.json", tmp_path / "store", name="h100")
    assert "-h100-" in run.id
    moved = tmp_path / "elsewhere"
    run.folder.rename(moved)
    assert len(StoredRun(moved).cases()) == 6
