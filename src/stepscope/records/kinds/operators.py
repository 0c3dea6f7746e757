"""Operators, and calls of any operator of torch."""

from __future__ import annotations

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
