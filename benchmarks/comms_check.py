"""What `--check all` adds to the times it stands beside: checked and unchecked samples, turn by turn, in one process.

    python benchmarks/comms_check.py [--ranks 2] [--ranks 4] [--times 20] [--rounds 21] [--output FILE]

Each round takes a few samples with `--check all` and as many with `--check off`, in changing order; the ratio is that
of the medians of the slowest rank, and its median over rounds, with a 99 % interval. A miss is an interval that lies
wholly outside of 0.95 to 1.05. The skew (how much later the last rank begins than the first) is shown beside it. Sizes
lie between powers of two as well. Exit code 1 with any miss in any of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from comms_overhead import KIB, MIB, close_room, find_ratio, open_room, run_ranks
from stepscope.bench.comms import make_cases
from stepscope.bench.comms.exchange import CollectiveTrial
from stepscope.bench.comms.trial import Check, Room, Steps
from stepscope.measure import MeasureSettings, WallClock, measure
from stepscope.records import Case
from stepscope.system import collect_system

CASES = [
    *(("all_reduce", size) for size in (64, 4 * KIB, 48 * KIB, 256 * KIB, 384 * KIB, 768 * KIB, 3 * MIB // 2, 4 * MIB)),
    ("all_gather", 96 * KIB), ("reduce_scatter", MIB), ("broadcast", 12 * KIB), ("broadcast", 768 * KIB),
]  # fmt: skip
SAMPLES = 16
LEVEL, LOWEST, HIGHEST = 0.99, 0.95, 1.05


def time_samples(trial: CollectiveTrial, room: Room, case: Case, check: Check) -> list[tuple[int, float]]:
    """The start and the time of each sample on this rank."""
    room.check = check
    settings = MeasureSettings(
        iterations=1, min_samples=SAMPLES, few_samples=SAMPLES, max_samples=SAMPLES, min_time_s=0.0, max_time_s=60.0,
        warmup_min_samples=1, warmup_max_time_s=0.0, window=1,
    )  # fmt: skip
    steps = Steps(trial, room, case)
    done = measure(trial.body, settings=settings, clock=WallClock(), device=trial.device, peers=steps)
    steps.verify()
    if steps.wrong:
        raise RuntimeError(f"{steps.wrong} wrong elements")
    samples = list(zip(done.start_ns, done.duration_s, strict=True))
    return samples[done.warmups :][:SAMPLES]


def compare_case(collective: str, size: int, rounds: int, room: Room) -> dict[str, Any] | None:
    """Medians of both sides, round by round; None but on rank 0."""
    (case,) = make_cases(
        collective=collective, sizes=[size], dtype="float32", backend=room.world.backend,
        world_size=room.world.size, device="cpu",
    )  # fmt: skip
    trial = CollectiveTrial(case, room)
    trial.open()
    checks: Sequence[Check] = ("off", "all")
    times: dict[str, list[list[tuple[int, float]]]] = {check: [] for check in checks}
    for number in range(rounds + 1):
        for check in checks if number % 2 else checks[::-1]:
            times[check].append(time_samples(trial, room, case, check))
    trial.close()
    everybody = room.world.gather_values(times)
    if everybody is None:
        return None
    row: dict[str, Any] = {"collective": collective, "size_bytes": size}
    for check in checks:
        # The first round sets up connections and caches.
        by_round = list(zip(*(rank[check][1:] for rank in everybody), strict=True))
        samples = [list(zip(*ranks, strict=True)) for ranks in by_round]
        row[f"{check}_s"] = [statistics.median(max(s for _, s in one) for one in found) for found in samples]
        row[f"{check}_skew_s"] = [
            statistics.median((max(at for at, _ in one) - min(at for at, _ in one)) * 1e-9 for one in found)
            for found in samples
        ]
    return row


def run_rank(answer: Path, rounds: int) -> None:
    room = open_room(answer.parent, "gloo")
    rows = []
    for collective, size in CASES:
        row = compare_case(collective, size, rounds, room)
        if row is None:
            continue
        ratio, low, high = find_ratio(row["off_s"], row["all_s"], LEVEL)
        missed = low > HIGHEST or high < LOWEST
        skews = [statistics.median(row[f"{check}_skew_s"]) * 1e6 for check in ("off", "all")]
        rows.append({**row, "ratio": ratio, "interval": [low, high], "missed": missed})
        print(f"{collective:>14} {size:>8} B  off {statistics.median(row['off_s']) * 1e6:8.1f} µs  "
              f"all {statistics.median(row['all_s']) * 1e6:8.1f} µs  {ratio:.3f} [{low:.3f}, {high:.3f}]  "
              f"skew {skews[0]:.1f} and {skews[1]:.1f} µs{'  MISSED' if missed else ''}", flush=True)  # fmt: skip
    if room.world.rank == 0:
        answer.write_text(json.dumps(rows))
    close_room(room)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="number of ranks; repeatable [default: 2 and 4]")
    parser.add_argument("--times", type=int, default=20, help="repetitions for each number of ranks")
    parser.add_argument("--rounds", type=int, default=21, help="rounds per case")
    parser.add_argument("--output", type=Path, help="write the rows and the system record as JSON")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        run_rank(options.answer, options.rounds)
        return 0
    found: list[dict[str, Any]] = []
    for number in range(options.times):
        for ranks in options.ranks or [2, 4]:
            print(f"repetition {number + 1} of {options.times}, {ranks} ranks", flush=True)
            rows = run_ranks(__file__, ranks, "--rounds", str(options.rounds), limit_s=1800)
            found += [{"repetition": number, "ranks": ranks, **row} for row in rows]
    missed = sum(row["missed"] for row in found)
    print(f"{missed} of {len(found)} comparisons missed")
    if options.output:
        system = msgspec.to_builtins(collect_system())
        options.output.write_text(json.dumps({"missed": missed, "rows": found, "system": system}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
