"""The documentation site: Sphinx, MyST Markdown, furo. ``python -m nox -s docs`` builds it."""

from __future__ import annotations

project = "tierkv"
author = "The tierkv authors"
copyright = author  # noqa: A001  # Sphinx names its settings

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_generate"]

html_theme = "furo"
html_title = "tierkv"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
