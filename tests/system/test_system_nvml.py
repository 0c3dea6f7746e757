from __future__ import annotations

from pathlib import Path

import pytest
from system_fakes import FakeNvml, make_torch_with_gpus, write_tree

from stepscope.system.nvml import (
    describe_visible_gpus,
    find_nvml_index,
    open_nvml,
    parse_pci_address,
    parse_visible_devices,
    read_gpus,
    read_links,
)

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-abab-3"]


def test_gpus(tmp_path: Path) -> None:
    write_tree(tmp_path, {"sys/bus/pci/devices/0000:af:00.0/numa_node": "1\n"})
    first, second = read_gpus(FakeNvml(), root=tmp_path)

    assert (first.index, first.name, first.memory_bytes) == (0, "NVIDIA H200", 141 << 30)
    assert (first.max_clock_hz, first.max_memory_clock_hz, first.power_limit_w) == (1.98e9, 3.201e9, 700.0)
    assert (first.driver, first.compute_capability, first.pci_address) == ("570.1", "9.0", "0000:3b:00.0")
    assert (first.numa_node, second.numa_node) == (None, 1)
    assert first.multiprocessors is None


def test_torch_adds_what_the_driver_does_not_tell_to_the_right_gpu(tmp_path: Path) -> None:
    first, second = read_gpus(FakeNvml(), root=tmp_path, torch=make_torch_with_gpus(["bbbb-2"]))
    assert (first.multiprocessors, first.l2_cache_bytes) == (None, None)
    assert (second.multiprocessors, second.l2_cache_bytes) == (132, 50 << 20)


def test_a_driver_that_answers_little_gives_none(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.refused = {
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetPowerManagementLimit",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetFieldValues",
    }
    gpu = read_gpus(nvml, root=tmp_path)[0]
    assert (gpu.memory_bytes, gpu.pci_address, gpu.max_clock_hz, gpu.power_limit_w) == (None, None, None, None)
    assert all(link.bytes_per_s is None for link in read_links(nvml))


def test_links_name_each_pair_once() -> None:
    links = read_links(FakeNvml())
    nvlinks = [(link.a, link.b, link.count, link.bytes_per_s) for link in links if link.kind == "NVLink"]
    assert nvlinks == [
        ("gpu0", "gpu1", 4, 100e9),
        ("gpu0", "nvswitch", 2, 50e9),
        ("gpu1", "nvswitch", 2, 50e9),
    ]
    pcie = [link for link in links if link.kind == "PCIe"]
    assert [(link.a, link.b, link.count) for link in pcie] == [("gpu0", "host", 16), ("gpu1", "host", 16)]
    assert pcie[0].bytes_per_s == pytest.approx(63.015e9, rel=1e-3)


def test_the_library_is_closed_again() -> None:
    nvml = FakeNvml()
    with open_nvml(nvml) as library:
        assert library is nvml
        assert nvml.opened == 1
    assert nvml.opened == 0


def test_no_driver_no_library() -> None:
    nvml = FakeNvml(driver=False)
    with open_nvml(nvml) as library:
        assert library is None
    assert nvml.opened == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,9,0", [1]),
        ("-1", []),
        ("GPU-bbbb", [1]),
        ("GPU-a", []),  # two begin so
        ("GPU-abab-3, 0", [2, 0]),
        ("MIG-1234", None),
    ],
)
def test_visible_devices(value: str | None, expected: list[int] | None) -> None:
    assert parse_visible_devices(value, UUIDS) == expected


def test_device_numbers_follow_torch_before_the_variable() -> None:
    nvml = FakeNvml()
    reordered = make_torch_with_gpus(["bbbb-2", "aaaa-1"])
    assert find_nvml_index(nvml, 0, torch=reordered, environment={}) == 1
    assert find_nvml_index(nvml, 0, environment={"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert find_nvml_index(nvml, 1, environment={"CUDA_VISIBLE_DEVICES": "1"}) is None
    assert find_nvml_index(nvml, 1, environment={}) == 1


def test_visible_gpus_are_told_by_model_and_number(tmp_path: Path) -> None:
    nvml = FakeNvml()
    gpus = read_gpus(nvml, root=tmp_path)
    assert describe_visible_gpus(nvml, gpus, {}) == "2× NVIDIA H200"
    # Which of two equal GPUs a scheduler hands out must not make another system of it.
    assert describe_visible_gpus(nvml, gpus, {"CUDA_VISIBLE_DEVICES": "0"}) == "1× NVIDIA H200"
    assert describe_visible_gpus(nvml, gpus, {"CUDA_VISIBLE_DEVICES": "1"}) == "1× NVIDIA H200"
    assert describe_visible_gpus(nvml, gpus, {"CUDA_VISIBLE_DEVICES": ""}) == "none"
    assert describe_visible_gpus(nvml, [], {}) is None


def test_pci_addresses_in_the_kernels_form() -> None:
    assert parse_pci_address("00000000:3B:00.0\0") == "0000:3b:00.0"
    assert parse_pci_address("00010000:3B:00.0") == "10000:3b:00.0"
    assert parse_pci_address("nonsense") is None
