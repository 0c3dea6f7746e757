"""The roles of a timeline's runtime calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analyze.critical.rows import codes_in, core, rows_of_kind
from stepscope.formats.classify import PLAIN, classify_call
from stepscope.formats.timeline import RUNTIME, Timeline

if TYPE_CHECKING:
    from stepscope.formats.timeline import Integers


def call_roles(timeline: Timeline) -> Integers:
    """The role of every row; PLAIN for all that are no runtime calls."""
    import numpy as np

    calls = rows_of_kind(timeline, RUNTIME)
    by_code = np.zeros(len(timeline.texts) + 1, np.int8)
    for code in codes_in(timeline, calls):
        by_code[code] = classify_call(timeline.texts[code])
    roles = np.full(len(timeline), PLAIN, np.int8)
    roles[calls] = by_code[core(timeline, "name")[calls]]
    return roles
