"""What the processors are, from /proc/cpuinfo and /sys/devices/system (x86 and ARM)."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from pathlib import Path

from stepscope.records import Cpu, NumaNode
from stepscope.system.files import ROOT, list_folder, parse_cpu_list, read_int, read_text

_KERNEL_FEATURES = {
    "x86_64": re.compile(r"sse4_2|avx|avx2|fma|f16c|avx_vnni\w*|avx_ne_convert|avx512\w*|avx10\w*|amx_\w+"),
    "aarch64": re.compile(r"asimd|asimdhp|asimddp|asimdfhm|fphp|bf16|i8mm|sve\w*|sme\w*"),
}
"""Instruction sets for which numeric libraries keep kernels of their own; the other flags say nothing about speed."""

_ARM_CORES = {
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "Kunpeng-920",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
"""(implementer, part) of /proc/cpuinfo; ARM kernels print these numbers instead of a name."""


def read_cpu(root: Path = ROOT) -> Cpu:
    entries = parse_cpuinfo(read_text(root / "proc/cpuinfo") or "")
    folder = root / "sys/devices/system/cpu"
    sockets, cores = _read_topology(folder)
    architecture = _architecture(entries)
    decisive = _KERNEL_FEATURES.get(architecture)
    return Cpu(
        model=_find_model(entries, root),
        architecture=architecture,
        sockets=sockets or _count_sockets(entries),
        cores=cores or _count_cores(entries),
        threads=_count_threads(entries, folder),
        usable_threads=_count_usable_threads(root, _count_threads(entries, folder)),
        max_clock_hz=_read_max_clock_hz(folder, entries),
        governor=read_governor(root),
        last_level_cache_bytes=_read_last_level_cache_bytes(folder),
        features=sorted(flag for flag in _flags(entries) if decisive and decisive.fullmatch(flag)),
    )


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """One dictionary a logical processor; what comes after the last (`Hardware : …`) joins a block of its own."""
    entries = []
    for block in re.split(r"\n\s*\n", text):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        entry = {key.strip(): value.strip() for key, value in pairs}
        if "processor" in entry:
            entries.append(entry)
    return entries


def has_hypervisor_flag(root: Path = ROOT) -> bool:
    """x86 only: ARM processors do not say."""
    return "hypervisor" in _flags(parse_cpuinfo(read_text(root / "proc/cpuinfo") or ""))


def _flags(entries: list[dict[str, str]]) -> set[str]:
    return set((entries[0].get("flags") or entries[0].get("Features") or "").split()) if entries else set()


def _find_model(entries: list[dict[str, str]], root: Path) -> str:
    if entries and (name := entries[0].get("model name")):
        return re.sub(r"\s+", " ", name)
    cores = Counter(core for entry in entries if (core := _name_arm_core(entry)) is not None)
    if len(cores) == 1:
        return next(iter(cores))
    if cores:
        return " + ".join(f"{count}× {core}" for core, count in sorted(cores.items()))
    board = read_text(root / "proc/device-tree/model")
    return board.rstrip("\0") if board else platform.processor() or "unknown"


def _name_arm_core(entry: dict[str, str]) -> str | None:
    try:
        key = int(entry["CPU implementer"], 16), int(entry["CPU part"], 16)
    except (KeyError, ValueError):
        return None
    return _ARM_CORES.get(key, f"ARM implementer {key[0]:#04x} part {key[1]:#05x}")


def _architecture(entries: list[dict[str, str]]) -> str:
    if entries and "CPU implementer" in entries[0]:
        return "aarch64"
    return "x86_64" if entries and "lm" in _flags(entries) else platform.machine()


def _read_topology(folder: Path) -> tuple[int | None, int | None]:
    """Sockets and physical cores. Cores are told apart by their sets of siblings: core ids repeat on some ARM."""
    packages, siblings = set(), set()
    for cpu in list_folder(folder, "cpu[0-9]*"):
        package = read_int(cpu / "topology/physical_package_id")
        if package is not None and package >= 0:
            packages.add(package)
        threads = read_text(cpu / "topology/core_cpus_list") or read_text(cpu / "topology/thread_siblings_list")
        if threads:
            siblings.add(threads)
    return len(packages) or None, len(siblings) or None


def _count_sockets(entries: list[dict[str, str]]) -> int | None:
    return len({entry["physical id"] for entry in entries if "physical id" in entry}) or None


def _count_cores(entries: list[dict[str, str]]) -> int | None:
    pairs = {(entry["physical id"], entry["core id"]) for entry in entries if {"physical id", "core id"} <= set(entry)}
    return len(pairs) or None


def _count_threads(entries: list[dict[str, str]], folder: Path) -> int:
    online = read_text(folder / "online")
    return len(parse_cpu_list(online or "")) or len(entries) or os.cpu_count() or 1


def _count_usable_threads(root: Path, threads: int) -> int:
    """By affinity; the file and not the system call, so that a fake root is believed."""
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            allowed = len(parse_cpu_list(line.split(":", 1)[1]))
            return min(allowed, threads) or threads
    return threads


def _read_max_clock_hz(folder: Path, entries: list[dict[str, str]]) -> float | None:
    """What the hardware may reach. Never the present clock of /proc/cpuinfo: it changes with every look."""
    clocks_khz = [read_int(policy / "cpuinfo_max_freq") for policy in _list_policies(folder)]
    known = [clock for clock in clocks_khz if clock]
    if known:
        return max(known) * 1e3
    stated = re.search(r"@\s*([\d.]+)\s*GHz", entries[0].get("model name", "")) if entries else None
    return float(stated[1]) * 1e9 if stated else None


def read_governor(root: Path = ROOT) -> str | None:
    """Several joined by a comma where processors differ; None where the kernel does not set clocks (most guests)."""
    policies = _list_policies(root / "sys/devices/system/cpu")
    governors = {name for policy in policies if (name := read_text(policy / "scaling_governor"))}
    return ",".join(sorted(governors)) or None


def read_turbo(root: Path = ROOT) -> bool | None:
    """Whether clocks may rise above the nominal one; None where the kernel does not tell."""
    folder = root / "sys/devices/system/cpu"
    no_turbo = read_int(folder / "intel_pstate/no_turbo")
    if no_turbo is not None:
        return no_turbo == 0
    boost = read_int(folder / "cpufreq/boost")
    return boost == 1 if boost is not None else None


def _list_policies(folder: Path) -> list[Path]:
    return list_folder(folder / "cpufreq", "policy[0-9]*") or list_folder(folder, "cpu[0-9]*/cpufreq")


def read_last_level_cache(root: Path = ROOT) -> int | None:
    """Bytes of this host's last-level caches together; None where the kernel does not tell."""
    return _read_last_level_cache_bytes(root / "sys/devices/system/cpu")


