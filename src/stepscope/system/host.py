"""Memory, container limits, virtualization and present load of this host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepscope.records import Container, Load, Memory
from stepscope.system.cpu import has_hypervisor_flag
from stepscope.system.files import ROOT, is_there, read_int, read_text

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
    limits = [limit for folder in _control_groups(root, "memory") if (limit := _read_memory_limit(folder)) is not None]
    limit_bytes = min(limits, default=None)
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


def _read_memory_limit(folder: Path) -> int | None:
    return read_int(folder / "memory.max") or read_int(folder / "memory.limit_in_bytes")


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
    return guest or ("hypervisor" if has_hypervisor_flag(root) else None)


def sample_load(root: Path = ROOT) -> Load:
    """Takes 50 ms: the busy share needs two looks at the processors' clocks."""
    import psutil

    fields = _read_meminfo(root)
    load_1m = re.match(r"[\d.]+", read_text(root / "proc/loadavg") or "")
    swap = fields["SwapTotal"] - fields["SwapFree"] if {"SwapTotal", "SwapFree"} <= set(fields) else None
    busy_percent = psutil.cpu_percent(interval=BUSY_SAMPLE_S) if root == ROOT else None
    return Load(
        load_1m=float(load_1m[0]) if load_1m else None,
        cpu_busy_share=busy_percent / 100 if busy_percent is not None else None,
        memory_available_bytes=fields.get("MemAvailable"),
        swap_used_bytes=swap,
    )
