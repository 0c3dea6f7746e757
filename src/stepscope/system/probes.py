"""Questions about torch, asked in child processes: the parent process loads nothing, and a crash is an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache

import msgspec

from stepscope.core.processes import last_line, name_signal, run_program

CHILD_TIMEOUT_S = 60.0
AMX_REMEDY = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Keeps oneDNN from the matrix tiles (AMX), which some virtual machines advertise but do not execute."""


class ChildResult(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int | None
    """Negative is the number of the signal that ended it; None where it outlasted its time and was ended."""
    stdout: str = ""
    stderr: str = ""


ChildRunner = Callable[[str, Mapping[str, str]], ChildResult]
"""Runs Python source with extra variables in a fresh process."""


def run_python_child(source: str, variables: Mapping[str, str]) -> ChildResult:
    command = [sys.executable, "-c", source]
    try:
        done = run_program(command, limit_s=CHILD_TIMEOUT_S, env={**os.environ, **variables})
    except subprocess.TimeoutExpired:
        return ChildResult(exit_code=None)
    return ChildResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a fresh process learns by importing torch."""

    version: str
    cuda: str | None = None
    """The version torch was built for; None in a build without CUDA."""
    hip: str | None = None
    cpu_capability: str | None = None
    threads: int | None = None
    gpus: list[str] = []
    gpu_dtypes: list[str] = []
    cuda_error: str | None = None
    """Why a build with CUDA finds no usable GPU, in its own words."""
    backends: list[str] = []
    """Backends of torch.distributed, as built."""


_FACTS_SOURCE = """
import json, warnings
import torch
import torch.distributed as dist
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    usable = torch.cuda.is_available()
facts = {
    "version": str(torch.__version__),
    "cuda": torch.version.cuda,
    "hip": getattr(torch.version, "hip", None),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "cuda_error": str(caught[0].message) if caught and not usable else None,
}
if usable:
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = torch.cuda.get_device_capability(0)
    dtypes = ["fp64", "fp32", "fp16"]
    dtypes += ["bf16"] if torch.cuda.is_bf16_supported() else []
    dtypes += ["tf32"] if capability >= (8, 0) and torch.version.cuda else []
    dtypes += ["fp8"] if capability >= (8, 9) and torch.version.cuda else []
    facts["gpu_dtypes"] = dtypes
if dist.is_available():
    names = ("gloo", "nccl", "mpi", "ucc")
    facts["backends"] = [name for name in names if getattr(dist, f"is_{name}_available", lambda: False)()]
print(json.dumps(facts))
"""


def probe_torch(run_child: ChildRunner) -> tuple[TorchFacts | None, str]:
    """The facts, or None and why there are none. One child process, a few seconds."""
    result = run_child(_FACTS_SOURCE, {})
    if result.exit_code == 0:
        try:
            return msgspec.json.decode(last_line(result.stdout), type=TorchFacts), ""
        except msgspec.MsgspecError as error:
            return None, f"the probe printed something else: {error}"
    return None, describe_end(result)


def describe_end(result: ChildResult) -> str:
    """How a child process ended, in words."""
    if result.exit_code is None:
        return f"no answer within {CHILD_TIMEOUT_S:g} s"
    if result.exit_code < 0:
        return f"ended by {name_signal(-result.exit_code)}"
    return last_line(result.stderr, f"ended with exit code {result.exit_code}")


class DtypeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the CPU computes in each type, tried for real."""

    working: list[str] = []
    failing: str | None = None
    """The type in whose matmul the process died, else the first that torch refused."""
    reason: str = ""
    trapped: bool = False
    """It was an illegal instruction: the processor advertises what it does not execute."""
    remedy_works: bool | None = None
    """Whether AMX_REMEDY lets the matmul through; None where it was not needed."""


CPU_DTYPES = ("float64", "float32", "float16", "bfloat16")

# A layer's forward and backward pass at 256: large enough for the kernels that big models use. Each type is named
# before its work, so that the last line shows in which one the process died.
_DTYPES_SOURCE = """
import torch
for name in {dtypes!r}:
    print("try", name, flush=True)
    dtype = getattr(torch, name)
    try:
        layer = torch.nn.Linear(256, 256).to(dtype)
        layer(torch.ones(256, 256, dtype=dtype)).sum().backward()
        (torch.ones(256, 256, dtype=dtype) @ torch.ones(256, 256, dtype=dtype))[0, 0].item()
    except RuntimeError as error:
        print("no", name, str(error).splitlines()[0], flush=True)
    else:
        print("ok", name, flush=True)
"""


def check_cpu_dtypes(run_child: ChildRunner, dtypes: tuple[str, ...] = CPU_DTYPES) -> DtypeCheck:
    """One child process, and a second one only after an illegal instruction, to see whether the remedy helps."""
    source = _DTYPES_SOURCE.format(dtypes=dtypes)
    check = _parse_dtype_check(run_child(source, {}))
    if not check.trapped:
        return check
    second = _parse_dtype_check(run_child(source, AMX_REMEDY))
    return msgspec.structs.replace(check, remedy_works=second.failing is None)


def _parse_dtype_check(result: ChildResult) -> DtypeCheck:
    lines = [line.split(" ", 2) for line in result.stdout.splitlines() if line.startswith(("try ", "ok ", "no "))]
    working = [line[1] for line in lines if line[0] == "ok"]
    refused = [line for line in lines if line[0] == "no"]
    if result.exit_code != 0:
        tried = [line[1] for line in lines if line[0] == "try"]
        return DtypeCheck(
            working=working,
            failing=tried[-1] if tried else "torch",
            reason=describe_end(result),
            trapped=result.exit_code == -signal.SIGILL,
        )
    if refused:
        return DtypeCheck(working=working, failing=refused[0][1], reason=refused[0][-1])
    return DtypeCheck(working=working)


@cache
def bfloat16_works() -> bool:
    """Whether a bfloat16 matmul on this CPU leaves the process alive, with the variables set now.

    Costs the import of torch in a child process, once per process. False only after an illegal instruction: a type
    that torch merely refuses raises an error when it is used.
    """
    return not _parse_dtype_check(run_python_child(_DTYPES_SOURCE.format(dtypes=("bfloat16",)), {})).trapped
