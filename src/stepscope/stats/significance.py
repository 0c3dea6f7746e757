"""Whether two sets of timings differ: pure functions on numbers, without a library beyond the standard one.

What is compared is the *quiet time* of each process, a low percentile of its samples: other work on a machine only ever
adds time, so the fast end of what was measured repeats far better than its middle.
docs/decisions/2026-11-15-verdicts.md has the measurements behind the constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from stepscope.stats.summary import quantile_sorted

QUIET_QUANTILE = 0.1
"""Low enough to stand while most samples are disturbed, high enough not to hang on one sample."""

ASSUMED_BETWEEN_SD = 0.03
"""Relative standard deviation of the quiet time between processes outside slow spells, before any is seen."""

ASSUMED_WEIGHT = 10
"""How many degrees of freedom that assumption counts for; what is measured is added to it and outweighs it."""

SPELL_LOG = 0.3
"""How much slower a whole process may run for its whole life without a visible cause, as a logarithm: 35 %."""

SPELL_CHANCE = 0.2
"""How likely a process is to be in such a spell. A side is misjudged only when every one of its processes was."""

SPELL_CHANCE_PROBED = 0.05
"""The same for processes whose probe shows no spell: most spells show in it, not all."""

QUANTILE_INEFFICIENCY = 1.71
"""Standard error of the tenth percentile over that of the mean, for normal samples: √(0.1 × 0.9) / φ(z)."""

LEAST_BLOCK = 5
MOST_BLOCKS = 20


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How far the logarithm of a ratio strays from the truth: Student's t, and now and then a spell on top."""

    log_se: float
    df: float
    spell_log: float = 0.0
    spell_chance: float = 0.0
    """That every process of one side was in a spell; both sides added."""

    def p_value(self, log_ratio: float) -> float:
        """Chance of straying at least this far to either side; falls as the distance grows."""
        distance = abs(log_ratio)
        # Up to its full length a spell may explain any distance: it is 35 % at worst, not always.
        beyond_spell = max(0.0, distance - self.spell_log)
        return min(1.0, self._beyond(distance) + self.spell_chance * self._beyond(beyond_spell))

    def _beyond(self, distance: float) -> float:
        """Chance that noise without spells strays so far to either side."""
        if self.log_se == 0:
            return float(distance <= 0)
        return t_two_sided(distance / self.log_se, self.df)

    def reach(self, level: float) -> float:
        """The distance that is strayed with the chance `level`: half the interval, as a logarithm."""
        if self.log_se == 0:
            return self.spell_log if self.spell_chance > level else 0.0
        low, high = 0.0, self.log_se
        while self.p_value(high) > level:
            low, high = high, 2 * high
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.p_value(middle) > level else (low, middle)
        return high


class RatioEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """How many times longer B takes than A: below 1 is faster, above 1 slower."""

    ratio: float
    low: float
    high: float
    """Interval of the ratio with coverage 1 − level; it leaves out 1 where p_value is below the level."""
    p_value: float
    """Two-sided, for this one comparison alone."""
    level: float
    noise: Noise | None = None
    """None for the sign test, which has no model of the noise."""
    between_sd: float | None = None
    """Relative standard deviation of the quiet time between processes, as used."""

    def interval_at(self, level: float) -> tuple[float, float]:
        """The same estimate's interval with another coverage, 1 − level."""
        if self.noise is None:
            raise ValueError("an interval by ranks is bound to the level it was made for")
        reach = self.noise.reach(level)
        return self.ratio * math.exp(-reach), self.ratio * math.exp(reach)


def quiet_time(process: Sequence[float]) -> float:
    """Seconds an iteration takes when the machine leaves it alone: the tenth percentile of one process's samples.

    Raises ValueError where there is no sample, or one that is not a time above zero.
    """
    if not process:
        raise ValueError("no samples to compare")
    if any(not (value > 0 and math.isfinite(value)) for value in process):
        raise ValueError("a sample is not a time above zero")
    return quantile_sorted(sorted(process), QUIET_QUANTILE)


