"""Small records for tests, with only what the test is about spelled out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.records import (
    Benchmark,
    Case,
    CaseResult,
    Cpu,
    Failure,
    Host,
    Memory,
    OperatorRequest,
    RankSamples,
    Score,
    System,
)
from stepscope.records.codec import make_observed, make_spec
from stepscope.store import create_run


def make_case(**parameters: Any) -> Case:
    benchmark = Benchmark(model="gemm", implementation="micro", mode="forward", config="custom")
    return case_of(benchmark, parameters)


def case_of(benchmark: Benchmark, parameters: dict[str, Any], **more: Any) -> Case:
    """The case that says these parameters by name, of the kind that fits the benchmark."""
    return Case(benchmark=benchmark, spec=make_spec(benchmark, parameters), **more)


def make_result(case: Case, *, work: float = 1.0, failure: Failure | None = None, **more: Any) -> CaseResult:
    facts = more.pop("observed", {})
    return CaseResult(
        case=case,
        observed=make_observed(case.spec, facts) if isinstance(facts, dict) else facts,
        status="failed" if failure else "ok",
        failure=failure,
        started_at="2026-01-01T00:00:00.000Z",
        elapsed_s=0.5,
        score=Score(unit="op/s", work=work),
        **more,
    )


def make_samples(case: Case, seconds: list[float], *, rank: int = 0, process: int = 0) -> RankSamples:
    return RankSamples(
        case=case.key,
        rank=rank,
        process=process,
        duration_s=seconds,
        iterations=[1] * len(seconds),
        warmup=[False] * len(seconds),
    )


def make_system(**changes: Any) -> System:
    host = Host(
        name="host",
        os="Linux",
        kernel="6.1",
        cpu=Cpu(model="Test CPU", architecture="x86_64", threads=2, usable_threads=2),
        memory=Memory(total_bytes=8 << 30),
    )
    content: dict[str, Any] = {
        "collected_at": "2026-01-01T00:00:00Z",
        "hosts": [host],
        "python": "3.11.7",
        "libraries": {"torch": "2.13.0"},
    }
    return System(**{**content, **changes})


def make_folder(store: Path, cases: list[Case]) -> Path:
    return create_run(store, verb="ops", name="gemm", command=["stepscope"], request=OperatorRequest(), cases=cases)
