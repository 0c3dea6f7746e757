"""NVIDIA GPUs and the links between them, as the driver's management library (NVML) reports them.

The library's module is passed in as `nvml`, so that tests can show another one; everything here lives with a
driver that is absent, old, or does not answer some questions.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from stepscope.records import Gpu, Link
from stepscope.system.host import ROOT, read_natural

MAX_NVLINKS = 18
_REMOTE_IS_SWITCH = 2
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 8e9 / 8.125, 4: 16e9 / 8.125, 5: 32e9 / 8.125, 6: 8e9}
"""One direction, after line coding: 8b/10b, from generation 3 on 128b/130b (8.125 line bits a byte), 6 uncoded."""


def import_nvml() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


@contextmanager
def open_nvml(nvml: Any | None = None) -> Iterator[Any | None]:
    """The library, started, until the block ends; None where there is no driver to talk to."""
    module = import_nvml() if nvml is None else nvml
    if module is None or not start_nvml(module):
        yield None
        return
    try:
        yield module
    finally:
        ask(module, "nvmlShutdown")


def start_nvml(nvml: Any) -> bool:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def ask(nvml: Any, question: str, *arguments: Any) -> Any | None:
    """None where this device does not tell, or this version of the library does not know the question."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def list_handles(nvml: Any) -> list[Any]:
    count = ask(nvml, "nvmlDeviceGetCount") or 0
    handles = (ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count))
    return [handle for handle in handles if handle is not None]


def read_gpus(nvml: Any, *, root: Path = ROOT, torch: Any | None = None) -> list[Gpu]:
    """All GPUs the driver shows, whether or not this process may use them; torch adds what NVML does not tell."""
    driver = _text(ask(nvml, "nvmlSystemGetDriverVersion"))
    gpus = [_read_gpu(nvml, handle, index, driver, root) for index, handle in enumerate(list_handles(nvml))]
    return _add_torch_facts(gpus, nvml, torch) if torch is not None else gpus


def _read_gpu(nvml: Any, handle: Any, index: int, driver: str | None, root: Path) -> Gpu:
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    address = _read_pci_address(nvml, "nvmlDeviceGetPciInfo", handle)
    node = read_natural(root / "sys/bus/pci/devices" / address / "numa_node") if address else None
    limit_mw = ask(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    return Gpu(
        index=index,
        name=_text(ask(nvml, "nvmlDeviceGetName", handle)) or "unknown NVIDIA GPU",
        memory_bytes=int(memory.total) if memory is not None else None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        max_clock_hz=_megahertz(ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)),
        max_memory_clock_hz=_megahertz(ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM)),
        power_limit_w=float(limit_mw) / 1e3 if limit_mw else None,
        driver=driver,
        pci_address=address,
        numa_node=node,
    )


