"""`stepscope bench overlap` with real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_process import Stepscope

from stepscope.store import StoredRun, verify_run

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_thread")]

OVERLAP = ("bench", "overlap", "--collective")
FAST = ("--quick", "--max-time", "50ms", "--check", "all", "--json")


def test_a_kernel_beside_a_collective_on_two_ranks(here: Stepscope) -> None:
    compute = ("--compute", "gemm:m=64,n=64,k=64", "--compute", "embedding:rows=1000,dim=16,batch=32,pooling=4")
    answer = here(*OVERLAP, "all_reduce", "--sizes", "4K,64K", *compute, "--ranks", "2", *FAST)
    assert answer.code == 0
    cases, overlaps = answer.data["cases"], answer.data["overlaps"]
    assert [case["size_bytes"] for case in cases] == [4096, 65536] * 2
    for case, overlap in zip(cases, overlaps, strict=True):
        assert case["wrong"] == 0
        assert case["checked"] > 0
        assert case["bus_factor"] == 1.0
        assert case["repeat"] >= 1
        assert case["key"] == overlap["key"]
        assert [side["name"] for side in overlap["sides"]] == ["comm", "compute"]
        assert overlap["efficiency"]["low"] <= overlap["efficiency"]["value"] <= overlap["efficiency"]["high"]
        assert case["samples_s"]
    run = StoredRun(Path(answer.data["run"]))
    assert verify_run(run) == []
    for measured in run.cases():
        assert [rank.rank for rank in measured.samples] == [0, 1]
        for rank in measured.samples:
            assert set(rank.extra_s) >= {"compute", "comm", "together", "compute_beside", "comm_beside"}
            assert len(rank.extra_s["together"]) == len(rank.seconds())
    shown = here("bench", "overlap", "--show", run.id, "--json")
    assert shown.data["overlaps"] == overlaps


def test_collectives_beside_each_other_on_groups_of_their_own(here: Stepscope) -> None:
    beside = ("--beside", "all_gather:8K", "--beside", "all_to_all:4K:split:2")
    answer = here(*OVERLAP, "all_reduce", "--sizes", "16K", *beside, "--ranks", "4", *FAST)
    assert answer.code == 0
    (case,), (overlap,) = answer.data["cases"], answer.data["overlaps"]
    assert case["wrong"] == 0
    assert [side["what"] for side in overlap["sides"]] == ["all_reduce", "all_gather", "all_to_all"]
    assert sum(side["bus_bytes"] for side in overlap["sides"]) == case["size_bytes"] * case["bus_factor"]


def test_a_copy_beside_a_kernel_needs_one_rank(here: Stepscope) -> None:
    answer = here(
        *OVERLAP, "device_copy", "--sizes", "64K", "--compute", "copy:size=64K", "--repeat", "2", "--ranks", "1", *FAST
    )
    assert answer.code == 0
    assert answer.data["cases"][0]["wrong"] == 0
    assert answer.data["cases"][0]["repeat"] == 2


def test_the_table_follows_the_rows(stepscope: Stepscope) -> None:
    answer = stepscope(*OVERLAP, "all_reduce", "--sizes", "4K", "--backend", "fake", *FAST[:-1])
    assert answer.code == 0
    assert "+ gemm:m=512,n=512,k=512" in answer.out
    assert "efficiency = " in answer.out


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("--time", "device"), "--time"),
        (("--balance", "--repeat", "2"), "--balance"),
        (("--compute", "gem"), "--compute"),
        (("--beside", "all_gather"), "--beside"),
        (("--sizes", "3"), "--sizes"),
        (("--groups", "split:7"), "--groups"),
        (("--show", "nothing"), None),
    ],
)
def test_what_cannot_be_is_refused(here: Stepscope, arguments: tuple[str, ...], where: str | None) -> None:
    answer = here(*OVERLAP, "all_reduce", "--ranks", "2", *arguments, "--json")
    assert answer.code == 2
    assert where is None or answer.error["where"] == where


def test_cases_are_listed_without_measuring(here: Stepscope, store: Path) -> None:
    answer = here(*OVERLAP, "all_reduce", "--sizes", "1K:4K:x2", "--dry-run", "--json")
    assert [case["parameters"]["size_bytes"] for case in answer.data["cases"]] == [1024, 2048, 4096]
    assert not store.exists()


def test_named_pairs_are_measured_and_no_other_combination(stepscope: Stepscope) -> None:
    pairs = ("all_reduce:16K+add:size=64K", "all_gather:4K:split:2+scale:size=4K", "all_to_all:8K+gemm:m=32,n=32,k=32")
    words = [word for pair in pairs for word in ("--pair", pair)]
    answer = stepscope("bench", "overlap", *words, "--ranks", "2", "--repeat", "2", *FAST)
    assert answer.code == 0
    found = [case["parameters"] for case in answer.data["cases"]]
    assert [one["collective"] for one in found] == ["all_reduce", "all_gather", "all_to_all"]
    assert [one["size_bytes"] for one in found] == [16384, 4096, 8192]
    assert [one["compute"].partition(":")[0] for one in found] == ["add", "scale", "gemm"]
    assert [one.get("groups", "world") for one in found] == ["world", "split:2", "world"]
    assert all(case["wrong"] == 0 for case in answer.data["cases"])


@pytest.mark.parametrize(
    "words",
    [
        ("--pair", "all_reduce:16K"),
        ("--pair", "all_reduce+gemm"),
        ("--pair", "all_reduce:16K+gem"),
        ("--pair", "barrier:16K+gemm"),
        ("--pair", "all_reduce:16K+gemm", "--sizes", "4K"),
        ("--pair", "all_reduce:16K+gemm", "--collective", "all_gather"),
        ("--pair", "all_reduce:16K+gemm", "--compute", "add"),
    ],
)
def test_pairs_that_cannot_be_are_refused(here: Stepscope, words: tuple[str, ...]) -> None:
    refused = here("bench", "overlap", *words, "--ranks", "2", "--dry-run", "--json")
    assert (refused.code, refused.error["where"]) == (2, "--pair")
