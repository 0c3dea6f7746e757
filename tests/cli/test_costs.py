"""`stepscope costs` with the real command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import Stepscope

from builders import make_case, make_folder
from costs.collective_examples import kinked, make_comms_case, measure, write_comms_run
from stepscope.costs.collective import find_cost, read_collective_table

EXCERPT = Path(__file__).parents[1] / "costs" / "data" / "all_reduce_8xa100.csv"
SIZES = [1024 * 2**i for i in range(16)]
FIT = ("costs", "fit-collective")


def test_runs_become_a_table(here: Stepscope, store: Path, tmp_path: Path) -> None:
    cases = [make_comms_case(size) for size in SIZES]
    run = write_comms_run(store, [*cases, *(make_comms_case(size, ranks=4) for size in SIZES[:3])], kinked)
    output = tmp_path / "costs.json"
    answer = here(*FIT, run.id, "--output", str(output), "--json")
    assert answer.code == 0
    (cost,) = answer.data["costs"]
    assert (cost["operation"], cost["members"], cost["backend"]) == ("all_reduce", 2, "gloo")
    assert cost["model"] == cost["curve"]["model"] == "piecewise"
    assert set(cost["candidates"]) == {"alpha_beta", "sqrt", "piecewise"}
    assert cost["bandwidth_bytes_per_s"] > 0
    (refused,) = answer.data["refused"]
    assert refused["label"] == "all_reduce, 4 ranks, gloo, float32"
    assert "at least 4" in refused["reason"]
    found = find_cost(read_collective_table(output), operation="all_reduce", members=2)
    assert found.predict(SIZES[3]).value_s == pytest.approx(measure(kinked, SIZES)[3].time_s, rel=0.01)
    assert found.sources == [run.id]


def test_the_text_has_one_line_a_curve(here: Stepscope, store: Path) -> None:
    write_comms_run(store, [make_comms_case(size, ranks=ranks) for ranks in (2, 4) for size in SIZES])
    make_folder(store, [make_case(m=1)])
    answer = here(*FIT)
    assert answer.code == 0
    rows = [line.split() for line in answer.out.splitlines() if not line.startswith("#")]
    assert [row[:5] for row in rows] == [["all_reduce", n, "gloo", "float32", "16"] for n in ("2", "4")]
    assert [row[9] for row in rows] == ["sqrt", "sqrt"]
    assert all(line.count("%") == 7 for line in answer.out.splitlines() if not line.startswith("#"))
    assert "# 2 curves; --output FILE.json keeps them" in answer.out
    assert "# system: Test CPU, 2 threads" in answer.out


def test_a_folder_and_a_published_table(here: Stepscope, store: Path) -> None:
    run = write_comms_run(store, [make_comms_case(size) for size in SIZES])
    answer = here(*FIT, str(run.folder), str(EXCERPT), "--json")
    assert [cost["system"] for cost in answer.data["costs"]] == ["Test CPU, 2 threads", "8xA100_NVLink3"]
    assert answer.data["output"] is None
    assert "all_reduce" in here(*FIT, str(EXCERPT)).out


def test_nothing_to_fit(here: Stepscope, store: Path, tmp_path: Path) -> None:
    few = write_comms_run(store, [make_comms_case(size) for size in SIZES[:3]])
    output = tmp_path / "costs.json"
    answer = here(*FIT, few.id, "--output", str(output), "--json")
    assert answer.code == 2
    assert "3 sizes measured" in answer.error["message"]
    assert "bench comms" in answer.error["hint"]
    assert not output.exists()
    other = make_folder(store, [make_case(m=1)])
    assert "bench ops" in here(*FIT, other.name, "--json").error["message"]
    assert here(*FIT, "nothing-of-this-name", "--json").error["kind"] == "run_not_found"
    assert here(*FIT, str(tmp_path / "missing.csv"), "--json").error["kind"] == "bad_input"
    wrong_name = here(*FIT, str(EXCERPT), "--output", str(tmp_path / "costs.txt"), "--json")
    assert (wrong_name.code, wrong_name.error["kind"]) == (2, "usage")


def test_an_empty_store(here: Stepscope) -> None:
    assert here(*FIT, "--json").error["kind"] == "run_not_found"


def test_help_loads_neither_numpy_nor_torch() -> None:
    code = (
        "import sys\nfrom stepscope.cli.main import run\n"
        "assert run(['costs', 'fit-collective', '--help']) == 0\n"
        "assert not {'numpy', 'torch', 'polars'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_costs_are_read_and_used_without_numpy(tmp_path: Path, here: Stepscope) -> None:
    table = tmp_path / "costs.json"
    assert here(*FIT, str(EXCERPT), "--output", str(table)).code == 0
    code = (
        "import sys\nfrom pathlib import Path\nsys.modules['numpy'] = None\n"
        "from stepscope.costs import find_cost, read_collective_table\n"
        f"table = read_collective_table(Path({str(table)!r}))\n"
        "assert find_cost(table, operation='all_reduce', members=8).predict(1 << 20).inside_range\n"
        "from stepscope.cli.main import run\n"
        f"assert run(['costs', 'fit-collective', {str(EXCERPT)!r}]) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "fitting needs numpy" in done.stderr
