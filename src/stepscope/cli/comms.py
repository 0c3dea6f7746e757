"""`stepscope bench comms`: collectives and messages between ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from stepscope.cli.options import FiniteRange, run_options, was_given
from stepscope.cli.output import emit, narrate
from stepscope.cli.ranks import RankOptions, find_ranks, measure_cases, world_options
from stepscope.core.errors import ExitCode, UsageError
from stepscope.records import Case

PLACEMENTS = ("in_place", "out_of_place")
MOST_IN_A_NAME = 4
"""Operations in the id of a run; of more, their number."""


@click.command("comms")
@click.option("--collective", "collectives", multiple=True, metavar="NAME",
              help="Operation, for example all_reduce; a list, repeatable, or all.")  # fmt: skip
@click.option("--sizes", default="1K:1M:x4", help="Message sizes: list, first:last:xF or :+STEP.")
@click.option("--dtype", "dtypes", multiple=True, default=["float32"], metavar="DTYPE",
              help="Data type: float64 … float8_e4m3fn, integers, bool; a list, repeatable, or all.")  # fmt: skip
@click.option("--reduction", "reductions", multiple=True, default=["sum"], metavar="NAME",
              help="Reduction operator: sum, avg, min, max or prod; a list, repeatable, or all.")  # fmt: skip
@click.option("--root", "roots", multiple=True, default=["0"], metavar="MEMBER",
              help="Root rank within the group; a list, repeatable, or all.")  # fmt: skip
@click.option("--placement", type=click.Choice(PLACEMENTS),
              help="Whether results replace the input [default: as usual for the operation].")  # fmt: skip
@click.option("--form", type=click.Choice(["tensor", "list"]), default="tensor",
              help="Whether pieces lie in one tensor or in a list of tensors.")  # fmt: skip
@click.option(
    "--pattern",
    help="Message pattern of send_recv: ring (default), one_to_one, pairwise, bidirectional, ping_pong, or all.",
)
@click.option("--src-ranks", metavar="RANKS", help="Sending ranks of send_recv, for example 0,2; with --dst-ranks.")
@click.option("--dst-ranks", metavar="RANKS", help="Receiving ranks of send_recv, one for each of --src-ranks.")
@click.option("--window", type=click.IntRange(1), default=1, help="Messages of send_recv that follow each other.")
@click.option("--skew", type=FiniteRange(0),
              help="Piece i of operations with uneven pieces is proportional to (i+1)^-SKEW.")  # fmt: skip
@click.option("--splits", metavar="LIST|FILE",
              help="Proportions of uneven pieces: 3,1, or a matrix with one line per sender.")  # fmt: skip
@click.option("--split-bytes", metavar="LIST|FILE",
              help="Exact sizes of uneven pieces, for example 64K,4K, in place of --sizes.")  # fmt: skip
@click.option("--mode", type=click.Choice(["blocking", "nonblocking", "graph"]), default="blocking",
              help="How calls are made: waited for, several outstanding, or replayed from a CUDA graph.")  # fmt: skip
@click.option("--depth", type=click.IntRange(1), help="Outstanding calls with --mode nonblocking [default: 4].")
@click.option("--coalesce", type=click.IntRange(1), default=1,
              help="Number of calls that each message is cut into; they are made as one.")  # fmt: skip
@click.option(
    "--wire",
    help="Quantise float32 to fp16, bf16, fp8, int8, int4 or int2 on the wire; all_reduce, reduce, all_to_all.",
)
@click.option("--groups", default="world", help="Groups of ranks that act together: world, split:N or colours:0,0,1,1.")
@click.option("--mesh", help="Mesh of ranks with the sizes of its axes, for example dp=2,tp=4; with --axis.")
@click.option("--axis", help="Axis of the mesh along which the groups lie.")
@click.option("--in-turn", is_flag=True, help="Measure one group at a time, instead of all at once.")
@click.option("--trace", "traced", metavar="SIZES",
              help="After timing, record these of --sizes (or all) with the profiler, one trace per rank.")  # fmt: skip
@click.option("--init-only", is_flag=True,
              help="Measure how long the ranks take to become a process group, and no collective.")  # fmt: skip
@click.option("--per-rank", is_flag=True, help="Also show each rank's average time, and the total.")
@click.option("--list", "listing", is_flag=True, help="List the operations.")
@click.option("--dry-run", is_flag=True, help="List the cases, measure nothing.")
@world_options
@run_options
def comms(*, collectives: tuple[str, ...], sizes: str, listing: bool, **choices: Any) -> int:
    """Measure collectives. The same command works by itself and under torchrun, mpirun and srun.

    Example: stepscope bench comms --collective all_reduce --sizes 1K:1M:x4 --ranks 2
    """
    from stepscope.bench.comms.cases import make_sweep
    from stepscope.core.units import parse_range

    if listing:
        return list_operations()
    ranks = find_ranks(choices)
    if choices["init_only"]:
        return measure_forming(ranks, choices)
    exact_splits = read_split_bytes(choices, ranks.world_size)
    points = [round(max(map(sum, exact_splits)))] if exact_splits else parse_range(sizes, where="--sizes")
    require_memory(min(points), ranks.device)
    cases, left_out = make_sweep(
        collectives=collectives, sizes=points, backend=ranks.backend,
        world_size=ranks.world_size, device=ranks.device, one_group_at_a_time=choices["in_turn"],
        **{name: choices[name] for name in ("dtypes", "reductions", "roots")},
        **call_options(choices, ranks.world_size),
    )  # fmt: skip
    for reason in left_out:
        narrate(f"left out: {reason}")
    named = list(dict.fromkeys(case.benchmark.model for case in cases))
    name = "-".join(named) if len(named) <= MOST_IN_A_NAME else f"{len(named)}-collectives"
    traced = choose_traced(choices["traced"], cases)
    return measure_cases(name, cases, ranks, choices, collectives=named, per_rank=choices["per_rank"], trace=traced)


OF_COLLECTIVES = (
    "collectives", "sizes", "dtypes", "reductions", "roots", "placement", "form", "pattern", "src_ranks", "dst_ranks",
    "window", "skew", "splits", "split_bytes", "mode", "depth", "coalesce", "wire", "groups", "mesh", "axis", "in_turn",
    "traced", "time_by",
)  # fmt: skip
"""Options that say what to do with a group once it is there."""


def measure_forming(ranks: RankOptions, choices: dict[str, Any]) -> int:
    """What it takes the ranks to become a process group."""
    from stepscope.bench.comms.process_group import make_process_group_cases

    named = [name for name in OF_COLLECTIVES if was_given(name)]
    if named:
        params = click.get_current_context().command.params
        (option,) = [one.opts[0] for one in params if one.name == named[0]]
        raise UsageError(f"--init-only measures no collective: {option} has no meaning", where=option)
    if ranks.backend == "mpi":
        raise UsageError(
            "MPI is initialised once in the life of a process", hint="use --backend gloo or nccl", where="--init-only"
        )
    cases = make_process_group_cases(backend=ranks.backend, world_size=ranks.world_size, device=ranks.device)
    return measure_cases("process-group", cases, ranks, choices, init_only=True, per_rank=choices["per_rank"])


def require_memory(size: int, device: str) -> None:
    """Some sizes that do not fit are skipped cases; where even the smallest never can, the command is wrong."""
    import psutil

    from stepscope.core.units import format_bytes

    total = psutil.virtual_memory().total
    if device == "cpu" and size > total:
        raise UsageError(
            f"a message of {format_bytes(size)} can never fit into this machine's memory of {format_bytes(total)}",
            hint="write for example 1K:1M:x4",
            where="--sizes",
        )


def call_options(choices: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Fields of a CollectiveSpec, from the command line."""
    from stepscope.bench.comms.cases import DEFAULT_DEPTH
    from stepscope.bench.comms.layouts import read_matrix

    names = ("placement", "form", "pattern", "window", "skew", "mode", "coalesce", "wire")
    options = {name: choices[name] for name in names}
    options["sources"] = read_ranks(choices["src_ranks"], where="--src-ranks")
    options["targets"] = read_ranks(choices["dst_ranks"], where="--dst-ranks")
    usual_depth = DEFAULT_DEPTH if choices["mode"] == "nonblocking" else 1
    options["depth"] = choices["depth"] or usual_depth
    options["groups"] = choices["groups"]
    if choices["mesh"] or choices["axis"]:
        if not (choices["mesh"] and choices["axis"]) or choices["groups"] != "world":
            raise UsageError("--mesh and --axis belong together, without --groups", hint="--mesh dp=2,tp=4 --axis tp")
        options["groups"] = f"mesh:{choices['mesh']}/{choices['axis']}"
    matrix = read_split_bytes(choices, world_size)
    if choices["splits"]:
        matrix = read_matrix(choices["splits"], world_size, where="--splits")
    if matrix:
        options["matrix"] = [value for row in matrix for value in row]
    return options


