"""How long does one call take, and how sure is that?"""

import torch

import stepscope

a, b = torch.randn(256, 256), torch.randn(256, 256)
measured = stepscope.measure(lambda: a @ b, settings=stepscope.MeasureSettings(max_time_s=0.5, min_time_s=0.1))
summary = measured.summary()
low_us, high_us = summary.ci_low_s * 1e6, summary.ci_high_s * 1e6
interval = f"{summary.level:.0%} interval {low_us:.1f} to {high_us:.1f} µs"
print(f"{summary.median_s * 1e6:.1f} µs, {interval}, n = {summary.n}")
