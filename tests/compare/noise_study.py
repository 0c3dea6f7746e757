"""The recorded noise of a real, busy machine, and pairs of simulated runs made from it.

Run as a program it prints the table of error rates in docs/decisions/2026-11-15-verdicts.md (about six minutes).
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Literal

from stepscope.compare import compare_cases
from stepscope.records import Benchmark, Case, CaseResult, RankSamples, Score
from stepscope.store.view import MeasuredCase

RECORDING = Path(__file__).parent / "data" / "noise_cpu.json.gz"
BLOCK = 25
"""Samples that stay together when a process is drawn anew: longer than their dependence reaches."""
MOST_SAMPLES = 100
"""Per process; fewer than were recorded, to keep the tests short. More samples only help."""


Part = Literal["processes", "later_processes"]
"""The constants of the test were chosen on the first part; the second was recorded later and had no say in them."""


@cache
def read_recording(part: Part = "processes") -> dict[str, list[list[float]]]:
    """By operator: seconds per iteration, one list a fresh process."""
    with gzip.open(RECORDING, "rt", encoding="utf-8") as file:
        processes = json.load(file)[part]
    return {
        name: [[value * 1e-6 for value in process["cases"][name]["microseconds"]] for process in processes]
        for name in processes[0]["cases"]
    }


def draw_run_pair(
    name: str, processes: int, rng: random.Random, slowdown: float = 1.0, part: Part = "processes"
) -> tuple[list[list[float]], list[list[float]]]:
    """Two runs of one benchmark on that machine, no recorded process in both; B slower by a factor."""
    recorded = read_recording(part)[name]
    drawn = [redraw_blocks(recorded[i], rng) for i in rng.sample(range(len(recorded)), 2 * processes)]
    return drawn[:processes], [[value * slowdown for value in process] for process in drawn[processes:]]


def redraw_blocks(samples: list[float], rng: random.Random) -> list[float]:
    """Blocks of neighbours taken anywhere from the process (circular block bootstrap)."""
    count, block = min(len(samples), MOST_SAMPLES), min(len(samples), BLOCK)
    twice = samples + samples
    starts = [rng.randrange(len(samples)) for _ in range(-(-count // block))]
    return [value for start in starts for value in twice[start : start + block]][:count]


def make_case(
    processes: list[list[float]],
    *,
    model: str = "gemm",
    implementation: str = "micro",
    size: int = 512,
    version: int = 1,
) -> MeasuredCase:
    benchmark = Benchmark(model=model, implementation=implementation, mode="forward", config="noise", version=version)  # type: ignore[arg-type]
    case = Case(benchmark=benchmark, parameters={"m": size})
    samples = [
        RankSamples(
            case=case.key,
            process=number,
            duration_s=list(values),
            iterations=[1] * len(values),
            warmup=[False] * len(values),
        )
        for number, values in enumerate(processes)
    ]
    result = CaseResult(
        case=case,
        status="ok",
        started_at="2026-11-15T08:00:00Z",
        elapsed_s=1.0,
        score=Score(unit="TFLOP/s", work=2.0 * size**3),
    )
    return MeasuredCase(result, samples)


def count_verdicts(
    operator: str, processes: int, slowdown: float, pairs: int = 1000, part: Part = "processes"
) -> Counter[str]:
    """Verdicts on simulated pairs of runs with one case, at the default settings."""
    rng = random.Random(f"{operator} {processes} {slowdown}")
    counts: Counter[str] = Counter()
    for _ in range(pairs):
        a, b = draw_run_pair(operator, processes, rng, slowdown, part)
        counts[compare_cases([make_case(a)], [make_case(b)]).rows[0].verdict] += 1
    return counts


def write_table(part: Part) -> None:
    sys.stdout.write(f"{part}\noperator | processes a side | false alarms | 20 % slower found | 35 % slower found\n")
    for operator in sorted(read_recording()):
        for processes in (1, 2, 3, 4, 5, 6, 8, 10):
            same, fifth, third = (count_verdicts(operator, processes, factor, part=part) for factor in (1.0, 1.2, 1.35))
            shares = [(same["better"] + same["worse"]) / 10, fifth["worse"] / 10, third["worse"] / 10]
            sys.stdout.write(f"{operator} | {processes} | " + " | ".join(f"{share:.1f} %" for share in shares) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    write_table("processes")
    write_table("later_processes")
