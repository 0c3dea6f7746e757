"""`stepscope runs import`, and what the other verbs make of an imported run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from cli_process import Stepscope

from builders import case_of, make_case, make_result, make_samples, make_system
from stepscope.records import Benchmark, Parameter, make_request
from stepscope.store import RunWriter, StoredRun, create_run, run_folders

OUTPUTS = Path(__file__).parents[1] / "store" / "nccl_outputs"
TEXT, JSON = OUTPUTS / "all_reduce_16_ranks.txt", OUTPUTS / "all_reduce_per_iteration.json"


def test_files_become_runs(here: Stepscope, store: Path) -> None:
    answer = here("runs", "import", str(TEXT), str(JSON), "--json")
    assert answer.code == 0
    runs = answer.data["runs"]
    assert [Path(run["file"]) for run in runs] == [TEXT, JSON]
    assert [(run["status"], run["verb"], run["world_size"]) for run in runs] == [("complete", "import", 16)] * 2
    assert runs[0]["command"] == ["stepscope", "runs", "import", TEXT.name]
    assert here("runs", "verify").code == 0


def test_what_is_said_of_an_import(here: Stepscope) -> None:
    answer = here("runs", "import", str(OUTPUTS / "all_reduce_truncated.txt"), "--partial")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0].startswith("all_reduce_truncated.txt: all_reduce, 8 ranks, 6 cases: ")
    assert "line 21 was left out" in lines[1]


def test_wrong_elements_are_a_failure(here: Stepscope) -> None:
    answer = here("runs", "import", str(OUTPUTS / "all_reduce_wrong.txt"))
    assert answer.code == 1
    assert "1 with wrong elements" in answer.out


def test_one_bad_file_and_nothing_is_imported(here: Stepscope, store: Path) -> None:
    answer = here("runs", "import", str(TEXT), str(OUTPUTS / "all_reduce_truncated.txt"), "--json")
    assert answer.code == 2
    assert answer.error["kind"] == "bad_input"
    assert answer.error["where"].endswith("all_reduce_truncated.txt:21")
    assert "--partial" in answer.error["hint"]
    assert run_folders(store) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "cannot read"),
        ([str(OUTPUTS)], "cannot read"),
        ([__file__], "no output of nccl-tests"),
        ([str(OUTPUTS / "all_gather_unnamed.txt")], "does not name its operation"),
        ([str(OUTPUTS / "all_gather_unnamed.txt"), "--operation", "all_reduce"], "the bus bandwidth is"),
        ([str(TEXT), "--operation", "broadcast"], "the file is of all_reduce"),
        ([str(TEXT), "--operation", "al_reduce"], "there is no operation"),
        ([], "Missing argument"),
    ],
)
def test_wrong_use_is_told(here: Stepscope, arguments: list[str], message: str) -> None:
    answer = here("runs", "import", *arguments, "--json")
    assert answer.code == 2
    assert message in answer.error["message"]


def test_the_operation_can_be_told(here: Stepscope) -> None:
    file = str(OUTPUTS / "all_gather_unnamed.txt")
    run = here("runs", "import", file, "--operation", "all_gather", "--json").data["runs"][0]
    assert StoredRun(Path(run["path"])).cases()[0].result.case.benchmark.model == "all_gather"


def test_every_reader_takes_an_imported_run(here: Stepscope, tmp_path: Path) -> None:
    first, second = (run["id"] for run in here("runs", "import", str(TEXT), str(JSON), "--json").data["runs"])
    assert "all_reduce" in here("runs", "show", first).out
    assert "NVIDIA H100" in here("report", first).out
    table = here("report", first, "--format", "nccl")
    assert table.code == 0
    assert "#  Rank 15 Group  0 Pid   4115 on     node-2 device  7" in table.out
    assert "# Out of bounds values : 0 OK" in table.out
    rows = list(csv.DictReader(io.StringIO(here("runs", "export", first, "--format", "csv").out)))
    assert {row["benchmark"] for row in rows} == {"all_reduce/micro/nccl/16ranks"}
    assert float(rows[-1]["busbw_bytes_per_s"]) == pytest.approx(113.78e9, rel=1e-3)
    page = tmp_path / "page.html"
    assert here("report", first, second, "--output", str(page)).code == 0
    assert "against message size" in page.read_text()
    compared = here("compare", first, second)
    assert compared.code == 0
    assert "5 are needed" in compared.out
    counted = here("runs", "sql", "SELECT count(*) FROM samples", "--json")
    assert counted.data["rows"] == [[10 + 4 * 12]]


def make_own_run(store: Path, sizes: list[int], *, ranks: int = 16) -> str:
    """As `bench comms --backend nccl` writes it."""
    benchmark = Benchmark(
        model="all_reduce", implementation="micro", mode="nccl", config=f"{ranks}ranks", owner="communication"
    )
    cases = []
    for size in sizes:
        parameters: dict[str, Parameter] = {"size_bytes": size, "dtype": "float32", "device": "cuda"}
        cases.append(case_of(benchmark, parameters, world_size=ranks))
    folder = create_run(
        store, verb="comms", name="all_reduce", command=["stepscope"], request=make_request("comms", {}), cases=cases
    )
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        for case in cases:
            observed = {"size_bytes": case.parameters["size_bytes"], "bus_factor": 2 * (ranks - 1) / ranks, "wrong": 0}
            seconds = [60e-6 + 1e-7 * i for i in range(12)]
            writer.append(
                make_result(case, timing="slowest_rank", observed=observed),
                [make_samples(case, seconds, rank=rank) for rank in range(2)],
            )
        writer.finish()
    return folder.name


def test_an_imported_run_is_compared_with_one_of_ours(here: Stepscope, store: Path) -> None:
    imported = here("runs", "import", str(JSON), "--json").data["runs"][0]["id"]
    ours = make_own_run(store, [1 << 20, 1 << 30])
    data = here("compare", imported, ours, "--json").data
    (row,) = data["rows"]
    assert row["ratio"] > 1
    assert (row["verdict"], row["processes_needed"]) == ("not enough data", 5), "each was measured in one process"
    assert len(data["only_a"]) == 3
    assert len(data["only_b"]) == 1


def test_when_nothing_pairs_it_is_said(here: Stepscope, store: Path) -> None:
    imported = here("runs", "import", str(JSON), "--json").data["runs"][0]["id"]
    ours = make_own_run(store, [1 << 20], ranks=8)
    answer = here("compare", imported, ours)
    assert answer.code == 0
    assert "share no case" in answer.out
    assert "only in A: all_reduce/micro/nccl/16ranks" in answer.out
    assert "only in B: all_reduce/micro/nccl/8ranks" in answer.out


def test_an_import_that_was_killed_cannot_be_resumed(here: Stepscope) -> None:
    run = here("runs", "import", str(TEXT), "--json").data["runs"][0]
    (Path(run["path"]) / "run.json").unlink()
    answer = here("runs", "resume", run["id"], "--json")
    assert answer.code == 2
    assert "was imported" in answer.error["message"]


def test_the_table_needs_communication(here: Stepscope, store: Path) -> None:
    case = make_case()
    folder = create_run(
        store, verb="ops", name="gemm", command=["stepscope"], request=make_request("ops", {}), cases=[case]
    )
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(make_result(case), [make_samples(case, [1e-3])])
        writer.finish()
    answer = here("report", folder.name, "--format", "nccl", "--json", "--output", str(store / "x.txt"))
    assert answer.code == 2
    assert "no communication" in answer.error["message"]
    make_own_run(store, [1 << 20])
    mixed = here("report", "--format", "nccl")
    assert mixed.code == 0
    assert f"left out: {folder.name}" in mixed.err
