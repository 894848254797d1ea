"""Supported versions of transformers: those whose caches consist of layers with a known window."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from tierkv.errors import EngineVersionError

FIRST, FIRST_UNKNOWN = (4, 56), (6, 0)
"""Supported are versions from the first to below the second. 4.56 added sliding layers to ``DynamicCache``."""


def check_installed() -> None:
    """Check the transformers that this process would import.

    Raises:
        EngineVersionError: transformers is missing, or its version is not supported.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise EngineVersionError(
            f"transformers is not installed; tierkv supports {_names()}: pip install 'tierkv[transformers]'"
        ) from error
    check_version(found)


def check_version(text: str) -> None:
    """Check a version of transformers, such as ``5.19.0`` or ``5.20.0.dev0``.

    Raises:
        EngineVersionError: the version is not supported. The message lists those that are.
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) < FIRST_UNKNOWN:
        raise EngineVersionError(
            f"transformers {text} is not supported by this version of tierkv, which supports {_names()}: install one "
            "of these, or a version of tierkv that supports yours"
        )


def _names() -> str:
    return f"{_dotted(FIRST)} and later, below {_dotted(FIRST_UNKNOWN)}"


def _dotted(version_numbers: tuple[int, int]) -> str:
    return ".".join(map(str, version_numbers))
