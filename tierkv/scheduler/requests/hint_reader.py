"""Hints of requests: parsed once per request; each kind of fault is logged once and counted always."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tierkv.metrics.counters import CoreCounters
from tierkv.types.hints import NO_HINTS, RequestHints, parse_hints

WARNINGS_MAX = 200
"""Different faults that are logged. Names of keys come from users, so the number must be bounded."""


class HintReader:
    """Parses hints for one stack.

    Args:
        tiers: returns the names of the stack's tiers, which may change, including the host tier.
        counters: ``hints_ignored`` counts every fault.
        warn: called once per key and kind of fault.
    """

    def __init__(
        self, tiers: Callable[[], Collection[str]], counters: CoreCounters, warn: Callable[[str], None]
    ) -> None:
        self._tiers = tiers
        self._counters = counters
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()

    def read_hints(self, request_id: str, params: object) -> RequestHints:
        """Hints in a request's ``kv_transfer_params``; unusable ones get their defaults."""
        if params is None:
            return NO_HINTS
        hints, faults = parse_hints(params, self._tiers())
        self._counters.hints_ignored += len(faults)
        for fault in faults:
            name = (fault.key, fault.kind)
            if name not in self._warned and len(self._warned) < WARNINGS_MAX:
                self._warned.add(name)
                self._warn(f"request {request_id!r}: {fault.message}")
        return hints
