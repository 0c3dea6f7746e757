"""`stepscope bench overlap`: kernels beside collectives, and collectives beside each other."""

from __future__ import annotations

from typing import Any

import click

from stepscope.cli.explain_comms import explain_overlaps, show_explained
from stepscope.cli.options import run_options, was_given
from stepscope.cli.ranks import find_ranks, measure_cases, world_options
from stepscope.core.errors import UsageError
from stepscope.records.kinds import OverlapSpec

DEFAULT_COMPUTE = "gemm:m=512,n=512,k=512"


@click.command("overlap")
@click.option("--collective", "collectives", multiple=True, metavar="NAME",
              help="Collective, for example all_reduce, or device_copy (needs no other rank); repeatable.")  # fmt: skip
@click.option("--sizes", default="64K:4M:x4", help="Message sizes: list, first:last:xF or :+STEP.")
@click.option("--dtype", "dtypes", multiple=True, default=["float32"], metavar="DTYPE",
              help="Data type of the collectives; a list, repeatable, or all.")  # fmt: skip
@click.option("--compute", "computes", multiple=True, metavar="KERNEL",
              help="gemm:m=,n=,k= / embedding:rows=,dim=,batch=,pooling= / copy:size= / add:size= / scale:size=, "
              "each also with dtype=; "
              f"repeatable [default: {DEFAULT_COMPUTE}, nothing with --beside].")  # fmt: skip
@click.option("--beside", multiple=True, metavar="NAME:SIZE[:GROUPS]",
              help="A further collective at the same time, on a communicator of its own; repeatable.")  # fmt: skip
@click.option("--pair", "pairs", multiple=True, metavar="NAME:SIZE[:GROUPS]+KERNEL",
              help="One collective beside one kernel, in place of all combinations; repeatable.")  # fmt: skip
@click.option("--groups", default="world", help="Groups of --collective: world, split:N or colours:0,0,1,1.")
@click.option("--repeat", type=click.IntRange(1), help="Kernels per segment; needed to compare runs with each other.")
@click.option("--balance", is_flag=True,
              help="Run as many kernels as take about as long as the collective (the default).")  # fmt: skip
@click.option("--show", metavar="RUN", help="Show the overlaps of a stored run, measure nothing.")
@click.option("--dry-run", is_flag=True, help="List the cases, measure nothing.")
@world_options
@run_options
def overlap(*, collectives: tuple[str, ...], sizes: str, show: str | None, **choices: Any) -> int:
    """Measure a kernel and a collective, each alone and both together: what is hidden, and what each side pays.

    Example: stepscope bench overlap --collective all_reduce --sizes 64K:4M:x4 --compute gemm:m=512 --ranks 2
    """
    if show is not None:
        return show_explained(show, explain_overlaps, "overlaps", choices["store"])
    from stepscope.bench.comms.cases import read_axis
    from stepscope.bench.comms.data import DTYPE_BYTES
    from stepscope.bench.comms.overlap import make_overlap_cases

    require_sense(choices)
    ranks = find_ranks(choices)
    wanted = read_wanted(collectives, sizes, choices)
    cases = [
        case
        for dtype in read_axis(choices["dtypes"], DTYPE_BYTES).values
        for combination in wanted
        for case in make_overlap_cases(
            **combination, backend=ranks.backend, world_size=ranks.world_size, device=ranks.device, dtype=dtype,
            repeat=choices["repeat"], beside=choices["beside"],
        )
    ]  # fmt: skip
    named = list(dict.fromkeys(case.spec.collective for case in cases if isinstance(case.spec, OverlapSpec)))
    return measure_cases("overlap", cases, ranks, choices, collectives=named)


def read_wanted(collectives: tuple[str, ...], sizes: str, choices: dict[str, Any]) -> list[dict[str, Any]]:
    """What runs beside what: every combination, or the pairs that were named."""
    from stepscope.bench.comms.cases import read_axis
    from stepscope.bench.comms.operations import operations
    from stepscope.bench.comms.overlap import parse_pair
    from stepscope.core.units import parse_range

    if not choices["pairs"]:
        every = [name for name in operations() if name != "barrier"]
        return [
            {
                "collectives": read_axis(collectives, every).values,
                "sizes": parse_range(sizes, where="--sizes"),
                "computes": choices["computes"] or ([None] if choices["beside"] else [DEFAULT_COMPUTE]),
                "groups": choices["groups"],
            }
        ]
    named = [f"--{name}" for name in ("sizes", "groups") if was_given(name)]
    named += ["--collective"] * bool(collectives) + ["--compute"] * bool(choices["computes"])
    if named:
        raise UsageError(f"--pair says what {named[0]} says", hint="give one of them", where="--pair")
    pairs = dict.fromkeys(parse_pair(text) for text in choices["pairs"])
    return [
        {"collectives": [one.collective], "sizes": [one.size_bytes], "computes": [compute], "groups": one.groups}
        for one, compute in pairs
    ]


def require_sense(choices: dict[str, Any]) -> None:
    if choices["time_by"] == "device":
        raise UsageError(
            "an overlap is timed on the device wherever that has a clock of its own",
            hint="leave --time out",
            where="--time",
        )
    if choices["balance"] and choices["repeat"] is not None:
        raise UsageError("--balance chooses what --repeat fixes", hint="give one of them", where="--balance")
