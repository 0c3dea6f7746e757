"""What several ranks do together: collectives, messages, both beside kernels, and the exchanges of a whole step."""

from typing import ClassVar, Literal

import msgspec

from stepscope.records.kinds.base import BaseObserved, BaseSpec, Number, Parameter, Scalar

COMMUNICATION_OWNER = "communication"
POINT_TO_POINT = "send_recv"
Mode = Literal["blocking", "nonblocking", "graph"]
WORLD = "world"
COMPUTE, COMM, TOGETHER = "compute", "comm", "together"
"""Names of an overlap's times in the samples: what computes, the first collective, and all at once."""
SETUP_PHASES = ("rendezvous", "create", "first_collective")
"""Names of the times of a process group until it works; together they are the case's time."""
LATER_PHASES = ("next_collective", "destroy")


class CollectiveSpec(BaseSpec, frozen=True, kw_only=True, tag="collective"):
    NAMELESS: ClassVar[frozenset[str]] = frozenset({"operation"})
    ALWAYS: ClassVar[frozenset[str]] = frozenset({"size_bytes", "dtype", "device"})

    operation: str
    size_bytes: int
    dtype: str = "float32"
    device: str = "cpu"
    splits: str | None = None
    """Who chose the pieces of an uneven operation; only imported results have it."""
    reduction: str = "sum"
    root: int = 0
    placement: str | None = None
    """`in_place` or `out_of_place`, where it is not the operation's usual."""
    form: str = "tensor"
    pattern: str | None = None
    """Who sends messages to whom."""
    window: int = 1
    sources: list[int] | None = None
    """Ranks that send, one for each of `targets`, in place of those of the pattern."""
    targets: list[int] | None = None
    skew: Number | None = None
    matrix: list[Number] | None = None
    """Row by row, one per sender; or a single row, which is every sender's."""
    mode: Mode = "blocking"
    depth: int = 1
    coalesce: int = 1
    wire: str | None = None
    """The encoding in which float32 data travels; None: as it is."""
    groups: str = WORLD
    group: int | None = None
    """The only one that acts; None: all at the same time."""
    round: int | None = None
    """Round of a search that measures again what it measured before."""
    clock: str | None = None
    """`issue` in imported results where the host's time to issue the calls was taken."""

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.sources or (), self.targets or (), strict=True))


class PointToPointSpec(CollectiveSpec, frozen=True, kw_only=True, tag="point_to_point"):
    """Messages between ranks, by a pattern or between the named ranks."""


class PairSpec(BaseSpec, frozen=True, kw_only=True, tag="pair"):
    """Messages from one rank to one other."""

    ALWAYS: ClassVar[frozenset[str]] = frozenset({"dtype", "device"})

    source: int
    target: int
    size_bytes: int
    dtype: str = "float32"
    device: str = "cpu"


class OverlapSpec(BaseSpec, frozen=True, kw_only=True, tag="overlap"):
    """A kernel beside a collective, or several collectives at once."""

    ALWAYS: ClassVar[frozenset[str]] = frozenset({"dtype", "device"})

    collective: str
    size_bytes: int
    compute: str | None = None
    """None: collectives alone beside each other."""
    dtype: str = "float32"
    device: str = "cpu"
    repeat: int | None = None
    """Kernels launched in a row; None: as many as take about as long as the longest collective."""
    groups: str = WORLD
    beside: list[str] = []


class PatternSpec(BaseSpec, frozen=True, kw_only=True, tag="pattern"):
    """The communication of one step of a job."""

    pattern: str
    options: dict[str, Parameter] = {}
    """Those of the pattern that are not usual."""
    overlap: bool = True
    device: str = "cpu"

    def list_parameters(self, model: str, mode: str) -> dict[str, Parameter]:
        stated: dict[str, Parameter] = {} if self.overlap else {"overlap": False}
        return {**self.options, **stated, **({"device": self.device} if self.device != "cpu" else {})}


class ProcessGroupSpec(BaseSpec, frozen=True, kw_only=True, tag="process_group"):
    """All ranks become a process group, communicate once, and leave it; again and again."""

    device: str = "cpu"
    eager: bool = False
    """Whether the library connects while the group is created (torch's `device_id`), not in the first collective."""


