"""Supported versions of transformers: those whose caches consist of layers with a known window."""

from __future__ import annotations

import re

from tierkv.integrations.engine_versions import EngineVersions

FIRST, FIRST_UNKNOWN = (4, 56), (6, 0)
"""Supported are versions from the first to below the second. 4.56 added sliding layers to ``DynamicCache``."""


def is_supported(text: str) -> bool:
    """Whether a version, such as ``5.19.0`` or ``5.20.0.dev0``, is supported."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return found is not None and FIRST <= (int(found[1]), int(found[2])) < FIRST_UNKNOWN


ENGINE = EngineVersions(
    "transformers",
    "{}.{} and later, below {}.{}".format(*FIRST, *FIRST_UNKNOWN),
    "pip install torch 'transformers>={}.{},<{}.{}'".format(*FIRST, *FIRST_UNKNOWN),
    is_supported,
)

check_installed = ENGINE.check_installed
