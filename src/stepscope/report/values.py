"""Values of sections as text, alike in a terminal and on a page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from stepscope.analyze.section import Unit
from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_share, format_significant
from stepscope.formats.classify import short_name


def _format_flops(value: float) -> str:
    from stepscope.report.labels import format_flops  # with it come records, which a summary does without

    return format_flops(value)


_FORMATS: dict[Unit, Callable[[Any], str]] = {
    "text": str,
    "name": short_name,
    "count": lambda value: f"{value:.0f}",
    "number": lambda value: format_significant(value, 3),
    "value": lambda value: format_significant(value, 4),
    "s": format_duration,
    "share": format_share,
    "B": format_bytes,
    "B/s": format_bandwidth,
    "flop": _format_flops,
    "flop/s": lambda value: f"{_format_flops(value)}/s",
}
_UNIT = re.compile(r"(\d) (%|×|ns|µs|ms|s|GB/s|[KMGT]?i?B)(?![\w/])")


def format_value(value: Any, unit: Unit) -> str:
    return "-" if value is None else _FORMATS[unit](value)


def keep_units(text: str) -> str:
    """A number and its unit stay on one line: the space between them becomes one that does not break."""
    return _UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)
