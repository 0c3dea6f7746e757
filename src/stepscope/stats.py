"""Whether two sets of timings differ: pure functions on numbers, without a library beyond the standard one.

The unit of evidence is the *process*: samples inside one share its memory layout, thread placement and the state of the
machine, so each process counts once, with one quantile of its samples. What differs between the processes of a side is
the noise that a difference between the sides has to stand out from.
docs/decisions/2026-11-16-verdicts.md has the reasons, benchmarks/verdict_grid.py the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

DEFAULT_LEVEL = 0.95
"""Coverage of the intervals shown beside a median."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Derived on reading from samples; seconds per iteration."""

    n: int
    median_s: float
    ci_low_s: float
    ci_high_s: float
    """Distribution-free interval of the median; the whole range where n is too small for the level."""
    level: float
    """Coverage the interval really has at this n."""
    mean_s: float
    stdev_s: float | None
    min_s: float
    max_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    outliers: int
    """Samples beyond the far fences (3 interquartile ranges); named, never dropped."""

    @property
    def relative_half_width(self) -> float:
        return (self.ci_high_s - self.ci_low_s) / 2 / self.median_s if self.median_s > 0 else math.inf


def summarize(values: Sequence[float], level: float = DEFAULT_LEVEL) -> Summary:
    """Raises ValueError on an empty list: there is no summary of nothing."""
    if not values:
        raise ValueError("no samples to summarise")
    ordered = sorted(values)
    n = len(ordered)
    low, high, covered = median_interval(ordered, level)
    return Summary(
        n=n,
        median_s=quantile_sorted(ordered, 0.5),
        ci_low_s=low,
        ci_high_s=high,
        level=covered,
        mean_s=mean(ordered),
        stdev_s=math.sqrt(_variance(ordered)) if n > 1 else None,
        min_s=ordered[0],
        max_s=ordered[-1],
        p50_s=quantile_sorted(ordered, 0.5),
        p95_s=quantile_sorted(ordered, 0.95),
        p99_s=quantile_sorted(ordered, 0.99),
        outliers=len(find_outliers(ordered)),
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """Estimate for the population that the values are a sample of."""
    center = mean(values)
    return math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist  # takes longer to import than a table of few samples takes to make

    return NormalDist().inv_cdf(probability)


def quantile_sorted(ordered: Sequence[float], q: float) -> float:
    """Linear between order statistics (Hyndman and Fan's type 7, numpy's default)."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float | None:
    """None where there are no values."""
    return quantile_sorted(sorted(values), 0.5) if values else None


def median_interval(ordered: Sequence[float], level: float = DEFAULT_LEVEL) -> tuple[float, float, float]:
    """Low, high and true coverage of an interval for the median from order statistics.

    Needs no assumption on the distribution but independence: the number of samples below the median is
    binomial. The narrowest symmetric pair of order statistics that covers at least `level` is taken; where n
    is too small for any pair, the whole range is returned with the coverage it has.
    """
    n = len(ordered)
    rank, tail = _interval_rank(n, level)
    return ordered[rank - 1], ordered[n - rank], 1 - 2 * tail


@lru_cache(maxsize=4096)
def _interval_rank(n: int, level: float) -> tuple[int, float]:
    """The largest r ≥ 1 such that [x_(r), x_(n+1-r)] covers the median with at least `level`, and P(X < r).

    X is the number of samples below the median, binomial with n and ½.
    """
    if n > 1000:  # the normal approximation is within one rank of the exact one here
        z = _normal_quantile(0.5 + level / 2)
        rank = max(1, math.floor((n - z * math.sqrt(n)) / 2))
        return rank, 0.5 * math.erfc((n / 2 - rank + 0.5) / math.sqrt(n / 2))
    probability = 0.5**n
    rank, tail = 1, probability
    for k in range(1, n // 2):
        probability *= (n - k + 1) / k
        if tail + probability > (1 - level) / 2:
            break
        rank, tail = k + 1, tail + probability
    return rank, tail


def find_outliers(values: Sequence[float]) -> list[int]:
    """Indices of samples more than three interquartile ranges outside the quartiles (Tukey's far fences)."""
    if len(values) < 4:
        return []
    ordered = sorted(values)
    first, third = quantile_sorted(ordered, 0.25), quantile_sorted(ordered, 0.75)
    reach = 3 * (third - first)
    return [i for i, value in enumerate(values) if value < first - reach or value > third + reach]


def drift(values: Sequence[float]) -> float:
    """Median of the later half over median of the earlier half, minus one: a slope that a mean would hide."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    early, late = sorted(values[:half]), sorted(values[-half:])
    base = quantile_sorted(early, 0.5)
    return quantile_sorted(late, 0.5) / base - 1 if base > 0 else 0.0


ASSUMED_BETWEEN_SD = 0.15
"""Least relative standard deviation between processes where a side has only one: the largest for which error rates
were simulated."""

SINGLE_DF = 4.0
"""Degrees of freedom of such a comparison: how far a single process may stray depends on tails that nothing shows."""

SLOW_PHASE_LOG = math.log(1.5)
"""How much slower a whole process may run for its whole life without a visible cause, as a logarithm: 50 %."""

SLOW_PHASE_CHANCE = 0.15
"""How likely a process is to be in such a phase."""

SLOW_PHASE_CHANCE_PROBED = 0.05
"""The same for processes whose probe shows no slow phase: most of them show in it, not all."""

STATE_LOG = 0.03
"""How far the two states lie apart that a process may be in from its start on (how its memory fell), each with a
chance of one half, as a logarithm."""

PLANNED_POWER = 0.9
"""Chance that the planned number of processes finds a change of the planned size."""

SPREAD_CONFIDENCE = 0.8
"""Coverage of the upper bound of the spread between processes that plans use. Few processes show too little of it half
of the time, and what is planned by that has to be planned again (simulated by benchmarks/verdict_grid.py)."""

LIGHT_TAIL_COUNT, LIGHT_TAIL_FACTOR, LIGHT_TAIL_CHANCE, LIGHT_TAIL_GROWTH = 7, 1.5, 1e-3, 0.25
"""Processes that are in one of two states by halves have lighter tails than normal ones, and from so many processes on
their t reaches far values up to so many times more often; beyond a distance that Student's t reaches with this chance,
the rarer the more so, by this power."""

NEGLIGIBLE_CHANCE = 1e-9
MOST_PLANNED = 1000
LARGEST_LOG = 300.0
"""Beyond it an interval has no upper end."""


class Shift(msgspec.Struct, frozen=True):
    """Something that sets whole processes apart, unseen where it hit all of one side and none of the other."""

    log_size: float
    """At most."""
    chance: float
    """That it did so."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How far the logarithm of a ratio strays from the truth: Student's t, and now and then a shift on top."""

    log_se: float
    df: float
    shifts: tuple[Shift, ...] = ()
    light_tails: bool = False
    """Whether processes in one of two states may make the far tails likelier than Student's."""

    def p_value(self, log_ratio: float) -> float:
        """Chance of straying at least this far to either side; falls as the distance grows."""
        distance = abs(log_ratio)
        # A shift may explain any distance up to its full size: it is that large at worst, not always.
        hidden = (shift.chance * self._beyond(max(0.0, distance - shift.log_size)) for shift in self.shifts)
        chance = self._beyond(distance) + math.fsum(hidden)
        if self.light_tails and chance > 0:
            chance *= LIGHT_TAIL_FACTOR * max(1.0, LIGHT_TAIL_CHANCE / chance) ** LIGHT_TAIL_GROWTH
        return min(1.0, chance)

    def _beyond(self, distance: float) -> float:
        """Chance that noise without shifts strays so far to either side."""
        if self.log_se == 0:
            return float(distance <= 0)
        return t_two_sided(distance / self.log_se, self.df)

    def half_width(self, level: float) -> float:
        """The distance that is strayed with the chance `level`: half the interval, as a logarithm."""
        return _find_fall(self.p_value, level, self.log_se or 1e-9, relative=1e-5, absolute=1e-12)


class RatioEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """How many times longer B takes than A: below 1 is faster, above 1 slower."""

    ratio: float
    noise: Noise
    between_sd: float
    """Relative standard deviation between the processes of a side (between pairs, where they are paired)."""
    between_df: float
    """Degrees of freedom behind it."""
    explained_a: float = 0.0
    explained_b: float = 0.0
    """How much of a side's time its circumstances may have added, as a logarithm: being slowed down explains why a side
    is slower, never why it is faster. Infinite where nothing bounds it."""

    @property
    def between_bound(self) -> float:
        """Upper bound of `between_sd` (one-sided), by Wilson and Hilferty's approximation of chi-squared."""
        part = 2 / (9 * self.between_df)
        root = 1 - part + _normal_quantile(1 - SPREAD_CONFIDENCE) * math.sqrt(part)
        return self.between_sd / math.pow(root, 1.5)

    @property
    def p_value(self) -> float:
        """Two-sided, for this one comparison alone."""
        distance = math.log(self.ratio)
        explained = self.explained_b if distance > 0 else self.explained_a
        return self.noise.p_value(max(0.0, abs(distance) - explained))

    def interval_at(self, level: float) -> tuple[float, float]:
        """Interval of the ratio with coverage 1 − level; it leaves out 1 where the p-value is below the level."""
        half_width = self.noise.half_width(level)
        above = half_width + self.explained_a
        high = self.ratio * math.exp(above) if above < LARGEST_LOG else math.inf
        return self.ratio * math.exp(-half_width - self.explained_b), high


def quantile_time(process: Sequence[float], quantile: float) -> float:
    """Seconds per iteration at a quantile of one process's samples.

    Raises ValueError where there is no sample, or one that is not a time above zero.
    """
    return quantile_sorted(_sort_times(process), quantile)


def _sort_times(process: Sequence[float]) -> list[float]:
    ordered = sorted(process)
    if not ordered:
        raise ValueError("no samples to compare")
    # A NaN may be sorted anywhere; the sum finds it, and an infinite value too.
    if not (ordered[0] > 0 and math.isfinite(sum(ordered))):
        raise ValueError("a sample is not a time above zero")
    return ordered


class _Side(msgspec.Struct, frozen=True):
    logs: list[float]
    """One per process."""
    within: float
    """Mean variance that sampling alone gives each of them."""

    def variance(self) -> float:
        """Between processes; never below what sampling alone must give: few processes may agree by luck."""
        return max(_variance(self.logs) if len(self.logs) > 1 else 0.0, self.within)


def _read_side(processes: Sequence[Sequence[float]], quantile: float) -> _Side:
    if not processes:
        raise ValueError("no processes to compare")
    ordered = [_sort_times(process) for process in processes]
    logs = [math.log(quantile_sorted(times, quantile)) for times in ordered]
    return _Side(logs, mean([_sampling_variance(times, quantile) for times in ordered]))


def _sampling_variance(ordered: Sequence[float], quantile: float) -> float:
    """Variance of the logarithm of a quantile, from the order statistics one binomial standard deviation away."""
    last = len(ordered) - 1
    stray = math.sqrt(len(ordered) * quantile * (1 - quantile))
    low, high = (round(min(max(quantile * last + side * stray, 0), last)) for side in (-1, 1))
    return (math.log(ordered[high] / ordered[low]) / 2) ** 2


def compare_processes(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    quantile: float = 0.1,
    slow_chance: float = SLOW_PHASE_CHANCE,
    explained: tuple[float, float] = (0.0, 0.0),
) -> RatioEstimate:
    """Ratio B over A from one or more fresh processes per side (a list of seconds each). `explained`: of A and of B.

    Welch's t on the logarithms of one quantile per process, plus an allowance for slow phases, which hold a whole
    process without a trace inside it: a side is misjudged when all its processes were in one. Where a side has
    one process, an assumed variance is used, at least. Swapping the sides inverts everything.
    """
    sides = [_read_side(side, quantile) for side in (a, b)]
    counts = [len(side.logs) for side in sides]
    log_se, df, between = _welch(sides, counts)
    noise = _make_noise(log_se, df, counts, slow_chance)
    return RatioEstimate(
        ratio=math.exp(mean(sides[1].logs) - mean(sides[0].logs)),
        noise=noise,
        between_sd=between,
        between_df=float(max(1, sum(counts) - 2)),
        explained_a=explained[0],
        explained_b=explained[1],
    )


def _make_noise(log_se: float, df: float, counts: Sequence[int], slow_chance: float) -> Noise:
    """With what may have hit every process of one side and none of the other, whichever of the two."""

    def chance(of_one: float) -> float:
        a, b = counts
        return of_one**a * (1 - of_one) ** b + of_one**b * (1 - of_one) ** a

    shifts = Shift(SLOW_PHASE_LOG, chance(slow_chance)), Shift(STATE_LOG, chance(0.5))
    return Noise(
        log_se=log_se,
        df=df,
        shifts=tuple(shift for shift in shifts if shift.chance > NEGLIGIBLE_CHANCE),
        light_tails=min(counts) >= LIGHT_TAIL_COUNT,
    )


def _welch(sides: Sequence[_Side], counts: Sequence[int]) -> tuple[float, float, float]:
    """Standard error, degrees of freedom (Welch and Satterthwaite) and the standard deviation between processes."""
    variances = [side.variance() for side in sides]
    if min(counts) == 1:
        shared = max(*variances, ASSUMED_BETWEEN_SD**2)
        return math.sqrt(shared * math.fsum(1 / count for count in counts)), SINGLE_DF, math.sqrt(shared)
    squares = math.fsum(one * (count - 1) for one, count in zip(variances, counts, strict=True))
    pooled = squares / (sum(counts) - len(counts))
    # Welch's degrees of freedom trust a small side whose few processes agree by luck: it has at least what both have.
    fewest = min(counts) if counts[0] != counts[1] else 0
    parts = [max(one, pooled if count == fewest else 0) / count for one, count in zip(variances, counts, strict=True)]
    total = math.fsum(parts)
    spread = math.fsum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return math.sqrt(total), total**2 / spread if spread else math.inf, math.sqrt(pooled)


def compare_paired(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    quantile: float = 0.1,
    slow_chance: float = SLOW_PHASE_CHANCE,
) -> RatioEstimate:
    """Ratio B over A from pairs of fresh processes that ran one after the other (the samples of A, of B).

    The same method on the differences inside the pairs: what the machine did to both at that hour cancels. A slow phase
    misleads only where it hit the same side of every pair. Raises ValueError below two pairs.
    """
    if len(pairs) < 2:
        raise ValueError("a comparison by pairs needs at least two pairs")
    a, b = (_read_side(side, quantile) for side in zip(*pairs, strict=True))
    differences = [after - before for before, after in zip(a.logs, b.logs, strict=True)]
    count = len(differences)
    between = max(_variance(differences), a.within + b.within)
    noise = _make_noise(math.sqrt(between / count), count - 1.0, [count, count], slow_chance)
    return RatioEstimate(
        ratio=math.exp(mean(differences)), noise=noise, between_sd=math.sqrt(between), between_df=count - 1.0
    )


def plan_processes(
    between_sd: float,
    log_effect: float,
    level: float,
    *,
    slow_chance: float = SLOW_PHASE_CHANCE,
    paired: bool = False,
    other: int | None = None,
) -> int | None:
    """How many processes per side find a change of this size with a chance of 90 %; None beyond a thousand.

    `between_sd`: its upper bound, where only a few processes have shown it. `paired`: how many pairs, where
    `between_sd` is that of the pairs' differences. `other`: how many processes the other side has, and keeps.
    """

    power_z = _normal_quantile(PLANNED_POWER)

    def is_enough(count: int) -> bool:
        counts = [count, count if other is None else other]
        shares = [1 / count] if paired else [1 / one for one in counts]
        freedom = math.fsum(share**2 / (1 / share - 1) for share in shares)
        log_se = between_sd * math.sqrt(math.fsum(shares))
        noise = _make_noise(log_se, math.fsum(shares) ** 2 / freedom, counts, slow_chance)
        missed = power_z * noise.log_se
        return missed < log_effect and noise.p_value(log_effect - missed) <= level

    low, high = 1, 2
    while not is_enough(high):
        if high > MOST_PLANNED:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm), in the order given: compare each with the family's level.

    Rejecting those at or below the level keeps the chance of even one false alarm in the family at that level,
    whatever the dependence between the cases.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - step)))
        adjusted[index] = highest
    return adjusted


