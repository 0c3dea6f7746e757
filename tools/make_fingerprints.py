"""What each benchmark of the workloads computes, in short texts: where one changes, its version must change too.

python tools/make_fingerprints.py writes them anew; it refuses to where a benchmark changed and its version did not.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.bench.workloads.facts import countable_kernels
from stepscope.bench.workloads.generation import Decoder, generate_plainly
from stepscope.bench.workloads.precision import math_of
from stepscope.bench.workloads.protocol import Setting
from stepscope.bench.workloads.registry import Workload, list_workloads

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.bench.workloads.protocol import Mode, Task

PLACE = Path(__file__).parents[1] / "tests" / "workloads" / "fingerprints.json"
PARTS = ("configuration", "weights", "optimizer", "graph")
METHOD = 2
"""Version of the way in which a benchmark is looked at; those taken by different ones cannot be compared. It is raised
in a change of its own that leaves every benchmark as it is, because nothing else would be noticed in it."""
BATCH = 2
DIGITS = 6
"""Significant digits of a number that an operator is called with: roots, powers and single precision leave no more
alike everywhere."""
IMPLIED_OPTIONS = {"decoupled_weight_decay"}
"""Options of optimizers that their kind says already, and that torch before 2.7 does not have it."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark computes, by its out-of-the-box implementation."""

    version: int
    """The benchmark's version."""
    configuration: str
    """Declared sizes of both scales, batch sizes, precision, accumulation."""
    weights: str
    """Names, shapes and dtypes of the full model's parameters."""
    optimizer: str = ""
    """Its kind and options, and which of the full model's parameters each group holds; empty in inference."""
    graph: str
    """Operators of one step of the tiny model, in their order, with the shapes, dtypes and scalars that they are called
    with: backward and optimizer are part of a training step, and a decoder generates. Depends on torch's version."""


class StoredFingerprints(msgspec.Struct, frozen=True, kw_only=True):
    method: int = 1
    made_with: dict[str, str]
    """Versions of torch and transformers: another one may write the same step with other operators."""
    benchmarks: dict[str, Fingerprint]


def read_fingerprints() -> StoredFingerprints:
    return msgspec.json.decode(PLACE.read_bytes(), type=StoredFingerprints)


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
    full = one.make_ootb("full")
    module = _build_without_memory(full)
    return Fingerprint(
        version=one.declared.version,
        configuration=_hash(_describe_configuration(one)),
        weights=_hash(_describe_weights(module)),
        optimizer=_hash(_describe_optimizer(full, module)) if one.declared.mode == "train" else "",
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


def _build_without_memory(task: Task) -> nn.Module:
    import torch

    with torch.device("meta"):
        return task.build()


def _describe_weights(module: nn.Module) -> list[str]:
    return [f"{name} {list(weight.shape)} {weight.dtype}" for name, weight in module.state_dict().items()]


def _describe_optimizer(task: Task, module: nn.Module) -> dict[str, Any]:
    optimizer = task.make_optimizer(module)
    names = {id(weight): name for name, weight in module.named_parameters()}
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {"weights": [names[id(one)] for one in group["params"]], "options": _options_of(group)}
            for group in optimizer.param_groups
        ],
    }


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are off: a later torch may have more of them."""
    return {
        name: _describe_argument(value)
        for name, value in group.items()
        if name not in IMPLIED_OPTIONS | {"params"} and value is not None and value is not False
    }


def _list_operators(one: Workload) -> list[str]:
    """Operators of one step at the tiny scale, on the CPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            # Marks for profilers compute nothing.
            if not str(function).startswith("profiler."):
                seen.append(f"{function} {_describe_argument(args)} {_describe_argument(named)}")
            return function(*args, **named)

    task, mode = one.make_ootb("tiny"), one.declared.mode
    torch.manual_seed(0)
    module = task.build().train(mode == "train")
    batch = task.make_batch(BATCH, seed=0, mode=mode)
    watch = Watch()  # type: ignore[no-untyped-call]
    with countable_kernels("cpu"), math_of(Setting(mode, "fp32", "cpu")), watch:
        for part in _make_step(task, module, batch, mode):
            seen.append(f"# {part}")
    return seen


def _make_step(task: Task, module: nn.Module, batch: Mapping[str, torch.Tensor], mode: Mode) -> Iterator[str]:
    """Says after each part what it was."""
    if mode == "train":
        optimizer = task.make_optimizer(module)
        task.loss(module, batch).backward()  # type: ignore[no-untyped-call]
        yield "gradients"
        for _ in range(2):  # what an optimizer remembers counts from its second step on
            optimizer.step()
            yield "optimizer"
        return
    task.infer(module, batch)
    yield "infer"
    if isinstance(task, Decoder):
        yield from generate_plainly(task, module, batch)


def _describe_argument(value: Any) -> Any:
    """A tensor is described by its kind only: values differ between machines. Devices and handles have no more than a
    name."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, list | tuple):
        return [_describe_argument(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _describe_argument(value[name]) for name in sorted(value)}
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    return type(value).__name__


def _hash(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]


def main() -> None:
    before = read_fingerprints() if PLACE.exists() else None
    if before is not None and before.method != METHOD:
        print(f"the stored ones were taken by method {before.method}: nothing is compared")
        before = None
    made_with = name_versions()
    found = {name: take_fingerprint(one) for name, one in benchmarks_to_mark().items()}
    same_tools = before is not None and before.made_with == made_with
    for name, new in found.items():
        old = before.benchmarks.get(name) if before is not None else None
        if old is None or old == new or new.version > old.version:
            continue
        changed = [part for part in PARTS if getattr(old, part) != getattr(new, part)]
        if changed != ["graph"] or same_tools:
            sys.exit(f"{name} computes something else ({', '.join(changed)}): raise its version in the catalogue first")
    stored = StoredFingerprints(method=METHOD, made_with=made_with, benchmarks=found)
    PLACE.write_bytes(msgspec.json.format(msgspec.json.encode(stored, order="sorted"), indent=1) + b"\n")
    print(f"{len(found)} fingerprints in {PLACE}")


if __name__ == "__main__":
    main()
