"""One host's system record, and several hosts' records made one."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from stepscope.records import Gpu, Host, Link, System
from stepscope.system.cpu import read_cpu, read_numa_nodes
from stepscope.system.files import ROOT, read_text
from stepscope.system.host import read_container, read_memory, read_virtualization, sample_load
from stepscope.system.network import read_nics
from stepscope.system.nvml import describe_visible_gpus, open_nvml, read_gpus, read_links
from stepscope.system.software import (
    find_loaded_torch,
    read_git,
    read_library_versions,
    read_torch_settings,
    select_environment,
)


def collect_system(
    *,
    torch_loaded: bool | None = None,
    root: Path = ROOT,
    nvml: Any | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> System:
    """What this host is and what this process has loaded. Takes about 0.1 s; never imports torch.

    `torch_loaded=False` leaves torch out even where the process has it; otherwise it is described if loaded, which
    starts CUDA where there is a usable GPU. `root`, `nvml` and `environment` replace the machine (for tests);
    `folder` is the checkout to describe, by default the working folder.
    """
    environment = os.environ if environment is None else environment
    torch = find_loaded_torch(torch_loaded)
    settings = read_torch_settings(torch)
    with open_nvml(nvml) as library:
        gpus: list[Gpu] = read_gpus(library, root=root, torch=torch) if library is not None else []
        links: list[Link] = read_links(library) if library is not None else []
        visible = describe_visible_gpus(library, gpus, environment)
    if visible is not None:
        settings["visible_gpus"] = visible
    return System(
        collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hosts=[_read_host(root, environment, gpus, links)],
        python=platform.python_version(),
        libraries=read_library_versions(torch),
        environment=select_environment(environment),
        settings=settings,
        git=read_git(folder),
    )


def _read_host(root: Path, environment: Mapping[str, str], gpus: list[Gpu], links: list[Link]) -> Host:
    return Host(
        name=read_text(root / "proc/sys/kernel/hostname") or platform.node(),
        os=_read_os_name(root),
        kernel=read_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        virtualization=read_virtualization(root),
        cpu=read_cpu(root),
        memory=read_memory(root),
        numa=read_numa_nodes(root),
        gpus=gpus,
        nics=read_nics(root),
        links=links,
        container=read_container(root, environment),
        load=sample_load(root),
    )


def _read_os_name(root: Path) -> str:
    lines = (read_text(root / "etc/os-release") or "").splitlines()
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("PRETTY_NAME", "").strip("\"'") or platform.system()


def merge_systems(systems: list[System]) -> System:
    """One record of several hosts, in the order given; what the first says of the software holds for all.

    A library, setting or variable that is not the same everywhere keeps every host's value under `name@host`, so
    that a mixed cluster is not taken for an even one. Raises ValueError on an empty list.
    """
    if not systems:
        raise ValueError("there is no system to merge")
    first = systems[0]
    return msgspec.structs.replace(
        first,
        hosts=[host for system in systems for host in system.hosts],
        python=_merge_python(systems),
        libraries=_merge_values([(_label(systems, i), system.libraries) for i, system in enumerate(systems)]),
        environment=_merge_values([(_label(systems, i), system.environment) for i, system in enumerate(systems)]),
        settings=_merge_values([(_label(systems, i), system.settings) for i, system in enumerate(systems)]),
    )


def _label(systems: list[System], position: int) -> str:
    """The host's name, with its position where two hosts share one (containers often do)."""
    names = [system.hosts[0].name for system in systems]
    name = names[position]
    return name if names.count(name) == 1 else f"{name}#{position}"


def _merge_python(systems: list[System]) -> str:
    versions = [system.python for system in systems]
    if len(set(versions)) == 1:
        return versions[0]
    return ", ".join(f"{version}@{_label(systems, i)}" for i, version in enumerate(versions))


def _merge_values(by_host: list[tuple[str, dict[str, str]]]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for name in sorted({name for _, values in by_host for name in values}):
        found = {host: values[name] for host, values in by_host if name in values}
        if len(found) == len(by_host) and len(set(found.values())) == 1:
            merged[name] = next(iter(found.values()))
        else:
            merged |= {f"{name}@{host}": value for host, value in found.items()}
    return merged
