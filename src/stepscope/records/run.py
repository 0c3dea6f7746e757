"""The documents of a run: what was asked (plan), what came of it (run), on which system, and who took part."""

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from stepscope.core.units import escape_line
from stepscope.records.case import Case, Failure
from stepscope.records.request import Request
from stepscope.records.seal import SCHEMA_VERSION

RunKind = Literal["measured", "predicted"]


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="plan"):
    """Written before the first case, so that an interrupted run can be continued without its command line."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    tool_version: str
    command: list[str]
    """As typed, for people; nothing is parsed out of it."""
    verb: str
    """Which producer continues it: `ops`, `comms`, `workload` …"""
    request: Request
    """How the cases are measured."""
    cases: list[Case]
    kind: RunKind = "measured"
    launcher: str = "inline"
    world_size: int = 1


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str


class Run(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="run"):
    """Written last, by rename: a folder that has it is complete."""

    schema_version: int = SCHEMA_VERSION
    id: str
    kind: RunKind = "measured"
    created_at: str
    finished_at: str
    tool_version: str
    verb: str
    command: list[str]
    launcher: str
    world_size: int
    system_fingerprint: str
    cases_ok: int
    cases_failed: int
    cases_skipped: int
    resumed: int = 0
    """How often it was continued after an interruption."""
    failures: list[Failure] = []
    """What ended the attempts before the last one."""
    files: dict[str, FileEntry] = {}
    """Every file of evidence with its hash; logs of ranks are not evidence."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    pid: int
    local_rank: int
    device: str
    name: str | None = None
    """Name of the device, where it has one."""


class Communication(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="communication"):
    """Written by rank 0 when all have joined."""

    schema_version: int = SCHEMA_VERSION
    backend: str
    library: dict[str, str]
    """As loaded: `name`, `version`, and `file` where it is known."""
    settings: dict[str, str] = {}
    """Environment variables that choose algorithms, protocols and interfaces."""
    ranks: list[RankPlace] = []
    cluster: dict[str, Any] | None = None
    """The cluster file or host file the ranks were started by."""


CORE_LIBRARIES = frozenset({"torch", "cuda", "cudnn", "nccl", "hip", "rocm"})
"""Those that every measuring process of one installation has loaded alike."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    architecture: str
    sockets: int | None = None
    cores: int | None = None
    """Physical."""
    threads: int
    """Logical processors of the host."""
    usable_threads: int
    """Those this process may run on."""
    max_clock_hz: float | None = None
    governor: str | None = None
    last_level_cache_bytes: int | None = None
    features: list[str] = []
    """Instruction sets that decide which kernels run (avx2, avx512f, amx_bf16 …)."""


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    cpus: str
    """In the kernel's list form: `0-7,16-23`."""
    memory_bytes: int | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    total_bytes: int
    swap_total_bytes: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    memory_bytes: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    l2_cache_bytes: int | None = None
    max_clock_hz: float | None = None
    max_memory_clock_hz: float | None = None
    power_limit_w: float | None = None
    driver: str | None = None
    pci_address: str | None = None
    numa_node: int | None = None


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    """`ethernet`, `infiniband`, `loopback`, `virtual`."""
    speed_bits_per_s: float | None = None
    mtu: int | None = None
    numa_node: int | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A connection between two devices of one host: `NVLink`, `PCIe`, with its number of lanes or links."""

    a: str
    b: str
    kind: str
    count: int | None = None
    bytes_per_s: float | None = None
    """One direction, as the device reports it."""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the host's own numbers do not show."""

    kind: str | None = None
    cpu_quota: float | None = None
    """Cores' worth of time a control group grants."""
    memory_limit_bytes: int | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """At the moment of collection; not part of what the system is."""

    load_1m: float | None = None
    cpu_busy_share: float | None = None
    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    os: str
    kernel: str
    virtualization: str | None = None
    cpu: Cpu
    memory: Memory
    numa: list[NumaNode] = []
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    links: list[Link] = []
    container: Container = Container()
    load: Load = Load()


class Git(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    branch: str | None = None
    dirty: bool = False


class System(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="system"):
    schema_version: int = SCHEMA_VERSION
    collected_at: str
    """UTC, ISO 8601."""
    hosts: list[Host]
    python: str
    libraries: dict[str, str] = {}
    """Versions as loaded in the measuring process: torch, cuda, cudnn, nccl, mpi, gloo …"""
    environment: dict[str, str] = {}
    """Variables that change results: NCCL_*, OMP_*, TORCH_*, CUDA_* …"""
    settings: dict[str, str] = {}
    """What the libraries say they do: threads, tf32, deterministic mode …"""
    git: Git | None = None
    """State of the working folder, where it is a checkout."""

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a system has at least one host")

    @property
    def fingerprint(self) -> str:
        """Same machine and same core software: same fingerprint, whatever the load or the hour.

        Results of different fingerprints never share a table.
        """
        return _digest(self._identity())

    def _identity(self) -> dict[str, object]:
        hosts = [
            {
                "cpu": msgspec.to_builtins(msgspec.structs.replace(host.cpu, governor=None)),
                "memory": host.memory.total_bytes >> 28,
                "gpus": [(gpu.name, gpu.memory_bytes, gpu.power_limit_w, gpu.driver) for gpu in host.gpus],
                "container": msgspec.to_builtins(host.container),
                "kernel": host.kernel,
            }
            for host in self.hosts
        ]
        libraries = {
            name: version for name, version in self.libraries.items() if name.partition("@")[0] in CORE_LIBRARIES
        }
        return {"hosts": hosts, "python": self.python, "libraries": libraries}

    @property
    def configuration(self) -> str:
        """Changes with the variables and settings that change results; two parts of one run must agree in it."""
        return _digest({"environment": self.environment, "settings": self.settings})

    @property
    def place(self) -> tuple[str, str]:
        """Equal where times may be compared without naming the two systems."""
        return self.fingerprint, self.configuration

    def differences(self, other: "System") -> list[str]:
        """What of another system is not as in this one, in the parts that `place` looks at: `name: this → other`."""
        before, after = (dict(_flatten(system.decisive())) for system in (self, other))
        return [
            f"{name}: {before.get(name, 'none')} → {after.get(name, 'none')}"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]

    def decisive(self) -> dict[str, object]:
        """Everything that makes two systems different ones."""
        return {**self._identity(), "environment": self.environment, "settings": self.settings}

    @property
    def name(self) -> str:
        """One line a person recognises the machine by."""
        host = self.hosts[0]
        devices = f"{len(host.gpus)}× {host.gpus[0].name}" if host.gpus else host.cpu.model
        count = f"{len(self.hosts)} hosts, " if len(self.hosts) > 1 else ""
        threads = f", {host.cpu.usable_threads} threads" if not host.gpus else ""
        return escape_line(f"{count}{devices}{threads}")


def _flatten(content: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flatten(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _flatten(value, f"{name}[{number}]")
    else:
        yield name, str(content)


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:12]
