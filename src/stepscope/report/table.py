"""The one table model: columns are declared, rows are anything; written for a terminal, for a file, or as Markdown.

On a terminal a table is no wider than the terminal. What tells a row from the others stays, and so does what has no
`drop`: constant columns move above the table, the benchmark above its rows, titles and names break into lines, other
metrics follow in a second table, and details are left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stepscope.core.units import escape_line

if TYPE_CHECKING:
    from stepscope.records import Notice

Row = TypeVar("Row")
T = TypeVar("T")

NONE = "-"
GAP = "  "
_NAME_WIDTH = 24
"""Room that names get before columns are left out for others."""
_LEAST_WIDTH = 6
_NARROW = re.compile("[ -~\u00a1-\u00ac\u00ae-\u02ff\u2010-\u2027\u2190-\u22ff]*")
"""Characters of one place each, as most texts are made of: the others are looked up."""


Role = Literal["benchmark", "case", "setting", "value"]
"""What a column says of its row. Where there is no room, a benchmark and a setting that is the same in every row move
above the table, other benchmarks above their rows; all but values are repeated beside metrics that follow below."""


class Cell(NamedTuple):
    text: str
    sort: str | float | None = None
    """What a sortable table orders by; None goes last."""


class Column(NamedTuple, Generic[Row]):
    title: str
    cell: Callable[[Row], Cell | str]
    numeric: bool = False
    unit: str = ""
    """Unit of every number in the column."""
    drop: int = 0
    """0: stays on every terminal. Where there is no room, the columns with the highest number are left out first."""
    role: Role = "value"
    hint: str = ""
    """What the column means, for new readers."""
    width: int = 0
    """Least width."""
    brief: Callable[[Row], str] | None = None
    """What stands in the cell where there is no room for the whole."""


class TableLayout(NamedTuple, Generic[Row]):
    """A table's lines, without what marks them as titles or rows."""

    constants: list[tuple[str, str]]
    """Titles and values of the columns that are the same in every row and stand above the table."""
    head: list[str]
    sections: list[str]
    """Benchmark of each row, where that has no columns."""
    rows: list[list[str]]
    """At least one line per row; more where a name was broken."""
    left_out: list[Column[Row]]
    """For which there was no room."""


class _Drawn(Struct, frozen=True, eq=False, dict=True):
    """A column with the text of every row."""

    place: int
    title: str
    """Here and in the cells, lines are separated by a line break."""
    unit: str
    cells: list[str]
    numeric: bool
    drop: int
    role: Role
    least: int
    brief: list[str] | None = None

    @cached_property
    def width(self) -> int:
        texts = (self.title, self.unit, *self.cells)
        return max(self.least, *(text_width(line) for text in texts for line in text.split("\n")))

    @property
    def is_constant(self) -> bool:
        says_nothing = self.cells[:1] == [NONE] and (self.role == "case" or self.drop > 0)
        return len(set(self.cells)) == 1 and (self.role in {"benchmark", "setting"} or says_nothing)


def format_table(columns: Sequence[Column[Row]], rows: Sequence[Row], *, width: int | None = None) -> list[str]:
    """Rows are indented by two; everything else is on lines that begin with `#`.

    Columns that would have to be left out for `width`, but are no details, follow in a second table.
    """
    layout = lay_out(columns, rows, width=None if width is None else width - 2)
    lines = [f"# all rows: {', '.join(f'{title} {text}' for title, text in layout.constants)}"] * bool(layout.constants)
    lines += [f"# {line}" for line in layout.head]
    for before, section, row in zip(["", *layout.sections], layout.sections, layout.rows, strict=False):
        lines += [f"# {section}"] * (section != before) + [f"  {line}" for line in row]
    further = [column for column in layout.left_out if column.drop == 1]
    if further:
        constant = {title for title, _ in layout.constants}
        names = [column for column in columns if column.role != "value" and column.title not in constant]
        # The first of them stays this time, so that there is an end.
        lines += format_table([*names, further[0]._replace(drop=0), *further[1:]], rows, width=width)
    if details := [column.title for column in layout.left_out if column.drop > 1]:
        lines.append(f"# left out for width: {', '.join(details)}")
    return lines


