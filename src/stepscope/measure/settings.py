"""How long to measure, and how sure to be."""

from __future__ import annotations

import msgspec

from stepscope.stats import DEFAULT_LEVEL


class MeasureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults answer in about two seconds a case on a quiet machine."""

    target_width: float = 0.01
    """Stop when half the interval of the median is this share of it."""
    level: float = DEFAULT_LEVEL
    """Coverage of that interval."""
    min_time_s: float = 0.25
    max_time_s: float = 3.0
    """Longest sampling, without warm-up; the sample in flight is finished."""
    min_samples: int = 20
    """Kept even beyond `max_time_s` only up to `few_samples`."""
    few_samples: int = 5
    """At least this many, however slow a sample is."""
    max_samples: int = 20_000
    min_sample_s: float = 1e-3
    """Iterations are batched until one sample takes this long."""
    resolution_share: float = 0.01
    """… and until the clock's step is at most this share of a sample."""
    iterations: int | None = None
    """A fixed number of iterations a sample instead (1 for collectives)."""
    warmup_samples: int | None = None
    """Exactly so many samples of warm-up, however stable they look; 0: none at all."""
    warmup_min_samples: int = 4
    warmup_min_time_s: float = 0.0
    """However stable it looks: a GPU lowers its clocks only some tenths of a second into a heavy load."""
    warmup_max_time_s: float = 2.0
    stable_share: float = 0.03
    """Warm-up ends when two neighbouring windows of samples agree to this share."""
    window: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.target_width < 1:
            raise ValueError(f"target_width {self.target_width} must be between 0 and 1")
        if not 0 < self.level < 1:
            raise ValueError(f"level {self.level} must be between 0 and 1")
        if self.min_time_s > self.max_time_s:
            raise ValueError(f"min_time_s {self.min_time_s} is above max_time_s {self.max_time_s}")
        if self.warmup_min_time_s > self.warmup_max_time_s:
            raise ValueError(
                f"warmup_min_time_s {self.warmup_min_time_s} is above warmup_max_time_s {self.warmup_max_time_s}"
            )
        if not 1 <= self.few_samples <= self.min_samples <= self.max_samples:
            raise ValueError("few_samples, min_samples and max_samples must rise from 1")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations {self.iterations} must be 1 or more")
        if self.warmup_samples is not None and self.warmup_samples < 0:
            raise ValueError(f"warmup_samples {self.warmup_samples} must be 0 or more")

    @property
    def fixed_samples(self) -> bool:
        """Whether the number of samples was decided beforehand: neither time nor noise changes it."""
        return self.few_samples == self.max_samples


QUICK = MeasureSettings(
    target_width=0.05,
    min_time_s=2e-3,
    max_time_s=0.2,
    min_samples=5,
    few_samples=3,
    min_sample_s=3e-4,
    warmup_max_time_s=0.05,
    warmup_min_samples=2,
    window=2,
)
"""For sweeps and smoke tests: a few hundredths of a second a case."""
