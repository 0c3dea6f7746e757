"""What people read and write: the only place that formats numbers for people, and that reads those they write.

Inside, time is in seconds and data in bytes. On the command line the suffixes K, M and G are powers of 1024
(as in nccl-tests); printed bandwidths are powers of 1000 (GB/s), and headers say so. Text that came from files is made
safe to show here: nothing in it can move a cursor, colour a line or reverse one.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise

from stepscope.core.errors import UsageError

BINARY_SUFFIXES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}

SCORE_SCALES = {"TFLOP/s": 1e12, "GB/s": 1e9, "ex/s": 1.0, "op/s": 1.0, "step/s": 1.0}
"""Work per second is stored in the base unit; a score is shown divided by this."""

MAX_RANGE_POINTS = 100_000
MAX_DURATION_S = 1e6
"""No measurement is longer, and every clock and timer takes it."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(ns|us|µs|ms|s|min|m|h)?", re.IGNORECASE)


def parse_size(text: str, *, where: str | None = None) -> int:
    """`64`, `4K`, `1.5M`, `2GiB` as a whole number; suffixes are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write a number such as 512, 4K, 64M or 1G", where=where)
    value = float(match[1]) * BINARY_SUFFIXES[match[2].upper()]
    if not math.isfinite(value):
        raise UsageError(f"{text[:40]!r} is too large for a size", hint="write a number such as 64M or 1G", where=where)
    if value != int(value):
        raise UsageError(f"{text!r} is not a whole number", hint="use a smaller suffix", where=where)
    return int(value)


def parse_range(text: str, *, where: str | None = None) -> list[int]:
    """A list of sizes: `1K,4K`, `8:64M:x2` (factor), `64:512:+64` or `64:512:64` (step); ends included."""
    points: list[int] = []
    for part in text.split(","):
        points.extend(_parse_span(part.strip(), where=where))
    if not points:
        raise UsageError("the list of sizes is empty", hint="write for example 1K:1M:x4", where=where)
    if len(set(points)) != len(points):
        raise UsageError(f"{text!r} names a size twice", hint="remove the repeated size", where=where)
    return points


def _parse_span(part: str, *, where: str | None) -> list[int]:
    pieces = part.split(":")
    if len(pieces) == 1:
        return [parse_size(part, where=where)]
    hint = "write first:last:xFACTOR or first:last:+STEP, for example 8:64M:x2"
    if len(pieces) != 3:
        raise UsageError(f"{part!r} is not a range of sizes", hint=hint, where=where)
    first, last = parse_size(pieces[0], where=where), parse_size(pieces[1], where=where)
    if last < first:
        raise UsageError(f"the range {part!r} ends below its start", hint=hint, where=where)
    advance = _parse_step(pieces[2].strip(), part, first, hint, where)
    points = [first]
    while (following := advance(points[-1])) <= last:
        points.append(following)
        if len(points) > MAX_RANGE_POINTS:
            raise UsageError(
                f"the range {part!r} has more than {MAX_RANGE_POINTS:,} points", hint="use a larger step", where=where
            )
    return points


def _parse_step(step: str, part: str, first: int, hint: str, where: str | None) -> Callable[[int], int]:
    if step[:1] in "x*×" and step[:1]:
        try:
            factor = float(step[1:])
        except ValueError:
            raise UsageError(f"{step!r} is not a factor", hint=hint, where=where) from None
        if not (math.isfinite(factor) and factor > 1) or first == 0:
            raise UsageError(f"the range {part!r} never grows", hint=hint, where=where)
        return lambda value: max(value + 1, round(value * factor))
    increment = parse_size(step.removeprefix("+"), where=where)
    if increment == 0:
        raise UsageError(f"the range {part!r} never grows", hint=hint, where=where)
    return lambda value: value + increment


def parse_duration(text: str, *, where: str | None = None) -> float:
    """`2s`, `500ms`, `1.5min` in seconds; a bare number is seconds."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration", hint="write for example 500ms, 2s or 5min", where=where)
    seconds = float(match[1]) * _TIME_UNITS[(match[2] or "s").lower()]
    if seconds > MAX_DURATION_S:
        raise UsageError(f"{text[:40]!r} is too long a duration", hint="write at most 11 days", where=where)
    return seconds


def parse_share(text: str, *, where: str | None = None) -> float:
    """`5%` or `0.05` as a fraction between 0 and 1."""
    stripped = text.strip()
    try:
        value = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{text!r} is not a share", hint="write for example 5% or 0.05", where=where) from None
    if not 0 <= value <= 1:
        raise UsageError(f"{text!r} is not between 0 and 100 %", hint="write for example 5% or 0.05", where=where)
    return value


