"""Which versions of transformers are served: those whose caches consist of layers that know their window."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from tierkv.errors import EngineVersionError

FIRST, FIRST_UNKNOWN = (4, 56), (6, 0)
"""Served is the first, and everything below the second. 4.56 gave ``DynamicCache`` its sliding layers."""


def check_installed() -> None:
    """Look at the transformers that this process would import.

    Raises:
        EngineVersionError: there is none, or it is not served.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise EngineVersionError(
            f"transformers is not installed; tierkv serves {_names()}: pip install 'tierkv[transformers]'"
        ) from error
    check_version(found)


def check_version(text: str) -> None:
    """Look at a version as transformers tells it, such as ``5.19.0`` or ``5.20.0.dev0``.

    Raises:
        EngineVersionError: it is not served; names those that are.
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) < FIRST_UNKNOWN:
        raise EngineVersionError(
            f"transformers {text} is not served by this version of tierkv; it serves {_names()}: install one of these, "
            "or a version of tierkv that serves yours"
        )


def _names() -> str:
    return f"{_dotted(FIRST)} and later, below {_dotted(FIRST_UNKNOWN)}"


def _dotted(version_numbers: tuple[int, int]) -> str:
    return ".".join(map(str, version_numbers))
