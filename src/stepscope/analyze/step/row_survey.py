"""What one compiled pass over all rows of a timeline tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.analyze.step.row_loops import COUNTS, IS_DEVICE, IS_HOST, Columns
from stepscope.formats.timeline import DEVICE_KINDS, HOST_KINDS, KINDS

if TYPE_CHECKING:
    from stepscope.formats.timeline import Integers

COUNTED = (*HOST_KINDS, *DEVICE_KINDS)
"""Kinds that a window begins and ends with: what a profiler writes about itself does not stretch it."""


class RowSurvey(NamedTuple):
    first_ns: int
    """When the first row of the counted kinds began; after `last_ns` where there is none."""
    last_ns: int
    device: Integers
    """Rows of device work, in file order."""
    top: Integers
    """Host rows that nothing encloses."""


def survey(columns: Columns) -> RowSurvey:
    import numpy as np

    from stepscope.analyze.native.step import survey_rows

    role = np.zeros(len(KINDS), np.uint8)
    for kinds, bit in ((COUNTED, COUNTS), (DEVICE_KINDS, IS_DEVICE), (HOST_KINDS, IS_HOST)):
        role[list(kinds)] |= bit
    device, top = (np.empty(len(columns.kind), np.int64) for _ in range(2))
    first, last, devices, tops = survey_rows(columns, role, device, top)
    return RowSurvey(first, last, device[:devices], top[:tops])
