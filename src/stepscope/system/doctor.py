"""What this machine is, what can run on it, what is missing, and what would spoil a measurement."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.units import format_bytes, format_duration, format_share
from stepscope.records import Host, Notice, System
from stepscope.system.capabilities import Capability, list_capabilities
from stepscope.system.collect import collect_system
from stepscope.system.files import ROOT
from stepscope.system.hazards import find_hazards
from stepscope.system.nvml import open_nvml
from stepscope.system.probes import ChildRunner, check_cpu_dtypes, probe_torch, run_python_child


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
    """Takes a few seconds: torch is imported in two child processes (three after a crash), never in this one.

    `probe=False` starts no child and takes a fraction of a second; it then knows of torch only its installed
    version. The load is taken first, so that the probes themselves are not reported as a busy machine.
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
        ("What would spoil a measurement", _format_warnings(diagnosis.warnings)),
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
