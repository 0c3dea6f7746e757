"""Network cards, from /sys/class/net and /sys/class/infiniband."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.records import Nic
from stepscope.system.files import ROOT, is_there, list_folder, read_natural, read_text

_ARPHRD_LOOPBACK = 772
_ARPHRD_INFINIBAND = 32


def read_nics(root: Path = ROOT) -> list[Nic]:
    """Interfaces of the network stack, then the ports of RDMA devices, which have rates of their own."""
    return [*_read_interfaces(root), *_read_rdma_ports(root)]


def _read_interfaces(root: Path) -> list[Nic]:
    nics = []
    for folder in list_folder(root / "sys/class/net"):
        mtu = read_natural(folder / "mtu")
        if mtu is None:
            # Not an interface: drivers leave plain files such as bonding_masters here.
            continue
        kind = _name_kind(folder)
        speed_mbit = read_natural(folder / "speed") if kind != "loopback" else None
        nics.append(
            Nic(
                name=folder.name,
                kind=kind,
                speed_bits_per_s=speed_mbit * 1e6 if speed_mbit else None,
                mtu=mtu,
                numa_node=read_natural(folder / "device/numa_node"),
            )
        )
    return nics


def _name_kind(folder: Path) -> str:
    kind = read_natural(folder / "type")
    if kind == _ARPHRD_LOOPBACK:
        return "loopback"
    if kind == _ARPHRD_INFINIBAND:
        return "infiniband"
    # Bridges, bonds, pairs of containers: no device stands behind them.
    return "ethernet" if is_there(folder / "device") else "virtual"


def _read_rdma_ports(root: Path) -> list[Nic]:
    nics = []
    for device in list_folder(root / "sys/class/infiniband"):
        for port in list_folder(device / "ports", "[0-9]*"):
            rate = re.match(r"([\d.]+)\s*Gb/sec", read_text(port / "rate") or "")
            layer = (read_text(port / "link_layer") or "InfiniBand").lower()
            nics.append(
                Nic(
                    name=f"{device.name}:{port.name}",
                    kind="infiniband" if layer == "infiniband" else "ethernet",
                    speed_bits_per_s=float(rate[1]) * 1e9 if rate else None,
                    numa_node=read_natural(device / "device/numa_node"),
                )
            )
    return nics
