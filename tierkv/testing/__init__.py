"""The shipped conformance kit, simulation and fault injection. Nothing outside of tests imports this package.

Names are loaded on first use: pytest must be able to import the package (its plugin lives here) before the modules
with the kit's assertions, and fault injection must not need pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.testing.conformance import BackendConformance

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> object:
    """Import the kit when it is asked for."""
    if name == "BackendConformance":
        from tierkv.testing.conformance import BackendConformance  # noqa: PLC0415  # lazy on purpose, see above

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
