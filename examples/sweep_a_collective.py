"""How good is the connection between ranks? A sweep over message sizes, and its report as a page."""

import tempfile
from pathlib import Path

import stepscope

store = Path(tempfile.mkdtemp())
settings = stepscope.MeasureSettings(max_time_s=0.2, min_time_s=0.05)
run = stepscope.bench_collective("all_reduce", sizes="1K:64K:x8", ranks=2, settings=settings, store=store)
for case in run.cases():
    print(f"{case.result.case.parameters['size_bytes']:>8} bytes: {case.score():.3f} GB/s bus bandwidth")
stepscope.report(run, output=store / "all_reduce.html")
print(f"page: {store / 'all_reduce.html'}")
