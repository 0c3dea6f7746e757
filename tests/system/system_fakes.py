"""Machines that are not here: trees of /proc and /sys, and a driver library with two GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

X86_FLAGS = "fpu sme smep sse4_2 avx avx2 fma f16c avx512f avx512_bf16 amx_tile amx_bf16 hypervisor lm nx"
ARM_FEATURES = "fp asimd evtstrm aes asimdhp asimddp sve sve2 bf16 i8mm svebf16"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def make_x86(root: Path) -> Path:
    """Two sockets of two cores with two threads each; the process may use six of the eight threads."""
    files = {
        "proc/meminfo": "MemTotal: 16384 kB\nMemAvailable: 8192 kB\nSwapTotal: 4096 kB\nSwapFree: 1024 kB\n",
        "proc/loadavg": "3.50 2.00 1.00 2/300 999\n",
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,6-7\n",
        "proc/self/cgroup": "0::/\n",
        "proc/sys/kernel/hostname": "node7\n",
        "proc/sys/kernel/osrelease": "6.1.0-test\n",
        "etc/os-release": 'NAME=Test\nPRETTY_NAME="Test Linux 1"\n',
        "sys/devices/system/cpu/online": "0-7\n",
        "sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
        "sys/devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq": "3500000\n",
        "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       8192 kB\nNode 0 MemFree: 1 kB\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       4096 kB\n",
        "sys/class/dmi/id/sys_vendor": "QEMU\n",
        "sys/class/dmi/id/product_name": "Standard PC\n",
    }
    blocks = []
    for cpu in range(8):
        socket, core = cpu // 4, cpu // 2
        blocks.append(
            f"processor\t: {cpu}\nmodel name\t: Test  CPU @ 2.50GHz\ncpu MHz\t\t: {2000 + cpu}.1\n"
            f"physical id\t: {socket}\ncore id\t\t: {core % 2}\nflags\t\t: {X86_FLAGS}\n"
        )
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        first = core * 2
        files |= {
            f"{folder}/topology/physical_package_id": f"{socket}\n",
            f"{folder}/topology/core_cpus_list": f"{first}-{first + 1}\n",
            f"{folder}/cpufreq/scaling_cur_freq": f"{2000000 + cpu * 1000}\n",
            f"{folder}/thermal_throttle/core_throttle_count": "0\n",
            f"{folder}/thermal_throttle/package_throttle_count": "5\n",
            f"{folder}/cache/index0/level": "1\n",
            f"{folder}/cache/index0/type": "Data\n",
            f"{folder}/cache/index0/size": "32K\n",
            f"{folder}/cache/index0/shared_cpu_list": f"{first}-{first + 1}\n",
            f"{folder}/cache/index3/level": "3\n",
            f"{folder}/cache/index3/type": "Unified\n",
            f"{folder}/cache/index3/size": "16M\n",
            f"{folder}/cache/index3/shared_cpu_list": f"{socket * 4}-{socket * 4 + 3}\n",
        }
    files["proc/cpuinfo"] = "\n".join(blocks)
    return write_tree(root, files)


def make_arm(root: Path) -> Path:
    """A big.LITTLE machine without hyper-threads whose core ids repeat and whose package is unknown."""
    parts = ["0xd85", "0xd85", "0xd87"]
    blocks = [
        f"processor\t: {cpu}\nBogoMIPS\t: 2000.00\nFeatures\t: {ARM_FEATURES}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU part\t: {part}\n"
        for cpu, part in enumerate(parts)
    ]
    files = {"proc/cpuinfo": "\n".join(blocks), "proc/meminfo": "MemTotal: 1024 kB\n"}
    for cpu in range(3):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "-1\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu}\n"
    return write_tree(root, files)


class FakeNVMLError(Exception):
    pass


class FakeNvml:
    """Two GPUs joined by four NVLinks, with two more links to a switch; answers as the driver's library does."""

    NVMLError = FakeNVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver
        self.opened = 0
        self.reasons = 0x1
        self.power_limit_mw = 700_000
        self.busy_percent = 0
        self.refused: set[str] = set()
        """Questions that this driver does not answer."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDevice") and name in object.__getattribute__(self, "refused"):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *arguments: Any) -> None:
        raise FakeNVMLError("not supported")

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise FakeNVMLError("driver not loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index not in (0, 1):
            raise FakeNVMLError("no such device")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return ("GPU-aaaa-1", "GPU-bbbb-2")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=141 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=("00000000:3B:00.0", "00000000:AF:00.0")[handle])

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return {1: 1500, 2: 3200}[kind] + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 400_500

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        return 61

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:  # noqa: N802
        return self.power_limit_mw

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return self.reasons

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self.busy_percent, memory=0)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= 6:
            raise FakeNVMLError("no such link")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:  # noqa: N802
        peer = ("00000000:AF:00.0", "00000000:3B:00.0")[handle]
        return SimpleNamespace(busId=peer if link < 4 else "00000000:C1:00.0")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:  # noqa: N802
        return 0 if link < 4 else 2

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=25_000))]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16


def make_torch_with_gpus(uuids: list[str]) -> Any:
    """As much of torch.cuda as the mapping of device numbers looks at."""
    properties = [
        SimpleNamespace(uuid=uuid, multi_processor_count=132, L2_cache_size=50 << 20, major=9, minor=0)
        for uuid in uuids
    ]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: len(properties),
        get_device_properties=lambda ordinal: properties[ordinal],
    )
    return SimpleNamespace(cuda=cuda)
