"""Analysing folders of many ranks: wall time, CPU time and peak memory against the number of ranks and processes.

    python benchmarks/trace_ranks.py [--ranks 64 512] [--workers 1 2]

Copies a real trace of 8 ranks as often as asked, each copy with its own rank, and explains the job.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import json, resource, sys, time
wall = time.perf_counter()
from stepscope.analyze.job import explain_job
from stepscope.traces import read_traces
if __name__ == "__main__":
    job = explain_job(read_traces(sys.argv[1], cache=False), workers=int(sys.argv[2]))
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"wall_s": time.perf_counter() - wall, "ranks": len(job.ranks),
        "cpu_s": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
        "own_mb": own.ru_maxrss / 1024, "child_mb": children.ru_maxrss / 1024,
        "telling": job.telling_rank, "steps": len(job.steps)}))
"""


def make_job(traces: list[Path], folder: Path, ranks: int) -> int:
    """Copies with ranks of their own; returns the raw bytes of all."""
    raw = 0
    for rank in range(ranks):
        text = gzip.decompress(traces[rank % len(traces)].read_bytes())
        text = re.sub(
            rb'("rank"\s*:\s*)\d+(\s*,\s*"world_size"\s*:\s*)\d+', rb"\g<1>%d\g<2>%d" % (rank, ranks), text, count=1
        )
        raw += len(text)
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(text, 1))
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[1].parent / "shared/data/traces/public/param/dlrm8_kineto"
    parser.add_argument("--traces", type=Path, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    traces = sorted(options.traces.glob("*.json.gz"))
    for ranks in options.ranks:
        folder = Path(tempfile.mkdtemp(prefix="stepscope-ranks-"))
        try:
            raw = make_job(traces, folder, ranks)
            for workers in options.workers:
                script = folder / "run.py"
                script.write_text(CODE)
                done = subprocess.run(
                    [sys.executable, str(script), str(folder), str(workers)],
                    capture_output=True, text=True, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"},
                )  # fmt: skip
                if done.returncode:
                    sys.exit(done.stderr[-2000:])
                result = json.loads(done.stdout.strip().splitlines()[-1])
                print(
                    f"{result['ranks']:5} ranks, {raw / 1e6:6.0f} MB raw, {workers} process(es): "
                    f"{result['wall_s']:6.1f} s, {result['cpu_s']:6.1f} s CPU, "
                    f"{result['ranks'] / result['wall_s']:6.1f} ranks/s, "
                    f"peak {result['own_mb']:.0f} MB here, {result['child_mb']:.0f} MB in a child",
                    flush=True,
                )
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