def _read_last_level_cache_bytes(folder: Path) -> int | None:
    """All instances of the highest level together; each is counted once though many processors share it."""
    sizes: dict[tuple[int, str], int] = {}
    for cpu in list_folder(folder, "cpu[0-9]*"):
        for index in list_folder(cpu / "cache", "index[0-9]*"):
            level, size = read_int(index / "level"), _parse_cache_size(read_text(index / "size"))
            if level is None or size is None or read_text(index / "type") == "Instruction":
                continue
            sizes[level, read_text(index / "shared_cpu_list") or cpu.name] = size
    if not sizes:
        return None
    last = max(level for level, _ in sizes)
    return sum(size for (level, _), size in sizes.items() if level == last)


def _parse_cache_size(text: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text or "")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else None


def read_numa_nodes(root: Path = ROOT) -> list[NumaNode]:
    nodes = []
    for folder in list_folder(root / "sys/devices/system/node", "node[0-9]*"):
        memory = re.search(r"MemTotal:\s*(\d+)\s*kB", read_text(folder / "meminfo") or "")
        nodes.append(
            NumaNode(
                node=int(folder.name.removeprefix("node")),
                cpus=read_text(folder / "cpulist") or "",
                memory_bytes=int(memory[1]) << 10 if memory else None,
            )
        )
    return nodes
