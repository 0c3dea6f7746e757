"""How often does a comparison of a benchmark with itself raise an alarm, and how often is a true change found?

    python benchmarks/verdict_grid.py [--quick] [--rounds] [--csv FILE] [--markdown FILE]
    python benchmarks/verdict_grid.py --again docs/measured/verdict-grid.csv.gz [--pairs 20000] [--seed 1]

Simulates pairs of runs over a grid: relative spread between processes, its distribution (normal, heavy tails, skewed,
slow phases that hold whole processes, shared by all cases or one at a time), processes per side and number of cases.
Every pair is judged by `stepscope.compare` as stored runs are. Prints the family-wise rate of alarms per cell, and the
power of a single case beside that of Welch's t-test at the same level. Then, or with --rounds alone: how often both
sides have to be measured anew until a planted change is found in three cases, with as many processes as the comparison
before asked for. With --again: the cells of an earlier grid that had most alarms are drawn anew. Exit code 1 when a
cell is above its level by more than chance allows (one in a thousand cells that are exactly at the level).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.compare.verdict import (
    DEFAULT_FAMILY_LEVEL,
    MIN_EFFECT,
    STATISTICS,
    estimate_ratios,
    lead_estimate,
)
from stepscope.stats import (
    ASSUMED_BETWEEN_SD,
    RatioEstimate,
    compare_processes,
    holm_levels,
    plan_processes,
    t_quantile,
)

SPREADS = (0.003, 0.01, 0.03, 0.05, 0.08, 0.15)
PROCESSES = (
    (2, 2), (3, 3), (4, 4), (5, 5), (7, 7), (10, 10), (20, 20),
    (1, 1), (1, 5), (1, 20), (2, 10), (3, 20), (4, 5), (20, 5),
)  # fmt: skip
CASES = (1, 10, 50)
EFFECTS = (0.02, 0.05, 0.10, 0.20)
SAMPLES = 20
"""Per process."""
WORST, CHUNK = 10, 2000
"""Cells that are drawn anew, and pairs that are drawn at once, for memory."""
BANK = 4000
"""Processes whose samples are drawn once; a simulated process is one of them times its own speed."""

PLANTED, PLANTED_CASES, PLANTED_SPREADS, FIRST_LOOKS = 0.10, 3, (0.01, 0.03, 0.06), (3, 4, 5)
"""Number of the trials that count rounds."""
MOST_ROUNDS, MOST_MEASURED = 5, 200

Array = NDArray[np.float64]
Effects = Callable[[np.random.Generator, tuple[int, int, int], float], Array]
"""(families, cases, processes) and the spread → logarithm of each process's speed."""


def normal(rng: np.random.Generator, shape: tuple[int, int, int], sd: float) -> Array:
    return rng.normal(0, sd, shape)


def heavy(rng: np.random.Generator, shape: tuple[int, int, int], sd: float) -> Array:
    return rng.standard_t(3, shape) * sd / math.sqrt(3)


def skewed(rng: np.random.Generator, shape: tuple[int, int, int], sd: float) -> Array:
    return sd * (rng.exponential(1, shape) - 1)


def slow_phases(chance: float, slowdown: float, *, shared: bool) -> Effects:
    def draw(rng: np.random.Generator, shape: tuple[int, int, int], sd: float) -> Array:
        hit = rng.random((shape[0], 1, shape[2]) if shared else shape) < chance
        return normal(rng, shape, sd) + hit * math.log1p(slowdown)

    return draw


def two_states(rng: np.random.Generator, shape: tuple[int, int, int], sd: float) -> Array:
    """Half of the processes are faster by 2 %, as memory falls (huge pages, cache colours)."""
    return normal(rng, shape, sd) + (rng.random(shape) < 0.5) * 0.02


DISTRIBUTIONS: dict[str, Effects] = {
    "normal": normal,
    "heavy tails (Student's t, 3 df)": heavy,
    "skewed (exponential)": skewed,
    "two states 2 % apart": two_states,
    "slow phases 5 %, 1.3×, shared": slow_phases(0.05, 0.3, shared=True),
    "slow phases 15 %, 1.3×, shared": slow_phases(0.15, 0.3, shared=True),
    "slow phases 15 %, 1.5×, shared": slow_phases(0.15, 0.5, shared=True),
    "slow phases 15 %, 1.3×, per case": slow_phases(0.15, 0.3, shared=False),
}


class Bank(NamedTuple):
    samples: Array
    """(processes, samples), around 1 second: 1 % noise, one sample in twenty up to twice as long."""
    logs: Array
    """(processes, statistics)"""


