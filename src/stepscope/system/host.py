"""What this host is: processors (x86 and ARM), memory, network cards, container limits and load.

All from /proc and /sys, where any file may be missing, unreadable or refuse to answer.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepscope.records import Container, Cpu, Load, Memory, Nic, NumaNode

ROOT = Path("/")
"""Every probe takes a root, so that tests can show it another machine."""


def read_text(path: Path) -> str | None:
    """None where the kernel does not tell (no file, no permission, an invalid read)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def read_natural(path: Path) -> int | None:
    """The kernel writes -1 where it does not know (a NUMA node, a link's speed)."""
    value = read_int(path)
    return value if value is not None and value >= 0 else None


def is_there(path: Path) -> bool:
    """False also where this user may not look; Path.exists would raise."""
    return os.path.exists(path)


def list_folder(path: Path, pattern: str = "*") -> list[Path]:
    """In natural order: cpu2 before cpu10."""
    try:
        found = list(path.glob(pattern))
    except OSError:
        return []
    parts = {one: [part for part in re.split(r"(\d+)", one.name) if part] for one in found}
    return sorted(found, key=lambda one: [(int(part), "") if part.isdigit() else (-1, part) for part in parts[one]])


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's list form: `0-3,8` is [0, 1, 2, 3, 8]; parts that are not numbers are left out."""
    cpus: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


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
    threads = len(parse_cpu_list(read_text(folder / "online") or "")) or len(entries) or os.cpu_count() or 1
    architecture = _architecture(entries)
    decisive = _KERNEL_FEATURES.get(architecture)
    return Cpu(
        model=_find_model(entries, root),
        architecture=architecture,
        sockets=sockets or _count_distinct(entries, "physical id"),
        cores=cores or _count_distinct(entries, "physical id", "core id"),
        threads=threads,
        # By affinity; the file and not the system call, so that a fake root is believed.
        usable_threads=min(len(read_allowed_cpus(root)), threads) or threads,
        max_clock_hz=_read_max_clock_hz(folder, entries),
        governor=read_governor(root),
        last_level_cache_bytes=read_last_level_cache(root),
        features=sorted(flag for flag in _flags(entries) if decisive and decisive.fullmatch(flag)),
    )


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """One dictionary per logical processor; what comes after the last (`Hardware : …`) joins a block of its own."""
    entries = []
    for block in re.split(r"\n\s*\n", text):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        entry = {key.strip(): value.strip() for key, value in pairs}
        if "processor" in entry:
            entries.append(entry)
    return entries


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


def _count_distinct(entries: list[dict[str, str]], *fields: str) -> int | None:
    """How many values these fields have together; None where no entry has them."""
    return len({tuple(entry[name] for name in fields) for entry in entries if set(fields) <= set(entry)}) or None


