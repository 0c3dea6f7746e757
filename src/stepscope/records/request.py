"""How the cases of a run are measured: one typed request per verb, which the plan keeps."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from stepscope.stats import DEFAULT_LEVEL

Check = Literal["all", "sample", "off"]
"""Iterations of an exchange whose results are compared: every one; the 1st, 2nd, 4th … and one more; none."""


class MeasureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults answer in about two seconds per case on an unloaded machine."""

    target_width: float = 0.01
    """Stop when half the interval of the median is this fraction of it."""
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
    """… and until the clock's step is at most this fraction of a sample."""
    iterations: int | None = None
    """A fixed number of iterations per sample instead (1 for collectives)."""
    warmup_samples: int | None = None
    """Exactly so many samples of warm-up, however stable they look; 0: none at all."""
    warmup_min_samples: int = 4
    warmup_min_time_s: float = 0.0
    """However stable it looks: a GPU lowers its clocks only some tenths of a second into a heavy load."""
    warmup_max_time_s: float = 2.0
    stable_share: float = 0.03
    """Warm-up ends when two neighbouring windows of samples agree to this fraction."""
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
"""For sweeps and smoke tests: a few hundredths of a second per case."""


class UntilDecided(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh processes until a comparison with another run can be decided."""

    baseline: str
    """Name of that run."""
    resolution: float
    """The change that must be visible, as a fraction."""
    max_processes: int


class BaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every kind of run may be asked, apart from its cases."""

    settings: MeasureSettings = MeasureSettings()
    device: str = "cpu"
    processes: int = 1
    """Fresh processes that measure each case one after the other."""
    until_decided: UntilDecided | None = None
    tag: str | None = None
    """A word for people, in tables and SQL."""
    backend: str | None = None
    """What ranks communicate with; None: there is one process."""
    hang_timeout_s: float = 300.0
    """How long a rank may send no heartbeat."""
    cluster: dict[str, Any] | None = None
    """The cluster file or host file that the ranks were started by."""
    side: str | None = None
    """What a person typed for this side of an A/B comparison."""
    environment: dict[str, str] = {}
    """Variables that only the processes of this side have."""
    partner: str | None = None
    """Run of the other side, in the one that was made second."""

    @property
    def searches(self) -> bool:
        """Whether the cases to come depend on what was measured."""
        return False


class TracedCallRecord(msgspec.Struct, kw_only=True):
    """One operator with one set of inputs, as a run keeps it."""

    operator: str
    inputs: str
    """For people: sizes and dtypes."""
    count: int
    """Calls in all steps of the trace."""
    trace_s: float | None = None
    """Profiled time of all these calls, on the device where the trace has one. None: the trace has no times."""
    key: str | None = None
    """The key of the case that measures it; None: it is not measured."""
    skip: str | None = None
    """Why it cannot be run."""
    assumed: list[str] = []
    """Inputs that were not recorded, as the operator's schema has them."""


class TracedCallsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run keeps of the trace that its cases came from."""

    sources: list[str]
    steps: int
    calls: list[TracedCallRecord]
    """By their time in the trace, then by count."""
    on_device: bool | None = None
    """Whether times are device times; None: there are none."""
    busy_s: float | None = None
    """Time of all work in the trace that was looked at, all steps: device time, or host time of operators."""
    left_s: dict[str, float] = {}
    """Time that belongs to no operator's call, by reason."""
    profiled_step_s: float | None = None
    unprofiled_step_s: float | None = None
    """A step's own time, where the recording has measured it."""


class OperatorRequest(BaseRequest, frozen=True, kw_only=True, tag="ops"):
    check: bool = True
    """Compare each case's result with float64."""
    kernels: bool = False
    """Look with the profiler which kernels ran."""
    graph: bool = False
    """Time graph replays too, where the device has graphs."""
    table: str | None = None
    """File of the kernel table that is written at the end."""
    from_trace: TracedCallsRecord | None = None


class BisectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The collective that subsets of the ranks run, and when one is slow."""

    collective: str
    size_bytes: int
    threshold: float


class CommunicationRequest(BaseRequest, frozen=True, kw_only=True, tag="comms"):
    backend: str = "gloo"
    check: Check = "sample"
    device_time: bool = False
    """Whether the device's clock gives a case its time."""
    collectives: list[str] = []
    patterns: list[str] = []
    trace: list[int] = []
    """Sizes in bytes of the cases that are recorded by the profiler after they were timed."""
    per_rank: bool = False
    """Show the averages of each rank, too."""
    bisect: BisectionRequest | None = None
    init_only: bool = False
    """Whether the cases form process groups, so that none may exist beside."""

    @property
    def searches(self) -> bool:
        return self.bisect is not None


class BatchSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search for the batch size with the best score."""

    goal: str
    largest: int | None = None
    """None: memory is the only limit."""
    resolution: float
    first: int = 1


class WorkloadRequest(BaseRequest, frozen=True, kw_only=True, tag="workload"):
    check: bool = True
    """Compare optimized implementations with the one out of the box; without it they have no score."""
    loader_workers: int | None = 2
    """Processes that feed the second score; None: only batches that are ready on the device."""
    trace: bool = False
    """Record a few steps after the timed ones."""
    compile_backend: str = "inductor"
    """Backend of torch.compile."""
    data: str | None = None
    """A user's examples instead of synthetic ones."""
    find_batch: BatchSearch | None = None
    rate_per_s: float | None = None
    """Requests per second that come to a decoder after the timed batches; None: none do."""
    requests: int = 64

    @property
    def searches(self) -> bool:
        return self.find_batch is not None


class ImportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Output of another tool. The file itself is not kept, since its JSON form holds a whole environment."""

    tool: str
    tool_version: str | None = None
    headers_version: str | None = None
    format: str
    file: str
    sha256: str


class ToolSummary(msgspec.Struct, frozen=True, kw_only=True):
    out_of_bounds: int | None = None
    average_busbw_bytes_per_s: float | None = None


class ImportedRank(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    group: int = 0
    pid: int
    host: str
    device: int
    name: str = ""
    pci_address: str = ""


class ImportRequest(BaseRequest, frozen=True, kw_only=True, tag="import"):
    """Who measured what, with which tool."""

    imported_from: ImportedFile
    tool_parameters: dict[str, int | str] = {}
    tool_summary: ToolSummary = ToolSummary()
    ranks: list[ImportedRank] = []


class OtherRequest(BaseRequest, frozen=True, kw_only=True, tag="other"):
    """What an older version stored and no kind says."""

    content: dict[str, Any] = {}


Request = OperatorRequest | CommunicationRequest | WorkloadRequest | ImportRequest | OtherRequest

REQUESTS: dict[str, type[Request]] = {
    "ops": OperatorRequest,
    "comms": CommunicationRequest,
    "workload": WorkloadRequest,
    "suite": WorkloadRequest,
    "import": ImportRequest,
}
"""By the verb of the plan."""


def make_request(verb: str, content: Mapping[str, Any]) -> Request:
    """From names and values, as formats before 3 kept them: names that the verb has no field for are left out."""
    struct = REQUESTS.get(verb, OtherRequest)
    try:
        return msgspec.convert({**content, "kind": struct.__struct_config__.tag}, struct)
    except msgspec.ValidationError:
        return OtherRequest(content=dict(content))
