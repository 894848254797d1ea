"""The store that is opened anew where the server refuses it: how often, and what a failure of that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.testing.manual_clock import ManualClock
from tierkv_fsspec.stores.local_store import LocalStore
from tierkv_fsspec.stores.renewed_store import RENEW_S, RenewedStore


class Keys:
    """Source of stores in a directory, as a rotation of credentials sees it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.opened: list[LocalStore] = []
        self.is_gone = False
        self.is_refused = False

    def open(self) -> LocalStore:
        if self.is_gone:
            raise PermissionError("no file with credentials")
        self.opened.append(LocalStore(self.place))
        if self.is_refused:
            self.refuse()
        return self.opened[-1]

    def refuse(self) -> None:
        """Let every store that was opened so far refuse."""
        for store in self.opened:
            store.exists = _refuse  # type: ignore[method-assign]


def _refuse(name: str) -> bool:
    raise PermissionError(name)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Stores in a directory."""
    return Keys(tmp_path)


def test_a_refused_request_is_sent_again_by_another_store(keys: Keys) -> None:
    """Credentials that were replaced in their file are used at once, and cost no chunk."""
    store = RenewedStore(keys.open, "here", ManualClock())
    store.write("a", memoryview(b"frame"))
    keys.refuse()
    assert store.exists("a")
    assert len(keys.opened) == 2


def test_a_lasting_refusal_opens_few_stores(keys: Keys) -> None:
    """A user whose rights were taken away for a night costs one new store every five seconds, not one a request."""
    keys.is_refused = True
    clock = ManualClock()
    store = RenewedStore(keys.open, "here", clock)
    for _ in range(100):
        with pytest.raises(PermissionError):
            store.exists("a")
        clock.advance(RENEW_S / 10)
    assert len(keys.opened) == 1 + 10


def test_credentials_that_are_gone_for_a_moment_are_looked_for_again(keys: Keys) -> None:
    """A file that is being replaced may be away: the request fails as it would, and a later one succeeds."""
    clock = ManualClock()
    store = RenewedStore(keys.open, "here", clock)
    keys.refuse()
    keys.is_gone = True
    with pytest.raises(PermissionError, match="a"):
        store.exists("a")
    keys.is_gone = False
    clock.advance(RENEW_S)
    assert not store.exists("a")
