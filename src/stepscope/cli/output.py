"""What goes to stdout and stderr: the same content for people and for programs."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from stepscope.errors import StepscopeError


def emit(data: Any, text: str, *, as_json: bool) -> None:
    """`data` as the JSON envelope, or `text`; never both."""
    if as_json:
        click.echo(msgspec.json.encode({"ok": True, "data": data}).decode())
    elif text:
        click.echo(text)


def narrate(message: str) -> None:
    """A word to the person watching; stdout belongs to the result."""
    click.echo(message, err=True)


def print_error(error: StepscopeError, *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode({"ok": False, "error": error.as_dict()}).decode())
        return
    lines = [f"error: {error.message}"]
    lines += [f"  where: {error.where}"] if error.where else []
    lines += [f"  next: {error.hint}"] if error.hint else []
    sys.stdout.flush()
    click.echo("\n".join(lines), err=True)
