"""What this machine is, its data-sheet peaks (catalogue), its state (telemetry) and what to fix (doctor)."""

from stepscope.system.catalogue import find_device_peak, find_link_peak
from stepscope.system.collect import collect_system, merge_systems
from stepscope.system.doctor import Diagnosis, diagnose, format_diagnosis
from stepscope.system.host import read_container, read_last_level_cache
from stepscope.system.probes import bfloat16_works
from stepscope.system.telemetry import Telemetry, open_telemetry

__all__ = [
    "Diagnosis", "Telemetry", "bfloat16_works", "collect_system", "diagnose", "find_device_peak", "find_link_peak",
    "format_diagnosis", "merge_systems", "open_telemetry", "read_container", "read_last_level_cache",
]  # fmt: skip
