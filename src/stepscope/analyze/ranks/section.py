"""What the summary and the page show of collectives and of ranks that wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analyze.section import Brief, Chart, Section, Table, field, make_table
from stepscope.core.units import count_of, format_bytes, format_duration, format_significant

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport
    from stepscope.analyze.ranks.collective_table import CollectiveRow
    from stepscope.analyze.ranks.ranks_report import RanksReport
    from stepscope.analyze.ranks.waiting import MapColumn, MapRow, WaitingMap


def collectives_section(job: JobReport) -> Section | None:
    across = job.across
    if across is None:
        return None
    over = "over all steps" if across.step is None else f"in step {across.step}"
    collectives = _collectives_table(across, over)
    groups = make_table("Process groups", "Each over all its collectives", across.groups, [
        field("Time of a rank", "per_rank_s", "s"),
        field("% waiting", "wait_share", "share"),
        field("Collectives", "collectives", "count"),
        field("Bytes", "bytes", "B"),
        field("busbw", "busbw_bytes_per_s", "B/s"),
        field("Size", "size", "count"),
        field("Members", "members"),
        field("Group", "group"),
    ])  # fmt: skip
    tables, charts = [collectives, groups], []
    if across.waiting_map is not None:
        caption = _caption(across.waiting_map)
        charts.append(Chart("waiting", "Waiting by rank and collective", caption, across.waiting_map))
        tables.append(_waiting_table(across.waiting_map))
    if across.step is None:
        over = f"in {len(job.steps)} steps" if len(job.steps) > 1 else ""
    first = [Brief(f"Collectives {over}".rstrip(), collectives, 4, "kinds")] if collectives.rows else []
    several = len(job.ranks) > 1
    facts = [
        ("Waiting of a rank in a step", _spell(across.over_steps.wait_s, " (median)")),
        ("Arrival skew in a step", _spell(across.over_steps.skew_s)),
        ("Busiest rank over mean", _imbalance(across, 4)),
    ]
    if several:
        late = across.stragglers.stragglers
        facts.append(("Stragglers", ", ".join(f"rank {rank}" for rank in late[:8]) or "none"))
    return Section(
        id="collectives",
        title="Collectives",
        summary=[*first, *(_summary_of_ranks(job, across) if several else [])],
        facts=[(name, value) for name, value in facts if value],
        charts=charts,
        tables=tables,
    )


def _spell(time_s: float | None, more: str = "") -> str:
    return "" if time_s is None else format_duration(time_s) + more


def _imbalance(across: RanksReport, digits: int) -> str:
    return "" if across.balance.imbalance is None else format_significant(across.balance.imbalance, digits)


def _collectives_table(across: RanksReport, over: str) -> Table:
    rows = sorted(across.table, key=lambda row: -row.total_s)
    caption = f"{over.capitalize()}; a matched one counts once, however many ranks took part"
    return make_table("Collectives", caption, rows, [
        field("Time", "total_s", "s", brief=1),
        field("Count", "count", "count", brief=1),
        field("Median", "median_s", "s", brief=1),
        field("% waiting", "wait_share", "share", "Of all members' time in them", brief=1),
        field("Transfer", "transfer_s", "s", "From the last arrival to the end, median"),
        field("", lambda row: "≥" if row.includes_waiting and row.busbw_bytes_per_s is not None else "",
              hint="Rates are lower bounds where waiting could not be taken out", brief=1),
        field("algbw", "algbw_bytes_per_s", "B/s"),
        field("busbw", "busbw_bytes_per_s", "B/s", brief=1),
        field("Size", "size_bytes", "B"),
        field("Sizes", _spell_size, brief=1),
        field("Ranks", "group_size", "count", brief=2),
        field("Collective", "collective", brief=1),
        field("Type", "dtype", brief=2),
        field("Group", "group"),
    ], is_folded=False)  # fmt: skip


def _spell_size(row: CollectiveRow) -> str:
    if row.size_bytes is None:
        return "unknown"
    if row.size_range_bytes:
        return f"{format_bytes(min(row.size_range_bytes))}–{format_bytes(max(row.size_range_bytes))}"
    return format_bytes(row.size_bytes)


def _summary_of_ranks(job: JobReport, across: RanksReport) -> list[str | Brief]:
    summary: list[str | Brief] = []
    late = [one for one in across.stragglers.ranks if one.stands_out]
    late.sort(key=lambda one: (-one.straggler, -one.caused_s))
    if not late and across.stragglers.ranks:
        summary.append("Late ranks: none is significantly late, or there is too little to decide")
    if late:
        count = len(across.stragglers.stragglers)
        table = make_table("Late ranks", "", late, [
            field("Rank", "rank", "count", brief=1),
            field("Last to", "last_calls", "count", brief=1),
            field("Others waited", "caused_s", "s", "In sum", brief=1),
            field("% of waiting", "last_share", "share", brief=1),
            field("Median lateness", "median_s", "s", brief=2),
            field("Verdict", "verdict", brief=1),
        ])  # fmt: skip
        summary.append(Brief(f"Late ranks: {count_of(count, 'straggler')}", table, 3, "late ones"))
    waits, busiest = _spell(across.over_steps.wait_s), _imbalance(across, 3)
    parts = [
        f"a rank waits {waits} in collectives of a step (median)" if waits else "",
        f"busiest rank over mean {busiest}" if busiest else "",
        f"times compared {describe_clocks(job)}",
    ]
    return [*summary, f"Ranks: {'; '.join(part for part in parts if part)}"]


def describe_clocks(job: JobReport) -> str:
    """How the ranks' times were compared, and why so; empty where there is one rank."""
    if job.across is None or len(job.ranks) < 2:
        return ""
    return f"{job.across.clocks} ({job.across.clocks_because})"


