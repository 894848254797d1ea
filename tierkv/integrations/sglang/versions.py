"""Supported versions of SGLang: those whose storage interface passes positions in the host pool."""

from __future__ import annotations

from tierkv.integrations.engine_versions import EngineVersions

SUPPORTED = "0.5.23"
"""Version that the tests run. Its post releases count as the same version."""

ENGINE = EngineVersions(
    "sglang", SUPPORTED, f"pip install sglang=={SUPPORTED}", lambda text: text.partition(".post")[0] == SUPPORTED
)

check_installed = ENGINE.check_installed