def format_significant(value: float, digits: int = 4) -> str:
    """Fixed digits without an exponent in the range people read: 0.001234, 12.35, 5678; beyond 11 places 1.510e+91."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if not -8 <= decimals <= 9:
        return f"{value:.{digits - 1}e}"
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def format_duration(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= scale:
            return f"{format_significant(seconds / scale)} {unit}"
    return f"{format_significant(seconds / 1e-9)} ns"


def format_bytes(size: float) -> str:
    """Binary units, as sizes are written on the command line."""
    for (unit, scale), (_, above) in pairwise([*BINARY_SUFFIXES.items(), ("", math.inf)]):
        if abs(size) < above:
            text = f"{size / scale:.4g}" if size / scale < 1000 else f"{size / scale:.0f}"
            return f"{text} {unit}{'iB' if unit else 'B'}"
    raise AssertionError("the last unit has no upper bound")


def format_bandwidth(bytes_per_s: float) -> str:
    return f"{format_significant(bytes_per_s / 1e9)} GB/s"


def cut_text(text: str, longest: int) -> str:
    """What is longer ends in an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def count_of(count: int, one: str, many: str | None = None) -> str:
    """`1 gap`, `2 gaps`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def format_share(fraction: float, digits: int = 1) -> str:
    percent = fraction * 100
    return f"{percent:.{digits}f} %" if abs(percent) < 1e9 else f"{percent:.1e} %"


def format_ratio(ratio: float) -> str:
    """Three decimals where they mean something: an interval may end anywhere."""
    return f"{ratio:.3f}×" if ratio < 1000 else f"{ratio:.2g}×" if math.isfinite(ratio) else "∞"


def scale_score(work_per_s: float, unit: str) -> float:
    """Work per second (flop/s, bytes/s, examples/s) in the unit a table shows."""
    return work_per_s / SCORE_SCALES[unit]


_LINE_PARTS = "\t\n"
_BREAKS = "\u0085\u2028\u2029"
"""What some programs end a line at, beside the newline."""
_DIRECTIONS = "\u061c\u200e\u200f" + "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
"""Marks that change the direction of the text behind them."""


@cache
def _escapes(kept: str, *, in_json: bool = False) -> dict[int, str]:
    """How characters that could move or colour something are written, but for those kept; made when first asked for."""
    codes = [*range(0x20), *range(0x7F, 0xA0), *map(ord, _BREAKS + _DIRECTIONS), *range(0xD800, 0xE000)]
    if in_json:
        return {code: f"\\u{code:04x}" for code in codes if code >= 0x7F}
    return {code: chr(code).encode("unicode_escape").decode() for code in codes if chr(code) not in kept}


def _is_printable(text: str) -> bool:
    """Whether no line of it has anything to escape, as almost all: known ten times as fast as a copy is made."""
    return all(map(str.isprintable, text.split("\n")))


def escape_controls(text: str) -> str:
    """Control characters as `\\x1b`; line breaks and tabs stay, as text of several lines has them."""
    return text if _is_printable(text) else text.translate(_escapes(_LINE_PARTS))


def escape_line(text: str) -> str:
    """The same for what must stay one line, a name or a cell: line breaks and tabs are escaped too."""
    return text if text.isprintable() else text.translate(_escapes(""))


def escape_json(text: str) -> str:
    """The same JSON without control characters in its strings: encoders leave those above 127 as they are."""
    return text if _is_printable(text) else text.translate(_escapes("", in_json=True))


def wrap_line(line: str, width: int | None) -> list[str]:
    """For a terminal: broken at spaces, indented as the line is. Commands, paths and other long words stay whole, to be
    copied.

    `width` None, as of a file or a pipe: the line as it is.
    """
    if width is None or len(line) <= width or _COMMAND.match(line):
        return [line]
    indent = _INDENT.match(line)
    return _Wrapper(
        width, subsequent_indent=f"{indent[0] if indent else ''}  ", break_long_words=False, break_on_hyphens=False
    ).wrap(line)


class _Wrapper(textwrap.TextWrapper):
    wordsep_simple_re = re.compile(r"(\s+|(?<=,)(?=\S))")
    """At spaces, and behind commas: labels have no spaces."""


_INDENT = re.compile(r"#?[ \t]*")
_COMMAND = re.compile(r"[# \t]*next: stepscope ")