def fill_bank() -> Bank:
    rng = np.random.default_rng(7)
    samples = np.exp(rng.normal(0, 0.01, (BANK, SAMPLES)))
    samples *= 1 + (rng.random(samples.shape) < 0.05) * rng.random(samples.shape)
    quantiles = [np.quantile(samples, statistic.quantile, axis=1) for statistic in STATISTICS]
    return Bank(samples, np.log(np.stack(quantiles, axis=1)))


class Cell(NamedTuple):
    distribution: str
    spread: float
    processes: tuple[int, int]
    cases: int
    families: int
    alarms: int

    @property
    def rate(self) -> float:
        return self.alarms / self.families


class Side(NamedTuple):
    numbers: NDArray[np.int64]
    """(families, cases, processes): which process of the bank."""
    speeds: Array

    def logs(self, bank: Bank) -> Array:
        found: Array = bank.logs[self.numbers] + self.speeds[..., None]
        return found

    def processes(self, bank: Bank, family: int, case: int) -> list[list[float]]:
        chosen = bank.samples[self.numbers[family, case]] * np.exp(self.speeds[family, case])[:, None]
        found: list[list[float]] = chosen.tolist()
        return found


def draw_side(rng: np.random.Generator, effects: Effects, shape: tuple[int, int, int], sd: float) -> Side:
    return Side(rng.integers(0, BANK, shape), effects(rng, shape, sd))


def might_alarm(a: Array, b: Array) -> NDArray[np.bool_]:
    """(families, cases): whether the case could raise its family's first alarm, at most degrees of freedom."""
    counts = (a.shape[2], b.shape[2])
    weight, df = max(statistic.weight for statistic in STATISTICS), sum(counts) - 2.0 or math.inf
    if min(counts) > 1:
        error = np.sqrt(a.var(axis=2, ddof=1) / counts[0] + b.var(axis=2, ddof=1) / counts[1])
    else:
        error = np.full_like(a[:, :, 0], ASSUMED_BETWEEN_SD * math.sqrt(1 / counts[0] + 1 / counts[1]))
    t = np.abs(b.mean(axis=2) - a.mean(axis=2)) / error
    found: NDArray[np.bool_] = (t > t_quantile(DEFAULT_FAMILY_LEVEL * weight / a.shape[1], df)).any(axis=2)
    return found


def judge_family(bank: Bank, sides: list[Side], family: int, suspects: NDArray[np.bool_]) -> bool:
    """Whether the family raises an alarm; the other cases' p-values cannot, and count as 1."""
    found = [
        estimate_ratios(*(side.processes(bank, family, case) for side in sides)) for case in np.flatnonzero(suspects)
    ]
    p_values = [lead_estimate(estimates).p_value for estimates in found]
    levels = holm_levels(p_values + [1.0] * (len(suspects) - len(found)), DEFAULT_FAMILY_LEVEL)
    return any(
        estimate.p_value <= level and abs(math.log(estimate.ratio.ratio)) >= math.log1p(MIN_EFFECT)
        for estimates, level in zip(found, levels, strict=False)
        for estimate in estimates
    )


def simulate(
    bank: Bank, distribution: str, sd: float, *, counts: tuple[int, int], cases: int, families: int, seed: int = 0
) -> Cell:
    drawn_by = (distribution, sd, counts, cases, *([seed] if seed else []))
    rng = np.random.default_rng(zlib.crc32(repr(drawn_by).encode()))
    effects = DISTRIBUTIONS[distribution]
    sides = [draw_side(rng, effects, (families, cases, count), sd) for count in counts]
    suspects = might_alarm(*(side.logs(bank) for side in sides))
    alarms = sum(judge_family(bank, sides, family, suspects[family]) for family in np.flatnonzero(suspects.any(axis=1)))
    return Cell(distribution, sd, counts, cases, families, alarms)


class Power(NamedTuple):
    spread: float
    processes: int
    effect: float
    found: float
    welch: float


def measure_power(bank: Bank, sd: float, count: int, effect: float, pairs: int) -> Power:
    rng = np.random.default_rng(int(1e6 * sd) + 1000 * count + int(100 * effect))
    a, b = (draw_side(rng, normal, (pairs, 1, count), sd) for _ in range(2))
    found = welch = 0
    for pair in range(pairs):
        before = a.processes(bank, pair, 0)
        after = [[value * (1 + effect) for value in process] for process in b.processes(bank, pair, 0)]
        found += lead_estimate(estimate_ratios(before, after)).p_value <= DEFAULT_FAMILY_LEVEL
        plain = compare_processes(before, after)
        plain = msgspec.structs.replace(plain, noise=msgspec.structs.replace(plain.noise, shifts=(), light_tails=False))
        welch += plain.p_value <= DEFAULT_FAMILY_LEVEL
    return Power(sd, count, effect, found / pairs, welch / pairs)


