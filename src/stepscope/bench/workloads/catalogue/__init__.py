"""The declared table of the suite: one TOML file a model, read as one table. Loads no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stepscope.bench.workloads.protocol import PRECISIONS, Mode, Precision
from stepscope.records import Benchmark, LatencyTarget
from stepscope.records.case import Implementation

if TYPE_CHECKING:
    from stepscope.bench.workloads.protocol import Optimized, Task

Scale = Literal["full", "tiny"]
SCALES: tuple[Scale, ...] = ("full", "tiny")


class Tiny(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same code small enough for two CPU cores."""

    batch_size: int
    sizes: dict[str, Any] = {}
    """Over those of the full scale."""


class Declared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the table: what is measured, and the rules it is measured under."""

    mode: Mode
    config: str
    description: str
    version: int = 1
    """Raised whenever the benchmark computes something else."""
    precision: Precision
    """Precision of the out-of-the-box implementation, unless another is asked for."""
    precisions: list[Precision]
    """Those that are known to be viable for the model."""
    batch_size: int
    max_batch_size: int | None = None
    """Training: the largest batch with which the model is known to converge."""
    latency_limit_s: float | None = None
    """Inference: limit for one batch."""
    latency_percentile: float = 95.0
    limit_reason: str = ""
    source: str
    """Where the sizes come from."""
    parameters: int | None = None
    """Published or tallied number of weights, which a test compares."""
    devices: int = 1
    accumulate: int = 1
    """Batches whose gradients are added up for one step."""
    sizes: dict[str, Any]
    tiny: Tiny

    def __post_init__(self) -> None:
        if self.precision not in self.precisions:
            raise ValueError(f"{self.config}: {self.precision} is not among its precisions")
        if self.mode == "train" and self.max_batch_size is None:
            raise ValueError(f"{self.config}: training needs max_batch_size")
        if self.mode == "infer" and self.latency_limit_s is None:
            raise ValueError(f"{self.config}: inference needs latency_limit_s")
        if self.latency_limit_s is not None and not self.limit_reason:
            raise ValueError(f"{self.config}: a latency limit needs limit_reason")

    def sizes_at(self, scale: Scale) -> dict[str, Any]:
        return self.sizes if scale == "full" else {**self.sizes, **self.tiny.sizes}

    def batch_size_at(self, scale: Scale) -> int:
        return self.batch_size if scale == "full" else self.tiny.batch_size

    @property
    def latency_target(self) -> LatencyTarget | None:
        if self.latency_limit_s is None:
            return None
        return LatencyTarget(limit_s=self.latency_limit_s, percentile=self.latency_percentile)


class DeclaredModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the table."""

    model: str
    domain: str
    task: str
    """`module:Class` of the out-of-the-box implementation, below `stepscope.bench.workloads.models`."""
    optimized: str
    shards: bool = False
    """Whether ranks can share it part by part instead of each having all of it: its tasks then have `shard`."""
    benchmark: list[Declared]

    def make_task(self, sizes: Mapping[str, Any]) -> Task:
        return _load(self.task)(sizes)  # type: ignore[no-any-return]

    def make_optimized(self, plain: Task) -> Optimized:
        return _load(self.optimized)(plain)  # type: ignore[no-any-return]

    def identify(self, declared: Declared, implementation: Implementation) -> Benchmark:
        return Benchmark(
            model=self.model,
            implementation=implementation,
            mode=declared.mode,
            config=declared.config,
            version=declared.version,
            owner=self.domain,
            description=declared.description,
        )


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"stepscope.bench.workloads.models.{module}"), name)


@cache
def read_catalogue() -> dict[str, DeclaredModel]:
    """By the model's name, in the order of the suite."""
    found = {}
    for file in resources.files(__package__).iterdir():
        if file.name.endswith(".toml"):
            declared = parse_model(file.read_text(encoding="utf-8"))
            found[declared.model] = declared
    return {name: found[name] for name in sorted(found, key=_place)}


def parse_model(text: str) -> DeclaredModel:
    """A benchmark takes what it does not say itself from the one that it is `like`, an earlier one of the same mode; or
    from `[train]` or `[infer]`, and what those do not say from the top of the file, of which `[sizes]` and `[tiny]`
    are part."""
    read = tomllib.loads(text)
    modes = {mode: read.pop(mode, {}) for mode in ("train", "infer")}
    facts = {name: read.pop(name) for name in DeclaredModel.__struct_fields__ if name in read}
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for one in facts["benchmark"]:
        mode, like = one["mode"], one.pop("like", None)
        below = known[mode, like] if like else _put_over(read, modes[mode])
        known[mode, one["config"]] = _put_over(below, one)
    return msgspec.convert({**facts, "benchmark": list(known.values())}, DeclaredModel)


def _put_over(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: _put_over(below.get(name, {}), own.get(name, {})) for name in ("sizes", "tiny") if name in below}
    return {**below, **own, **parts}


SUITE = ("dlrm", "xlmr", "cvt", "oscar", "rnnt", "resnext3d", "regnety")
"""The seven models of Proxy Workloads; the others are here because other parts need them."""


def _place(model: str) -> tuple[int, str]:
    return (SUITE.index(model) if model in SUITE else len(SUITE), model)


__all__ = ["PRECISIONS", "SCALES", "SUITE", "Declared", "DeclaredModel", "Scale", "Tiny", "read_catalogue"]
