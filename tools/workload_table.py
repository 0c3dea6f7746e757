"""The table of docs/workloads.md from the values that were kept: optimized beside out of the box, in two precisions.

`python tools/workload_table.py RUN…` takes new runs into the kept values; a case that is there already is replaced.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from stepscope import api  # noqa: E402
from stepscope.bench.workloads.registry import (  # noqa: E402
    choose_suite,
    find_workload,
    suite_precisions,
)
from stepscope.core.units import format_duration, format_ratio, format_share, format_significant  # noqa: E402

VALUES = ROOT / "docs" / "measured" / "nvidia-h200" / "workloads.csv"
HEADER = """
| benchmark | batch | out of the box | MFU | same precision | gain | any precision | gain | memory | check |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---|
"""

Row = dict[str, str]


class Line(NamedTuple):
    plain: Row
    same: Row | None
    best: Row | None

    @property
    def gains(self) -> list[float | None]:
        return [float(one["score"]) / float(self.plain["score"]) if one else None for one in (self.same, self.best)]


def read_values(path: Path = VALUES) -> dict[tuple[str, str], Row]:
    """By benchmark and precision."""
    rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return {(row["benchmark"], json.loads(row["parameters"])["precision"]): row for row in rows}


def format_table(values: dict[tuple[str, str], Row]) -> str:
    lines = find_lines(values)
    table = HEADER.strip() + "\n" + "\n".join(format_line(line) for line in lines)
    return f"{table}\n\n{format_means(lines)}\n"


def find_lines(values: dict[tuple[str, str], Row]) -> list[Line]:
    """The suite in its own order, as far as it was measured."""
    lines = []
    for fast in choose_suite(implementations=["optimized"], everything=False):
        own, *others = suite_precisions(fast)
        name = fast.benchmark.id
        plain = values.get((name.replace("/optimized/", "/ootb/"), own))
        if plain is None or not plain["score"]:
            continue
        scored = [values[name, one] for one in (own, *others) if (name, one) in values and values[name, one]["score"]]
        same = next((row for row in scored if json.loads(row["parameters"])["precision"] == own), None)
        best = max(scored, key=lambda row: float(row["score"]), default=None)
        lines.append(Line(plain, same, best))
    return lines


def format_line(line: Line) -> str:
    plain = line.plain
    star = _star(plain)
    name = plain["benchmark"].replace("/ootb/", "/…/")
    time = format_duration(float(plain["median_s"]))
    share = _mfu(plain)
    cells = [f"`{name}`{_older(plain)}", plain["batch_size"], f"{_score(plain)}{star} ex/s, {time}", share]
    for row, gain in zip((line.same, line.best), line.gains, strict=True):
        shown = f"{_score(row)}{_star(row)} ({format_precision(row)})" if row else "–"
        cells += [shown, format_ratio(gain) if gain else "–"]
    memory = [f"{_observed(row)['peak_memory_bytes'] / 2**30:.1f}" for row in (plain, line.best) if row]
    checks = {_observed(row)["check"] for row in (line.same, line.best) if row}
    cells += [f"{' → '.join(memory)} GiB", ", ".join(sorted(checks)) or "–"]
    return f"| {' | '.join(cells)} |"


def format_means(lines: list[Line]) -> str:
    sentences = []
    for name, place in (("the same precision", 0), ("any precision that the benchmark allows", 1)):
        gains = {line.plain["benchmark"]: gain for line in lines if (gain := line.gains[place])}
        if gains:
            mean = math.exp(math.fsum(map(math.log, gains.values())) / len(gains))
            least = min(gains, key=lambda one: gains[one])
            sentences.append(
                f"In {name}: {format_ratio(mean)} in the geometric mean of {len(gains)}, "
                f"least {format_ratio(gains[least])} (`{least.replace('/ootb/', '/…/')}`)."
            )
    return "\n".join(sentences)


def _score(row: Row) -> str:
    value = float(row["score"])
    return f"{value:,.0f}" if value >= 1000 else format_significant(value)


def _star(row: Row) -> str:
    return "*" if row["missed_latency"] == "true" else ""


def _older(row: Row) -> str:
    """What was measured of a benchmark before its version was raised says so."""
    now = find_workload(row["benchmark"]).benchmark.version
    return "" if int(row["benchmark_version"]) == now else f" (version {row['benchmark_version']})"


def _mfu(row: Row) -> str:
    return f"{format_share(float(row['mfu']))} of {format_precision(row)}" if row["mfu"] else "–"


def _observed(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(row["observed"])
    return found


def format_precision(row: Row) -> str:
    return str(json.loads(row["parameters"])["precision"])


def take_in(folders: list[Path]) -> None:
    values = read_values() if VALUES.exists() else {}
    text = api.report(folders, kind="csv")
    names = next(csv.reader(io.StringIO(text)))
    for row in csv.DictReader(io.StringIO(text)):
        parameters = json.loads(row["parameters"])
        # Neither tries, nor what was asked for in another way than the benchmark declares, nor anything but the suite.
        if set(parameters) != {"device", "scale", "precision"} or parameters["scale"] != "full":
            continue
        found = find_workload(row["benchmark"])
        if not parameters["device"].startswith("cuda") or int(row["world_size"]) != 1:
            continue
        if int(row["batch_size"]) != found.declared.batch_size:
            continue
        # A form that fails today has no score, whatever it had before.
        values.pop((row["benchmark"], parameters["precision"]), None)
        if row["status"] == "ok":
            values[row["benchmark"], parameters["precision"]] = row
    with VALUES.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(values[key] for key in sorted(values))


if __name__ == "__main__":
    take_in([Path(one) for one in sys.argv[1:]])
