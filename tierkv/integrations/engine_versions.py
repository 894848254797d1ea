"""Check of an engine's installed version against those that an adapter supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from tierkv.errors import EngineVersionError


@dataclass(frozen=True, slots=True)
class EngineVersions:
    """Supported versions of one engine."""

    distribution: str
    """Name of the engine's distribution, as pip knows it."""
    names: str
    """Supported versions, as text for messages."""
    install: str
    """Command that installs one of them."""
    accepts: Callable[[str], bool]
    """Whether a version, such as ``0.5.23`` or ``5.20.0.dev0``, is supported."""

    def check_installed(self) -> None:
        """Check the engine that this process would import.

        Raises:
            EngineVersionError: it is missing, or its version is not supported.
        """
        try:
            found = version(self.distribution)
        except PackageNotFoundError as error:
            raise EngineVersionError(
                f"{self.distribution} is not installed; tierkv supports {self.names}: {self.install}"
            ) from error
        self.check(found)

    def check(self, text: str) -> None:
        """Check a version.

        Raises:
            EngineVersionError: it is not supported. The message names those that are.
        """
        if not self.accepts(text):
            raise EngineVersionError(
                f"{self.distribution} {text} is not supported by this version of tierkv, which supports {self.names}: "
                f"{self.install}, or install a version of tierkv that supports yours"
            )