def compare_processes(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    level: float = 0.01,
    between_sd: float = ASSUMED_BETWEEN_SD,
    spell_log: float = SPELL_LOG,
    spell_chance: float = SPELL_CHANCE,
) -> RatioEstimate:
    """Ratio of the quietest processes, B over A, from one or more fresh processes a side (a list of seconds each).

    Two kinds of noise between processes are allowed for. Small differences: their variance is pooled from the faster
    half of the processes at hand and from `between_sd`, each weighted by its degrees of freedom. Slow spells, which
    hold a whole process: with k processes a side is misjudged only when all k were in one. The error within a process
    is added from contiguous blocks, so that samples which depend on their neighbours do not count as independent.
    Swapping the sides inverts everything.
    """
    logs = [sorted(math.log(quiet_time(process)) for process in side) for side in (a, b)]
    halves = [side[: (len(side) + 1) // 2] for side in logs]
    squares = math.fsum((value - fmean(half)) ** 2 for half in halves for value in half)
    df = ASSUMED_WEIGHT + sum(len(half) - 1 for half in halves)
    between = (ASSUMED_WEIGHT * between_sd**2 + squares) / df
    # The variance of the least of k normal values falls about with the root of k, not with k as a mean's would.
    parts = [(between * math.fsum(len(side) ** -0.5 for side in logs), float(df))]
    parts += [_within_variance(min(side, key=quiet_time)) for side in (a, b)]
    variance = math.fsum(part for part, _ in parts)
    weights = math.fsum(part**2 / part_df for part, part_df in parts)
    noise = Noise(
        log_se=math.sqrt(variance),
        df=variance**2 / weights if weights else math.inf,
        spell_log=spell_log,
        spell_chance=math.fsum(spell_chance ** len(side) for side in logs),
    )
    return _estimate(logs[1][0] - logs[0][0], noise, level, between_sd=math.sqrt(between))


def _estimate(difference: float, noise: Noise, level: float, *, between_sd: float | None = None) -> RatioEstimate:
    reach = noise.reach(level)
    return RatioEstimate(
        ratio=math.exp(difference),
        low=math.exp(difference - reach),
        high=math.exp(difference + reach),
        p_value=noise.p_value(difference),
        level=level,
        noise=noise,
        between_sd=between_sd,
    )


def _within_variance(process: Sequence[float]) -> tuple[float, float]:
    """Variance of the logarithm of a process's quiet time from within, with its degrees of freedom."""
    blocks = min(MOST_BLOCKS, len(process) // LEAST_BLOCK)
    if blocks >= 4:
        edges = [len(process) * i // blocks for i in range(blocks + 1)]
        values = [math.log(quiet_time(process[start:end])) for start, end in pairwise(edges)]
        return _robust_sd(values) ** 2 / blocks, blocks - 1.0
    sd = _robust_sd([math.log(value) for value in process])
    return (QUANTILE_INEFFICIENCY * sd) ** 2 / len(process), max(1.0, len(process) - 1.0)


def _robust_sd(values: Sequence[float]) -> float:
    centre = median(values)
    return 1.4826 * median(abs(value - centre) for value in values)


def compare_paired(pairs: Sequence[tuple[float, float]], *, level: float = 0.05) -> RatioEstimate:
    """Ratio B over A from pairs of fresh processes that ran one after the other (quiet time of A, of B).

    The sign test asks for nothing but that, where nothing differs, either one of a pair is as likely to be the slower;
    a pair spoilt by other work counts as one vote, however far out it lies. The estimate is the median of the pairs'
    ratios, the interval the same test turned round (order statistics). With too few pairs for the level (5 or fewer
    at 5 %) no vote can decide; Student's t on the logarithms is used then, which also asks for roughly normal noise.
    Raises ValueError below two pairs.
    """
    if len(pairs) < 2:
        raise ValueError("a comparison by pairs needs at least two pairs")
    logs = [math.log(quiet_time([b]) / quiet_time([a])) for a, b in pairs]
    if 2.0 ** (1 - len(logs)) <= level:
        return _sign_test(logs, level)
    centre, n = fmean(logs), len(logs)
    variance = math.fsum((value - centre) ** 2 for value in logs) / (n - 1) / n
    return _estimate(centre, Noise(log_se=math.sqrt(variance), df=n - 1.0), level)


def _sign_test(logs: Sequence[float], level: float) -> RatioEstimate:
    ordered, n = sorted(logs), len(logs)
    counts = [math.comb(n, k) / 2**n for k in range(n + 1)]
    tail = [math.fsum(counts[: k + 1]) for k in range(n + 1)]
    # A pair without any difference votes against both sides: that keeps the test on the safe side.
    against = min(sum(value <= 0 for value in logs), sum(value >= 0 for value in logs))
    rank = max(k for k in range(n) if 2 * tail[k] <= level)
    return RatioEstimate(
        ratio=math.exp(median(ordered)),
        low=math.exp(ordered[rank]),
        high=math.exp(ordered[-1 - rank]),
        p_value=min(1.0, 2 * tail[against]),
        level=level,
    )


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
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > level:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, df) > level else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (modified Lentz)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this point
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + factor * d, tiny)
            c = _away_from_zero(1 + factor / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return math.exp(log_front) * fraction / a


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
