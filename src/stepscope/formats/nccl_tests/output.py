"""What one test of nccl-tests gave, as plain values, and what its programs measure."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Literal, NamedTuple

import msgspec

from stepscope.core.collectives import FACTS, bus_factor

Placement = Literal["out_of_place", "in_place"]

SPLIT_HINT = "split the file: one test per file"
PARTIAL_HINT = "repeat the test, or keep the whole rows with --partial"
FOREIGN_HINT = "give the standard output of all_reduce_perf and the like, or the file it wrote with -J"

LARGEST = 2**63 - 1
"""Largest size or count."""


class Operation(NamedTuple):
    """What nccl-tests measures under one program name."""

    name: str
    """As Stepscope calls it."""
    usual: Placement = "out_of_place"
    splits: str | None = None
    """Who chose its pieces, where that tells it from Stepscope's operation of the same name."""

    def bus_factor(self, members: int) -> float:
        """Bus bytes over the size in the table."""
        return bus_factor(self.name, members) or 0.0

    @property
    def reduces(self) -> bool:
        return FACTS[self.name].reduces

    @property
    def rooted(self) -> bool:
        return FACTS[self.name].rooted


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", usual="in_place"),
    "reduce": Operation("reduce", usual="in_place"),
    "broadcast": Operation("broadcast", usual="in_place"),
    "all_gather": Operation("all_gather"),
    "reduce_scatter": Operation("reduce_scatter"),
    "alltoall": Operation("all_to_all"),
    "alltoallv": Operation("all_to_allv", splits="nccl-tests"),
    "gather": Operation("gather"),
    "scatter": Operation("scatter"),
    "sendrecv": Operation("send_recv"),
    # Its own algorithmic bandwidth leaves out the rank's own piece; the bus bandwidth is the same either way.
    "hypercube": Operation("hypercube"),
}
"""By program, without `_perf`."""


class NcclRank(msgspec.Struct, frozen=True, kw_only=True):
    """One of the lines `#  Rank  0 Group  0 Pid …`; the JSON's names where they are others."""

    rank: int
    group: int = 0
    pid: int
    host: str = msgspec.field(name="hostname")
    device: int
    name: str = msgspec.field(name="device_info", default="")
    pci_address: str = msgspec.field(name="device_hex", default="")


class NcclRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size in one placement; times in seconds, rates in bytes per second."""

    where: str
    """The line, or the place in the JSON."""
    placement: Placement
    size_bytes: int
    count: int
    dtype: str
    """As nccl-tests names it."""
    redop: str = "none"
    root: int = -1
    """-1: the operation has none."""
    time_s: float
    """Time of one collective, averaged over ranks and iterations."""
    algbw_bytes_per_s: float | None = None
    busbw_bytes_per_s: float | None = None
    wrong: int | None = None
    """Wrong elements; None: not checked, or not counted."""
    exceeds: bool = False
    """Marked as beyond the threshold, in versions that print a deviation in place of a count."""
    iterations: int | None = None
    """Iterations that were run, where the file says so for each row."""
    iteration_s: list[float] = []
    """Time of each iteration on the slowest rank, by device events; only JSON has them."""
    iteration_stats: dict[str, float] = {}
    """`min_s`, `max_s`, `p99_s` and `cv` of them, where only these were printed."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value > 0 for value in (self.time_s, *self.iteration_s)):
            raise ValueError("the time is not a number above zero")
        for name, value in (("size", self.size_bytes), ("count", self.count), ("#wrong", self.wrong or 0)):
            if not 0 <= value <= LARGEST:
                raise ValueError(f"{value} under {name} is not between 0 and {LARGEST}")

    @property
    def is_wrong(self) -> bool:
        return self.exceeds or bool(self.wrong)


class NcclOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One test."""

    format: Literal["text", "json"]
    tool: str = "nccl-tests"
    tool_version: str | None = None
    program: str | None = None
    """`all_reduce`: without path and `_perf`; None where the file does not name it."""
    library_version: str | None = None
    """NCCL as it was loaded."""
    headers_version: str | None = None
    """NCCL as the tests were compiled against."""
    cuda_version: str | None = None
    ranks: list[NcclRank]
    """In order of rank."""
    ranks_per_line: int = 1
    """Ranks that one entry of `ranks` stands for: JSON names the first of each process only."""
    parameters: dict[str, int | str] = {}
    environment: dict[str, str] = {}
    host_time: bool = False
    """Times are how long the host needed to issue the calls (`-C 1`), not how long they took."""
    rows: list[NcclRow]
    out_of_bounds: int | None = None
    average_busbw_bytes_per_s: float | None = None
    remarks: list[str] = []
    """What a reader of the numbers has to know: rows left out, errors of the library."""

    @property
    def world_size(self) -> int:
        """0 where no rank is listed."""
        return self.ranks[-1].rank + self.ranks_per_line if self.ranks else 0

    @property
    def groups(self) -> int:
        return len({rank.group for rank in self.ranks})

    @property
    def members(self) -> int:
        """Ranks of the group that rank 0 is in: the printed numbers are those of that group."""
        if self.groups < 2:
            return self.world_size
        return sum(rank.group == self.ranks[0].group for rank in self.ranks) * self.ranks_per_line

    def describe_groups(self) -> str:
        """In the words of `bench comms --groups`; of ranks that are not listed only the number of groups is known."""
        colours = [rank.group for rank in self.ranks]
        if len(colours) < self.world_size:
            return f"{self.groups} groups"
        if colours == [number % self.groups for number in range(self.world_size)]:
            return f"split:{self.groups}"
        return f"colours:{','.join(map(str, colours))}"

    def count_averaged(self, row: NcclRow) -> int | None:
        """Collectives that the row's time is the average of; None where the file does not say."""
        iterations = row.iterations or self.parameters.get("iterations")
        if not isinstance(iterations, int) or iterations < 1:
            return None
        factors = (self.parameters.get(name) for name in ("aggregated_iterations", "graph_launches"))
        return iterations * math.prod(max(1, factor) for factor in factors if isinstance(factor, int))


def format_version_code(code: int) -> str:
    """`23003` → `2.30.3`; NCCL counted in steps of 1000 before 2.9."""
    step = 10_000 if code >= 10_000 else 1_000
    return f"{code // step}.{code % step // 100}.{code % 100}"


def find_program(text: str) -> str | None:
    """`./build/all_reduce_perf` → `all_reduce`; None for what is no program of nccl-tests."""
    name = PurePath(text).name.removesuffix("_mpi").removesuffix("_perf")
    return name if name in OPERATIONS else None


def parse_number(cell: str, column: str) -> float:
    """Raises ValueError with the rule that the cell breaks."""
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{cell!r} under {column} is no number") from None


def parse_rate(cell: str | float) -> float | None:
    """GB/s in bytes per second; None for what is no rate."""
    try:
        value = float(cell) * 1e9
    except ValueError:
        return None
    return value if math.isfinite(value) else None
