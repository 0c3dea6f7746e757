"""What can never run is wrong use, said before a run or a rank is started; what is skipped is said loudly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_process import Stepscope

from stepscope.store import run_folders

COMMS = ("bench", "comms", "--collective", "all_reduce", "--ranks", "2", "--quick")


@pytest.mark.parametrize(
    ("words", "where", "told"),
    [
        ((*COMMS, "--sizes", "10T"), "--sizes", "never fit into this machine's memory"),
        ((*COMMS, "--mode", "graph"), "--mode", "GPU only"),
        ((*COMMS, "--backend", "foo"), "--backend", "built without foo"),
        (("bench", "overlap", "--compute", "gemm:m=8,n=8,k=8", "--backend", "foo"), "--backend", "built without foo"),
        (("bench", "pattern", "ddp", "--backend", "foo"), "--backend", "built without foo"),
        (("bench", "ops", "--call", "aten::nope", "--args", "float32[2]"), "--call", "no operator aten::nope"),
        (("bench", "ops", "--call", "torch.nope", "--args", "float32[2]"), "--call", "no function torch.nope"),
        (("bench", "ops", "--call", "aten::add.nope", "--args", "float32[2]"), "--call", "no overload nope"),
    ],
)
def test_what_can_never_run_is_wrong_use(
    here: Stepscope, store: Path, words: tuple[str, ...], where: str, told: str
) -> None:
    answer = here(*words, "--json")
    assert answer.code == 2
    assert told in answer.error["message"]
    assert answer.error["where"] == where
    assert run_folders(store) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [("--device", "cuda"), ("--backend", "nccl")])
def test_a_device_that_is_not_there_is_refused_before_ranks_start(
    here: Stepscope, store: Path, words: tuple[str, ...]
) -> None:
    answer = here(*COMMS, *words, "--json")
    assert answer.code == 2
    assert "no CUDA device" in answer.error["message"]
    assert run_folders(store) == []


def test_some_sizes_may_be_too_large(stepscope: Stepscope) -> None:
    """Only where even the smallest can never fit is the command wrong."""
    answer = stepscope(*COMMS, "--backend", "fake", "--sizes", "1K,10T", "--json")
    assert answer.code == 0
    assert [case["status"] for case in answer.data["cases"]] == ["ok", "skipped"]
    assert "nothing was measured" not in answer.err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_skips_alone_are_told_loudly(stepscope: Stepscope, flags: tuple[str, ...]) -> None:
    answer = stepscope(*COMMS, "--backend", "fake", "--wire", "bf16", *flags)
    assert answer.code == 0
    assert "warning: nothing was measured: all 6 cases were skipped. The first: quantised" in answer.err


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job",
}  # fmt: skip


def test_operators_under_a_launcher_leave_no_empty_runs(
    here: Stepscope, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    answer = here("bench", "ops", "--op", "gemm", "--shape", "m=8,n=8,k=8", "--quick", "--json")
    assert answer.code == 2
    assert "mpirun started 2" in answer.error["message"]
    assert run_folders(store) == []


def test_a_rank_without_its_world_is_told_what_is_missing(
    here: Stepscope, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    answer = here("bench", "comms", "--collective", "all_reduce", "--quick", "--json")
    assert answer.code == 2
    assert "OMPI_COMM_WORLD_SIZE is not set" in answer.error["message"]
    assert run_folders(store) == []


def test_a_comparison_says_that_the_checks_differ(stepscope: Stepscope) -> None:
    runs = [stepscope(*COMMS, "--backend", "fake", "--sizes", "1K", "--check", check, "--json").data["id"]
            for check in ("all", "off", "off")]  # fmt: skip
    notes = stepscope("compare", runs[0], runs[1], "--json").data["notes"]
    assert any("A was measured with --check all and B with --check off" in note for note in notes)
    notes = stepscope("compare", runs[1], runs[2], "--json").data["notes"]
    assert not any("--check" in note for note in notes)


def test_the_choices_of_a_pattern_are_listed(here: Stepscope) -> None:
    answer = here("bench", "pattern", "--list")
    (line,) = [line for line in answer.out.splitlines() if " interaction=" in line]
    assert line.endswith("One of cat, dot, dot_self, projected.")
