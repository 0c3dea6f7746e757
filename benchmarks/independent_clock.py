"""Does this clock agree with others? 30 operator cases against `triton.testing.do_bench` or torch's benchmark Timer.

    python benchmarks/independent_clock.py [--device cuda|cpu] [--output FILE]

On CUDA: cold-cache device time against do_bench's median, which overwrites the cache before each call. On the CPU:
warm wall time against torch.utils.benchmark.Timer, blocked. Both clocks time the same calls on the same inputs in one
process, turn by turn. Cases under 20 µs are left out and named. Backward cases are larger than what the host needs to
issue them (some 150 µs): do_bench does not hold the device, and would time the host.
Exit code 1 when the median ratio is more than 2 % off or one case more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.bench.ops import expand_shape, find_operator
from stepscope.bench.ops.producer import OperatorProducer
from stepscope.launch.worker import Session
from stepscope.measure import MeasureSettings, WallClock
from stepscope.records import Benchmark, Case, OperatorRequest
from stepscope.records.kinds import OperatorSpec
from stepscope.system import collect_system

CASES: dict[str, list[tuple[str, str, str, str]]] = {
    "cuda": [
        *(("gemm", f"m={m},n={n},k={k}", dtype, "forward") for m, n, k, dtype in (
            (1024, 1024, 1024, "float32"), (2048, 2048, 2048, "float32"), (333, 4096, 1500, "float32"),
            (4096, 4096, 1024, "bfloat16"), (8192, 8192, 8192, "bfloat16"), (2048, 2048, 2048, "tf32"),
            (128, 8192, 8192, "bfloat16"), (8192, 1024, 4096, "bfloat16"),
        )),
        ("bmm", "batch=64,m=512,n=512,k=64", "float32", "forward"),
        ("bmm", "batch=192,m=512,n=64,k=512", "bfloat16", "forward"),
        ("linear", "batch=4096,in=1024,out=4096", "float32", "forward"),
        ("linear", "batch=8192,in=4096,out=4096", "bfloat16", "backward"),
        ("softmax", "rows=16384,cols=2048", "float32", "forward"),
        ("softmax", "rows=65536,cols=2048", "bfloat16", "backward"),
        ("layer_norm", "rows=16384,cols=4096", "float32", "forward"),
        ("layer_norm", "rows=32768,cols=4096", "bfloat16", "backward"),
        ("rms_norm", "rows=16384,cols=4096", "float32", "forward"),
        ("activation", "rows=16384,cols=4096,function=gelu", "float32", "forward"),
        ("activation", "rows=8192,cols=8192,function=relu", "bfloat16", "forward"),
        ("elementwise", "rows=16384,cols=4096,chain=add", "float32", "forward"),
        ("elementwise", "rows=8192,cols=4096,chain=mul-add", "float32", "forward"),
        ("reduction", "rows=32768,cols=4096,function=sum,over=cols", "float32", "forward"),
        ("transpose", "batch=64,m=1024,n=1024", "float32", "forward"),
        ("concat", "batch=64,rows=1024,columns=256,parts=4", "float32", "forward"),
        ("conv2d", "batch=32,in=64,out=64,height=56,width=56,kernel=3,padding=1", "float32", "forward"),
        ("conv2d", "batch=64,in=128,out=128,height=28,width=28,kernel=3,padding=1", "bfloat16", "forward"),
        ("embedding_bag", "rows=1000000,dim=128,pooling=32,batch=4096", "float32", "forward"),
        ("cross_entropy", "rows=4096,classes=32000", "float32", "forward"),
        ("attention", "batch=8,heads=16,kv_heads=16,queries=1024,keys=1024,head_dim=64", "bfloat16", "forward"),
        ("batch_norm", "batch=64,channels=256,height=56,width=56", "float32", "forward"),
    ],
    "cpu": [
        *(("gemm", f"m={m},n={n},k={k}", "float32", "forward") for m, n, k in (
            (128, 128, 128), (256, 256, 256), (512, 512, 512), (64, 1024, 1024), (1000, 333, 77), (1024, 64, 512),
        )),
        ("bmm", "batch=16,m=128,n=128,k=64", "float32", "forward"),
        ("linear", "batch=64,in=512,out=512", "float32", "forward"),
        ("linear", "batch=64,in=512,out=512", "float32", "backward"),
        ("softmax", "rows=1024,cols=512", "float32", "forward"),
        ("softmax", "rows=1024,cols=512", "float32", "backward"),
        ("layer_norm", "rows=1024,cols=768", "float32", "forward"),
        ("layer_norm", "rows=1024,cols=768", "float32", "backward"),
        ("rms_norm", "rows=1024,cols=512", "float32", "forward"),
        ("activation", "rows=1024,cols=768,function=gelu", "float32", "forward"),
        ("activation", "rows=2048,cols=768,function=tanh", "float32", "forward"),
        ("elementwise", "rows=2048,cols=1024,chain=add", "float32", "forward"),
        ("elementwise", "rows=1024,cols=1024,chain=mul-add", "float32", "forward"),
        ("reduction", "rows=2048,cols=1024,function=sum,over=cols", "float32", "forward"),
        ("transpose", "batch=8,m=256,n=256", "float32", "forward"),
        ("concat", "batch=4,rows=256,columns=128,parts=4", "float32", "forward"),
        ("conv2d", "batch=2,in=16,out=16,height=28,width=28,kernel=3,padding=1", "float32", "forward"),
        ("conv1d", "batch=8,in=16,out=32,length=256,kernel=3", "float32", "forward"),
        ("embedding_bag", "rows=100000,dim=64,pooling=20,batch=256", "float32", "forward"),
        ("cross_entropy", "rows=256,classes=1000", "float32", "forward"),
        ("attention", "batch=2,heads=4,kv_heads=4,queries=128,keys=128,head_dim=32", "float32", "forward"),
        ("batch_norm", "batch=8,channels=32,height=28,width=28", "float32", "forward"),
        ("dot_interaction", "batch=256,features=9,dim=16", "float32", "forward"),
        ("index_select", "rows=10000,dim=64,count=4096", "float32", "forward"),
        ("sort", "rows=64,columns=1024", "float32", "forward"),
    ],
}  # fmt: skip
SHORTEST_S = 20e-6
TURNS = 5
SETTINGS = MeasureSettings(min_time_s=0.05, max_time_s=0.5, min_samples=20)


def make_case(row: tuple[str, str, str, str], device: str, cache: str) -> Case:
    op, shape, dtype, direction = row
    (chosen,) = expand_shape(shape, find_operator(op))
    benchmark = Benchmark(model=op, implementation="micro", mode=direction, config="custom")
    spec = OperatorSpec(op=op, direction=direction, shape=dict(chosen), dtype=dtype, device=device, cache=cache)
    return Case(benchmark=benchmark, spec=spec)


def do_bench_median_s(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=60, return_mode="median")) * 1e-3


def timer_median_s(call: Callable[[], object]) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.1).median)


def compare_case(
    bench: OperatorProducer, case: Case, other: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """Medians of both clocks over several turns: ours, theirs."""
    prepared = bench.prepare(case)
    ours, theirs = [], []
    with prepared.scope or torch.no_grad():
        for _ in range(TURNS):
            result = prepared.time(SETTINGS, clock=WallClock(), device=bench.device)
            samples = result.as_samples(case.key)
            ours.append(statistics.median(samples.device_seconds() or samples.seconds()))
            theirs.append(other(prepared.body))
    return statistics.median(ours), statistics.median(theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write the rows and the system record as JSON")
    options = parser.parse_args()
    kind = options.device.partition(":")[0]
    name, other = ("do_bench", do_bench_median_s) if kind == "cuda" else ("torch Timer", timer_median_s)
    cache = "cold" if kind == "cuda" else "warm"
    request = OperatorRequest(settings=SETTINGS, device=options.device, check=False)
    bench = OperatorProducer(Session(verb="ops", request=request))
    bench.open()
    rows: list[dict[str, Any]] = []
    for row in CASES[kind]:
        op, shape, dtype, direction = row
        case = make_case(row, bench.device.name, cache)
        ours_s, theirs_s = compare_case(bench, case, other)
        rows.append({"case": f"{op} {direction} {dtype} {shape}", "ours_s": ours_s, "theirs_s": theirs_s})
        short = " (under 20 µs: left out)" if theirs_s < SHORTEST_S else ""
        print(f"{ours_s * 1e6:10.2f} µs  {theirs_s * 1e6:10.2f} µs {name}  {ours_s / theirs_s:.3f}  "
              f"{rows[-1]['case']}{short}", flush=True)  # fmt: skip
    ratios = [row["ours_s"] / row["theirs_s"] for row in rows if row["theirs_s"] >= SHORTEST_S]
    median, worst = statistics.median(ratios), max(ratios, key=lambda ratio: abs(ratio - 1))
    kept = abs(median - 1) <= 0.02 and abs(worst - 1) <= 0.10
    print(f"{len(ratios)} cases of at least 20 µs: median ratio {median:.3f}, worst {worst:.3f}: "
          f"{'kept' if kept else 'MISSED'} (2 %, 10 %)")  # fmt: skip
    if options.output:
        content = {"device": options.device, "peer": name, "rows": rows, "median": median, "worst": worst}
        system = msgspec.to_builtins(collect_system())
        options.output.write_text(json.dumps({**content, "system": system}, indent=1))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
