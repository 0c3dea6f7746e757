"""A user's own model: a function in a file that builds a step."""

from __future__ import annotations

import hashlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.measure import Device, Further, Prepared
from stepscope.records import Benchmark, Case, Score
from stepscope.workloads.facts import EnergyMeter, PeakMemory

HINT = "write path/to/file.py:build, where build(device, batch_size) returns a function that makes one step"


def is_own(text: str) -> bool:
    """`path/to/file.py:build`, which no benchmark of the suite looks like."""
    return ".py:" in text or text.endswith(".py")


def make_own_case(text: str, *, device: str, batch_size: int | None, precision: str | None) -> Case:
    file, _, name = text.rpartition(":") if ".py:" in text else (text, "", "build")
    path = Path(file)
    if not path.is_file():
        raise UsageError("there is no such file", hint=HINT, where=file)
    parameters: dict[str, Any] = {
        "device": device,
        "file": str(path.resolve()),
        "function": name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:12],
    }
    if precision is not None:
        parameters["precision"] = precision
    benchmark = Benchmark(
        model=_as_part(path.stem),
        implementation="ootb",
        mode="step",
        config=_as_part(name),
        owner="user",
        description=f"{name} of {path.name}",
    )
    return Case(benchmark=benchmark, parameters=parameters, batch_size=batch_size)


def _as_part(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-") or "own"


def prepare_own(case: Case, device: Device) -> Prepared:
    path, name = Path(str(case.parameters["file"])), str(case.parameters["function"])
    memory = PeakMemory(device.name)
    built = _call(_find(path, name), case, path)
    step = getattr(built, "step", None) or built
    if not callable(step):
        raise UsageError(f"{name} returned {type(built).__name__}, which has no step", hint=HINT, where=str(path))
    examples = getattr(built, "examples", None) or case.batch_size or _usual_batch(path, name)
    step()
    device.synchronize()
    energy, calls = EnergyMeter(device.name), 0

    def body() -> None:
        nonlocal calls
        step()
        calls += 1

    def look_further() -> Further:
        joules = energy.read_j()
        peak = memory.read_bytes()
        facts: dict[str, Any] = {} if peak is None else {"peak_memory_bytes": peak}
        if joules is not None and calls and examples:
            facts["energy_j_per_example"] = joules / (calls * examples)
        return Further(observed=facts)

    return Prepared(
        body=body,
        score=Score(unit="ex/s" if examples else "step/s", work=float(examples or 1)),
        further=look_further,
        check=getattr(built, "check", None),
    )


def _usual_batch(path: Path, name: str) -> int | None:
    """The default of the function's own batch size; None: it has none, and only steps can be counted."""
    usual = inspect.signature(_find(path, name)).parameters.get("batch_size")
    return usual.default if usual is not None and isinstance(usual.default, int) else None


def _find(path: Path, name: str) -> Callable[..., Any]:
    # As `python file.py` does: what lies beside the file can be imported.
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = runpy.run_path(str(path), run_name=path.stem).get(name)
    if not callable(found):
        raise UsageError(f"there is no function {name} in it", hint=HINT, where=str(path))
    return found  # type: ignore[no-any-return]


def _call(build: Callable[..., Any], case: Case, path: Path) -> Any:
    """With those of `device`, `batch_size` and `precision` that it takes; others keep their defaults."""
    offered = {
        "device": case.parameters["device"],
        "batch_size": case.batch_size,
        "precision": case.parameters.get("precision"),
    }
    takes = inspect.signature(build).parameters
    every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    given = {name: value for name, value in offered.items() if value is not None and (every or name in takes)}
    lacking = [
        name for name, one in takes.items()
        if one.default is inspect.Parameter.empty and name not in given
        and one.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]  # fmt: skip
    if lacking:
        option = " (--batch-size)" if "batch_size" in lacking else ""
        raise UsageError(f"{build.__name__} needs {', '.join(lacking)}{option}", hint=HINT, where=str(path))
    return build(**given)