def holm_levels(p_values: Sequence[float], level: float) -> list[float]:
    """The level at which Holm's procedure decides each case: its interval at this level agrees with the verdict."""
    levels, own = [0.0] * len(p_values), 0.0
    stopped = False
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if not stopped:
            own = level / (len(p_values) - step)
            stopped = p_values[index] > own
        levels[index] = own
    return levels


def t_two_sided(t: float, df: float) -> float:
    """P(|T| ≥ |t|) for Student's T with `df` degrees of freedom, which need not be whole."""
    if math.isinf(df):
        return math.erfc(abs(t) / math.sqrt(2))
    return _incomplete_beta(df / 2, 0.5, df / (df + t * t))


def t_quantile(level: float, df: float) -> float:
    """The t that |T| reaches with the chance `level`."""
    return _find_fall(lambda t: t_two_sided(t, df), level, 1.0, relative=1e-12)


def _find_fall(
    chance: Callable[[float], float], level: float, start: float, *, relative: float, absolute: float = 0.0
) -> float:
    """Where a chance that falls from 0 on comes down to the level, by doubling and halving."""
    low, high = 0.0, start
    while chance(high) > level:
        low, high = high, 2 * high
    while high - low > max(relative * high, absolute):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > level else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (modified Lentz)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this point
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300  # instead of an exact zero, which would end the recurrence
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 500):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + factor * d or tiny)
            c = 1 + factor / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return math.exp(log_front) * fraction / a
