"""Reports of commands as HTML pages."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierkv.abc.places import exists
from tierkv.errors import ConfigError
from tierkv.reports.page import Page


def _checked_before(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check that a report can be written, before the work whose result it is.

    Raises:
        BadParameter: it cannot.
    """
    if path is not None and (path.is_dir() or not os.access(path if exists(path) else path.parent, os.W_OK)):
        raise click.BadParameter(f"{path}: {_FIX}")
    return path


_FIX = "name a file in a folder that exists and may be written to"

HTML_OPTION = click.option(
    "--html",
    type=click.Path(path_type=Path),
    callback=_checked_before,
    help="File for a report with tables and plots: one page, no network.",
)


def write_page(page: Page, path: Path) -> None:
    """Write a report, and name the file on standard error.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        page.write(path)
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror or error}; {_FIX}") from error
    click.echo(f"Report: {path}", err=True)