def most_allowed(families: int, cells: int) -> int:
    """Alarms of a cell that is exactly at its level, exceeded by chance in one of a thousand whole grids."""
    z = NormalDist().inv_cdf(1 - 1e-3 / cells)
    expected = families * DEFAULT_FAMILY_LEVEL
    return math.floor(expected + z * math.sqrt(expected * (1 - DEFAULT_FAMILY_LEVEL)))


def simulate_row(distribution: str, sd: float, families: dict[int, int]) -> list[Cell]:
    """Every number of processes and cases for one distribution and spread."""
    bank = fill_bank()
    return [
        simulate(bank, distribution, sd, counts=counts, cases=cases, families=families[cases])
        for counts in PROCESSES
        for cases in CASES
    ]


def read_worst(grid: Path) -> list[Cell]:
    """The `WORST` cells of an earlier grid: those with most alarms for their number of pairs."""
    with gzip.open(grid, "rt", newline="") as file:
        cells = [
            Cell(
                row["distribution"],
                float(row["spread"]),
                (int(row["processes_a"]), int(row["processes_b"])),
                int(row["cases"]),
                int(row["families"]),
                int(row["alarms"]),
            )
            for row in csv.DictReader(file)
        ]
    return sorted(cells, key=lambda cell: cell.rate, reverse=True)[:WORST]


def simulate_again(cell: Cell, families: int, seed: int) -> Cell:
    """The same cell with other pairs, `CHUNK` at a time."""
    bank = fill_bank()
    alarms = 0
    for number, begun in enumerate(range(0, families, CHUNK), 1):
        count = min(CHUNK, families - begun)
        drawn = simulate(
            bank,
            cell.distribution,
            cell.spread,
            counts=cell.processes,
            cases=cell.cases,
            families=count,
            seed=1000 * seed + number,
        )
        alarms += drawn.alarms
    return cell._replace(families=families, alarms=alarms)


def report_again(grid: Path, families: int, seed: int) -> int:
    worst = read_worst(grid)
    print("| distribution between processes | spread | processes | cases | alarms before | drawn anew | in percent |")
    print("|---|---|---|---|---|---|---|")
    above = 0
    with ProcessPoolExecutor() as pool:
        again = pool.map(partial(simulate_again, families=families, seed=seed), worst)
        for before, now in zip(worst, again, strict=True):
            place = f"{now.distribution} | {100 * now.spread:g} % | {now.processes[0]}/{now.processes[1]} | {now.cases}"
            counts = f"{before.alarms} of {before.families:,} | {now.alarms} of {now.families:,}"
            print(f"| {place} | {counts} | {100 * now.rate:.2f} |", flush=True)
            above += now.alarms > most_allowed(now.families, len(worst))
    return int(bool(above))


def measure_power_row(sd: float, pairs: int) -> list[Power]:
    bank = fill_bank()
    return [measure_power(bank, sd, k, effect, pairs) for k in (2, 3, 5, 10, 20) for effect in EFFECTS]


class Rounds(NamedTuple):
    distribution: str
    bounded: bool
    """Whether plans use the upper bound of the spread, as Stepscope does, or the spread as it was seen."""
    within: tuple[float, float, float]
    """Fraction of the trials that are decided within one round, two and three."""
    processes: float
    """Per side, over all rounds, in the mean."""


def measure_rounds(distribution: str, trials: int, *, bounded: bool) -> Rounds:
    """Three cases; every spread and first look, as often each."""
    rng = np.random.default_rng(zlib.crc32(distribution.encode()))
    found = [
        find_planted(rng, DISTRIBUTIONS[distribution], sd, first, bounded=bounded)
        for sd in PLANTED_SPREADS
        for first in FIRST_LOOKS
        for _ in range(trials)
    ]
    within = [sum(len(counts) <= most for counts in found) / len(found) for most in (1, 2, 3)]
    return Rounds(distribution, bounded, (within[0], within[1], within[2]), fmean(sum(counts) for counts in found))


def find_planted(rng: np.random.Generator, effects: Effects, sd: float, first: int, *, bounded: bool) -> list[int]:
    """Processes per side of each round until a planted change is found in every case; at most `MOST_ROUNDS`."""
    level, size = STATISTICS[0].weight * DEFAULT_FAMILY_LEVEL / PLANTED_CASES, math.log1p(PLANTED)
    estimates = look(rng, effects, sd, first)
    counts: list[int] = []
    while len(counts) < MOST_ROUNDS:
        spreads = [one.between_bound if bounded else one.between_sd for one in estimates]
        counts.append(max(first, *(plan_processes(spread, size, level) or MOST_MEASURED for spread in spreads)))
        estimates = look(rng, effects, sd, counts[-1], shift=size)
        if all(one.p_value <= level for one in estimates):
            break
    return counts


