"""`stepscope bench pairs` and `bench bisect`: which host, link or rank is the slow one."""

from __future__ import annotations

from typing import Any

import click

from stepscope.cli.options import FiniteRange, json_option, measure_options, run_options, store_option
from stepscope.cli.ranks import RankOptions, find_ranks, measure_cases, world_options
from stepscope.cli.trace_options import parse_numbers
from stepscope.core.errors import UsageError
from stepscope.records import BisectionRequest


@click.command("pairs")
@click.option("--sizes", default="8,4M", help="Message sizes: a small one for latency, a large one for bandwidth.")
@click.option("--only", metavar="RANKS",
              help="Ranks to pair up, for example 0,8,16 for one rank per host [default: all].")  # fmt: skip
@world_options
@run_options
def pairs(*, sizes: str, only: str | None, **choices: Any) -> int:
    """Measure messages between every two ranks, show the matrix, and name what is slow.

    Example: stepscope bench pairs --ranks 4 --quick
    """
    from stepscope.bench.comms.pairs import make_pair_cases
    from stepscope.core.units import parse_range

    ranks = find_real_ranks(choices)
    cases = make_pair_cases(
        ranks=choose_ranks(only, ranks.world_size), sizes=parse_range(sizes, where="--sizes"), backend=ranks.backend,
        world_size=ranks.world_size, device=ranks.device,
    )  # fmt: skip
    return measure_cases("pairs", cases, ranks, choices)


def find_real_ranks(choices: dict[str, Any]) -> RankOptions:
    ranks = find_ranks(choices)
    if ranks.backend == "fake" or ranks.world_size < 2:
        raise UsageError(
            "one process has no links to measure", hint="--ranks 2 or more, and a backend that moves data",
            where="--backend" if ranks.backend == "fake" else "--ranks",
        )  # fmt: skip
    return ranks


def choose_ranks(text: str | None, world_size: int) -> list[int]:
    chosen = parse_numbers(text, "--only")
    if chosen is None:
        return list(range(world_size))
    if len(chosen) < 2 or max(chosen) >= world_size:
        raise UsageError(
            f"{text!r} are not two or more of {world_size} ranks", hint="for example --only 0,4,8", where="--only"
        )
    return chosen


@click.command("bisect")
@click.option("--collective", default="all_reduce", help="Collective that the subsets run.")
@click.option("--size", default="1M", help="Message size.")
@click.option("--threshold", type=FiniteRange(1.01), default=1.4,
              help="Ratio to the fastest subset of the same size from which a subset counts as slow.")  # fmt: skip
@world_options
@measure_options
@store_option
@json_option
def bisect(*, collective: str, size: str, threshold: float, **choices: Any) -> int:
    """Find a slow rank by collectives over ever smaller subsets of the ranks; far fewer measurements than all pairs.

    Example: stepscope bench bisect --ranks 4 --quick
    """
    from stepscope.bench.comms.bisection import next_round
    from stepscope.core.units import parse_size

    ranks = find_real_ranks(choices)
    if choices["processes"] > 1:
        raise UsageError("a search decides as it goes: it has one process a rank", where="--processes")
    search = BisectionRequest(collective=collective, size_bytes=parse_size(size, where="--size"), threshold=threshold)
    cases = next_round(search, [], backend=ranks.backend, device=ranks.device, world_size=ranks.world_size)
    return measure_cases("bisect", cases, ranks, choices, bisect=search)
