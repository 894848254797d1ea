"""Reports of commands as HTML pages."""

from __future__ import annotations

from pathlib import Path

import click

from tierkv.errors import ConfigError
from tierkv.reports.page import Page

HTML_OPTION = click.option(
    "--html", type=click.Path(path_type=Path), help="File for a report with tables and plots: one page, no network."
)


def write_page(page: Page, path: Path) -> None:
    """Write a report, and name the file on standard error.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        page.write(path)
    except OSError as error:
        raise ConfigError(
            f"--html {path}: {error.strerror or error}; name a file in a folder that exists and may be written to"
        ) from error
    click.echo(f"Report: {path}", err=True)