class ExchangeObserved(BaseObserved, frozen=True, kw_only=True):
    """What every measurement of several ranks finds."""

    LAST: ClassVar[tuple[str, ...]] = ("trace", "clock_error_s", "wrong", "checked", "library", "other")

    trace: str | None = None
    """Where it was recorded, relative to the run folder."""
    clock_error_s: float | None = None
    """How far the ranks' clocks may be apart."""
    wrong: int | None = None
    """Elements that are not what they must be; None: not compared."""
    checked: int | None = None
    """Samples whose results were compared."""
    library: str | None = None
    """That carried the data, with its version."""


class MessageObserved(ExchangeObserved, frozen=True, kw_only=True):
    """A message and what it means for the links."""

    size_bytes: int | float | None = None
    """What was really moved."""
    count: int | None = None
    """Elements per rank."""
    bus_factor: float | None = None
    """Bytes on the busiest link over `size_bytes`."""
    members: int | None = None
    """Ranks of the largest group."""


class CollectiveObserved(MessageObserved, frozen=True, kw_only=True, tag="collective"):
    NAMES: ClassVar[dict[str, str]] = {"iteration": "iteration_{}"}

    groups: int | None = None
    """That acted at once."""
    wire_bytes: int | None = None
    """Bytes in the encoding of the wire."""
    error_max: float | None = None
    error_l2: float | None = None
    error_bound: float | None = None
    composed: str | None = None
    """What it was made of where the library has no such call."""
    algbw_bytes_per_s: float | None = None
    """As another tool printed it; None: derived from size and time."""
    busbw_bytes_per_s: float | None = None
    average_s: float | None = None
    """The time that the tool of imported results itself printed."""
    iteration: dict[str, float] = {}
    """Statistics over single iterations in imported results (`min_s`, `p99_s`)."""


class PointToPointObserved(CollectiveObserved, frozen=True, kw_only=True, tag="point_to_point"):
    """As of a collective."""


class PairObserved(MessageObserved, frozen=True, kw_only=True, tag="pair"):
    source_host: str | None = None
    target_host: str | None = None
    source_nic: str | None = None
    target_nic: str | None = None


class OverlapSide(msgspec.Struct, frozen=True, kw_only=True):
    """One of the collectives that ran beside others."""

    name: str
    """`comm`, `comm2` …: the name its times have in the samples."""
    collective: str
    size_bytes: int
    bus_bytes: float


class OverlapObserved(ExchangeObserved, frozen=True, kw_only=True, tag="overlap"):
    size_bytes: int | float | None = None
    """For all collectives together."""
    bus_factor: float | None = None
    members: int | None = None
    sides: list[OverlapSide] = []
    repeat: int | None = None
    """Kernels launched in a row."""
    compute_flops: int | float | None = None
    compute_bytes: int | float | None = None


class PatternStep(msgspec.Struct, frozen=True, kw_only=True):
    """One communication of a step."""

    name: str
    operation: str
    size_bytes: int
    bus_bytes: int


class PatternLookup(msgspec.Struct, frozen=True, kw_only=True):
    """Lookups in embedding tables, on the rank that has most."""

    name: str
    """The step: its times are called `step:NAME`."""
    tables: int
    rows: int
    """Per table."""
    moved_bytes: int
    """Rows and indices that are read, and sums that are written."""


class PatternObserved(ExchangeObserved, frozen=True, kw_only=True, tag="pattern"):
    steps: int | None = None
    """Communications of one step of the job."""
    busiest_rank_bytes: int | float | None = None
    sequence: list[PatternStep] = []
    composed: str | None = None
    lookups: list[PatternLookup] = []

    def name_facts(self, field: str, value: object) -> dict[str, Scalar]:
        if field == "sequence":
            steps = (f"{one.name}:{one.operation}:{one.size_bytes}:{one.bus_bytes}" for one in self.sequence)
            return {"sequence": " ".join(steps)} if self.steps is not None else {}
        return super().name_facts("bytes" if field == "busiest_rank_bytes" else field, value)


class ProcessGroupObserved(ExchangeObserved, frozen=True, kw_only=True, tag="process_group"):
    NAMES: ClassVar[dict[str, str]] = {"cold": "cold_{}_s"}

    members: int | None = None
    """Ranks of the group."""
    cold: dict[str, float] = {}
    """Seconds of each phase when the processes did it for the first time, on the rank where it took longest."""
