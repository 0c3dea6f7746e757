"""What measuring adds to a collective: our loop against a bare one, in one process, turn by turn.

    python benchmarks/comms_overhead.py [--ranks 2] [--backend gloo] [--turns 7] [--output FILE]

The bare loop calls `dist.all_reduce` and reads the clock before and after, nothing else. Both give one time an
iteration, that of the slowest rank; the ratio is that of medians, turn by turn. Exit code 1 when the median ratio of
small messages (8 B to 4 KB) is above 1.05, or that of large ones (4 MB and more) above 1.02.
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
from stepscope.system import collect_system

SMALL, LARGE = [8, 64, 512, 4096], [4 << 20, 16 << 20]
LIMITS = {"small": 1.05, "large": 1.02}
SECONDS = {"small": 0.3, "large": 0.6}


def time_bare(size: int, seconds: float, world: TorchWorld) -> list[float]:
    """Seconds of each iteration on this rank; both ranks make as many."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(size // 4)
    for _ in range(20):
        dist.all_reduce(tensor)
    start = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(tensor)
    count = world.broadcast_value(max(20, int(seconds / ((time.perf_counter() - start) / 10))))
    times = []
    now = time.perf_counter_ns
    world.barrier()
    for _ in range(count):
        began = now()
        dist.all_reduce(tensor)
        times.append((now() - began) * 1e-9)
    return times


def time_ours(size: int, seconds: float, room: Room) -> list[float]:
    (case,) = make_cases(
        collective="all_reduce", sizes=[size], dtype="float32", backend=room.world.backend,
        world_size=room.world.size, device="cpu",
    )  # fmt: skip
    trial = CollectiveTrial(case, room)
    trial.open()
    settings = MeasureSettings(
        target_width=1e-6, min_time_s=seconds, max_time_s=seconds, min_samples=20, max_samples=100_000, iterations=1
    )
    steps = Steps(trial, room, case)
    result = measure(trial.body, settings=settings, clock=WallClock(), device=trial.device, peers=steps)
    trial.close()
    return result.as_samples(case.key).seconds()


def slowest(times: list[float], world: TorchWorld) -> float | None:
    everybody = world.gather_values(times)
    if everybody is None:
        return None
    return statistics.median(max(row) for row in zip(*everybody, strict=True))


def run_rank(options: argparse.Namespace) -> int:
    context = detect_rank_context()
    export_rendezvous(context)
    world = TorchWorld(context, options.backend, join_limit_s=60, timeout_s=120)
    heartbeat = Heartbeat(rank=context.rank, limit_s=600, log=sys.stderr)
    room = Room(world, open_device("cpu"), heartbeat, "sample")
    rows: list[dict[str, Any]] = []
    kept = True
    for kind, sizes in (("small", SMALL), ("large", LARGE)):
        ratios = []
        for size in sizes:
            bare, ours = [], []
            for _ in range(options.turns):
                bare.append(slowest(time_bare(size, SECONDS[kind], world), world))
                ours.append(slowest(time_ours(size, SECONDS[kind], room), world))
            if context.rank == 0:
                turns = [a / b for a, b in zip(ours, bare, strict=True) if a and b]
                ratios.append(statistics.median(turns))
                row = {"size_bytes": size, "bare_s": bare, "ours_s": ours, "ratios": turns}
                rows.append(row)
                print(f"{size:>9} B  bare {statistics.median(b for b in bare if b) * 1e6:9.1f} µs  "
                      f"ours {statistics.median(o for o in ours if o) * 1e6:9.1f} µs  "
                      f"{ratios[-1]:.3f} ({min(turns):.3f}–{max(turns):.3f}, n={len(turns)})", flush=True)  # fmt: skip
        if context.rank == 0:
            ratio = statistics.median(ratios)
            kept &= ratio <= LIMITS[kind]
            print(f"{kind}: {ratio:.3f}, limit {LIMITS[kind]}", flush=True)
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
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the rows and the system record as JSON")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        return run_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
            __file__, "--backend", options.backend, "--turns", str(options.turns), "--answer", str(answer),
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
