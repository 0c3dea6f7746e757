"""Sweeps of operators with the real command: lists, presets, files, tables, suites, dry runs, resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_process import Stepscope

from stepscope.store import StoredRun, read_kernel_table, run_folders

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = ("bench", "ops")


def test_the_list_tells_programs_what_there_is(here: Stepscope) -> None:
    ops = {one["name"]: one for one in here(*OPS, "--list", "--json").data["ops"]}
    assert len(ops) >= 40
    gemm = ops["gemm"]
    assert [parameter["name"] for parameter in gemm["parameters"]] == ["m", "n", "k", "layout"]
    assert gemm["parameters"][3]["choices"] == ["nn", "nt", "tn", "tt"]
    assert {"float32", "tf32", "bfloat16", "float8_e4m3fn"} <= set(gemm["dtypes"])
    assert gemm["passes"] == ["forward", "backward"]
    assert {"tiny", "A", "B", "C"} <= set(gemm["presets"])
    assert all("tiny" in one["presets"] for one in ops.values())


def test_every_operator_has_the_tiny_preset_and_it_runs(here: Stepscope) -> None:
    answer = here(*OPS, "--op", "all", "--preset", "tiny", "--quick", "--json")
    assert answer.code == 0
    states = {case["benchmark"].split("/")[0]: case["status"] for case in answer.data["cases"]}
    assert set(states.values()) == {"ok"}
    listed = here(*OPS, "--list", "--json").data["ops"]
    assert states.keys() == {one["name"] for one in listed}


def test_a_dry_run_estimates_and_measures_nothing(here: Stepscope, store: Path) -> None:
    answer = here(*OPS, "--op", "gemm", "--shape", "m=64:256:x2,n=m,k=2*m", "--shape", "m=1M,n=1M,k=1M",
                       "--dry-run", "--json")  # fmt: skip
    assert answer.code == 0
    *fit, large = answer.data["cases"]
    assert [case["parameters"]["k"] for case in fit] == [128, 256, 512]
    assert all(case["iteration_s"] > 0 and case["memory_bytes"] > 0 and case["skip"] is None for case in fit)
    assert "needs" in large["skip"]
    assert answer.data["total_s"] > 0
    assert not store.exists() or run_folders(store) == []


def test_what_is_lacking_is_a_recorded_skip(here: Stepscope) -> None:
    answer = here(*OPS, "--op", "gemm", "--preset", "tiny", "--dtype", "tf32", "--dtype", "int4", "--quick",
                       "--json")  # fmt: skip
    assert answer.code == 0
    assert [case["status"] for case in answer.data["cases"]] == ["skipped", "skipped"]
    assert "tf32" in answer.data["cases"][0]["failure"]["message"]


def test_a_sweep_becomes_a_table_and_parquet(here: Stepscope, tmp_path: Path) -> None:
    table = tmp_path / "out.csv.gz"
    answer = here(*OPS, "--op", "linear", "--shape", "batch=4~64,in=8~64,out=8~64", "--draws", "6", "--seed", "3",
                       "--pass", "forward", "--pass", "backward", "--cache", "warm", "--cache", "cold", "--kernels",
                       "--quick", "--json", "--table", str(table))  # fmt: skip
    assert answer.code == 0
    assert answer.data["table"]["rows"] == 24
    rows = read_kernel_table(table)
    assert len(rows) == 24
    assert {(row.direction, row.cache) for row in rows} == {
        (direction, cache) for direction in ("forward", "backward") for cache in ("warm", "cold")
    }
    assert all(row.latency_s == pytest.approx(row.wall_s) for row in rows)  # on a CPU they are the same
    assert all(row.kernels and row.flops and row.bytes == row.unique_bytes for row in rows)
    system = StoredRun(Path(answer.data["run"])).system
    assert system is not None
    assert {row.system for row in rows} == {system.fingerprint}

    import duckdb

    for source in (answer.data["id"], str(table)):
        made = tmp_path / "t.parquet"
        exported = here("runs", "export", source, "--format", "parquet", "--output", str(made), "--json")
        assert exported.data["rows"] == 24
        assert duckdb.sql(f"SELECT count(*), sum(\"in\") FROM read_parquet('{made}')").fetchall() == [
            (24, sum(int(row.parameters["in"]) for row in rows))
        ]


def test_ceilings_give_shares_and_a_roofline(here: Stepscope, tmp_path: Path) -> None:
    answer = here(*OPS, "--op", "gemm", "--shape", "m=256,n=256,k=256", "--ceilings", "--quick", "--json")
    ceilings = answer.data["ceilings"]["cpu"]
    assert ceilings["bytes_per_s"].keys() == {"read", "write", "copy"}
    case = answer.data["cases"][-1]
    assert case["compute_share"] == pytest.approx(case["flops_per_s"] / ceilings["matrix_flops_per_s"]["float32"])
    assert case["memory_share"] > 0
    page = tmp_path / "r.html"
    assert here("report", answer.data["id"], "--format", "html", "--output", str(page)).code == 0
    assert "oofline" in page.read_text()


def test_cases_from_files(here: Stepscope, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[[cases]]\nop = "softmax"\nshape = "rows=4/8,cols=16"\npasses = ["forward", "backward"]\n')
    param = tmp_path / "param.json"
    tensor = {"type": "tensor", "dtype": "float", "shape": [8, 4]}
    swept = {"type": "tensor", "dtype": "float", "shape": [-1, [2, 4, 1]], "__range__": ["shape"]}
    content = {"torch.mm": {"input_data_generator": "PyTorch:DefaultDataGenerator", "config": [
        {"input": [{"args": [tensor, {**swept, "shape": [4, [2, 4, 1]]}], "kwargs": {}}]}]}}  # fmt: skip
    content["torch.mm"]["input_iterator"] = "RangeConfigIterator"  # type: ignore[assignment,index]
    param.write_text(json.dumps(content))
    answer = here(*OPS, "--cases", str(own), "--cases", str(param), "--quick", "--json")
    assert answer.code == 0
    models = [case["benchmark"].split("/")[0] for case in answer.data["cases"]]
    assert models == ["softmax"] * 4 + ["call"] * 3
    assert {case["status"] for case in answer.data["cases"]} == {"ok"}
    bad = tmp_path / "bad.toml"
    bad.write_text('[[cases]]\nop = "softmax"\nshap = "rows=4"\n')
    error = here(*OPS, "--cases", str(bad), "--json").error
    assert "shap" in error["message"]
    assert str(bad) in (error["where"] or "")


def test_any_aten_operator_by_its_schema(here: Stepscope) -> None:
    schema = "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"
    arguments = ("--call", schema, "--args", "float32[4,6] float32[4,5] float32[5,6]")
    answer = here(*OPS, *arguments, "--pass", "forward", "--pass", "backward", "--quick", "--json")
    assert answer.code == 0
    assert [case["status"] for case in answer.data["cases"]] == ["ok", "ok"]
    absent = here(*OPS, "--call", "aten::no_such_thing", "--args", "float32[4]", "--quick", "--json")
    assert (absent.code, absent.error["where"]) == (2, "--call")
    assert "no operator aten::no_such_thing" in absent.error["message"]


def test_the_micro_suite_gives_one_score_a_row(here: Stepscope) -> None:
    ids = ("dlrm/micro/linear/linear_tiny.1dev", "dlrm/micro/embedding_bag/emb_tiny.1dev")
    wanted = [word for one in ids for word in ("--benchmark", one)]
    answer = here("bench", "suite", "micro", *wanted, "--quick", "--json")
    assert answer.code == 0
    linear, bag = answer.data["suite"]
    assert (linear["id"], linear["unit"], bag["id"], bag["unit"]) == (ids[0], "TFLOP/s", ids[1], "GB/s")
    (case,) = (one for one in answer.data["cases"] if one["benchmark"] == ids[1])
    shape = case["parameters"]
    gathered = shape["batch"] * shape["pooling"] * shape["dim"] * 4
    assert bag["score"] == pytest.approx(gathered / case["summary"]["median_s"] / 1e9)
    listed = here("bench", "suite", "micro", "--list", "--json").data["benchmarks"]
    assert {"dlrm/micro/linear/linear_A.1dev", "dlrm/micro/embedding_bag/emb_A.1dev"} <= {one["id"] for one in listed}
    plan = here("bench", "suite", "micro", "--dry-run", "--json").data["cases"]
    assert len(plan) == 12 + 16  # PARAM's linear list A and embedding list A
    for wrong in (("--benchmark", "dlrm/micro/none/x"), ("--dtype", "float31")):
        assert here("bench", "suite", "micro", *wrong, "--json").code == 2


def test_a_killed_sweep_resumes_and_its_table_is_whole(stepscope: Stepscope, store: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    sweep = [
        *OPS,
        "--op",
        "gemm",
        "--shape",
        "m=8~64,n=8~64,k=8~64",
        "--draws",
        "150",
        "--quick",
        "--table",
        str(table),
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "stepscope", *sweep, "--store", str(store)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        folders = run_folders(store) if store.exists() else []
        if folders and len(StoredRun(folders[0]).results) >= 20:
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = len(StoredRun(run_folders(store)[0]).results)
    assert 20 <= kept < 150
    assert not table.exists()
    run = run_folders(store)[0].name
    answer = stepscope("runs", "resume", run, "--json")
    assert answer.code == 0
    assert len(run_folders(store)) == 1
    assert len(read_kernel_table(table)) == 150


def test_places_and_devices_that_are_not_there_are_refused_before_anything_is_measured(
    here: Stepscope, store: Path, tmp_path: Path
) -> None:
    gemm = (*OPS, "--op", "gemm", "--preset", "tiny", "--quick", "--json")
    for wrong in (("--table", "/proc/t.csv"), ("--table", str(tmp_path / "t.parquet")), ("--device", "cuda:99"),
                  ("--device", "abacus")):  # fmt: skip
        answer = here(*gemm, *wrong)
        assert answer.code == 2, wrong
        assert answer.error["where"] == wrong[0] or wrong[1] in (answer.error["where"] or "")
    assert not store.exists() or run_folders(store) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shape", "m=8"),
        ("--op", "gemm", "--preset", "Z"),
        ("--op", "gemm", "--shape", "m=8~64"),
        ("--op", "gemm", "--draws", "5"),
        ("--op", "gemm", "--shape", "m=8~9,n=1,k=1", "--draws", "50"),
        ("--op", "gemm", "--args", "float32[2]"),
        ("--op", "gemm", "--cache", "lukewarm"),
        ("--op", "gemm", "--dtype", "float31"),
        ("--op", "gemm", "--pass", "sideways"),
        ("--cases", "nothing.toml"),
        ("--op", "conv2d", "--shape", "in=3,groups=2"),
        ("--op", "elementwise", "--shape", "chain=frobnicate"),
        ("--dry-run",),
        ("--call", "aten::nope"),
        ("--call", "torch.nn.Nope"),
        ("--op", "gemm", "--graph", "--device", "cpu"),
    ],
)
def test_bad_requests(here: Stepscope, arguments: tuple[str, ...]) -> None:
    answer = here(*OPS, *arguments, "--json")
    assert answer.code == 2
    assert answer.error["message"]
    assert answer.error["hint"]
