"""`stepscope bench pattern` with real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_process import Stepscope

from stepscope.store import StoredRun, verify_run

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("dlrm", "ddp", "fsdp", "tp", "sp", "pp", "ep", "ps")
SETTINGS = ("scale=0.001", "hidden=32", "sequence=32", "tokens=64", "layers=2", "micro_batches=4", "ps.shards=3")
SMALL = tuple(word for setting in SETTINGS for word in ("--set", setting))
FAST = ("--quick", "--max-time", "50ms", "--check", "all", "--json")


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "more"), [(2, ("--no-overlap",)), (4, ("--set", "ep.flops=1e5"))])
def test_every_pattern_is_right(here: Stepscope, ranks: int, more: tuple[str, ...]) -> None:
    answer = here("bench", "pattern", *ALL, "--ranks", str(ranks), *SMALL, *more, *FAST)
    assert answer.code == 0
    cases = answer.data["cases"]
    assert [case["benchmark"] for case in cases] == [f"pattern_{name}/micro/gloo/{ranks}ranks" for name in ALL]
    for case in cases:
        assert (case["status"], case["wrong"]) == ("ok", 0), case["label"]
        assert case["parameters"].get("overlap", True) == ("--no-overlap" not in more)
        assert case["score"] == pytest.approx(case["bytes"] / case["summary"]["median_s"] / 1e9, rel=1e-3)
        steps = case["steps"]
        assert len(steps) == len(case["sequence"].split())
        for step in steps:
            assert 0 < step["quickest_s"] <= step["median_s"] <= step["p95_s"]
            assert step["busbw_bytes_per_s"] == pytest.approx(step["bus_bytes"] / step["median_s"])
    run = StoredRun(Path(answer.data["run"]))
    assert verify_run(run) == []
    assert {rank.rank for case in run.cases() for rank in case.samples} == set(range(ranks))
    shown = here("bench", "pattern", "--show", run.id, "--json")
    assert [case["steps"] for case in shown.data["cases"]] == [case["steps"] for case in cases]


def test_a_played_world_and_its_table(stepscope: Stepscope) -> None:
    answer = stepscope(
        "bench", "pattern", "ddp", "--backend", "fake", "--ranks", "8", "--set", "scale=0.0001", "--quick"
    )
    assert answer.code == 0
    assert "pattern_ddp/micro/fake/8ranks[scale=0.0001]: overlapped" in answer.out
    assert [line.split()[:2] for line in answer.out.splitlines() if line.startswith("  reduce")] == [
        ["reduce", "all_reduce"]
    ]


def test_a_dry_run_shows_the_sequence(here: Stepscope, store: Path) -> None:
    wanted = ("bench", "pattern", "tp", "pp", "--set", "tp.degree=2", "--set", "pp.micro_batches=1", "--ranks", "4")
    answer = here(*wanted, "--dry-run", "--json")
    tp, pp = answer.data["patterns"]
    assert (tp["parameters"], pp["parameters"]) == ({"degree": 2}, {"micro_batches": 1})
    assert tp["steps"][1] == {
        "name": "attention_reduce.0", "part": "attention_reduce", "operation": "all_reduce", "dtype": "bfloat16",
        "size_bytes": 262_144, "bus_bytes": 262_144.0, "flops": 0.0, "groups": [[0, 1], [2, 3]],
        "after": ["attention.0"],
    }  # fmt: skip
    text = here(*wanted, "--dry-run").out
    assert "0-1 2-3" in text
    assert "2→1" in text
    assert not store.exists()


def test_the_list_names_patterns_and_parameters(here: Stepscope) -> None:
    listed = here("bench", "pattern", "--list", "--json").data["patterns"]
    assert tuple(one["name"] for one in listed) == ALL
    assert all(entry["meaning"] for one in listed for entry in one["parameters"])
    assert "bottom=13-512-256-64-16" in here("bench", "pattern", "--list").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no pattern was named"),
        (("dllm",), "no pattern 'dllm'"),
        (("ddp", "--set", "modle=vgg16"), "no parameter 'modle'"),
        (("ddp", "--set", "model=vgg17"), "no model 'vgg17'"),
        (("ddp", "--set", "scale=2"), "parameters of ddp cannot be"),
        (("pp", "--ranks", "1"), "2 ranks or more"),
        (("--show", "nothing"), "nothing"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    here: Stepscope, store: Path, arguments: tuple[str, ...], message: str
) -> None:
    answer = here("bench", "pattern", *arguments, "--json")
    assert answer.code == 2
    assert message in answer.error["message"]
    assert not store.exists()
