"""The command-line reference, made from the commands themselves."""

from __future__ import annotations

import copy
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
    shown = _with_own_help_option(app)
    parts = [HEADER, _section(shown, "stepscope", 2)]
    root = click.Context(shown, info_name="stepscope", show_default=True)
    for verb in VERBS:
        command = app.get_command(root, verb)
        if command is not None:
            parts.extend(_sections(command, f"stepscope {verb}", root))
    return "\n".join(parts)


def _sections(command: click.Command, path: str, parent: click.Context, depth: int = 2) -> Iterator[str]:
    shown = _with_own_help_option(command)
    yield _section(shown, path, depth, parent)
    if isinstance(shown, click.Group):
        context = click.Context(shown, info_name=path.rpartition(" ")[2], parent=parent)
        for name in shown.list_commands(context):
            child = shown.get_command(context, name)
            if child is not None:
                yield from _sections(child, f"{path} {name}", context, depth + 1)


def _with_own_help_option(command: click.Command) -> click.Command:
    """A copy: click keeps a command's help option for good, under the names of the context that first asked for it."""
    shown = copy.copy(command)
    shown.params = [*command.params]
    shown.add_help_option = False
    click.help_option("--help")(shown)
    return shown


def _section(command: click.Command, path: str, depth: int, parent: click.Context | None = None) -> str:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent, max_content_width=100)
    context.terminal_width = 100
    help_text = command.get_help(context).rstrip()
    return f"{'#' * depth} `{path}`\n\n```text\n{help_text}\n```\n"
