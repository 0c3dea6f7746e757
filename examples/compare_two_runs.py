"""Did this change make it slower? Two runs of the same operator in fresh processes, and the verdict."""

import tempfile

import stepscope

settings = stepscope.MeasureSettings(max_time_s=0.3, min_time_s=0.1)
store = tempfile.mkdtemp()
runs = [
    stepscope.bench_op("gemm", shape="m=128,n=128,k=128", settings=settings, processes=2, store=store) for _ in range(2)
]
comparison = stepscope.compare(*runs)
for row in comparison.rows:
    print(f"{row.label}: {row.verdict}")
