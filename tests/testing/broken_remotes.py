"""Broken remote backends: each treats an outage of its server as authors first do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from plain_remote import PLUGIN, PlainremoteBackend

from tierkv.abc import BackendContext, BackendPlugin
from tierkv.errors import BackendError, TierKVError
from tierkv.types.keys import Key

OUTAGES: dict[str, tuple[str, BackendPlugin]] = {}
"""Name of the mistake -> the kit's test that must fail, and the plugin that makes it."""


def noticed_by(*tests: str) -> Callable[[Any], Any]:
    """Register a mistake."""

    def register(broken: Any) -> Any:
        for test in tests:
            OUTAGES[f"{broken.__name__}-{test.removeprefix('test_')}"] = (test, replace(PLUGIN, open=broken))
        return broken

    return register


@noticed_by("test_an_outage_is_an_error_within_a_bound")
class TakesAnOutageForAMiss(PlainremoteBackend):
    """Answers "absent" where it does not know: a breaker never opens, and the outage is in no metric."""

    def contains(self, keys: Sequence[Key]) -> list[Any]:
        return [False if isinstance(answer, TierKVError) else answer for answer in super().contains(keys)]


@noticed_by("test_traffic_survives_an_outage", "test_an_outage_is_a_miss_and_heals")
class NeverComesBack(PlainremoteBackend):
    """Keeps its first failure: the tier is gone until the engine restarts."""

    failed: BaseException | None = None

    def write(self, requests: Sequence[Any]) -> list[Any]:
        if self.failed is None:
            results = super().write(requests)
            self.failed = next((result for result in results if result is not None), None)
            return results
        return [BackendError(str(self.failed))] * len(requests)


@noticed_by("test_no_server_is_an_error_at_open")
class OpensWithAForeignError(PlainremoteBackend):
    """Lets the client's own error out: the framework takes it for a bug, and does not try again."""

    def __init__(self, context: BackendContext, options: Any) -> None:
        try:
            super().__init__(context, options)
        except TierKVError as error:
            raise RuntimeError("connection refused") from error


@noticed_by("test_no_server_is_an_error_at_open")
class OpensUnasked(PlainremoteBackend):
    """Connects with its first call: the tier is in service before its server is."""

    def __init__(self, context: BackendContext, options: Any) -> None:
        with suppress(TierKVError):
            super().__init__(context, options)