def look(
    rng: np.random.Generator, effects: Effects, sd: float, count: int, *, shift: float = 0.0
) -> list[RatioEstimate]:
    a, b = (effects(rng, (1, PLANTED_CASES, count), sd)[0] for _ in range(2))
    return [
        compare_processes([[math.exp(speed)] for speed in before], [[math.exp(speed + shift)] for speed in after])
        for before, after in zip(a.tolist(), b.tolist(), strict=True)
    ]


def format_rounds(rows: list[Rounds]) -> str:
    lines = ["| distribution between processes | planned by | one round | two | three | processes per side |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        shares = " | ".join(f"{100 * share:.0f}" for share in row.within)
        plan = "upper bound" if row.bounded else "spread as seen"
        lines.append(f"| {row.distribution} | {plan} | {shares} | {row.processes:.0f} |")
    return "\n".join(lines)


def format_grid(cells: list[Cell], powers: list[Power]) -> str:
    lines = ["| distribution between processes | cases | " + " | ".join(f"{a}/{b}" for a, b in PROCESSES) + " |"]
    lines.append("|---|---|" + "---|" * len(PROCESSES))
    for distribution in DISTRIBUTIONS:
        for cases in CASES:
            worst = [
                max(c.rate for c in cells if (c.distribution, c.cases, c.processes) == (distribution, cases, counts))
                for counts in PROCESSES
            ]
            lines.append(f"| {distribution} | {cases} | " + " | ".join(f"{100 * rate:.2f}" for rate in worst) + " |")
    lines += ["", "| spread | processes per side | " + " | ".join(f"+{effect:.0%}" for effect in EFFECTS) + " |"]
    lines.append("|---|---|" + "---|" * len(EFFECTS))
    for sd in SPREADS:
        for count in dict.fromkeys(power.processes for power in powers):
            row = [p for p in powers if (p.spread, p.processes) == (sd, count)]
            told = " | ".join(f"{100 * p.found:.0f} ({100 * p.welch:.0f})" for p in row)
            lines.append(f"| {100 * sd:.1f} % | {count} | {told} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A tenth of the pairs.")
    parser.add_argument("--csv", type=Path, help="Every cell, one row each.")
    parser.add_argument("--markdown", type=Path, help="The tables.")
    parser.add_argument("--rounds", action="store_true", help="Only the rounds until a planted change is found.")
    parser.add_argument("--again", type=Path, help="Draw the cells anew that had most alarms in this earlier grid.")
    parser.add_argument("--pairs", type=int, default=20_000, help="Comparisons per cell for --again.")
    parser.add_argument("--seed", type=int, default=1, help="Random seed for --again.")
    options = parser.parse_args()
    if options.again:
        return report_again(options.again, options.pairs, options.seed)
    scale = 0.1 if options.quick else 1.0
    rounds = [
        measure_rounds(name, int(50 * scale), bounded=bounded) for name in DISTRIBUTIONS for bounded in (False, True)
    ]
    print(format_rounds(rounds))
    if options.rounds:
        return 0
    families = {1: int(20_000 * scale), 10: int(5_000 * scale), 50: int(2_000 * scale)}
    cells: list[Cell] = []
    with ProcessPoolExecutor() as pool:
        rows = [pool.submit(simulate_row, name, sd, families) for name in DISTRIBUTIONS for sd in SPREADS]
        power_rows = [pool.submit(measure_power_row, sd, int(1000 * scale)) for sd in SPREADS]
        for row in rows:
            cells += (done := row.result())
            worst = max(cell.rate for cell in done)
            print(f"{done[0].distribution}, spread {done[0].spread:.1%}: at most {worst:.2%}", flush=True)
        powers = [power for row in power_rows for power in row.result()]
    tables = format_grid(cells, powers)
    print(tables)
    if options.markdown:
        options.markdown.write_text(f"{tables}\n\n{format_rounds(rounds)}\n")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["distribution", "spread", "processes_a", "processes_b", "cases", "families", "alarms"])
            writer.writerows([c.distribution, c.spread, *c.processes, c.cases, c.families, c.alarms] for c in cells)
    above = [cell for cell in cells if cell.alarms > most_allowed(cell.families, len(cells))]
    for cell in above:
        print(f"above the level: {cell} {cell.rate:.2%}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
