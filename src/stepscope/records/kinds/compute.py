"""Operators, calls of any operator of torch, and whole models."""

from typing import ClassVar

import msgspec

from stepscope.records.kinds.base import BaseObserved, BaseSpec, Parameter

CALL = "call"
"""The operator that stands for any operator of torch."""


class ComputeSpec(BaseSpec, frozen=True, kw_only=True):
    """One operator on inputs of one shape."""

    direction: str
    """`forward`, `backward` …"""
    dtype: str | None = None
    device: str | None = None
    cache: str | None = None
    """`warm` or `cold` inputs; None: warm."""
    compile: bool = False

    @property
    def op(self) -> str:
        raise NotImplementedError

    @property
    def shape(self) -> dict[str, Parameter]:
        raise NotImplementedError

    def list_parameters(self, model: str, mode: str) -> dict[str, Parameter]:
        """`op` and `pass` where the benchmark's own names say something else, as in suites."""
        named: dict[str, Parameter] = {}
        if (self.op, self.direction) != (model, mode):
            named = {"op": self.op, "pass": self.direction}
        stated = {"dtype": self.dtype, "device": self.device, "cache": self.cache, "compile": self.compile or None}
        return {**named, **self.shape, **{name: value for name, value in stated.items() if value is not None}}


class OperatorSpec(ComputeSpec, frozen=True, kw_only=True, tag="operator"):
    op: str
    shape: dict[str, Parameter] = {}
    measured_peak: bool = False
    """Measured to know what the machine can do at best."""

    @property
    def is_measured_peak(self) -> bool:
        return self.measured_peak


class CallSpec(ComputeSpec, frozen=True, kw_only=True, tag="call"):
    """Any operator of torch by its name."""

    target: str
    args: str
    """A JSON list; `kwargs` are a JSON object."""
    kwargs: str
    build: str
    """What a module of torch.nn is made with, as a JSON list; `build_kwargs` the same by name."""
    build_kwargs: str

    @property
    def op(self) -> str:
        return CALL

    @property
    def shape(self) -> dict[str, Parameter]:
        names = ("target", "args", "kwargs", "build", "build_kwargs")
        return {name: getattr(self, name) for name in names}


class OperatorObserved(BaseObserved, frozen=True, kw_only=True, tag="operator"):
    """Work is that of one iteration, as the operator declares it: each input read once, each output written once."""

    flops: int | float | None = None
    moved_bytes: int | float | None = None
    unique_bytes: int | float | None = None
    """Without what a call touches again: rows that are looked up twice. None: all of them."""
    input_sets: int | None = None
    """Copies of the inputs that iterations used in turn."""
    compile_s: float | None = None


class CallObserved(OperatorObserved, frozen=True, kw_only=True, tag="call"):
    """Bytes are those of the tensors that the call is given; operations of matmuls alone."""


class ModelSpec(BaseSpec, frozen=True, kw_only=True):
    device: str | None = None
    precision: str | None = None


class WorkloadSpec(ModelSpec, frozen=True, kw_only=True, tag="workload"):
    scale: str | None = None
    """`full` or `tiny`."""
    parallel: str | None = None
    """How ranks share the model; None: there is one."""
    search: str | None = None
    """The goal of the search that this case is a try of; None: it is no try."""
    accumulate: int | None = None
    """Batches whose gradients are added up; None: as the benchmark declares."""
    data: str | None = None
    """Hash of the user's file of examples; None: synthetic ones."""

    @property
    def is_try(self) -> bool:
        return self.search is not None


class UserModelSpec(BaseSpec, frozen=True, kw_only=True, tag="user_model"):
    """A function in a user's file that builds a step."""

    device: str
    file: str
    function: str
    sha256: str
    precision: str | None = None
    search: str | None = None
    """The goal of the search that this case is a try of; None: it is no try."""

    @property
    def is_try(self) -> bool:
        return self.search is not None


class Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests that came at moments of their own, after the timed batches."""

    requests: int | None = None
    achieved_per_s: float | None = None
    busy_share: float | None = None
    longest_queue: int | None = None
    above_capacity: bool | None = None
    """More was offered than full batches do."""
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None
    latency_p99_s: float | None = None
    offered_per_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    missed_latency: bool | None = None
    """None: nothing limits how long they take."""


class ModelObserved(BaseObserved, frozen=True, kw_only=True):
    """What every whole model reports beside its times."""

    peak_memory_bytes: int | float | None = None
    energy_j_per_example: float | None = None
    trace: str | None = None
    """Where a few steps were recorded, relative to the run folder."""


class WorkloadObserved(ModelObserved, frozen=True, kw_only=True, tag="workload"):
    LAST: ClassVar[tuple[str, ...]] = (
        "peak_memory_bytes", "tokens_per_s", "energy_j_per_example", "serving", "trace", "traced_ranks", "model_flops",
        "peak_flops", "peak_source", "check", "check_examples", "check_errors", "check_s", "other",
    )  # fmt: skip
    NAMES: ClassVar[dict[str, str]] = {"check_errors": "check_{}"}

    setup_s: float | None = None
    round_steps: int | None = None
    """Steps that together stand for all, where batches differ in shape; None: they are alike."""
    porting: str | None = None
    """What had to be changed to run the plain model here."""
    changes: str | None = None
    """What the optimized implementation changes."""
    compile_backend: str | None = None
    tokens_per_s: float | None = None
    """New tokens of all sequences over time, prefill included."""
    serving: Serving | None = None
    traced_ranks: str | None = None
    """Ranks whose steps were recorded, where not all were."""
    model_flops: int | float | None = None
    """Operations of one step over all ranks, as the out-of-the-box model needs them."""
    peak_flops: int | float | None = None
    """Per second, as the makers of all devices together promise."""
    peak_source: str | None = None
    check: str | None = None
    """`passed`, or why nothing was compared."""
    check_examples: int | None = None
    """Where fewer than the batch were compared."""
    check_errors: dict[str, float] = {}
    """By what was compared and its precision (`gradients_fp32`)."""
    check_s: float | None = None


class UserModelObserved(ModelObserved, frozen=True, kw_only=True, tag="user_model"):
    LAST: ClassVar[tuple[str, ...]] = ("peak_memory_bytes", "energy_j_per_example", "trace", "other")

    batch_size: int | None = None
    """The function's own default, where none was asked for."""
    examples: float | int | None = None
    """Per step."""
