"""What a benchmark computes, as short texts: they change when it does, and then its version must too."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.workloads.precision import math_of
from stepscope.workloads.registry import Workload, list_workloads

if TYPE_CHECKING:
    from torch import nn

FILE = "fingerprints.json"
BATCH = 2


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Of the out-of-the-box form."""

    version: int
    """Of the benchmark."""
    configuration: str
    """Declared sizes of both scales, batch sizes, precision, accumulation."""
    weights: str
    """Names, shapes and dtypes of the full model's parameters."""
    graph: str
    """Operators and shapes of one step of the tiny model, in their order; depends on torch's version."""


class StoredFingerprints(msgspec.Struct, frozen=True, kw_only=True):
    made_with: dict[str, str]
    """Versions of torch and transformers: another one may write the same step with other operators."""
    benchmarks: dict[str, Fingerprint]


def read_fingerprints() -> StoredFingerprints:
    text = resources.files("stepscope.workloads").joinpath(FILE).read_bytes()
    return msgspec.json.decode(text, type=StoredFingerprints)


def name_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def benchmarks_to_mark() -> dict[str, Workload]:
    """By id without the implementation: both forms compute the same."""
    return {
        f"{one.model.model}/{one.declared.mode}/{one.declared.config}": one
        for one in list_workloads()
        if one.implementation == "ootb"
    }


def take_fingerprint(one: Workload) -> Fingerprint:
    return Fingerprint(
        version=one.declared.version,
        configuration=_hash(_describe_configuration(one)),
        weights=_hash(_describe_weights(_build_without_memory(one))),
        graph=_hash(_list_operators(one)),
    )


def _describe_configuration(one: Workload) -> dict[str, Any]:
    declared = one.declared
    return {
        "sizes": declared.sizes,
        "tiny": msgspec.to_builtins(declared.tiny),
        "batch_size": declared.batch_size,
        "precision": declared.precision,
        "accumulate": declared.accumulate,
        "devices": declared.devices,
    }


def _build_without_memory(one: Workload) -> nn.Module:
    import torch

    with torch.device("meta"):
        return one.make_plain("full").build()


def _describe_weights(module: nn.Module) -> list[str]:
    return [f"{name} {list(weight.shape)} {weight.dtype}" for name, weight in module.state_dict().items()]


def _list_operators(one: Workload) -> list[str]:
    """Of one step at the tiny scale, on the CPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            shapes = [list(value.shape) for value in args if isinstance(value, torch.Tensor)]
            seen.append(f"{function} {shapes}")
            return function(*args, **(kwargs or {}))

    task, mode = one.make_plain("tiny"), one.declared.mode
    torch.manual_seed(0)
    module = task.build().train(mode == "train")
    batch = task.make_batch(BATCH, seed=0, mode=mode)
    watch = Watch()  # type: ignore[no-untyped-call]
    with watch, math_of("fp32", mode=mode, device="cpu"):
        if mode == "train":
            task.loss(module, batch).backward()  # type: ignore[no-untyped-call]
        else:
            task.infer(module, batch)
    return seen


def _hash(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]
