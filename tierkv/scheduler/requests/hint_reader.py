"""Hints of requests are read once each; what is wrong with them is told once and counted always."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tierkv.metrics.counters import CoreCounters
from tierkv.types.hints import RequestHints, parse_hints

WARNINGS_MAX = 200
"""Different faults that are told. Names of keys come from outside: without a bound the log would have none."""


class HintReader:
    """Reads hints for one stack.

    Args:
        tiers: gives the names of the stack's tiers, the host tier among them; they may change.
        counters: ``hints_ignored`` counts every fault.
        warn: is told each kind of fault of each key once.
    """

    def __init__(
        self, tiers: Callable[[], Collection[str]], counters: CoreCounters, warn: Callable[[str], None]
    ) -> None:
        self._tiers = tiers
        self._counters = counters
        self._warn = warn
        self._told: set[tuple[str, str]] = set()

    def read(self, request_id: str, params: object) -> RequestHints:
        """The hints in a request's ``kv_transfer_params``; what cannot be used is left at its default."""
        hints, faults = parse_hints(params, self._tiers())
        self._counters.hints_ignored += len(faults)
        for fault in faults:
            name = (fault.key, fault.kind)
            if name not in self._told and len(self._told) < WARNINGS_MAX:
                self._told.add(name)
                self._warn(f"request {request_id!r}: {fault.message}")
        return hints
