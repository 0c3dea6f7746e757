"""Whether two sets of timings differ: pure functions on numbers, without a library beyond the standard one.

What is compared is the *quiet time* of each side (see `quiet_time`). Other work on a machine only ever adds time,
so the fast end of what was measured repeats far better than its middle; docs/decisions/2026-11-15-verdicts.md has
the measurements behind every constant here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

import msgspec

from stepscope.stats.summary import quantile_sorted

BetweenSource = Literal["estimated", "history", "assumed"]

QUIET_QUANTILE = 0.1
"""Within a process: low enough to stand while most samples are disturbed, high enough not to hang on one sample."""

SPELL_LOG = 0.16
"""How much slower a whole process runs in one of the machine's slow spells, as a logarithm: 17 %."""

SPELL_CHANCE = 0.4
"""How likely a process is to fall into one. Only when every process of a side did, its quiet time is wrong."""

ASSUMED_BETWEEN_SD = 0.02
"""Relative standard deviation of the quiet time between processes outside such spells."""

ASSUMED_WEIGHT = 10
"""How many degrees of freedom that assumption counts for; what is measured is added to it and outweighs it."""

LEAST_HISTORY = 5
LEAST_PROCESSES = 6
"""Processes on each side from which spells are no longer assumed to have hit them all: 2 × 0.4⁶ is below 1 %."""

DISTURBED_LOG = 0.25
"""An earlier run further than this above the quietest was kept from its cores; it says nothing about spells."""

FAST_HALF_VARIANCE = 1 - 2 / math.pi
"""Variance of the lower half of many normal values as a share of that of all of them."""

UNSETTLED_LOG = 0.1
TICK_S = 0.004
TICK_TOLERANCE_S = 5e-5
"""Linux hands out processor time in steps of 4 ms (at its usual 250 Hz); see `is_disturbed`."""

QUANTILE_INEFFICIENCY = 1.71
"""Standard error of the tenth percentile over that of the mean, for normal samples: √(0.1 × 0.9) / φ(z)."""

MOST_REACH = 600.0
"""As a logarithm: an interval that wide says nothing, and a wider one does not fit into a float."""

LEAST_BLOCK = 5
MOST_BLOCKS = 20


class RatioEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """How many times longer B takes than A: below 1 is faster, above 1 slower."""

    ratio: float
    low: float
    high: float
    """Interval of the ratio with coverage 1 − level; it leaves out 1 where p_value is below the level."""
    p_value: float
    """Two-sided, for this one comparison alone."""
    level: float
    n_a: int
    n_b: int
    """Samples, or pairs."""
    processes_a: int
    processes_b: int
    between_sd: float | None
    """Relative standard deviation of the quiet time between processes; None for pairs, which need none."""
    between_source: BetweenSource | None
    quiet_a_s: float | None = None
    quiet_b_s: float | None = None
    """Quiet times; None for pairs."""
    method: Literal["quiet-time", "student", "sign"]
    noise: Noise | None = None
    """None for the sign test, which asks for no model of the noise."""

    def interval_at(self, level: float) -> tuple[float, float]:
        """The same estimate's interval with another coverage, 1 − level."""
        if self.noise is None:
            raise ValueError("an interval by votes is bound to the level it was made for")
        reach = self.noise.reach(level)
        return self.ratio * math.exp(-reach), self.ratio * math.exp(reach)


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
        if self.log_se == 0:
            return 1.0 if distance == 0 else 0.0
        alone = t_two_sided(distance / self.log_se, self.df)
        beyond = distance - self.spell_log
        half = t_two_sided(beyond / self.log_se, self.df) / 2
        return min(1.0, alone + self.spell_chance * (half if beyond > 0 else 1 - half))

    def reach(self, level: float) -> float:
        """The distance that is strayed with the chance `level`: half the interval, as a logarithm."""
        if self.log_se == 0:
            return 0.0
        low, high = 0.0, self.log_se
        while self.p_value(high) > level and high < MOST_REACH:
            low, high = high, 2 * high
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.p_value(middle) > level else (low, middle)
        return min(high, MOST_REACH)


def quiet_time(processes: Sequence[Sequence[float]]) -> float:
    """Seconds an iteration takes when the machine leaves it alone: the fastest process's tenth percentile.

    Raises ValueError where there is no sample, or one that is not above zero.
    """
    return math.exp(min(_log_quiet(process) for process in _checked(processes)))


