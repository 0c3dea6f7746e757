"""Regenerate what is generated: JSON Schemas, the command-line reference, the operator and catalogue pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from cli_reference import format_cli_reference  # noqa: E402
from operator_page import format_operator_page  # noqa: E402
from reference_tables import (  # noqa: E402
    RECORDS,
    format_catalogue,
    format_metrics,
    format_sql_tables,
    format_trace_metrics,
    make_schema,
)
from rooms_picture import draw_rooms  # noqa: E402
from stepscope.metrics.traces import TRACE_METRICS  # noqa: E402
from workload_picture import draw_gains  # noqa: E402
from workload_table import find_lines, format_table, read_values  # noqa: E402


def replace_between(path: Path, marker: str, content: str) -> None:
    """The generated part stands between two equal markers."""
    before, _, after = path.read_text(encoding="utf-8").split(f"<!-- {marker} -->")
    path.write_text(f"<!-- {marker} -->".join([before, f"\n{content.strip()}\n", after]), encoding="utf-8")


def main() -> None:
    schemas = ROOT / "docs" / "schemas"
    schemas.mkdir(exist_ok=True)
    for name in RECORDS:
        text = json.dumps(make_schema(name), indent=2, ensure_ascii=False)
        (schemas / f"{name}.schema.json").write_text(text + "\n", encoding="utf-8")
    (ROOT / "docs" / "cli.md").write_text(format_cli_reference(), encoding="utf-8")
    (ROOT / "docs" / "operators.md").write_text(format_operator_page(), encoding="utf-8")
    replace_between(ROOT / "docs" / "system.md", "catalogue", format_catalogue())
    replace_between(ROOT / "docs" / "store.md", "tables", format_sql_tables())
    replace_between(ROOT / "docs" / "metrics.md", "metrics", format_metrics())
    for analysis in TRACE_METRICS:
        replace_between(ROOT / "docs" / "trace-metrics.md", analysis, format_trace_metrics(analysis))
    values = read_values()
    replace_between(ROOT / "docs" / "workloads.md", "suite", format_table(values))
    (ROOT / "docs" / "images" / "suite-gains.svg").write_text(draw_gains(find_lines(values)), encoding="utf-8")
    (ROOT / "docs" / "images" / "rooms.svg").write_text(draw_rooms(), encoding="utf-8")
    print("docs are up to date")


if __name__ == "__main__":
    main()
