"""Simulated runs with the recorded noise of a real machine (made by benchmarks/record_noise.py)."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from builders import make_case, make_result
from stepscope.records import RankSamples
from stepscope.store import MeasuredCase

RECORDING = Path(__file__).parent / "data" / "noise_cpu.json.gz"
OPERATORS = ("gemm", "linear", "embedding_bag")


class Process(NamedTuple):
    seconds: list[float]
    other_share: float | None
    probes_s: list[float]


@cache
def read_recording() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(RECORDING.read_bytes()))
    return content


def recorded(operator: str, part: str = "quiet") -> list[Process]:
    """`quiet` and `crowded` had no say in any constant of the test; `earlier` had."""
    rows = read_recording()[part][operator]
    return [Process(row["seconds"], row["other_share"], row["probes_s"]) for row in rows]


def draw_sides(
    rng: random.Random, pool: list[Process], count: int, slowdown: float = 1.0
) -> tuple[list[Process], list[Process]]:
    """Two sides of `count` recorded processes each, none on both; the second slower by a factor."""
    drawn = [redraw(rng, process) for process in rng.sample(pool, 2 * count)]
    return drawn[:count], [slow(process, slowdown) for process in drawn[count:]]


def redraw(rng: random.Random, process: Process) -> Process:
    """The same process, its samples drawn again in stretches of ten so that neighbours stay neighbours."""
    seconds: list[float] = []
    while len(seconds) < len(process.seconds):
        start = rng.randrange(len(process.seconds))
        seconds += process.seconds[start : start + 10]
    return process._replace(seconds=seconds[: len(process.seconds)])


def slow(process: Process, factor: float) -> Process:
    return process._replace(seconds=[value * factor for value in process.seconds])


def as_case(processes: list[Process], **parameters: Any) -> MeasuredCase:
    case = make_case(**parameters)
    samples = [
        RankSamples(
            case=case.key,
            process=number,
            duration_s=process.seconds,
            iterations=[1] * len(process.seconds),
            warmup=[False] * len(process.seconds),
            other_share=process.other_share,
            probes_s=process.probes_s,
        )
        for number, process in enumerate(processes)
    ]
    return MeasuredCase(make_result(case), samples)