def read_ranks(text: str | None, *, where: str) -> list[int] | None:
    """`0,2` or `0-3`."""
    if text is None:
        return None
    spans = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word.strip()) for word in text.split(",")]
    if None in spans:
        raise UsageError(f"{text!r} is no list of ranks", hint="write for example 0,2 or 0-3", where=where)
    return [rank for span in spans if span for rank in range(int(span[1]), int(span[2] or span[1]) + 1)]


def choose_traced(text: str | None, cases: Sequence[Case]) -> list[int]:
    """Sizes in bytes of --trace, which must be among those of the cases."""
    from stepscope.core.units import parse_range

    if text is None:
        return []
    measured = list(dict.fromkeys(case.spec.size_bytes or 0 for case in cases))
    wanted = measured if text.strip() == "all" else parse_range(text, where="--trace")
    missing = [size for size in wanted if size not in measured]
    if missing:
        raise UsageError(f"{missing[0]} bytes are not measured", hint="name sizes of --sizes, or all", where="--trace")
    return wanted


def read_split_bytes(choices: dict[str, Any], world_size: int) -> list[list[float]] | None:
    """What --split-bytes says, which is also the size of the message."""
    from stepscope.bench.comms.cases import read_axis
    from stepscope.bench.comms.data import DTYPE_BYTES
    from stepscope.bench.comms.layouts import read_matrix, require_whole_elements

    given = choices["split_bytes"]
    if given is None:
        return None
    if choices["splits"] or was_given("sizes"):
        other = "--splits" if choices["splits"] else "--sizes"
        raise UsageError(f"--split-bytes says what {other} says", hint="give one of them", where="--split-bytes")
    matrix = read_matrix(given, world_size, where="--split-bytes", in_bytes=True)
    for dtype in read_axis(choices["dtypes"], DTYPE_BYTES).values:
        require_whole_elements(matrix, dtype, DTYPE_BYTES.get(dtype, 1))
    return matrix


def list_operations() -> int:
    from stepscope.bench.comms import operations
    from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
    from stepscope.bench.comms.operations import PATTERNS

    listed = [
        {
            "name": one.name,
            "summary": one.summary,
            "reductions": list(REDUCTIONS) if one.reduces else [],
            "rooted": one.rooted,
            "uneven": one.uneven,
            "forms": ["tensor", "list"] if one.cut else ["tensor"],
            "placements": list(PLACEMENTS) if one.both_placements else [PLACEMENTS[not one.in_place]],
            "patterns": list(PATTERNS) if one.name == "send_recv" else [],
        }
        for one in operations().values()
    ]
    text = "\n".join(f"{one.name:16} {one.summary}" for one in operations().values())
    emit({"operations": listed, "dtypes": list(DTYPE_BYTES)}, text)
    return ExitCode.DONE
