"""Damage, odd places and odd numbers: one message that names the file, and everything else is served."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Stepscope

from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.records import add_seal
from stepscope.store import RunWriter, StoredRun, run_folders

CASES = [make_case(m=m, device="cpu", dtype="float32") for m in (1, 2)]
FORMAT_1 = Path(__file__).parents[1] / "store" / "data" / "format-1"


def write_run(store: Path, *, finish: bool = True) -> Path:
    folder = make_folder(store, CASES)
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        for case in CASES:
            writer.append(make_result(case), [make_samples(case, [0.1 + 0.001 * i for i in range(20)])])
        if finish:
            writer.finish()
    return folder


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# Flips: benchmarks/store_flips.py does the same two thousand times


@pytest.mark.parametrize("seed", range(12))
def test_a_flip_is_named_and_the_other_runs_are_served(here: Stepscope, store: Path, seed: int) -> None:
    others = [write_run(store), write_run(store), write_run(store, finish=False)]
    hit = write_run(store, finish=bool(seed % 2))
    chance = random.Random(seed)
    files = [path for path in sorted(hit.rglob("*.json*")) if path.is_file()]
    path = files[seed % len(files)]
    flip(path, chance.randrange(8 * (path.stat().st_size - 1)))
    names = [folder.name for folder in others]

    listed = here("runs", "list", "--json")
    assert (listed.code, [row["id"] for row in listed.data["runs"] if row["id"] != hit.name]) == (0, sorted(names))
    verified = here("runs", "verify", "--json")
    assert (verified.code, [row["id"] for row in verified.data["runs"] if row["damage"]]) == (1, [hit.name])
    asked = here("runs", "sql", "SELECT DISTINCT run FROM samples ORDER BY run", "--json")
    assert asked.data["rows"] == [[name] for name in sorted(names)]
    assert hit.name in json.dumps(asked.data["damaged"])
    for arguments in (("report",), ("runs", "export")):
        answer = here(*arguments)
        assert answer.code == 0
        assert all(name in answer.out for name in names)
        assert "left out: " in answer.err
        assert hit.name in answer.err
    assert here("compare", names[0], names[1]).code == 0
    assert here("check", names[0], "--baseline", names[1]).code in {0, 4}
    for arguments in (
        ("compare", hit.name, names[0]),
        ("check", hit.name, "--baseline", names[0]),
        ("report", hit.name),
    ):
        answer = here(*arguments, "--json")
        assert answer.code == 2
        assert hit.name in answer.error["where"]


def test_a_run_that_nothing_vouches_for_says_so_in_every_header(here: Stepscope, store: Path) -> None:
    shutil.copytree(FORMAT_1, store)
    killed, other = "20261116-154733-gemm-e81190", "20261116-154751-gemm-resumed"
    for arguments in (
        ("runs", "list"), ("runs", "show", killed), ("runs", "verify", killed), ("report", killed),
        ("compare", killed, other), ("compare", other, killed), ("check", killed, "--baseline", other),
    ):  # fmt: skip
        answer = here(*arguments)
        assert "unverified" in answer.out, arguments
    assert "unverified" not in here("compare", other, other).out


# Values that a record takes and no reader does


def test_nonsense_with_a_right_seal_costs_its_own_run_only(here: Stepscope, store: Path) -> None:
    good, odd = write_run(store), write_run(store, finish=False)
    journal, after, lines = odd / "journal.jsonl", StoredRun(odd).plan_seal, b""
    for line in journal.read_bytes().splitlines():
        content = json.loads(line)
        del content["seal"]
        content["observed"] = {"kind": "collective", "size_bytes": -1, "bus_factor": 0.0, "iteration": {"x": -1.0}}
        content["timing"] = "slowest_rank_device"
        sealed = add_seal(json.dumps(content).encode(), after)
        lines, after = lines + sealed + b"\n", json.loads(sealed)["seal"]
    journal.write_bytes(lines)
    for arguments in (("runs", "list"), ("runs", "sql", "SELECT * FROM cases"), ("report",), ("runs", "export")):
        answer = here(*arguments)
        assert answer.code == 0, answer.err
        assert good.name in answer.out
        assert "defect" not in answer.err


# Places


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A store that can only be read, for root too."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "read-only"
    place.mkdir()
    write_run(place)
    write_run(place, finish=False)
    done = subprocess.run(["mount", "--bind", "-o", "ro", str(place), str(place)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a folder cannot be mounted read-only here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_read_only_store_is_read_and_named_where_it_is_written(here: Stepscope, read_only: Path) -> None:
    at = ("--store", str(read_only))
    complete = next(folder.name for folder in run_folders(read_only) if (folder / "run.json").exists())
    interrupted = next(folder.name for folder in run_folders(read_only) if folder.name != complete)
    for arguments in (
        ("runs", "list"),
        ("runs", "verify"),
        ("report",),
        ("runs", "sql", "SELECT 1"),
        ("runs", "export"),
    ):
        assert here(*arguments, *at).code == 0, arguments
    inside = str(read_only / "page.html")
    for arguments in (
        ("runs", "rm", complete), ("runs", "resume", interrupted), ("report", "-o", inside),
        ("runs", "export", "-o", inside),
        ("runs", "export", "--format", "table", "-o", str(read_only / "t.csv")),
        ("bench", "ops", "--op", "gemm", "--quick"),
        ("bench", "ops", "--op", "gemm", "--quick", "--resume", interrupted),
    ):  # fmt: skip
        answer = here(*arguments, *at, "--json")
        assert answer.code in {1, 2}, arguments
        assert "defect" not in json.dumps(answer.error), answer.error
        assert str(read_only) in answer.error["where"], arguments


def test_a_link_is_removed_and_its_run_kept(here: Stepscope, store: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "elsewhere")
    store.mkdir()
    (store / folder.name).symlink_to(folder)
    answer = here("runs", "rm", folder.name)
    assert (answer.code, "the run is kept" in answer.out, folder.exists()) == (0, True, True)
    assert here("runs", "list", "--json").data["runs"] == []


def test_a_store_without_runs_is_not_verified(here: Stepscope, tmp_path: Path) -> None:
    for store in (tmp_path / "typo", tmp_path):
        answer = here("runs", "verify", "--store", str(store), "--json")
        assert (answer.code, answer.error["where"]) == (2, str(store))


@pytest.mark.parametrize(
    ("query", "code"),
    [(" ", 0), ("select now()", 0), ("select now() as t, 1 as n;", 0), ("-- nothing\n", 2), ("select", 2), (";", 2)],
)
def test_odd_queries_are_answered(here: Stepscope, store: Path, query: str, code: int) -> None:
    write_run(store)
    answer = here("runs", "sql", "--json", "--", query)
    assert answer.code == code
    if code:
        assert "defect" not in json.dumps(answer.error)


@pytest.mark.parametrize(
    "arguments", [("trace", "summary"), ("report",), ("compare", "x"), ("trace", "diff", "x"), ("runs", "import")]
)
def test_a_name_that_is_too_long_is_said_so(here: Stepscope, arguments: tuple[str, ...]) -> None:
    answer = here(*arguments, "x" * 300, "--json")
    assert answer.code == 2
    assert "defect" not in json.dumps(answer.error)


# Writing through


def test_output_goes_through_devices_and_links(stepscope: Stepscope, store: Path, tmp_path: Path) -> None:
    write_run(store)
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    link.symlink_to(target)
    assert stepscope("report", "-o", "/dev/null").code == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stepscope("runs", "export", "-o", str(link)).code == 0
    assert link.is_symlink()
    assert stepscope("runs", "export", "-o", "/dev/stdout").out == target.read_text() == stepscope("runs", "export").out


# Numbers

ODD_NUMBERS = ("nan", "inf", "-inf", "-1", "1e400", "1e999s")
FLOAT_OPTIONS = [
    ("bench", "comms", "--collective", "all_to_allv", "--ranks", "2", "--skew"),
    ("bench", "comms", "--collective", "all_reduce", "--hang-timeout"),
    ("bench", "bisect", "--threshold"),
    ("bench", "workload", "gpt2/ootb/infer/A.1dev-small-fp32", "--rate"),
    ("bench", "workload", "dlrm/ootb/train/A.1dev-embed32-fp32", "--find-batch", "throughput", "--resolution"),
    ("bench", "workload", "dlrm/ootb/train/A.1dev-embed32-fp32", "--ranks", "2", "--hang-timeout"),
    ("bench", "ops", "--op", "gemm", "--target-width"),
    ("bench", "ops", "--op", "gemm", "--min-time"),
    ("bench", "ops", "--op", "gemm", "--max-time"),
    ("bench", "ops", "--op", "gemm", "--warmup-max-time"),
    ("check", "--baseline", "x", "--max-regression"),
    ("compare", "x", "y", "--level"),
]


@pytest.mark.parametrize("number", ODD_NUMBERS)
@pytest.mark.parametrize("arguments", FLOAT_OPTIONS, ids=lambda words: f"{words[1]}{words[-1]}")
def test_odd_numbers_are_refused_before_anything_is_written(
    here: Stepscope, store: Path, arguments: tuple[str, ...], number: str
) -> None:
    answer = here(*arguments, number, "--json")
    assert answer.code == 2
    assert "defect" not in json.dumps(answer.error)
    assert not store.exists()


@pytest.mark.parametrize("sizes", ["9" * 400, "1e400", "nan", "99999999999999T", "1:9999999999T:x2"])
def test_odd_sizes_are_refused(here: Stepscope, store: Path, sizes: str) -> None:
    answer = here("bench", "comms", "--collective", "all_reduce", "--sizes", sizes, "--json")
    assert answer.code == 2
    assert "defect" not in json.dumps(answer.error)
    assert not store.exists()


@pytest.mark.parametrize("option", ["--min-samples", "--max-samples", "--processes"])
def test_integers_that_are_too_long_are_refused(here: Stepscope, store: Path, option: str) -> None:
    answer = here("bench", "ops", "--op", "gemm", "--dtype", "float32", option, "9" * 30, "--json")
    assert answer.code == 2
    assert "defect" not in json.dumps(answer.error)
    assert not store.exists()
