"""What is known about a system and a case, as names and values to list."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from stepscope.core.units import (
    count_of,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_share,
    format_significant,
)
from stepscope.metrics import list_metrics
from stepscope.records import Cpu, Gpu, Host, Load, Nic, System
from stepscope.report.columns import describe_target, format_with_unit
from stepscope.report.labels import (
    format_fact,
    format_flop_rate,
    format_frequency,
    format_parameter,
    name_fact,
)
from stepscope.report.series import Roofline
from stepscope.report.table import show
from stepscope.report.view import CaseView, RunView
from stepscope.stats import Summary

MAX_HOSTS = 8
"""Hosts described one by one; clusters are made of equals."""


class Fact(NamedTuple):
    name: str
    value: str


class FactGroup(NamedTuple):
    title: str
    facts: list[Fact]


def describe_system(system: System) -> list[FactGroup]:
    groups: list[FactGroup] = []
    for host in system.hosts[:MAX_HOSTS]:
        of = f" of {host.name}" if len(system.hosts) > 1 else ""
        groups += [FactGroup(f"{group.title}{of}", group.facts) for group in _describe_host(host)]
    if len(system.hosts) > MAX_HOSTS:
        groups.append(FactGroup("Hosts", [Fact("Not listed", f"{len(system.hosts) - MAX_HOSTS} further hosts")]))
    groups += [
        FactGroup("Versions as loaded", _pairs({"python": system.python, **system.libraries})),
        FactGroup("Settings", _pairs(system.settings)),
        FactGroup("Environment", _pairs(system.environment)),
    ]
    return [group for group in groups if group.facts]


def _pairs(values: dict[str, str]) -> list[Fact]:
    return [Fact(name, value) for name, value in values.items()]


def _facts(*pairs: tuple[str, str | None]) -> list[Fact]:
    return [Fact(name, value) for name, value in pairs if value]


def _describe_host(host: Host) -> list[FactGroup]:
    container = host.container
    machine = _facts(
        ("Name", host.name),
        ("System", host.os),
        ("Kernel", host.kernel),
        ("Virtualization", host.virtualization),
        ("Container", container.kind),
        ("CPU quota", show(container.cpu_quota, lambda cores: f"{format_significant(cores)} cores", "")),
        ("Memory limit", show(container.memory_limit_bytes, format_bytes, "")),
    )
    gpus = Counter(_describe_gpu(gpu) for gpu in host.gpus)
    links = Counter(_describe_link(link.kind, link.count, link.bytes_per_s) for link in host.links)
    return [
        FactGroup("Host", machine),
        FactGroup("CPU", _describe_cpu(host.cpu)),
        FactGroup("Memory", _describe_memory(host)),
        FactGroup("GPUs", [Fact(f"{number}×", text) for text, number in gpus.items()]),
        FactGroup("Links", [Fact(text, count_of(number, "pair")) for text, number in links.items()]),
        FactGroup("Network", [Fact(nic.name, _describe_nic(nic)) for nic in host.nics]),
    ]


def _describe_cpu(cpu: Cpu) -> list[Fact]:
    return _facts(
        ("Model", cpu.model),
        ("Architecture", cpu.architecture),
        ("Sockets", show(cpu.sockets, str, "")),
        ("Cores", show(cpu.cores, str, "")),
        ("Threads", f"{cpu.usable_threads} usable of {cpu.threads}"),
        ("Highest clock", show(cpu.max_clock_hz, format_frequency, "")),
        ("Last-level cache", show(cpu.last_level_cache_bytes, format_bytes, "")),
        ("Features", " ".join(cpu.features)),
    )


def _describe_memory(host: Host) -> list[Fact]:
    swap = host.memory.swap_total_bytes
    facts = _facts(("Total", format_bytes(host.memory.total_bytes)), ("Swap", format_bytes(swap) if swap else "none"))
    for node in host.numa:
        size = show(node.memory_bytes, format_bytes, "")
        facts.append(Fact(f"NUMA node {node.node}", _list(f"CPUs {node.cpus}", size)))
    return facts


def _describe_gpu(gpu: Gpu) -> str:
    return _list(
        gpu.name,
        show(gpu.memory_bytes, format_bytes, ""),
        f"compute capability {gpu.compute_capability}" if gpu.compute_capability else "",
        show(gpu.multiprocessors, lambda count: f"{count} multiprocessors", ""),
        show(gpu.max_clock_hz, lambda clock: f"up to {format_frequency(clock)}", ""),
        show(gpu.power_limit_w, lambda power: f"limit {format_significant(power)} W", ""),
        f"driver {gpu.driver}" if gpu.driver else "",
    )


def _describe_link(kind: str, count: int | None, bytes_per_s: float | None) -> str:
    number = show(count, lambda known: f" ×{known}", "")
    return _list(kind + number, show(bytes_per_s, lambda rate: f"{format_bandwidth(rate)} each way", ""))


def _describe_nic(nic: Nic) -> str:
    rate = show(nic.speed_bits_per_s, lambda bits: f"{format_significant(bits / 1e9)} Gbit/s", "")
    return _list(nic.kind, rate, show(nic.mtu, lambda mtu: f"MTU {mtu}", ""))


def _list(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def describe_run(run: RunView) -> list[Fact]:
    """What may differ between two runs of one system."""
    facts = _facts(("Started", run.created_at), ("Status", run.status), ("Commit", run.commit))
    for host in run.hosts[:MAX_HOSTS]:
        of = f" of {host.name}" if len(run.hosts) > 1 else ""
        facts += _facts((f"Governor{of}", host.governor), (f"Load{of}", _describe_load(host.load)))
    return facts


def _describe_load(load: Load) -> str:
    return _list(
        show(load.load_1m, lambda length: f"{format_significant(length, 3)} runnable", ""),
        show(load.cpu_busy_share, lambda busy: f"CPU {format_share(busy)} busy", ""),
        show(load.memory_available_bytes, lambda size: f"{format_bytes(size)} free", ""),
        f"{format_bytes(load.swap_used_bytes)} swapped" if load.swap_used_bytes else "",
    )


def describe_timing(case: CaseView) -> list[Fact]:
    if case.timing is None:
        return []
    summary = case.timing.summary
    return _facts(
        ("Median", format_duration(summary.median_s)),
        (
            f"{format_share(summary.level)} interval",
            f"{format_duration(summary.ci_low_s)} – {format_duration(summary.ci_high_s)}",
        ),
        ("Mean", format_duration(summary.mean_s)),
        ("Standard deviation", show(summary.stdev_s, format_duration, "")),
        ("Range", f"{format_duration(summary.min_s)} – {format_duration(summary.max_s)}"),
        ("Samples", str(summary.n)),
        ("Outliers", str(summary.outliers)),
        ("Drift", format_share(case.timing.drift, 2)),
    )


def describe_peaks(roofline: Roofline) -> list[Fact]:
    """Every peak that was measured, also those without a roof."""
    rates = [Fact(f"{dtype} matmul", format_flop_rate(value)) for dtype, value in roofline.matrix_flops_per_s.items()]
    return rates + [Fact(f"{name} bandwidth", format_bandwidth(value)) for name, value in roofline.bytes_per_s.items()]


def describe_case(case: CaseView) -> list[Fact]:
    """What was asked for, and what was observed besides time."""
    facts = [Fact(*format_parameter(name, value).split("=", 1)) for name, value in case.result.case.parameters.items()]
    if case.result.case.world_size > 1:
        facts.append(Fact("ranks", str(case.result.case.world_size)))
    facts += [Fact(name_fact(name), format_fact(name, value)) for name, value in case.result.facts.items()]
    facts += describe_metrics(case)
    missed = {True: " (missed)", False: " (kept)"}.get(case.metrics.get("missed_latency"), "")  # type: ignore[call-overload]
    target = describe_target(case)
    return facts + _facts(
        ("latency target", f"{target}{missed}" if target else None),
        ("benchmark version", str(case.benchmark.version)),
        ("whole case took", format_duration(case.result.elapsed_s)),
        ("run", case.run_id),
        ("key", case.result.case.key),
    )


def describe_metrics(case: CaseView) -> list[Fact]:
    """Every metric that the case has, but for what stands elsewhere beside it: statistics of its times, and facts."""
    told = {*Summary.__struct_fields__, *case.result.facts, "score", "missed_latency", "size_bytes", "drift"}
    if case.result.timing == "device":  # the median of device times is the case's own
        told.add("device_median_s")
    return [
        Fact(one.title, format_with_unit(one.unit, case.metrics[name]) + case.marks.get(name, ""))
        for name, one in list_metrics().items()
        if name in case.metrics and name not in told
    ]
