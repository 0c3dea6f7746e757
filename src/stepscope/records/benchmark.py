"""What is measured: the benchmark's identity and one point of it, the case."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from stepscope.core.units import escape_line
from stepscope.records.kinds import Parameter, Spec

Implementation = Literal["ootb", "optimized", "micro"]

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=:-]*")


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """`model/implementation/mode/config` with the version of what it computes and the role that answers for it."""

    model: str
    implementation: Implementation
    mode: str
    config: str
    version: int = 1
    """Raised whenever the benchmark computes something else; results of two versions are never compared."""
    owner: str = "operators"
    """A role, never a person."""
    description: str = ""

    def __post_init__(self) -> None:
        for name in ("model", "implementation", "mode", "config"):
            value = getattr(self, name)
            if not _PART.fullmatch(value):
                raise ValueError(f"benchmark {name} {value!r} must be letters, digits and . _ + = : - only")
        if self.version < 1:
            raise ValueError(f"benchmark version {self.version} must be 1 or more")
        if "@" in self.owner or not self.owner:
            raise ValueError(f"benchmark owner {self.owner!r} must be a role")

    @property
    def id(self) -> str:
        return f"{self.model}/{self.implementation}/{self.mode}/{self.config}"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a benchmark: a batch size, a message size, one set of shapes."""

    benchmark: Benchmark
    spec: Spec
    """What was asked for, by its kind."""
    batch_size: int | None = None
    world_size: int = 1
    """Ranks that take part; part of what is measured, so part of the key."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """What the spec states, by name and in the order of labels; changing it changes nothing."""
        return self.spec.list_parameters(self.benchmark.model, self.benchmark.mode)

    @property
    def key(self) -> str:
        """The same content has the same key on every machine: resume and comparison pair cases by it."""
        content = {
            "benchmark": self.benchmark.id,
            "version": self.benchmark.version,
            "parameters": dict(sorted(self.parameters.items())),
            "batch_size": self.batch_size,
            "world_size": self.world_size,
        }
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]

    @property
    def label(self) -> str:
        """What a person sees: the benchmark and the parameters that set this case apart."""
        parameters = ",".join(f"{name}={_plain(value)}" for name, value in self.parameters.items())
        return escape_line(f"{self.benchmark.id}[{parameters}]") if parameters else self.benchmark.id


def _plain(value: Parameter) -> str:
    return "x".join(str(item) for item in value) if isinstance(value, list) else str(value)
