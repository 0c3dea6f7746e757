from __future__ import annotations

from pathlib import Path

import pytest

from reference_tables import format_catalogue
from stepscope.system import find_device_peak, find_link_peak
from stepscope.system.catalogue import DTYPES, DevicePeak, LinkPeak, load_catalogue

DOCS = Path(__file__).parents[2] / "docs" / "system.md"
DEVICES = load_catalogue().devices
LINKS = load_catalogue().links


@pytest.mark.parametrize("peak", DEVICES, ids=lambda peak: peak.name)
def test_every_device_makes_sense(peak: DevicePeak) -> None:
    assert peak.source
    assert any(str(year) in peak.source for year in range(2010, 2027)), "a source names its year"
    assert set(peak.flops) <= set(DTYPES)
    assert 4 << 30 <= peak.memory_bytes <= 512 << 30
    assert 1e11 < peak.memory_bytes_per_s < 2e13
    assert all(1e12 < rate < 1e16 for rate in peak.flops.values())
    assert peak.l2_bytes is None or 1 << 20 <= peak.l2_bytes <= 512 << 20


@pytest.mark.parametrize("peak", DEVICES, ids=lambda peak: peak.name)
def test_narrower_types_are_not_slower(peak: DevicePeak) -> None:
    for wide, narrow in (("fp64", "fp32"), ("fp32", "tf32"), ("tf32", "bf16"), ("bf16", "fp8"), ("fp16", "int8")):
        if wide in peak.flops and narrow in peak.flops:
            assert peak.flops[wide] <= peak.flops[narrow], (wide, narrow)
    if {"tf32", "bf16"} <= set(peak.flops):
        # A dense rate beside a sparse one would show as a ratio of 1 or 4.
        assert peak.flops["bf16"] / peak.flops["tf32"] == pytest.approx(2, rel=0.03)
    if {"bf16", "fp8"} <= set(peak.flops) and "Gaudi 3" not in peak.name:
        assert peak.flops["fp8"] / peak.flops["bf16"] == pytest.approx(2, rel=0.03)


def test_rates_are_dense() -> None:
    h200, a100 = find_device_peak("NVIDIA H200"), find_device_peak("NVIDIA A100-SXM4-80GB")
    assert h200 is not None
    assert a100 is not None
    assert h200.flops["bf16"] == pytest.approx(989e12, rel=1e-3)
    assert h200.memory_bytes_per_s == 4.8e12
    assert a100.flops["bf16"] == 312e12
    assert a100.memory_bytes_per_s == 2.039e12


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM4 80GB"),
        ("A100-SXM4-40GB", "NVIDIA A100 SXM4 40GB"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 PCIe 80GB"),
        ("Tesla V100-SXM2-32GB", "NVIDIA V100 SXM2 32GB"),
        ("Tesla V100S-PCIE-32GB", "NVIDIA V100S PCIe 32GB"),
        ("Tesla P100-PCIE-16GB", "NVIDIA P100 PCIe 16GB"),
        ("Tesla T4", "NVIDIA T4"),
        ("Tesla P4", "NVIDIA P4"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("h100 sxm", "NVIDIA H100 SXM"),
        ("NVIDIA GB10", "NVIDIA GB10"),
        ("AMD Instinct MI300X", "AMD MI300X"),
        ("AMD Instinct MI250X / MI250", "AMD MI250X (one die)"),
        ("TPU v5 lite", "Google TPU v5e"),
        ("HL-225", "Intel Gaudi 2"),
    ],
)
def test_drivers_names_are_understood(name: str, expected: str) -> None:
    peak = find_device_peak(name)
    assert peak is not None
    assert peak.name == expected


@pytest.mark.parametrize(
    "name",
    ["", "NVIDIA", "A100", "H100", "NVIDIA A10G", "NVIDIA L40", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD EPYC"],
)
def test_no_peak_is_better_than_a_wrong_one(name: str) -> None:
    assert find_device_peak(name) is None


def test_no_name_means_two_entries() -> None:
    for entries, find in ((DEVICES, find_device_peak), (LINKS, find_link_peak)):
        for entry in entries:
            for name in (entry.name, *entry.aliases):
                found = find(name)
                assert found is not None
                assert found.name == entry.name, name


@pytest.mark.parametrize("peak", LINKS, ids=lambda peak: peak.name)
def test_every_link_makes_sense(peak: LinkPeak) -> None:
    assert peak.source
    assert 1e9 < peak.bytes_per_s < 2e12


def test_links_hold_together() -> None:
    def rate(name: str) -> float:
        peak = find_link_peak(name)
        assert peak is not None, name
        return peak.bytes_per_s

    for slower, faster in (("PCIe 3.0 x16", "PCIe 4.0 x16"), ("PCIe 4.0 x16", "PCIe gen5 x16"), ("HDR", "NDR")):
        assert rate(faster) == pytest.approx(2 * rate(slower), rel=1e-3)
    for version, links, gpu in ((2, 6, "V100"), (3, 12, "A100"), (4, 18, "H100"), (5, 18, "B200")):
        assert rate(f"NVLink {gpu}") == links * rate(f"NVLink {version}")
    for gigabits in (10, 25, 100, 200, 400, 800):
        assert rate(f"Ethernet {gigabits}G") == gigabits * 1e9 / 8


def test_the_documented_table_is_up_to_date() -> None:
    table = DOCS.read_text(encoding="utf-8").split("<!-- catalogue -->")[1].strip()
    assert table == format_catalogue(), "run `make docs`"
