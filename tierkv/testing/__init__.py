"""Kit for authors of plugins: conformance tests, fault injection and small engines. Only tests import this package.

- ``conformance``: the suite that every backend passes. A backend's author inherits from ``BackendConformance``,
  that of an eviction policy from ``PolicyConformance``, and that of a codec from ``CodecConformance``.
- ``faults``: wrappers that make a real backend fail by explicit rules.
- ``engines``: the *hand engine*, which a test moves call by call, and the *small stack*: a backend under test inside a
  real stack, with a clock that the test moves.
- ``damage``: changes of stored files by the thousand, each used in a process of its own.
- ``frames``, ``raw``: bytes for tests, and access to stored bytes past the backend.
- ``manual_clock``: time and threads under a test's control.
- ``pytest_plugin``: skipping rules and the report of a conformance run; registered as an entry point.

Invariants: the kit uses the public names of the core only (``stack.introspection`` where it needs the state of a
stack), so it survives changes inside; whether a test applies follows from declared capabilities, never from a name.

Names are imported on first use: pytest imports this package for its plugin before it rewrites the kit's assertions, and
fault injection must not need pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.testing.conformance import BackendConformance
    from tierkv.testing.conformance.codec import CodecConformance
    from tierkv.testing.conformance.policy import PolicyConformance

__all__ = ["BackendConformance", "CodecConformance", "PolicyConformance"]

_HOMES = {
    "BackendConformance": "tierkv.testing.conformance",
    "CodecConformance": "tierkv.testing.conformance.codec",
    "PolicyConformance": "tierkv.testing.conformance.policy",
}
"""Module of each name."""


def __getattr__(name: str) -> object:
    """Import the kit on first use.

    Raises:
        ModuleNotFoundError: a package that tests need is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        fix = "in a checkout of tierkv: pip install '.[testing]'"
        raise ModuleNotFoundError(f"{name} needs the package {error.name}; {fix}", name=error.name) from error
