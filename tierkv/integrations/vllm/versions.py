"""Which versions of vLLM are served. Its interfaces for connectors change between minor versions."""

from __future__ import annotations

import re

from tierkv.errors import EngineVersionError

SUPPORTED = ("0.32", "0.33")
"""Minor versions whose interfaces the adapters were written for; 0.32 is the one that is tested in the engine."""


def check_installed() -> None:
    """Look at the vLLM that this process would import.

    Raises:
        EngineVersionError: there is none, or it is not one of :data:`SUPPORTED`.
    """
    try:
        from vllm.version import __version__ as version  # noqa: PLC0415 - the package must import without vLLM
    except ImportError as error:
        raise EngineVersionError(
            f"vLLM cannot be imported here ({error}); install one of the versions that tierkv serves: {_names()}"
        ) from error
    check_version(version)


def check_version(version: str) -> None:
    """Look at a version as vLLM tells it, such as ``0.32.0+cpu``.

    Raises:
        EngineVersionError: it is not one of :data:`SUPPORTED`; names them.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or f"{found[1]}.{found[2]}" not in SUPPORTED:
        raise EngineVersionError(
            f"vLLM {version} is not served by this version of tierkv; it serves {_names()}: install one of these, or a "
            "version of tierkv that serves yours"
        )


def _names() -> str:
    return " and ".join(f"{minor}.x" for minor in SUPPORTED)
