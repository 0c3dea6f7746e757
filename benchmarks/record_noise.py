"""Record this machine's noise between processes, as the test of the verdicts' error rates uses it.

    python benchmarks/record_noise.py OUT.json.gz [QUIET [CROWDED]]

Measures three operators in QUIET fresh processes one after the other on the machine as it is, then in CROWDED processes
beside a busy loop that this script starts and stops. Samples are thinned to at most 150 a process and case, in order,
and rounded to four digits.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepscope.bench.ops import make_cases
from stepscope.measure import MeasureSettings, SilentProgress
from stepscope.records import OperatorRequest
from stepscope.run.processes import RunSide, run_process
from stepscope.store import StoredRun, create_run, run_folders

MOST_SAMPLES = 150
CASES = [
    ("gemm", "m=256,n=256,k=256"),
    ("linear", "batch=128,in=256,out=256"),
    ("embedding_bag", "rows=10000,dim=64,pooling=10,batch=256"),
]


def measure_process(store: Path) -> None:
    """One fresh process that measures all three."""
    cases = [
        case
        for name, shape in CASES
        for case in make_cases(names=[name], shapes=[shape], dtypes=["float32"], directions=["forward"], device="cpu")
    ]
    request = OperatorRequest(settings=MeasureSettings(max_time_s=0.5))
    folder = create_run(store, verb="ops", name="noise", command=sys.argv, request=request, cases=cases)
    run = StoredRun(folder)
    run_process(run, RunSide(run), progress=SilentProgress(), name="process")


def thin(values: list[float]) -> list[float]:
    step = max(1, len(values) / MOST_SAMPLES)
    return [float(f"{values[int(i * step)]:.4g}") for i in range(min(len(values), MOST_SAMPLES))]


def collect(store: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in CASES}
    for folder in run_folders(store):
        for case in StoredRun(folder).cases():
            (samples,) = case.samples
            found[case.result.case.benchmark.model].append(
                {
                    "other_share": samples.other_share,
                    "probes_s": [float(f"{p:.3g}") for p in samples.probes_s],
                    "seconds": thin(samples.seconds()),
                }
            )
    return found


def main() -> None:
    target = Path(sys.argv[1])
    quiet, crowded = (int(word) for word in (*sys.argv[2:4], "60", "20")[:2])
    recorded: dict[str, Any] = {}
    for name, count in (("quiet", quiet), ("crowded", crowded)):
        with tempfile.TemporaryDirectory() as scratch:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if name == "crowded" else None
            try:
                for _ in range(count):
                    measure_process(Path(scratch))
            finally:
                if busy is not None:
                    busy.kill()
                    busy.wait()
            recorded[name] = collect(Path(scratch))
            system = StoredRun(run_folders(Path(scratch))[0]).system
    assert system is not None
    recorded["system"] = {"name": system.name, "libraries": system.libraries, "kernel": system.hosts[0].kernel}
    target.write_bytes(gzip.compress(json.dumps(recorded).encode(), mtime=0))
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
