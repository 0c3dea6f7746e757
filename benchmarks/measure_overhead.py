"""What the measuring loop adds to an iteration, against a bare loop over the same body in the same process.

    python benchmarks/measure_overhead.py [REPEATS]

Two figures: what a sample contains beyond the bare loop (it biases results), and all the time the loop spends
outside its samples, spread over the iterations (it only costs patience). The limit is 1 µs for the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from stepscope.core.units import format_duration
from stepscope.measure import CpuDevice, MeasureSettings, WallClock, measure
from stepscope.stats import summarize

LIMIT_S = 1e-6
SETTINGS = MeasureSettings(min_time_s=0.2, max_time_s=0.2)


def nothing() -> None:
    """The cheapest body there is: all that is measured is the loop."""


def spin_10_us() -> None:
    stop = time.perf_counter_ns() + 10_000
    while time.perf_counter_ns() < stop:
        pass


def bare(body: Callable[[], None], iterations: int, samples: int) -> float:
    best = []
    for _ in range(samples):
        start = time.perf_counter_ns()
        for _ in range(iterations):
            body()
        best.append((time.perf_counter_ns() - start) * 1e-9 / iterations)
    return summarize(best).median_s


def compare(body: Callable[[], None]) -> tuple[float, float, float, int]:
    start = time.perf_counter()
    result = measure(body, settings=SETTINGS, clock=WallClock(), device=CpuDevice())
    took_s = time.perf_counter() - start
    iterations = result.iterations[-1]
    sampled = summarize([d / n for d, n in zip(result.duration_s, result.iterations, strict=True)][result.warmups :])
    outside_s = (took_s - sum(result.duration_s)) / sum(result.iterations)
    return sampled.median_s, bare(body, iterations, sampled.n), outside_s, iterations


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    worst = 0.0
    for body in (nothing, spin_10_us):
        rows = [compare(body) for _ in range(repeats)]
        inside = summarize([sampled - bare_s for sampled, bare_s, _, _ in rows])
        ratio = summarize([sampled / bare_s for sampled, bare_s, _, _ in rows])
        outside = summarize([outside_s for _, _, outside_s, _ in rows])
        print(
            f"{body.__name__}: {rows[0][3]} iterations a sample; a sample holds {inside.median_s * 1e9:+.1f} ns an "
            f"iteration ({inside.ci_low_s * 1e9:+.1f} to {inside.ci_high_s * 1e9:+.1f}, n={inside.n}) beyond a bare "
            f"loop: {ratio.median_s:.3f}× ({ratio.ci_low_s:.3f} to {ratio.ci_high_s:.3f}); "
            f"outside the samples {format_duration(outside.median_s)} an iteration"
        )
        worst = max(worst, inside.median_s)
    print(f"the loop's cost is {worst / LIMIT_S:.4f} of the limit of {format_duration(LIMIT_S)} an iteration")
    return int(worst > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
