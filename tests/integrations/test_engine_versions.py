"""Versions of an engine: a message names what is installed, what is supported, and the command."""

from __future__ import annotations

import dataclasses

import pytest

from tierkv.errors import EngineVersionError
from tierkv.integrations.engine_versions import EngineVersions
from tierkv.integrations.sglang.versions import ENGINE as SGLANG

PYTEST = EngineVersions("pytest", "7.x", "pip install pytest==7", lambda text: text.startswith("7."))


def test_an_engine_that_is_not_installed() -> None:
    """Its adapter can be imported, so the first use says what is missing."""
    missing = dataclasses.replace(PYTEST, distribution="no-such-engine")
    with pytest.raises(EngineVersionError, match=r"no-such-engine is not installed; .*7\.x: pip install pytest==7"):
        missing.check_installed()


def test_the_installed_version_is_checked() -> None:
    """Not a version that the adapter was built with."""
    with pytest.raises(EngineVersionError, match=rf"pytest {pytest.__version__} is not supported.*7\.x: pip install"):
        PYTEST.check_installed()
    dataclasses.replace(PYTEST, accepts=pytest.__version__.__eq__).check_installed()


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1"])
def test_sglang_versions_that_are_served(version: str) -> None:
    """A post release changes no code."""
    SGLANG.check(version)


@pytest.mark.parametrize("version", ["0.5.2", "0.5.22", "0.5.230", "0.6.0", ""])
def test_sglang_versions_that_are_not_served(version: str) -> None:
    """A version that only begins alike is another one."""
    with pytest.raises(EngineVersionError, match=r"supports 0\.5\.23: pip install sglang==0\.5\.23"):
        SGLANG.check(version)
