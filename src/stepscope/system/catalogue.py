"""Peaks of devices and links with the document each number comes from; the data is in `catalogue.toml`.

A peak is what the maker promises, never what a program reaches: scores are shown against it, predictions are not
made from it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""Columns of the table, in this order."""

_BRAND_WORDS = frozenset({"nvidia", "tesla", "amd", "instinct", "intel", "habana", "google", "cloud", "radeon"})


class DevicePeak(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    aliases: list[str]
    """Names under which drivers and people know it."""
    memory_bytes: int
    memory_bytes_per_s: float
    flops: dict[str, float]
    """Per second and dense, by type; a type the maker does not state is absent."""
    l2_bytes: int | None = None
    source: str
    note: str = ""


class LinkPeak(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    aliases: list[str]
    bytes_per_s: float
    """One direction."""
    source: str


PeakT = TypeVar("PeakT", bound=DevicePeak | LinkPeak)


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[DevicePeak]
    links: list[LinkPeak]


@cache
def load_catalogue() -> Catalogue:
    """Reads the packaged file once per process."""
    text = resources.files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    return Catalogue(
        devices=[_parse_device(entry) for entry in content["device"]],
        links=[LinkPeak(bytes_per_s=entry.pop("gb_per_s") * 1e9, **entry) for entry in content["link"]],
    )


def _parse_device(entry: dict[str, Any]) -> DevicePeak:
    return DevicePeak(
        memory_bytes=entry.pop("memory_gib") << 30,
        memory_bytes_per_s=entry.pop("memory_gb_per_s") * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry.pop("tflops").items()},
        l2_bytes=entry.pop("l2_mib") << 20 if "l2_mib" in entry else None,
        **entry,
    )


def find_device_peak(name: str) -> DevicePeak | None:
    """The entry a driver's name (`NVIDIA A100-SXM4-80GB`) or a person's (`h100 sxm`) means.

    None for what is not in the catalogue and for what fits several entries (`A100` alone has two bandwidths) or
    only a part of a device (a MIG slice): a wrong peak is worse than none.
    """
    return _find(name, load_catalogue().devices)


def find_link_peak(name: str) -> LinkPeak | None:
    return _find(name, load_catalogue().links)


def _find(name: str, peaks: Iterable[PeakT]) -> PeakT | None:
    wanted = _words(name)
    for peak in peaks:
        if wanted in {_words(known) for known in (peak.name, *peak.aliases)}:
            return peak
    return None


def _words(name: str) -> tuple[str, ...]:
    """Words in alphabetical order without brands: drivers change the order (`A100 80GB PCIe`, `A100-PCIE-40GB`)."""
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return tuple(sorted(word for word in found if word not in _BRAND_WORDS))
