"""The command: check the name and the folder, then write the files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import click

from tierkv.abc.places import exists
from tierkv.cli.new_plugin.rendering import Kind, check_name, rendered
from tierkv.cli.output import console
from tierkv.errors import ConfigError
from tierkv.plugins.loading import load_plugins


@click.command("new-plugin")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(get_args(Kind)),
    default="local",
    show_default=True,
    help="local: files of this machine. remote: a server that several engines share.",
)
@click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="Parent of the new folder."
)
def new_plugin(name: str, kind: Kind, into: Path) -> None:
    """Write the distribution of a new backend, tierkv-NAME, into a folder of that name.

    It works as written, and its tests are the conformance kit: first run them, then replace the storage.

    \b
    Examples:
      tierkv new-plugin my-store                  files of this machine
      tierkv new-plugin my-store --kind remote    a server, with a small one for the tests
      pip install -e "tierkv-my-store[testing]"
      python -m pytest tierkv-my-store
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    check_name(name, {found.plugin.name: str(found.origin) for found in load_plugins().backends.values()})
    folder = into / f"tierkv-{name}"
    if exists(folder) or folder.is_symlink():
        raise ConfigError(f"{folder} exists already, and nothing in it is changed; give another name, or --into")
    try:
        write_files(folder, name, kind)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}; give a writable folder with --into") from error
    out = console()
    for path in rendered(name, kind):
        out.print(f"{folder / path}", highlight=False, markup=False)
    out.print(
        f'\nNext:\n  pip install -e "{folder}[testing]"\n  python -m pytest {folder}', highlight=False, markup=False
    )


def write_files(folder: Path, name: str, kind: Kind) -> None:
    """Write the files of a new distribution into a folder that does not exist.

    Raises:
        OSError: a file cannot be written; the folder is removed.
    """
    folder.mkdir(parents=True)
    try:
        for path, text in rendered(name, kind).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        for package in folder.glob("src/*"):
            (package / "py.typed").touch()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