def lay_out(columns: Sequence[Column[Row]], rows: Sequence[Row], *, width: int | None = None) -> TableLayout[Row]:
    """Aligned lines, as wide as they are where `width` is None."""
    drawn = [_draw(place, column, rows) for place, column in enumerate(columns)]
    constants: list[_Drawn] = []
    shown, sections = drawn, [""] * len(rows)
    left_out: list[_Drawn] = []
    if width is not None and _total(drawn) > width:
        shown, constants, left_out = _fit(drawn, width)
        if _total(shown, _NAME_WIDTH) > width or left_out:
            shown, sections = _take_out_benchmark(shown)
        shown = _narrow(shown, width)
    return TableLayout(
        [(_one_line(column), column.cells[0]) for column in constants if column.cells[0] != NONE],
        _draw_head(shown),
        sections,
        [_draw_line(shown, cells) for cells in zip(*(column.cells for column in shown), strict=True)],
        [columns[one.place] for one in sorted(left_out, key=lambda one: one.place)],
    )


def _draw(place: int, column: Column[Row], rows: Sequence[Row]) -> _Drawn:
    title, unit = plain(column.title), f"({column.unit})" if column.unit else ""
    cells = [plain(read_cell(column, row).text) for row in rows]
    if column.numeric and any(cell.endswith("*") for cell in cells):  # digits stay under digits
        title, unit, *cells = (text if text.endswith("*") else f"{text} " for text in (title, unit, *cells))
    brief = [plain(column.brief(row)) for row in rows] if column.brief is not None else None
    return _Drawn(place, title, unit, cells, column.numeric, column.drop, column.role, column.width, brief)


def read_cell(column: Column[Row], row: Row) -> Cell:
    found = column.cell(row)
    return found if isinstance(found, Cell) else Cell(found)


def _total(columns: Sequence[_Drawn], most: int | None = None) -> int:
    """Width of a row whose names take no more than `most`."""
    widths = [column.width if column.numeric or most is None else min(column.width, most) for column in columns]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _fit(columns: list[_Drawn], width: int) -> tuple[list[_Drawn], list[_Drawn], list[_Drawn]]:
    """Columns that fit if the benchmark moves above its rows, those that move above the table, those left out."""
    constants = [column for column in columns[1:] if column.is_constant]
    shown = [replace(one, cells=one.brief or one.cells) for one in columns if one not in constants]
    left_out: list[_Drawn] = []
    for level in sorted({column.drop for column in shown if column.drop}, reverse=True):
        for column in [column for column in reversed(shown) if column.drop == level]:
            rest = [_break_title(one) for one in shown if level > 1 or one.role != "benchmark"]
            if _total(rest, _NAME_WIDTH) > width:
                shown.remove(column)
                left_out.append(column)
    return [_break_title(column) for column in shown], constants, left_out


def _take_out_benchmark(columns: list[_Drawn]) -> tuple[list[_Drawn], list[str]]:
    """The columns without the parts of the benchmark's name, and that name for each row."""
    parts = [column for column in columns if column.role == "benchmark"]
    rest = [column for column in columns if column not in parts]
    if not parts or not rest:
        return columns, [""] * len(columns[0].cells)
    names = zip(*(one.cells for one in parts), strict=True)
    return rest, ["/".join(text for text in texts if text != NONE) for texts in names]


def _break_title(column: _Drawn) -> _Drawn:
    """The title on several lines where it is wider than what stands below it."""
    room = max([column.least, *map(text_width, (*column.title.split(), column.unit, *column.cells))])
    return replace(column, title="\n".join(textwrap.wrap(column.title, room)))


def _one_line(column: _Drawn) -> str:
    return column.title.replace("\n", " ").strip()