def is_disturbed(processes: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Whether even the quietest of the processes was kept from its cores, judged by its shape beside the other side.

    Two marks, of which most recordings that were slowed several times over by a busy machine bear one, and almost
    no others: the fast end is not settled (the tenth percentile lies far above the fastest sample, and more than
    twice as far as on the other side), or most samples end on the scheduler's tick.
    """
    own, theirs = _quietest(processes), _quietest(other)
    gap, their_gap = _unsettled(own), _unsettled(theirs)
    return (gap > UNSETTLED_LOG and gap > 2 * their_gap) or (_on_tick(own) >= 0.5 > _on_tick(theirs))


def _quietest(processes: Sequence[Sequence[float]]) -> Sequence[float]:
    return min(_checked(processes), key=_log_quiet)


def _unsettled(process: Sequence[float]) -> float:
    return _log_quiet(process) - math.log(min(process))


def _on_tick(process: Sequence[float]) -> float:
    ticks = (round(value / TICK_S) for value in process)
    near = [n > 0 and abs(value - n * TICK_S) <= TICK_TOLERANCE_S for value, n in zip(process, ticks, strict=True)]
    return sum(near) / len(near)


def compare_processes(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    level: float = 0.01,
    between_sd: float = ASSUMED_BETWEEN_SD,
    spell_log: float = SPELL_LOG,
    history: Sequence[float] = (),
) -> RatioEstimate:
    """Ratio of quiet times, B over A, from one or more fresh processes a side (one list of seconds a process).

    Two kinds of noise between processes are allowed for. Small differences: their variance is pooled from the
    faster half of the processes at hand and from `between_sd`, each weighted by its degrees of freedom. Slow
    spells, which hold a whole process: with k processes a side's quiet time is spoilt only when all k were in one.
    Where `history` has five or more quiet times of earlier runs of the same case on the same system, they say how
    often spells come and how far they reach. The error within a process is added from contiguous blocks, so that
    samples which depend on their neighbours do not count as independent. Swapping the sides inverts ratio and
    interval.
    """
    sides = [_checked(a), _checked(b)]
    quiet = [[_log_quiet(process) for process in side] for side in sides]
    quietest = [side[values.index(min(values))] for side, values in zip(sides, quiet, strict=True)]
    logs = [sorted(values) for values in quiet]
    prior = _prior(between_sd, spell_log, history)
    fast = [_fast_half_squares(side) for side in logs]
    df = prior.df + sum(half_df for _, half_df in fast)
    between = (prior.df * prior.variance + math.fsum(squares for squares, _ in fast)) / df
    # The variance of the least of k normal values falls about with the root of k, not with k as a mean's would.
    parts = [(between * math.fsum(len(side) ** -0.5 for side in logs), df)]
    parts += [_within_variance(process) for process in quietest]
    variance = math.fsum(part for part, _ in parts)
    noise = Noise(
        log_se=math.sqrt(variance),
        df=variance**2 / math.fsum(part**2 / part_df for part, part_df in parts),
        spell_log=prior.spell_log,
        spell_chance=math.fsum(prior.spell_chance ** len(side) for side in logs),
    )
    difference, reach = logs[1][0] - logs[0][0], noise.reach(level)
    many = min(len(side) for side in logs) >= LEAST_PROCESSES
    return RatioEstimate(
        ratio=math.exp(difference),
        low=math.exp(difference - reach),
        high=math.exp(difference + reach),
        p_value=noise.p_value(difference),
        level=level,
        n_a=sum(len(process) for process in sides[0]),
        n_b=sum(len(process) for process in sides[1]),
        processes_a=len(sides[0]),
        processes_b=len(sides[1]),
        between_sd=math.sqrt(between),
        between_source="estimated" if many else prior.source,
        quiet_a_s=math.exp(logs[0][0]),
        quiet_b_s=math.exp(logs[1][0]),
        method="quiet-time",
        noise=noise,
    )


class _Prior(msgspec.Struct, frozen=True):
    variance: float
    df: float
    spell_log: float
    spell_chance: float
    source: BetweenSource


def _prior(between_sd: float, spell_log: float, history: Sequence[float]) -> _Prior:
    """What is held of the noise between processes before those at hand are seen.

    History says how often this case falls into a spell here (two more of four more runs are counted as spells, so
    that a short history promises little), how far a spell reaches, and how much runs outside spells differ.
    """
    if len(history) < LEAST_HISTORY:
        return _Prior(between_sd**2, ASSUMED_WEIGHT, spell_log, SPELL_CHANCE, "assumed")
    logs = sorted(math.log(value) for value in history)
    excess = [value - logs[0] for value in logs if value - logs[0] <= DISTURBED_LOG]
    squares, fast_df = _fast_half_squares(excess)
    df = ASSUMED_WEIGHT + fast_df
    variance = (ASSUMED_WEIGHT * between_sd**2 + squares / FAST_HALF_VARIANCE) / df
    chance = (sum(value > spell_log / 2 for value in excess) + 2) / (len(excess) + 4)
    return _Prior(variance, df, max(spell_log, excess[-1]), chance, "history")


def _checked(processes: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    kept = [process for process in processes if process]
    if not kept:
        raise ValueError("no samples to compare")
    if any(not (value > 0 and math.isfinite(value)) for process in kept for value in process):
        raise ValueError("a sample is not a time above zero")
    return kept


def _log_quiet(process: Sequence[float]) -> float:
    return math.log(quantile_sorted(sorted(process), QUIET_QUANTILE))


def _fast_half_squares(ordered: Sequence[float]) -> tuple[float, int]:
    """Sum of squares of the faster half around its mean, and its degrees of freedom.

    The slower half is left out because spells live there; they have their own place in `Noise`.
    """
    half = ordered[: (len(ordered) + 1) // 2]
    centre = fmean(half)
    return math.fsum((value - centre) ** 2 for value in half), len(half) - 1


def _within_variance(process: Sequence[float]) -> tuple[float, float]:
    """Variance of the logarithm of a process's quiet time from within, with its degrees of freedom."""
    blocks = min(MOST_BLOCKS, len(process) // LEAST_BLOCK)
    if blocks >= 4:
        edges = [len(process) * i // blocks for i in range(blocks + 1)]
        values = [_log_quiet(process[start:end]) for start, end in pairwise(edges)]
        return _robust_sd(values) ** 2 / blocks, blocks - 1.0
    sd = _robust_sd([math.log(value) for value in process])
    return (QUANTILE_INEFFICIENCY * sd) ** 2 / len(process), max(1.0, len(process) - 1.0)


def _robust_sd(values: Sequence[float]) -> float:
    centre = median(values)
    return 1.4826 * median(abs(value - centre) for value in values)


def compare_paired(pairs: Sequence[tuple[float, float]], *, level: float = 0.05) -> RatioEstimate:
    """Ratio B over A from pairs of fresh processes that ran one after the other (seconds of A, seconds of B).

    Give the quiet time of each process. The sign test asks for nothing but that, where nothing differs, either one
    of a pair is as likely to be the slower; a pair spoilt by other work counts as one vote, however far out it lies.
    The estimate is the median of the pairs' ratios, the interval the same test turned round (order statistics).
    With too few pairs for the level (5 or fewer at 5 %) no vote can decide; Student's t on the logarithms is used
    then, which also asks for roughly normal noise. Raises ValueError below two pairs.
    """
    if len(pairs) < 2:
        raise ValueError("a comparison by pairs needs at least two pairs")
    _checked([[value for pair in pairs for value in pair]])
    logs = [math.log(b / a) for a, b in pairs]
    if 2.0 ** (1 - len(logs)) <= level:
        return _sign_test(logs, level)
    se = math.sqrt(math.fsum((value - fmean(logs)) ** 2 for value in logs) / (len(logs) - 1) / len(logs))
    noise = Noise(log_se=se, df=len(logs) - 1.0)
    centre, reach = fmean(logs), noise.reach(level)
    return _paired_estimate(
        centre, (centre - reach, centre + reach), noise.p_value(centre), level=level, pairs=len(logs), noise=noise
    )


def _sign_test(logs: Sequence[float], level: float) -> RatioEstimate:
    ordered, n = sorted(logs), len(logs)
    counts = [math.comb(n, k) / 2**n for k in range(n + 1)]
    tail = [math.fsum(counts[: k + 1]) for k in range(n + 1)]
    # A pair without any difference votes against both sides: that keeps the test on the safe side.
    against = min(sum(value <= 0 for value in logs), sum(value >= 0 for value in logs))
    rank = max(k for k in range(n) if 2 * tail[k] <= level)
    interval = (ordered[rank], ordered[-1 - rank])
    return _paired_estimate(median(ordered), interval, min(1.0, 2 * tail[against]), level=level, pairs=n, noise=None)


def _paired_estimate(
    centre: float, interval: tuple[float, float], p_value: float, *, level: float, pairs: int, noise: Noise | None
) -> RatioEstimate:
    return RatioEstimate(
        ratio=math.exp(centre),
        low=math.exp(interval[0]),
        high=math.exp(interval[1]),
        p_value=p_value,
        level=level,
        n_a=pairs,
        n_b=pairs,
        processes_a=pairs,
        processes_b=pairs,
        between_sd=None,
        between_source=None,
        method="sign" if noise is None else "student",
        noise=noise,
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
    return _incomplete_beta(df / 2, 0.5, df / (df + t * t))


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
