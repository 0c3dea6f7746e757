"""What measuring adds to a collective: our loop against a bare one, in one process, turn by turn.

    python benchmarks/comms_overhead.py [--ranks 2] [--backend gloo] [--output FILE]

The bare loop calls `dist.all_reduce` and reads the clock before and after, nothing else; like ours it uses
several tensors in turn. The two sides alternate after each burst of up to 16 calls, since the machine's state changes
fast. Both give one time per iteration, that of the slowest rank; the ratio is that of a turn's medians, and its median
over turns. Sizes reach from 8 B to 16 MiB, and lie between powers of two as well. Exit code 1 when a ratio is above
1.05 (below 4 MiB) or above 1.02 (from 4 MiB on).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec

from stepscope.bench.comms import make_cases
from stepscope.bench.comms.exchange import CollectiveTrial
from stepscope.bench.comms.torch_group import TorchWorld
from stepscope.bench.comms.trial import Room, Steps
from stepscope.launch import RankSession, export_rendezvous
from stepscope.measure import MeasureSettings, WallClock, measure, open_device
from stepscope.records import Case, CommunicationRequest
from stepscope.stats import median_interval
from stepscope.system import collect_system

KIB, MIB = 1 << 10, 1 << 20
SIZES = [
    8, 64, 512, 4 * KIB, 12 * KIB, 32 * KIB, 128 * KIB, 256 * KIB, 260 * KIB, 384 * KIB, 512 * KIB, 768 * KIB, MIB,
    3 * MIB // 2, 2 * MIB, 3 * MIB, 4 * MIB, 16 * MIB,
]  # fmt: skip
LARGE_BYTES = 4 * MIB
LIMIT, LARGE_LIMIT = 1.05, 1.02
SECONDS, LARGE_SECONDS = 6.0, 40.0
"""For each size, both sides together."""


class Turns(Steps):
    """The steps of our loop; before each sample, or burst of samples, as many calls of a bare loop."""

    def __init__(self, trial: CollectiveTrial, room: Room, case: Case) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(trial, room, case)
        self._all_reduce = dist.all_reduce
        self._tensors = cycle([torch.zeros(trial.options.size_bytes // 4) for _ in range(trial.places)])
        self.bare_s: list[list[float]] = []
        self.sizes: list[int] = []
        """Samples of ours that follow each of the bare loop's turns."""

    def align(self) -> int:
        self.bare_s.append(self.time_bare(self._burst))
        self._disturbed = True  # both sides begin alike: they meet, and make a call that is not timed
        self.sizes.append(super().align())
        return self.sizes[-1]

    def time_bare(self, calls: int) -> list[float]:
        now, all_reduce, tensors = time.perf_counter_ns, self._all_reduce, self._tensors
        self._room.world.barrier()
        all_reduce(next(tensors))
        times = [0] * calls
        for i in range(calls):
            began = now()
            all_reduce(next(tensors))
            times[i] = now() - began
        return [value * 1e-9 for value in times]


def compare_size(size: int, seconds: float, room: Room) -> dict[str, Any] | None:
    """Turn by turn, the medians of both sides' slowest rank; None but on rank 0."""
    (case,) = make_cases(
        collective="all_reduce", sizes=[size], dtype="float32", backend=room.world.backend,
        world_size=room.world.size, device="cpu",
    )  # fmt: skip
    trial = CollectiveTrial(case, room)
    trial.open()
    settings = MeasureSettings(
        target_width=1e-6, min_time_s=seconds, max_time_s=seconds, max_samples=100_000, iterations=1
    )
    steps = Turns(trial, room, case)
    result = measure(trial.body, settings=settings, clock=WallClock(), device=trial.device, peers=steps)
    trial.close()
    everybody = room.world.gather_values((steps.bare_s, result.duration_s, result.warmups))
    if everybody is None:
        return None
    bare = [
        [max(row) for row in zip(*turn, strict=True)] for turn in zip(*(rank[0] for rank in everybody), strict=True)
    ]
    ours = [max(row) for row in zip(*(rank[1] for rank in everybody), strict=True)]
    warmups, place, turns = everybody[0][2], 0, []
    for turn, count in zip(bare, steps.sizes, strict=True):
        mine = ours[place : place + count]
        place += count
        # A sample that is looked at comes alone; it stands beside the median of the bare turn.
        if place > warmups and count == len(turn):
            turns.append((statistics.median(turn), statistics.median(mine)))
    return {"size_bytes": size, "bare_s": [one for one, _ in turns], "ours_s": [other for _, other in turns]}


def open_room(folder: Path, backend: str) -> Room:
    """This process as one rank of torchrun."""
    session = RankSession(verb="comms", request=CommunicationRequest(), hang_limit_s=600, supervised=False)
    export_rendezvous(session.context)
    session.heartbeat.move_to(folder, sys.stderr)
    return Room(TorchWorld(session, backend), open_device("cpu"), session.heartbeat, "sample")


def close_room(room: Room) -> None:
    room.heartbeat.disarm()
    room.world.barrier()
    room.world.close()


def find_ratio(before: Sequence[float], after: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The median over turns of the second to the first, and its interval."""
    ratios = sorted(two / one for one, two in zip(before, after, strict=True))
    low, high, _ = median_interval(ratios, level)
    return statistics.median(ratios), low, high


def run_rank(answer: Path, backend: str) -> None:
    room = open_room(answer.parent, backend)
    rows: list[dict[str, Any]] = []
    kept = True
    for size in SIZES:
        large = size >= LARGE_BYTES
        row = compare_size(size, LARGE_SECONDS if large else SECONDS, room)
        if row is None:
            continue
        limit = LARGE_LIMIT if large else LIMIT
        ratio, low, high = find_ratio(row["bare_s"], row["ours_s"])
        rows.append({**row, "ratio": ratio, "interval": [low, high]})
        kept &= ratio <= limit
        bare_s, ours_s = (statistics.median(row[name]) for name in ("bare_s", "ours_s"))
        print(f"{size:>9} B  bare {bare_s * 1e6:9.1f} µs  ours {ours_s * 1e6:9.1f} µs  "
              f"{ratio:.3f} [{low:.3f}, {high:.3f}] n={len(row['bare_s'])}, limit {limit}", flush=True)  # fmt: skip
    if room.world.rank == 0:
        answer.write_text(json.dumps({"kept": kept, "rows": rows}))
    close_room(room)


def run_ranks(script: str, ranks: int, *arguments: str, limit_s: float) -> dict[str, Any]:
    """Start `script` on so many ranks by torchrun; what rank 0 writes to the file that `--answer` names."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            script, *arguments, "--answer", str(answer),
        ]  # fmt: skip
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=limit_s)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--output", type=Path, help="write the rows and the system record as JSON")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        run_rank(options.answer, options.backend)
        return 0
    result = run_ranks(__file__, options.ranks, "--backend", options.backend, limit_s=1800)
    print("kept" if result["kept"] else "MISSED")
    if options.output:
        options.output.write_text(json.dumps({**result, "system": msgspec.to_builtins(collect_system())}, indent=1))
    return 0 if result["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
