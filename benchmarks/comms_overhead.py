"""What measuring adds to a collective: our loop against a bare one, in one process, turn by turn.

    python benchmarks/comms_overhead.py [--ranks 2] [--backend gloo] [--output FILE]

The bare loop calls `dist.all_reduce` and reads the clock before and after, nothing else. The two sides alternate every
16 calls (small messages) or every call (large ones), since the machine's mood changes fast. Both give one time an
iteration, that of the slowest rank; the ratio is that of a turn's medians, and its median over turns. Exit code 1 when
the ratio of a small message (8 B to 4 KB) is above 1.05, or that of a large one (4 MB and more) above 1.02.
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
from pathlib import Path
from typing import Any

import msgspec

from stepscope.comms import make_cases
from stepscope.comms.collective_trial import CollectiveTrial
from stepscope.comms.torch_group import TorchWorld
from stepscope.comms.trial import Room, Steps
from stepscope.launch import Heartbeat, detect_rank_context, export_rendezvous
from stepscope.measure import MeasureSettings, WallClock, measure, open_device
from stepscope.records import Case
from stepscope.stats import median_interval
from stepscope.system import collect_system

SMALL, LARGE = [8, 64, 512, 4096], [4 << 20, 16 << 20]
LIMITS = {"small": 1.05, "large": 1.02}
SECONDS = {"small": 6.0, "large": 40.0}
"""Of each size, both sides together."""


class Turns(Steps):
    """The steps of our loop; before each sample, or burst of samples, as many calls of a bare loop."""

    def __init__(self, trial: CollectiveTrial, room: Room, case: Case) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(trial, room, case)
        self._all_reduce = dist.all_reduce
        self._tensor = torch.zeros(trial.options.size_bytes // 4)
        self.bare_s: list[list[float]] = []
        self.sizes: list[int] = []
        """Samples of ours that follow each of the bare loop's turns."""

    def align(self) -> int:
        self.bare_s.append(self.time_bare(self._trial.burst))
        self._disturbed = True  # both sides begin alike: they meet, and make a call that is not timed
        self.sizes.append(super().align())
        return self.sizes[-1]

    def time_bare(self, calls: int) -> list[float]:
        now, all_reduce, tensor = time.perf_counter_ns, self._all_reduce, self._tensor
        self._room.world.barrier()
        all_reduce(tensor)
        times = [0] * calls
        for i in range(calls):
            began = now()
            all_reduce(tensor)
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
        if place > warmups and count == trial.burst:
            turns.append((statistics.median(turn), statistics.median(mine)))
    return {"size_bytes": size, "bare_s": [one for one, _ in turns], "ours_s": [other for _, other in turns]}


def run_rank(options: argparse.Namespace) -> int:
    context = detect_rank_context()
    export_rendezvous(context)
    world = TorchWorld(context, options.backend, join_limit_s=60, timeout_s=120)
    heartbeat = Heartbeat(rank=context.rank, limit_s=600, log=sys.stderr)
    heartbeat.move_to(Path(options.answer).parent, sys.stderr)
    room = Room(world, open_device("cpu"), heartbeat, "sample")
    rows: list[dict[str, Any]] = []
    kept = True
    for kind, sizes in (("small", SMALL), ("large", LARGE)):
        for size in sizes:
            row = compare_size(size, SECONDS[kind], room)
            if row is None:
                continue
            ratios = sorted(mine / bare for bare, mine in zip(row["bare_s"], row["ours_s"], strict=True))
            low, high, _ = median_interval(ratios, 0.95)
            ratio = statistics.median(ratios)
            rows.append({**row, "ratio": ratio, "interval": [low, high]})
            kept &= ratio <= LIMITS[kind]
            bare_s, ours_s = (statistics.median(row[name]) for name in ("bare_s", "ours_s"))
            print(f"{size:>9} B  bare {bare_s * 1e6:9.1f} µs  ours {ours_s * 1e6:9.1f} µs  "
                  f"{ratio:.3f} [{low:.3f}, {high:.3f}] n={len(ratios)}, limit {LIMITS[kind]}", flush=True)  # fmt: skip
    if context.rank == 0:
        print("kept" if kept else "MISSED", flush=True)
        system = msgspec.to_builtins(collect_system())
        Path(options.answer).write_text(json.dumps({"kept": kept, "rows": rows, "system": system}, indent=1))
    heartbeat.disarm()
    world.barrier()
    world.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--output", type=Path, help="write the rows and the system record as JSON")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        return run_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
            __file__, "--backend", options.backend, "--answer", str(answer),
        ]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=900)
        if done.returncode or not answer.exists():
            return done.returncode or 1
        result = json.loads(answer.read_text())
        if options.output:
            options.output.write_text(json.dumps(result, indent=1))
    return 0 if result["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