def read_allowed_cpus(root: Path = ROOT) -> list[int]:
    """Logical processors that this process may use; empty where the kernel does not tell."""
    found = re.search(r"^Cpus_allowed_list:(.*)", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return parse_cpu_list(found[1]) if found else []


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
    """Bytes of all caches of the highest level together, each counted once though many processors share it; None where
    the kernel does not tell."""
    folder = root / "sys/devices/system/cpu"
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


BUSY_SAMPLE_S = 0.05
"""How long the busy share of the processors is watched."""

_HYPERVISORS = (
    # (in the firmware's vendor and product, what people call it); the first that fits wins.
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("innotek", "virtualbox"),
    ("xen", "xen"),
    ("google compute engine", "google"),
    ("amazon ec2", "amazon"),
    ("alibaba cloud ecs", "alibaba"),
    ("openstack", "kvm"),
    ("digitalocean", "kvm"),
    ("qemu", "kvm"),
    ("kvm", "kvm"),
    ("microsoft corporation virtual machine", "hyper-v"),
)


def read_memory(root: Path = ROOT) -> Memory:
    fields = _read_meminfo(root)
    return Memory(total_bytes=fields.get("MemTotal", 0), swap_total_bytes=fields.get("SwapTotal", 0))


def _read_meminfo(root: Path) -> dict[str, int]:
    pairs = re.findall(r"^(\w+):\s+(\d+) kB", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in pairs}


def read_container(root: Path = ROOT, environment: Mapping[str, str] | None = None) -> Container:
    """A limit that is not lower than what the host has is none."""
    environment = os.environ if environment is None else environment
    total_bytes = read_memory(root).total_bytes
    quotas = [quota for folder in _control_groups(root, "cpu") if (quota := _read_cpu_quota(folder)) is not None]
    limits = [
        read_int(folder / "memory.max") or read_int(folder / "memory.limit_in_bytes")
        for folder in _control_groups(root, "memory")
    ]
    limit_bytes = min((limit for limit in limits if limit is not None), default=None)
    return Container(
        kind=_detect_container(root, environment),
        cpu_quota=min(quotas, default=None),
        memory_limit_bytes=limit_bytes if limit_bytes is not None and limit_bytes < total_bytes else None,
    )


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """This process's groups of version 1 and 2 and all above them: the strictest of them binds.

    Inside a container the path may name a group that is not mounted there; the mount's top is then its own group.
    """
    mount = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        bases = [mount, mount / "unified"] if number == "0" else [mount / controllers, mount / controller]
        group = path.strip("/")
        for base in bases:
            yield from (base / part for part in _with_parents(group) if is_there(base / part))


def _with_parents(group: str) -> list[str]:
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return ["/".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _read_cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time; version 2 keeps quota and period in one file."""
    version_2 = (read_text(folder / "cpu.max") or "").split()
    if len(version_2) == 2 and version_2[0].isdigit():
        return int(version_2[0]) / int(version_2[1])
    quota, period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def read_throttled_periods(root: Path = ROOT) -> int | None:
    """How often the quota stopped this process's group, since the group was made; None where there is no count."""
    for folder in _control_groups(root, "cpu"):
        match = re.search(r"^nr_throttled (\d+)", read_text(folder / "cpu.stat") or "", re.MULTILINE)
        if match:
            return int(match[1])
    return None


def _detect_container(root: Path, environment: Mapping[str, str]) -> str | None:
    groups = read_text(root / "proc/self/cgroup") or ""
    signs = {
        "kubernetes": "KUBERNETES_SERVICE_HOST" in environment or "kubepods" in groups,
        "apptainer": bool({"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"} & set(environment)),
        "podman": is_there(root / "run/.containerenv") or "libpod" in groups,
        "docker": is_there(root / ".dockerenv") or "docker" in groups,
        "lxc": "/lxc" in groups,
    }
    found = next((kind for kind, sign in signs.items() if sign), None)
    return found or read_text(root / "run/systemd/container") or None


def read_virtualization(root: Path = ROOT) -> str | None:
    """`kvm`, `amazon` …; `hypervisor` where there is one that does not name itself; None on bare metal."""
    dmi = root / "sys/class/dmi/id"
    firmware = " ".join(read_text(dmi / name) or "" for name in ("sys_vendor", "product_name")).lower()
    if ".metal" in firmware:
        return None
    named = next((kind for sign, kind in _HYPERVISORS if sign in firmware), None)
    if named is None and "microsoft" in (read_text(root / "proc/sys/kernel/osrelease") or "").lower():
        return "wsl"
    guest = named or read_text(root / "sys/hypervisor/type") or None
    # x86 only: ARM processors do not say.
    flags = _flags(parse_cpuinfo(read_text(root / "proc/cpuinfo") or ""))
    return guest or ("hypervisor" if "hypervisor" in flags else None)


def read_load(root: Path = ROOT) -> float | None:
    """Runnable processes, averaged over a minute."""
    found = re.match(r"\d+(\.\d+)?", read_text(root / "proc/loadavg") or "")
    return float(found[0]) if found else None


def sample_load(root: Path = ROOT) -> Load:
    """Takes 50 ms: the busy share needs two looks at the processors' clocks."""
    import psutil

    fields = _read_meminfo(root)
    swap = fields["SwapTotal"] - fields["SwapFree"] if {"SwapTotal", "SwapFree"} <= set(fields) else None
    busy_percent = psutil.cpu_percent(interval=BUSY_SAMPLE_S) if root == ROOT else None
    return Load(
        load_1m=read_load(root),
        cpu_busy_share=busy_percent / 100 if busy_percent is not None else None,
        memory_available_bytes=fields.get("MemAvailable"),
        swap_used_bytes=swap,
    )


_ARPHRD_LOOPBACK = 772
_ARPHRD_INFINIBAND = 32


def read_nics(root: Path = ROOT) -> list[Nic]:
    """Interfaces of the network stack, then the ports of RDMA devices, which have rates of their own."""
    return [*_read_interfaces(root), *_read_rdma_ports(root)]


def _read_interfaces(root: Path) -> Iterator[Nic]:
    for folder in list_folder(root / "sys/class/net"):
        mtu = read_natural(folder / "mtu")
        if mtu is None:  # no interface: drivers leave plain files such as bonding_masters here
            continue
        kind = _name_kind(folder)
        speed_mbit = read_natural(folder / "speed") if kind != "loopback" else None
        yield Nic(
            name=folder.name,
            kind=kind,
            speed_bits_per_s=speed_mbit * 1e6 if speed_mbit else None,
            mtu=mtu,
            numa_node=read_natural(folder / "device/numa_node"),
        )


def _name_kind(folder: Path) -> str:
    kind = read_natural(folder / "type")
    if kind == _ARPHRD_LOOPBACK:
        return "loopback"
    if kind == _ARPHRD_INFINIBAND:
        return "infiniband"
    # Bridges, bonds, pairs of containers: no device stands behind them.
    return "ethernet" if is_there(folder / "device") else "virtual"


def _read_rdma_ports(root: Path) -> Iterator[Nic]:
    for device in list_folder(root / "sys/class/infiniband"):
        for port in list_folder(device / "ports", "[0-9]*"):
            rate = re.match(r"([\d.]+)\s*Gb/sec", read_text(port / "rate") or "")
            layer = (read_text(port / "link_layer") or "InfiniBand").lower()
            yield Nic(
                name=f"{device.name}:{port.name}",
                kind="infiniband" if layer == "infiniband" else "ethernet",
                speed_bits_per_s=float(rate[1]) * 1e9 if rate else None,
                numa_node=read_natural(device / "device/numa_node"),
            )
