"""Kit for authors of backends: conformance tests, fault injection and small engines. Only tests import this package.

- ``conformance``: the suite that every backend passes. A backend's author inherits from ``BackendConformance``.
- ``faults``: wrappers that make a real backend fail by explicit rules.
- ``engines``: the *hand engine*, which a test moves call by call, and the *small stack*: a backend under test inside a
  real stack, with a clock that the test moves.
- ``frames``, ``raw``: bytes for tests, and access to stored bytes past the backend.
- ``manual_clock``: time and threads under a test's control.
- ``pytest_plugin``: skipping rules and the report of a conformance run; registered as an entry point.

Invariants: the kit uses the public names of the core only (``stack.introspection`` where it needs the state of a
stack), so it survives changes inside; whether a test applies follows from declared capabilities, never from a name.

Names are imported on first use: pytest imports this package for its plugin before it rewrites the kit's assertions, and
fault injection must not need pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.testing.conformance import BackendConformance

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> object:
    """Import the kit on first use."""
    if name == "BackendConformance":
        from tierkv.testing.conformance import BackendConformance  # noqa: PLC0415  # lazy on purpose, see above

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
