"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from stepscope import __version__

project = "Stepscope"
author = "The Stepscope authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_design"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["schemas", "measured"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
html_theme = "pydata_sphinx_theme"
html_title = "Stepscope"
html_static_path: list[str] = []
html_theme_options = {
    "show_toc_level": 2,
    "show_nav_level": 2,
    "navigation_with_keys": True,
    "secondary_sidebar_items": ["page-toc"],
}
html_show_sourcelink = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
