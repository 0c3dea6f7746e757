"""Text that came from files, made safe to show: nothing in it can move a cursor, colour a line or reverse one."""

from __future__ import annotations

_LINE_PARTS = "\t\n"
_BREAKS = "\u0085\u2028\u2029"
"""What some programs end a line at, beside the newline."""
_DIRECTIONS = "\u061c\u200e\u200f" + "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
"""Marks that change the direction of the text behind them."""

_CONTROLS = {
    code: chr(code).encode("unicode_escape").decode()
    for code in [*range(0x20), *range(0x7F, 0xA0), *map(ord, _BREAKS + _DIRECTIONS), *range(0xD800, 0xE000)]
}
_IN_TEXT = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in _LINE_PARTS}
_IN_JSON = {code: f"\\u{code:04x}" for code in _IN_TEXT if code >= 0x7F}


def escape_controls(text: str) -> str:
    """Control characters as `\\x1b`; line breaks and tabs stay, as text of several lines has them."""
    return text.translate(_IN_TEXT)


def escape_line(text: str) -> str:
    """The same for what must stay one line, a name or a cell: line breaks and tabs are escaped too."""
    return text.translate(_CONTROLS)


def escape_json(text: str) -> str:
    """The same JSON without control characters in its strings: encoders leave those above 127 as they are."""
    return text.translate(_IN_JSON)