# Who waited for whom


def spell_collective(name: str) -> str:
    """As people write it: `all_reduce` → `all-reduce`."""
    return {"send_recv": "send/receive", "recv": "receive", "other": "communication"}.get(name, name.replace("_", "-"))


def name_row(row: MapRow) -> str:
    return f"rank {row.ranks[0]}" if len(row.ranks) == 1 else f"ranks {row.ranks[0]}–{row.ranks[-1]}"


def short_title(column: MapColumn) -> str:
    names = list(column.collectives)
    count = sum(column.collectives.values())
    size = f" {format_bytes(column.size_bytes)}" if column.size_bytes is not None else ""
    name = spell_collective(names[0]) if len(names) == 1 else "several kinds"
    return f"{count} × {name}" if count > 1 else f"{name}{size}"


def describe_column(column: MapColumn) -> str:
    count = sum(column.collectives.values())
    if count == 1:
        return short_title(column) + (f" among {column.group_size}" if column.group_size else "")
    return ", ".join(f"{number} × {spell_collective(name)}" for name, number in column.collectives.items())


def _caption(found: WaitingMap) -> str:
    where = f"step {found.step}" if found.step is not None else "all steps"
    together = ""
    if len(found.columns) < found.collectives:
        together = f"; {found.collectives} collectives in {len(found.columns)} columns, the colour is their mean"
    grouped = "; groups of ranks show their mean" if any(len(row.ranks) > 1 for row in found.rows) else ""
    return (
        f"Waiting for later ranks in the collectives of {where}, in order of time: the stronger the colour, the longer "
        f"the wait; an outline marks the rank that came last{together}{grouped}"
    )


def _waiting_table(found: WaitingMap) -> Table:
    """One row per column of the map."""
    columns = [
        field("Place", lambda item: item[0] + 1, "count"),
        field("Collective", lambda item: describe_column(item[1])),
        field("Came last", lambda item: None if item[1].last_rank is None else f"rank {item[1].last_rank}",
              hint="The rank to whom most of the arrival skew is due"),
        field("Arrival skew", lambda item: item[1].skew_s, "s", "Latest minus median arrival"),
        *(
            field(name_row(row).capitalize(), lambda item, row=row: row.wait_s[item[0]], "s",  # type: ignore[misc]
                  "How long it waited for later ranks")
            for row in found.rows
        ),
    ]  # fmt: skip
    caption = "Waiting of each rank for later ones"
    rows = list(enumerate(found.columns))
    return make_table("Waiting by collective and rank", caption, rows, columns, most=len(rows))
