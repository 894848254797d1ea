"""Files of a new distribution, from templates."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Literal

from tierkv._version import __version__
from tierkv.abc.plugin import SPI_VERSION
from tierkv.errors import ConfigError
from tierkv.plugins.registry import OWN_BACKENDS
from tierkv.plugins.validation import NAME_CHARS_MAX
from tierkv.types.cache_events import HOST

Kind = Literal["local", "remote"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

COMMON = {"pyproject.toml": "common/pyproject.toml", "README.md": "common/README.md"}
LAYOUTS: Mapping[Kind, Mapping[str, str]] = {
    "local": {
        **COMMON,
        "src/@PACKAGE@/__init__.py": "local/init.py",
        "src/@PACKAGE@/options.py": "local/options.py",
        "src/@PACKAGE@/backend.py": "local/backend.py",
        "src/@PACKAGE@/checking.py": "local/checking.py",
        "src/@PACKAGE@/at_rest.py": "local/at_rest.py",
        "tests/test_conformance.py": "local/test_conformance.py",
    },
    "remote": {
        **COMMON,
        "src/@PACKAGE@/__init__.py": "remote/init.py",
        "src/@PACKAGE@/options.py": "remote/options.py",
        "src/@PACKAGE@/client.py": "remote/client.py",
        "src/@PACKAGE@/failures.py": "remote/failures.py",
        "src/@PACKAGE@/backend.py": "remote/backend.py",
        "src/@PACKAGE@/checking.py": "remote/checking.py",
        "src/@PACKAGE@/at_rest.py": "remote/at_rest.py",
        "tests/@PACKAGE@_server.py": "remote/server.py",
        "tests/test_conformance.py": "remote/test_conformance.py",
    },
}
"""Kind -> files of the distribution, each with its template."""


def check_name(name: str, taken: Mapping[str, str]) -> None:
    """Check the name of a new backend.

    Args:
        name: as users will write it.
        taken: name of an installed backend -> the distribution that has it.

    Raises:
        ConfigError: names the mistake and an allowed name.
    """
    if name.startswith(("tierkv-", "tierkv_")):
        raise ConfigError(f"NAME = {name!r}: leave the tierkv- out; the distribution gets it: {name[7:]!r}")
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
        raise ConfigError(
            f"NAME = {name!r}: give at most {NAME_CHARS_MAX} lower-case letters and digits, with single '-' between "
            "words, like 'my-store'"
        )
    if keyword.iskeyword(name):
        raise ConfigError(f"NAME = {name!r}: this is a word of Python; give another name, like '{name}-store'")
    if name == HOST:
        raise ConfigError(f"NAME = {name!r}: a tier is named after its backend, and this is the host tier's name")
    if name in taken or name in OWN_BACKENDS:
        owner = taken.get(name, f"tierkv-{name} of this project")
        raise ConfigError(f"NAME = {name!r}: {owner} has a backend of this name; give another one")


def rendered(name: str, kind: Kind) -> dict[PurePosixPath, str]:
    """Return the files of a new distribution, by path."""
    words = {
        "@NAME@": name,
        "@PACKAGE@": f"tierkv_{name.replace('-', '_')}",
        "@CLASS@": "".join(part.capitalize() for part in name.split("-")),
        "@SPI@": str(SPI_VERSION),
        "@CORE@": ".".join(__version__.split(".")[:2]),
    }
    templates = files(__package__) / "templates"
    return {
        PurePosixPath(_filled(path, words)): _filled((templates / f"{template}.txt").read_text(encoding="utf-8"), words)
        for path, template in LAYOUTS[kind].items()
    }


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
