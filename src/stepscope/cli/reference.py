"""The command-line reference, made from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator

import click

from stepscope.cli.main import VERBS, app

HEADER = """# Command-line reference

Generated from the code by `make docs`; a test fails when it is out of date.

Every verb takes `--json`: the same content on stdout as `{"ok": true, "data": …}`, or
`{"ok": false, "error": {"kind", "message", "hint", "where"}}`. Narration and progress go to stderr.

| exit code | meaning |
|---|---|
| 0 | done; skipped cases alone included |
| 1 | the run, or any case of it, failed |
| 2 | wrong use or bad input |
| 3 | regression found (`check`) |
| 4 | not enough data to decide (`check`) |
| 130 | interrupted |
"""


def format_cli_reference() -> str:
    parts = [HEADER, _section(app, "stepscope", 2)]
    root = click.Context(app, info_name="stepscope")
    for verb in VERBS:
        command = app.get_command(root, verb)
        if command is not None:
            parts.extend(_sections(command, f"stepscope {verb}", root))
    return "\n".join(parts)


def _sections(command: click.Command, path: str, parent: click.Context, depth: int = 2) -> Iterator[str]:
    yield _section(command, path, depth, parent)
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _sections(child, f"{path} {name}", context, depth + 1)


def _section(command: click.Command, path: str, depth: int, parent: click.Context | None = None) -> str:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent, max_content_width=100)
    context.terminal_width = 100
    help_text = command.get_help(context).rstrip()
    return f"{'#' * depth} `{path}`\n\n```text\n{help_text}\n```\n"
