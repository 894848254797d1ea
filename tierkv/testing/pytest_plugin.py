"""pytest plugin of the kit: without it, assertions in inherited tests would fail without an explanation.

Loaded through the ``pytest11`` entry point in every pytest run where tierkv is installed, so it imports nothing.
"""

from __future__ import annotations

import pytest

MODULES = ("kit", "session", "model", "crash", "ledger", "suite_contract", "suite_durability", "suite_load")
"""Modules with assertions. The package itself is imported already, so it cannot be named."""

pytest.register_assert_rewrite(*(f"tierkv.testing.{module}" for module in MODULES))
