"""What the pages of runs and of traces are made with: one environment of templates, styles and scripts in the page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any


def render_template(
    name: str,
    /,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    filters: Mapping[str, Callable[..., str]] | None = None,
    **content: Any,
) -> str:
    """A page that needs nothing else. `styles`, `scripts`: files of the package, which hold no data."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    # Optimising a template that is rendered once takes longer than it saves.
    environment = Environment(
        loader=PackageLoader("stepscope.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, optimized=False,
    )  # fmt: skip
    environment.filters.update(filters or {})
    folder = files("stepscope.report") / "templates"
    style, script = (
        "".join((folder / asset).read_text(encoding="utf-8") for asset in assets) for assets in (styles, scripts)
    )
    return environment.get_template(name).render(
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **content,
    )
