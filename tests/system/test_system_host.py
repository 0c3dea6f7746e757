from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_fakes import make_arm, make_x86, write_tree

from stepscope.system.host import (
    list_folder,
    parse_cpu_list,
    parse_cpuinfo,
    read_container,
    read_cpu,
    read_memory,
    read_natural,
    read_nics,
    read_numa_nodes,
    read_text,
    read_throttled_periods,
    read_turbo,
    read_virtualization,
    sample_load,
)


def test_x86_processors(tmp_path: Path) -> None:
    cpu = read_cpu(make_x86(tmp_path))

    assert cpu.model == "Test CPU @ 2.50GHz"
    assert cpu.architecture == "x86_64"
    assert (cpu.sockets, cpu.cores, cpu.threads, cpu.usable_threads) == (2, 4, 8, 6)
    assert cpu.max_clock_hz == 3.5e9
    assert cpu.governor == "powersave"
    assert cpu.last_level_cache_bytes == 32 << 20
    # `sme` is memory encryption on x86, `smep` a protection: neither decides a kernel.
    assert cpu.features == ["amx_bf16", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512f", "f16c", "fma", "sse4_2"]
    assert read_turbo(tmp_path) is True


def test_the_present_clock_never_enters_the_record(tmp_path: Path) -> None:
    make_x86(tmp_path)
    (tmp_path / "sys/devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq").unlink()
    assert read_cpu(tmp_path).max_clock_hz == 2.5e9  # what the model name states

    text = (tmp_path / "proc/cpuinfo").read_text().replace(" @ 2.50GHz", "")
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert read_cpu(tmp_path).max_clock_hz is None


def test_arm_processors(tmp_path: Path) -> None:
    cpu = read_cpu(make_arm(tmp_path))

    assert cpu.architecture == "aarch64"
    assert cpu.model == "1× Cortex-A725 + 2× Cortex-X925"
    assert (cpu.sockets, cpu.cores, cpu.threads) == (None, 3, 3)
    assert cpu.features == ["asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2", "svebf16"]
    assert cpu.last_level_cache_bytes is None
    assert cpu.governor is None


def test_an_unknown_arm_core_keeps_its_numbers(tmp_path: Path) -> None:
    write_tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n"})
    assert read_cpu(tmp_path).model == "ARM implementer 0x99 part 0x123"


def test_topology_falls_back_to_cpuinfo(tmp_path: Path) -> None:
    make_x86(tmp_path)
    for path in (tmp_path / "sys/devices/system/cpu").glob("cpu*/topology/*"):
        path.unlink()
    cpu = read_cpu(tmp_path)
    assert (cpu.sockets, cpu.cores) == (2, 4)


def test_an_empty_machine_has_no_made_up_values(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path)
    assert cpu.threads >= 1
    assert (cpu.sockets, cpu.cores, cpu.max_clock_hz, cpu.governor, cpu.features) == (None, None, None, None, [])
    assert read_numa_nodes(tmp_path) == []
    assert read_nics(tmp_path) == []
    assert read_virtualization(tmp_path) is None
    assert read_container(tmp_path, {}).kind is None
    assert sample_load(tmp_path).load_1m is None
    assert read_throttled_periods(tmp_path) is None


def test_numa_nodes(tmp_path: Path) -> None:
    nodes = read_numa_nodes(make_x86(tmp_path))
    assert [(node.node, node.cpus, node.memory_bytes) for node in nodes] == [(0, "0-3", 8 << 20), (1, "4-7", 4 << 20)]


def test_memory_and_load(tmp_path: Path) -> None:
    memory, load = read_memory(make_x86(tmp_path)), sample_load(tmp_path)
    assert (memory.total_bytes, memory.swap_total_bytes) == (16 << 20, 4 << 20)
    assert (load.load_1m, load.memory_available_bytes, load.swap_used_bytes) == (3.5, 8 << 20, 3 << 20)


def test_cgroup_2_limits_of_the_strictest_ancestor(tmp_path: Path) -> None:
    write_tree(
        make_x86(tmp_path),
        {
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod1/box/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/box/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 4\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/kubepods/memory.max": "4194304\n",
        },
    )
    box = read_container(tmp_path, {})
    assert (box.kind, box.cpu_quota, box.memory_limit_bytes) == ("kubernetes", 1.5, 4 << 20)
    assert read_throttled_periods(tmp_path) == 4


def test_cgroup_1_limits_where_the_named_group_is_not_mounted(tmp_path: Path) -> None:
    write_tree(
        make_x86(tmp_path),
        {
            ".dockerenv": "",
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8388608\n",
        },
    )
    box = read_container(tmp_path, {})
    assert (box.kind, box.cpu_quota, box.memory_limit_bytes) == ("docker", 2.0, 8 << 20)


def test_unlimited_is_no_limit(tmp_path: Path) -> None:
    write_tree(
        make_x86(tmp_path),
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    box = read_container(tmp_path, {})
    assert (box.kind, box.cpu_quota, box.memory_limit_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("files", "environment", "kind"),
    [
        ({"run/.containerenv": ""}, {}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_CONTAINER": "/image.sif"}, "apptainer"),
        ({"run/systemd/container": "systemd-nspawn\n"}, {}, "systemd-nspawn"),
        ({"proc/self/cgroup": "0::/lxc/box\n"}, {}, "lxc"),
    ],
)
def test_container_kinds(tmp_path: Path, files: dict[str, str], environment: dict[str, str], kind: str) -> None:
    assert read_container(write_tree(tmp_path, files), environment).kind == kind


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/class/dmi/id/sys_vendor": "Amazon EC2", "sys/class/dmi/id/product_name": "p5.48xlarge"}, "amazon"),
        ({"sys/class/dmi/id/sys_vendor": "Amazon EC2", "sys/class/dmi/id/product_name": "c5.metal"}, None),
        ({"sys/class/dmi/id/sys_vendor": "Dell Inc.", "sys/class/dmi/id/product_name": "PowerEdge"}, None),
        ({"proc/sys/kernel/osrelease": "5.15.0-microsoft-standard-WSL2"}, "wsl"),
        ({"sys/hypervisor/type": "xen"}, "xen"),
        ({"proc/cpuinfo": "processor : 0\nflags : fpu hypervisor\n"}, "hypervisor"),
    ],
)
def test_virtualization(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    assert read_virtualization(write_tree(tmp_path, files)) == expected


def test_network_cards(tmp_path: Path) -> None:
    net, rdma = "sys/class/net", "sys/class/infiniband"
    write_tree(
        tmp_path,
        {
            f"{net}/lo/mtu": "65536",
            f"{net}/lo/type": "772",
            f"{net}/eth0/mtu": "9000",
            f"{net}/eth0/type": "1",
            f"{net}/eth0/speed": "100000",
            f"{net}/eth0/device/numa_node": "1",
            f"{net}/eth1/mtu": "1500",
            f"{net}/eth1/type": "1",
            f"{net}/eth1/speed": "-1",
            f"{net}/eth1/device/numa_node": "-1",
            f"{net}/veth9/mtu": "1500",
            f"{net}/veth9/type": "1",
            f"{net}/ib0/mtu": "2044",
            f"{net}/ib0/type": "32",
            f"{net}/bonding_masters": "bond0",
            f"{rdma}/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            f"{rdma}/mlx5_0/ports/1/link_layer": "InfiniBand",
            f"{rdma}/mlx5_0/device/numa_node": "0",
            f"{rdma}/mlx5_1/ports/1/rate": "200 Gb/sec (4X HDR)",
            f"{rdma}/mlx5_1/ports/1/link_layer": "Ethernet",
        },
    )
    nics = {nic.name: nic for nic in read_nics(tmp_path)}

    assert {name: nic.kind for name, nic in nics.items()} == {
        "lo": "loopback",
        "eth0": "ethernet",
        "eth1": "ethernet",
        "veth9": "virtual",
        "ib0": "infiniband",
        "mlx5_0:1": "infiniband",
        "mlx5_1:1": "ethernet",
    }
    assert (nics["eth0"].speed_bits_per_s, nics["eth0"].mtu, nics["eth0"].numa_node) == (100e9, 9000, 1)
    assert (nics["eth1"].speed_bits_per_s, nics["eth1"].numa_node) == (None, None)
    assert (nics["mlx5_0:1"].speed_bits_per_s, nics["mlx5_0:1"].numa_node) == (400e9, 0)


def test_reads_that_fail_are_missing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("many\n")
    assert read_text(tmp_path / "absent") is None
    assert read_text(tmp_path / "folder") is None
    assert read_natural(tmp_path / "text") is None


def test_folders_are_listed_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        (tmp_path / f"cpu{number}").mkdir()
    assert [path.name for path in list_folder(tmp_path)] == ["cpu1", "cpu2", "cpu10"]


@given(st.sets(st.integers(0, 500), min_size=1))
def test_cpu_lists_come_back(cpus: set[int]) -> None:
    """Written as the kernel writes them: runs joined by a dash, single ones alone."""
    ordered = sorted(cpus)
    starts = [cpu for cpu in ordered if cpu - 1 not in cpus]
    ends = [cpu for cpu in ordered if cpu + 1 not in cpus]
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    assert parse_cpu_list(text + "\n") == ordered


@given(st.text())
def test_any_cpuinfo_is_read(text: str) -> None:
    assert all("processor" in entry for entry in parse_cpuinfo(text))