def _narrow(columns: list[_Drawn], width: int) -> list[_Drawn]:
    """Names on several lines, the widest first, until the rows fit; parts of names are broken last."""
    widths = [column.width for column in columns]
    parts = [max(map(text_width, _PARTS.split(" ".join([column.title, *column.cells])))) for column in columns]
    names = [place for place, column in enumerate(columns) if not column.numeric]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for least in ([max(_LEAST_WIDTH, one) for one in parts], [_LEAST_WIDTH] * len(columns)):
        while excess > 0 and (wide := [place for place in names if widths[place] > least[place]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
            excess -= 1
    return [
        replace(
            column, title=break_text(_one_line(column), room), cells=[break_text(cell, room) for cell in column.cells]
        )
        if room < column.width
        else column
        for column, room in zip(columns, widths, strict=True)
    ]


_PARTS = re.compile(r"(\s+|(?<=[/,])(?=\S))")
"""Where long names are broken first."""


def break_text(text: str, width: int) -> str:
    """On lines of at most `width` places; at spaces, or behind what separates parts of a name, where there is any."""
    from rich.cells import chop_cells

    lines = _Wrapper(width, break_long_words=False).wrap(text)
    return "\n".join(
        part for line in lines for part in (chop_cells(line, width) if text_width(line) > width else [line])
    )


class _Wrapper(textwrap.TextWrapper):
    def _split(self, text: str) -> list[str]:
        parts = _PARTS.split(text)
        return [
            piece
            for part in parts
            for piece in (re.split(r"(?<=-)(?=\S)", part) if len(part) > self.width else [part])
            if piece
        ]


def _draw_head(columns: Sequence[_Drawn]) -> list[str]:
    """Titles on as many lines as the longest needs, the last line of each above its unit."""
    most = max(column.title.count("\n") for column in columns)
    lines = _draw_line(columns, ["\n" * (most - column.title.count("\n")) + column.title for column in columns])
    return lines + (
        _draw_line(columns, [column.unit for column in columns]) if any(c.unit.strip() for c in columns) else []
    )


def _draw_line(columns: Sequence[_Drawn], texts: Sequence[str]) -> list[str]:
    """One row, on as many lines as its longest cell has."""
    cells = [text.split("\n") for text in texts]
    return [
        GAP.join(
            _pad(lines[number] if number < len(lines) else "", column.width, right=column.numeric)
            for lines, column in zip(cells, columns, strict=True)
        ).rstrip()
        for number in range(max(map(len, cells), default=0))
    ]


def _pad(text: str, width: int, *, right: bool) -> str:
    padding = " " * (width - text_width(text))
    return padding + text if right else text + padding


def show(value: T | None, form: Callable[[T], str], none: str = NONE) -> str:
    """What `form` makes of a value; `none` where there is no value."""
    return none if value is None else form(value)


def align(rows: Sequence[Sequence[str]], numeric: Sequence[bool], *, width: int | None = None) -> list[str]:
    """Lines of a table of texts whose first row is the titles."""
    layout = lay_out(text_columns(rows[0], numeric), rows[1:], width=width)
    return [*layout.head, *(line for row in layout.rows for line in row)]


def text_columns(titles: Sequence[str], numeric: Sequence[bool]) -> list[Column[Sequence[str]]]:
    """Columns of rows that are texts already."""
    return [
        Column(title, lambda row, place=place: row[place], right)  # type: ignore[misc]
        for place, (title, right) in enumerate(zip(titles, numeric, strict=True))
    ]


def format_notices(notices: Sequence[tuple[Notice, str]], several: str) -> list[str]:
    """One entry per kind of notice, with the first one's place: on a noisy machine every case says the same."""
    by_kind: dict[str, list[tuple[Notice, str]]] = {}
    for notice, place in notices:
        by_kind.setdefault(notice.kind, []).append((notice, place))
    lines = []
    for said in by_kind.values():
        notice, place = said[0]
        count = several.format(len(said)) if len(said) > 1 else ""
        lines.append(f"# notice: {count}{plain(place)}{plain(notice.message)}")
        lines += [f"#   next: {plain(notice.hint)}"] if notice.hint else []
    return lines


def markdown_table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> list[str]:
    """As GitHub shows it, whatever the texts hold."""
    titles = [f"{column.title} ({column.unit})" if column.unit else column.title for column in columns]
    cells = [[escape(read_cell(column, row).text) for column in columns] for row in rows]
    rule = ["---:" if column.numeric else "---" for column in columns]
    return [f"| {' | '.join(line)} |" for line in ([escape(title) for title in titles], rule, *cells)]


_ESCAPES = str.maketrans({"\\": "\\\\", "|": "\\|", "*": "\\*", "`": "\\`", "[": "\\[", "]": "\\]"} | {
    "&": "&amp;", "<": "&lt;", ">": "&gt;",
})  # fmt: skip


def escape(text: str) -> str:
    """For Markdown: shown as written, whatever it holds; on one line."""
    return plain(text).translate(_ESCAPES)


def text_width(text: str) -> int:
    """Places on a terminal: some characters take two, some none."""
    if _NARROW.fullmatch(text):
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def plain(text: str) -> str:
    """On one line and harmless to a terminal: control characters are written out."""
    return escape_line(text)