def _text(value: Any) -> str | None:
    """Older bindings answer in bytes."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _megahertz(value: Any) -> float | None:
    return float(value) * 1e6 if value else None


def _read_pci_address(nvml: Any, question: str, *arguments: Any) -> str | None:
    information = ask(nvml, question, *arguments)
    return parse_pci_address(_text(information.busId) or "") if information is not None else None


def parse_pci_address(bus_id: str) -> str | None:
    """NVML's `00000000:3B:00.0` in the kernel's form, `0000:3b:00.0`."""
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", bus_id.strip("\0 ").lower())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else None


def _add_torch_facts(gpus: list[Gpu], nvml: Any, torch: Any) -> list[Gpu]:
    """Multiprocessors and caches of the devices that torch sees. Starts CUDA in this process."""
    if not torch.cuda.is_available():
        return gpus
    facts = {}
    for ordinal in range(torch.cuda.device_count()):
        index = find_nvml_index(nvml, ordinal, torch=torch)
        if index is not None:
            facts[index] = torch.cuda.get_device_properties(ordinal)
    return [_with_properties(gpu, facts[gpu.index]) if gpu.index in facts else gpu for gpu in gpus]


def _with_properties(gpu: Gpu, properties: Any) -> Gpu:
    return msgspec.structs.replace(
        gpu,
        compute_capability=gpu.compute_capability or f"{properties.major}.{properties.minor}",
        multiprocessors=getattr(properties, "multi_processor_count", None),
        l2_cache_bytes=getattr(properties, "L2_cache_size", None),
    )


def find_nvml_index(
    nvml: Any, ordinal: int, *, torch: Any | None = None, environment: Mapping[str, str] | None = None
) -> int | None:
    """NVML's number of torch's `cuda:ordinal`: CUDA hides and reorders devices, NVML does neither.

    By unique id where torch is loaded and has started CUDA (it has the true order), else by CUDA_VISIBLE_DEVICES.
    """
    uuids = _read_uuids(nvml)
    if torch is not None and torch.cuda.is_available() and ordinal < torch.cuda.device_count():
        uuid = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
        if uuid is not None and (index := _index_of(f"GPU-{str(uuid).removeprefix('GPU-')}", uuids)) is not None:
            return index
    variables = os.environ if environment is None else environment
    visible = parse_visible_devices(variables.get("CUDA_VISIBLE_DEVICES"), uuids)
    return visible[ordinal] if visible is not None and ordinal < len(visible) else None


def _read_uuids(nvml: Any) -> list[str]:
    return [_text(ask(nvml, "nvmlDeviceGetUUID", handle)) or "" for handle in list_handles(nvml)]


def _index_of(uuid: str, uuids: list[str]) -> int | None:
    """CUDA accepts the beginning of an id where it is unique."""
    found = [index for index, known in enumerate(uuids) if known.lower().startswith(uuid.lower())]
    return found[0] if len(found) == 1 else None


def parse_visible_devices(value: str | None, uuids: list[str]) -> list[int] | None:
    """NVML numbers in CUDA's order. As in CUDA, the first entry that names no device ends the list.

    None for slices of a GPU (MIG), which have no number of their own.
    """
    if value is None:
        return list(range(len(uuids)))
    visible: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            return None
        index = int(entry) if entry.isdigit() else _index_of(entry, uuids) if entry.startswith("GPU-") else None
        if index is None or index >= len(uuids):
            break
        visible.append(index)
    return visible


def describe_visible_gpus(nvml: Any, gpus: list[Gpu], environment: Mapping[str, str]) -> str | None:
    """What this process may use, by model and number: `2× NVIDIA H200`. Which of several equal ones it got is chance.

    None where the host has no GPU.
    """
    if not gpus:
        return None
    visible = parse_visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), _read_uuids(nvml))
    if visible is None:
        return "slices of a GPU (MIG)"
    names = Counter(gpus[index].name for index in visible if index < len(gpus))
    return ", ".join(f"{count}× {name}" for name, count in sorted(names.items())) or "none"


def read_links(nvml: Any) -> list[Link]:
    """NVLinks by peer (a pair of GPUs is named once), then each GPU's way to the host."""
    handles = list_handles(nvml)
    addresses = {
        _read_pci_address(nvml, "nvmlDeviceGetPciInfo", handle): f"gpu{index}" for index, handle in enumerate(handles)
    }
    links: list[Link] = []
    for index, handle in enumerate(handles):
        speed = _read_nvlink_speed(nvml, handle)
        for peer, count in sorted(_count_nvlinks(nvml, handle, addresses).items()):
            if peer in addresses.values() and int(peer.removeprefix("gpu")) < index:
                continue
            rate = speed * count if speed is not None else None
            links.append(Link(a=f"gpu{index}", b=peer, kind="NVLink", count=count, bytes_per_s=rate))
    return links + [_read_pcie_link(nvml, handle, index) for index, handle in enumerate(handles)]


def _count_nvlinks(nvml: Any, handle: Any, addresses: dict[str | None, str]) -> Counter[str]:
    peers: Counter[str] = Counter()
    for number in range(MAX_NVLINKS):
        if ask(nvml, "nvmlDeviceGetNvLinkState", handle, number) != 1:
            continue
        address = _read_pci_address(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        if address is not None and address in addresses:
            peers[addresses[address]] += 1
        elif ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number) == _REMOTE_IS_SWITCH:
            peers["nvswitch"] += 1
        else:
            peers["unknown"] += 1
    return peers


def _read_nvlink_speed(nvml: Any, handle: Any) -> float | None:
    """Speed of one link in one direction, bytes per second."""
    field = getattr(nvml, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", None)
    values = ask(nvml, "nvmlDeviceGetFieldValues", handle, [field]) if field is not None else None
    if not values or values[0].nvmlReturn != 0 or not values[0].value.uiVal:
        return None
    return float(values[0].value.uiVal) * 1e6


def _read_pcie_link(nvml: Any, handle: Any, index: int) -> Link:
    """The generation at its best (an idle link slows down), the width as it is (a bad slot stays narrow)."""
    generation = ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle) or ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    lane = _PCIE_LANE_BYTES_PER_S.get(generation) if generation else None
    rate = lane * width if lane is not None and width else None
    return Link(a=f"gpu{index}", b="host", kind="PCIe", count=width or None, bytes_per_s=rate)
