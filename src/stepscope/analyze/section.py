"""What an analysis shows, as plain data: sentences, facts, tables with typed columns, charts.

An analysis returns its `Section` beside its result; the summary in a terminal and the page are rendered from sections
alone, so that both show the same numbers under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport
    from stepscope.formats.timeline import Timeline

MOST_ROWS = 40
Unit = Literal["text", "name", "count", "number", "value", "s", "share", "B", "B/s", "flop", "flop/s"]
"""What a column holds. `name`: a kernel's whole name, shown in short; `number`: three significant digits;
`value`: four."""
Read = str | Callable[[Any], Any]


class SectionColumn(NamedTuple):
    title: str
    unit: Unit
    hint: str = ""
    brief: int = 0
    """Whether the summary shows it too: 1 always, 2 where the terminal is wide enough."""

    @property
    def is_numeric(self) -> bool:
        return self.unit not in ("text", "name")


class Table(NamedTuple):
    title: str
    caption: str
    columns: list[SectionColumn]
    rows: list[list[Any]]
    """None where there is no value."""
    left_out: int = 0
    id: str = ""
    """Makes its rows targets of links: `id-0`, `id-1`, …"""
    is_folded: bool = True
    """Whether the page shows it only when it is opened."""


class Brief(NamedTuple):
    """The first rows of a table, in those of its columns that are brief."""

    heading: str
    table: Table
    rows: int
    what: str = ""
    """What the rows are, to say how many there are: `names`."""


class Bars(NamedTuple):
    """Stacked bars whose lengths are times."""

    name: str
    caption: str
    words: dict[str, str]
    """Part → what it is called, in order."""
    bars: list[Bar]


class Bar(NamedTuple):
    label: str
    whole_s: float
    parts_s: Sequence[float]
    """In the order of the words; they sum to the whole."""


class Chart(NamedTuple):
    """Anything else that is drawn: `kind` names the function that draws `data`."""

    kind: Literal["memory", "roofline", "waiting"]
    name: str
    caption: str
    data: Any


class Section(NamedTuple):
    id: str
    title: str
    lead: str = ""
    summary: Sequence[str | Brief | Bars] = ()
    """What a terminal shows, in order."""
    facts: Sequence[tuple[str, str]] = ()
    charts: Sequence[Bars | Chart] = ()
    tables: Sequence[Table] = ()

    @property
    def has_content(self) -> bool:
        return bool(self.lead or self.facts or self.charts or any(table.rows for table in self.tables))


class Analysis(NamedTuple):
    """An entry of the list in module `analyses`."""

    name: str
    section: Callable[[JobReport], Section | None]
    """What is shown of its result; None: nothing, because it does not apply."""
    compute: Callable[[Timeline, int | None], Any] | None = None
    """Its plain result (a msgspec Struct) for a step of the representative rank, kept as `job.more[name]`. None: the
    result is a field of the report of the job or of its step."""
    in_summary: bool = True
    """False: only the page shows its section."""


class Field(NamedTuple):
    """A column, and how it reads a row."""

    column: SectionColumn
    read: Callable[[Any], Any]


def field(title: str, read: Read, unit: Unit = "text", hint: str = "", *, brief: int = 0) -> Field:
    """`read`: a function of a row, or an attribute such as `call.median_s`."""
    return Field(SectionColumn(title, unit, hint, brief), _follow(read) if isinstance(read, str) else read)


def _follow(path: str) -> Callable[[Any], Any]:
    """Reads attributes of attributes; None where one on the way is None."""
    names = path.split(".")

    def read(row: Any) -> Any:
        for name in names:
            row = None if row is None else getattr(row, name)
        return row

    return read


def make_table(
    title: str,
    caption: str,
    rows: Sequence[Any],
    fields: Sequence[Field],
    *,
    most: int = MOST_ROWS,
    id: str = "",
    is_folded: bool = True,
) -> Table:
    shown = rows[:most]
    cells = [[one.read(row) for one in fields] for row in shown]
    return Table(title, caption, [one.column for one in fields], cells, len(rows) - len(shown), id, is_folded)
