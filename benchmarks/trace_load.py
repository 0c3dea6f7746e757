"""How fast a large trace is read, against Holistic Trace Analysis (PyPI `traceinsight`) in the same run.

    python benchmarks/trace_load.py --trace nccl_data.json.gz [--peer /path/to/venv/bin/python] [--megabytes 1070]

Makes a trace of about 1 GB (4 million records) by repeating a real one with shifted times and ids, then loads it, each
time in a fresh process: the full table, from the cache, and with the peer. Prints CPU seconds, peak
memory and ratios. The peer is a Python that has `traceinsight` installed (Stepscope does not install it).
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

NUMBERS = re.compile(
    rb'"(?:ts|External id|Record function id|Ev Idx|correlation|Sequence number|id)":\s*([0-9.]+)|ProfilerStep#([0-9]+)'
)

OURS = """
import json, resource, sys, time
from pathlib import Path
cpu, wall = time.process_time(), time.perf_counter()
import stepscope.traces.read as read
path, what = Path(sys.argv[1]), sys.argv[2]
if what == "cached":
    timeline = read.load_timeline(path)
else:
    timeline = read.read_timeline(path)
done = time.process_time() - cpu, time.perf_counter() - wall
print(json.dumps({"cpu_s": done[0], "wall_s": done[1], "rows": len(timeline),
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""

PEER = """
import json, logging, resource, sys, time
logging.disable(logging.CRITICAL)
cpu, wall = time.process_time(), time.perf_counter()
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=".")
done = time.process_time() - cpu, time.perf_counter() - wall
print(json.dumps({"cpu_s": done[0], "wall_s": done[1], "rows": len(analysis.t.get_trace(0)),
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def enlarge(trace: Path, out: Path, megabytes: int, *, all_steps: bool = False) -> tuple[int, int]:
    """Write `trace` again and again, later each time; returns copies and raw bytes.

    Only the first copy has steps unless all are asked for: the peer assigns steps in a loop over events and steps,
    which would be most of its time in a trace with hundreds of them.
    """
    text = gzip.decompress(trace.read_bytes())
    begin = text.index(b'"traceEvents"')
    begin = text.index(b"[", begin) + 1
    end = text.rindex(b"]", 0, text.rindex(b"}")) if b'"traceName"' not in text else _end_of_events(text)
    head, body, tail = text[:begin], text[begin:end], text[end:]
    parts, numbers = [], []
    reached = 0
    for found in NUMBERS.finditer(body):
        group = 1 if found[1] is not None else 2
        parts.append(body[reached : found.start(group)])
        numbers.append((found[0][:5] == b'"ts":', found[group], group == 2))
        reached = found.end(group)
    last = body[reached:]
    times = [float(number) for is_time, number, _ in numbers if is_time]
    span_us = int(max(times) - min(times)) + 2_000_000
    biggest = max(int(float(number)) for is_time, number, _ in numbers if not is_time) + 1
    steps = len({number for _, number, is_step in numbers if is_step}) + 1
    copies = max(1, megabytes * 1_000_000 // len(body))
    raw = len(head) + len(tail)
    with gzip.open(out, "wb", compresslevel=1) as file:
        file.write(head)
        for copy in range(copies):
            piece = []
            for part, (is_time, number, is_step) in zip(parts, numbers, strict=True):
                piece.append(part)
                if is_time:
                    whole, point, fraction = number.partition(b".")
                    piece.append(b"%d%s%s" % (int(whole) + copy * span_us, point, fraction))
                else:
                    piece.append(b"%d" % (int(number) + copy * (steps if is_step else biggest)))
            piece.append(last)
            written = b"".join(piece) + (b"," if copy + 1 < copies else b"")
            if copy and not all_steps:
                written = written.replace(b'"ProfilerStep#', b'"profiled step#')
            raw += len(written)
            file.write(written)
        file.write(tail)
    return copies, raw


def _end_of_events(text: bytes) -> int:
    """The bracket that ends the list of events: the last one at the beginning of a line with what follows no event."""
    return text.rindex(b"\n  ]", 0, text.rindex(b'"traceName"')) + 3


def run(python: str, code: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def show(name: str, result: dict[str, float], peer: dict[str, float] | None) -> None:
    line = f"{name:28} {result['cpu_s']:8.2f} s CPU {result['wall_s']:8.2f} s {result['peak_mb']:7.0f} MB"
    line += f" {result['rows']:9.0f} rows"
    if peer and result is not peer:
        cpu, memory = peer["cpu_s"] / result["cpu_s"], peer["peak_mb"] / result["peak_mb"]
        line += f"   peer / this: CPU {cpu:6.1f}, memory {memory:5.1f}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[1].parent / "shared/data/traces/public/hta/nccl_parser_config/nccl_data.json.gz"
    parser.add_argument("--trace", type=Path, default=default)
    parser.add_argument("--megabytes", type=int, default=1070)
    parser.add_argument("--peer", default=os.environ.get("STEPSCOPE_PEER_PYTHON"))
    parser.add_argument("--keep", type=Path, help="make the large trace here and keep it")
    parser.add_argument("--all-steps", action="store_true", help="every copy brings its steps")
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="stepscope-trace-load-"))
    folder.mkdir(parents=True, exist_ok=True)
    large = folder / f"large-{options.megabytes}{'-steps' if options.all_steps else ''}.json.gz"
    try:
        if not large.exists():
            copies, raw = enlarge(options.trace, large, options.megabytes, all_steps=options.all_steps)
            packed = large.stat().st_size / 1e6
            print(f"{copies} copies of {options.trace.name}: {raw / 1e6:.0f} MB raw, {packed:.0f} MB packed")
        # Compiling is paid once a machine; a small trace is enough to have it done.
        small = folder / "small.json.gz"
        enlarge(options.trace, small, 20)
        print("compiling:")
        show("  first load ever, or cached", run(sys.executable, OURS, str(small), "full"), None)
        for _ in range(options.repeat):
            peer = run(options.peer, PEER, str(large)) if options.peer else None
            if peer:
                show("peer: traceinsight", peer, peer)
            show("full table", run(sys.executable, OURS, str(large), "full"), peer)
            show("full table, cache written", run(sys.executable, OURS, str(large), "cached"), peer)
            show("from the cache", run(sys.executable, OURS, str(large), "cached"), peer)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
