"""Sources of noise on this machine right now; each with its numbers and the next step."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope.core.units import format_bytes, format_share
from stepscope.records import Host, Notice, System
from stepscope.system.host import ROOT, list_folder, read_int, read_throttled_periods, read_turbo
from stepscope.system.nvml import ask, list_handles
from stepscope.system.probes import AMX_REMEDY, DtypeCheck
from stepscope.system.telemetry import read_throttle_reasons

MAX_LOAD_SHARE = 0.25
"""Runnable processes per usable thread above which others visibly take time from a measurement."""
MAX_BUSY_SHARE = 0.25
MAX_STEAL_SHARE = 0.01
MIN_FREE_DISK_BYTES = 1 << 30
MIN_AVAILABLE_MEMORY_SHARE = 0.1
MAX_GPU_BUSY_PERCENT = 5
POWER_LIMIT_TOLERANCE = 0.99

_RANK_COUNTS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE")


def find_hazards(
    system: System,
    *,
    environment: Mapping[str, str],
    root: Path = ROOT,
    nvml: Any | None = None,
    dtypes: DtypeCheck | None = None,
) -> list[Notice]:
    """`nvml` is the started library, where there is one."""
    host = system.hosts[0]
    found: list[Iterable[Notice]] = [
        _check_traps(dtypes),
        _check_clocks(host, root),
        _check_load(host),
        _check_memory(host),
        _check_quota(host, root),
        _check_threads(host, environment),
        _check_cpu_throttling(root),
        _check_steal(root),
        _check_gpus(nvml) if nvml is not None else [],
        _check_disk(Path.cwd()),
    ]
    return [notice for notices in found for notice in notices]


def _check_traps(dtypes: DtypeCheck | None) -> Iterator[Notice]:
    if dtypes is None or not dtypes.trapped:
        return
    variable, value = next(iter(AMX_REMEDY.items()))
    seen = {True: "tried: with it the matmul runs", False: "tried: it does not help here", None: "not tried"}
    yield Notice(
        kind="illegal_instruction",
        message=f"a {dtypes.failing} matmul on the CPU dies of an illegal instruction: "
        "the processor advertises matrix tiles that this virtual machine does not execute",
        hint=f"export {variable}={value} ({seen[dtypes.remedy_works]})",
    )


def _check_clocks(host: Host, root: Path) -> Iterator[Notice]:
    governor = host.cpu.governor
    if governor is not None and governor != "performance":
        yield Notice(
            kind="cpu_governor",
            message=f"the frequency governor is {governor}: clocks follow the load and rise late",
            hint="cpupower frequency-set -g performance",
        )
    if read_turbo(root):
        yield Notice(
            kind="cpu_turbo",
            message="turbo is on: the clock depends on temperature and on how many cores are busy",
            hint="echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo, or echo 0 > "
            "/sys/devices/system/cpu/cpufreq/boost, for results that repeat more closely",
        )


def _check_load(host: Host) -> Iterator[Notice]:
    load, threads = host.load.load_1m, host.cpu.usable_threads
    if load is not None and load > MAX_LOAD_SHARE * threads:
        yield Notice(
            kind="load",
            message=f"{load:g} processes were runnable on average over the last minute, for {threads} usable threads",
            hint="wait until the machine is idle, or find what runs with top",
        )
    busy = host.load.cpu_busy_share
    if busy is not None and busy > MAX_BUSY_SHARE:
        yield Notice(
            kind="cpu_busy",
            message=f"the processors are {format_share(busy, 0)} busy right now with other work",
            hint="wait until the machine is idle, or find what runs with top",
        )


def _check_memory(host: Host) -> Iterator[Notice]:
    swap, available, total = host.load.swap_used_bytes, host.load.memory_available_bytes, host.memory.total_bytes
    if swap:
        yield Notice(
            kind="swap",
            message=f"{format_bytes(swap)} of swap are in use: a page that comes back costs milliseconds",
            hint="swapoff -a && swapon -a, when enough memory is free",
        )
    if available is not None and total and available < MIN_AVAILABLE_MEMORY_SHARE * total:
        yield Notice(
            kind="memory",
            message=f"{format_bytes(available)} of {format_bytes(total)} of memory are available",
            hint="end what holds the memory, or measure smaller cases",
        )


def _check_quota(host: Host, root: Path) -> Iterator[Notice]:
    quota, threads = host.container.cpu_quota, host.cpu.usable_threads
    if quota is None or quota >= threads:
        return
    stopped = read_throttled_periods(root)
    so_far = f", and has stopped it {stopped} times so far" if stopped else ""
    yield Notice(
        kind="cpu_quota",
        message=f"the container grants the time of {quota:g} cores but shows {threads} threads{so_far}",
        hint=f"export OMP_NUM_THREADS={max(1, int(quota))}, or start the container without a CPU limit",
    )


def _check_threads(host: Host, environment: Mapping[str, str]) -> Iterator[Notice]:
    ranks = max((int(text) for name in _RANK_COUNTS if (text := environment.get(name, "")).isdigit()), default=1)
    threads, cores = host.cpu.usable_threads, host.cpu.cores
    if ranks > 1 and "OMP_NUM_THREADS" not in environment:
        yield Notice(
            kind="omp_threads",
            message=f"OMP_NUM_THREADS is not set: each of {ranks} ranks would start {threads} threads",
            hint=f"export OMP_NUM_THREADS={max(1, threads // ranks)}",
        )
    if cores is not None and host.cpu.threads > cores:
        yield Notice(
            kind="hyperthreads",
            message=f"{host.cpu.threads} threads share {cores} cores: two ranks on one core slow each other",
            hint=f"export OMP_NUM_THREADS={cores} OMP_PLACES=cores OMP_PROC_BIND=close",
        )


def _check_cpu_throttling(root: Path) -> Iterator[Notice]:
    counters = list_folder(root / "sys/devices/system/cpu", "cpu[0-9]*/thermal_throttle/core_throttle_count")
    count = max((read_int(path) or 0 for path in counters), default=0)
    if count:
        yield Notice(
            kind="cpu_throttled",
            message=f"a core has been slowed down for its temperature {count} times since the machine started",
            hint="look at the cooling; readings of each case say whether it happened then",
        )


def _check_steal(root: Path) -> Iterator[Notice]:
    """Time a virtual machine wanted a processor and the host gave it to another, since the start."""
    if root != ROOT:
        return
    import psutil

    times = psutil.cpu_times()
    share = getattr(times, "steal", 0.0) / (sum(times) or 1.0)
    if share > MAX_STEAL_SHARE:
        yield Notice(
            kind="cpu_steal",
            message=f"the host took {format_share(share)} of this virtual machine's processor time for others",
            hint="use a machine of your own (dedicated tenancy) for numbers that must repeat",
        )


def _check_gpus(nvml: Any) -> Iterator[Notice]:
    for index, handle in enumerate(list_handles(nvml)):
        yield from _check_power_limit(nvml, handle, index)
        reasons = [name for name in read_throttle_reasons(nvml, handle) if name != "applications_clocks_setting"]
        if reasons:
            yield Notice(
                kind="gpu_throttled",
                message=f"gpu{index} runs slower than it could right now: {', '.join(reasons)}",
                hint="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
            )
        use = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
        if use is not None and use.gpu > MAX_GPU_BUSY_PERCENT:
            yield Notice(
                kind="gpu_busy",
                message=f"gpu{index} is {use.gpu} % busy with other work",
                hint="nvidia-smi shows whose; wait, or choose another with CUDA_VISIBLE_DEVICES",
            )


def _check_power_limit(nvml: Any, handle: Any, index: int) -> Iterator[Notice]:
    limit_mw = ask(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    default_mw = ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    if limit_mw and default_mw and limit_mw < POWER_LIMIT_TOLERANCE * default_mw:
        yield Notice(
            kind="gpu_power_limit",
            message=f"gpu{index} is limited to {limit_mw / 1e3:g} W; its default is {default_mw / 1e3:g} W",
            hint=f"nvidia-smi -i {index} -pl {default_mw / 1e3:g}",
        )


def _check_disk(folder: Path) -> Iterator[Notice]:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if free < MIN_FREE_DISK_BYTES:
        yield Notice(
            kind="disk",
            message=f"{format_bytes(free)} are free where runs would be written ({folder})",
            hint="make room: a run that cannot write its evidence stops",
        )
