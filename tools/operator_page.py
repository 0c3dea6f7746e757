"""The page of the docs that describes every operator."""

from __future__ import annotations

from stepscope.bench.ops import Operator, operators, shape_sets

HEADER = """# Operators

Generated from the code by `make docs`; a test fails when it is out of date. `stepscope bench ops --list` prints the
same, `--list --json` for programs. How shapes are written: [operator cases](operators-cases.md). What the numbers mean:
[metrics](metrics.md).

Packages add operators by the entry point group `stepscope.ops`: the value is a subclass of
`stepscope.bench.ops.Operator`.
"""


def format_operator_page() -> str:
    known = operators()
    contents = [
        f"{len(known)} operators:",
        "",
        ", ".join(f"[{name}](#{name})" for name in known),
        "",
    ]
    return "\n".join([HEADER, *contents, *(format_section(operator) for operator in known.values())])


def format_section(operator: Operator) -> str:
    lines = [
        f"## {operator.name}",
        "",
        f"{operator.summary}.",
        "",
        f"Passes: {', '.join(operator.passes)}. Score: {operator.unit}. dtypes: {', '.join(operator.dtypes)}.",
        f"Presets: {', '.join(shape_sets(operator))}.",
        "",
        "| parameter | unit | default | meaning |",
        "|---|---|---|---|",
    ]
    for parameter in operator.parameters:
        choices = f" ({', '.join(parameter.choices)})" if parameter.choices else ""
        default = f"`{parameter.default}`" if parameter.default != "" else ""
        meaning = f"{parameter.meaning}{choices}".replace("|", "\\|")
        lines.append(f"| `{parameter.name}` | {parameter.unit} | {default} | {meaning} |")
    return "\n".join([*lines, ""])
