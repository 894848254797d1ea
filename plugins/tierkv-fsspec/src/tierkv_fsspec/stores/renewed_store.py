"""Store that is opened anew where the server refuses it, so that credentials which were replaced are used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tierkv.abc.logs import plugin_logger
from tierkv_fsspec.failures import Failure, FailureKind, clear_tracebacks
from tierkv_fsspec.stores.store import ListedObject, Store

RENEW_S = 5.0
"""Shortest time between two renewals."""
_REFUSALS = (FailureKind.REFUSED, FailureKind.WRONG_CREDENTIALS, FailureKind.NO_CREDENTIALS)
_log = plugin_logger(__name__)
R = TypeVar("R")


class RenewedStore:
    """Objects of the store that ``make`` opens. Storage libraries read files with credentials when they are opened.

    A request that is refused opens another store, and is sent once more by it. The replaced store is closed at the next
    renewal: until then, calls on other threads may still use it.

    Args:
        make: opens a store with the credentials of that moment.
        where: URL, for the log.
        clock: seconds, for the time between renewals.
    """

    def __init__(self, make: Callable[[], Store], where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._where = where
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self.present = make()
        """The store in use."""
        self.is_remote = self.present.is_remote
        self._replaced: Store | None = None
        self._next_s = 0.0
        self._is_closed = False

    def exists(self, name: str) -> bool:
        """Whether an object of that name is stored."""
        return self._asked(lambda store: store.exists(name))

    def read(self, name: str) -> bytes:
        """Read a short object whole."""
        return self._asked(lambda store: store.read(name))

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Copy an object to the start of ``buffer``."""
        return self._asked(lambda store: store.read_into(name, buffer))

    def holds_same(self, name: str, data: memoryview) -> bool:
        """Whether the object exists with the same length and head."""
        return self._asked(lambda store: store.holds_same(name, data))

    def write(self, name: str, data: memoryview) -> None:
        """Store an object atomically."""
        self._asked(lambda store: store.write(name, data))

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Store an object unless its name exists."""
        return self._asked(lambda store: store.create(name, data))

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._asked(lambda store: store.delete(name))

    def list_names(self) -> Iterator[Sequence[str]]:
        """Names of objects. A refused listing is not sent again."""
        return self.present.list_names()

    def list_objects(self) -> Iterator[Sequence[ListedObject]]:
        """Objects two levels down. A refused listing is not sent again."""
        return self.present.list_objects()

    def list_children(self) -> Iterator[str]:
        """Names of the directories directly below. A refused listing is not sent again."""
        return self.present.list_children()

    def read_head(self, name: str) -> bytes:
        """Read the first bytes of an object."""
        return self._asked(lambda store: store.read_head(name))

    def close(self) -> None:
        """Release connections and threads."""
        with self._lock:
            self._is_closed = True
            self.present.close()
            if self._replaced is not None:
                self._replaced.close()

    def _asked(self, request: Callable[[Store], R]) -> R:
        store = self.present
        try:
            return request(store)
        except FileNotFoundError:
            raise
        except Exception as error:
            if Failure.of(error).kind not in _REFUSALS or not self._renew(store):
                raise
            clear_tracebacks(error)
        return request(self.present)

    def _renew(self, refused: Store) -> bool:
        """Open another store than the refused one. Returns whether there is another."""
        with self._lock:
            if self.present is not refused:
                return True
            now_s = self._clock()
            if self._is_closed or now_s < self._next_s:
                return False
            self._next_s = now_s + RENEW_S
            try:
                opened = self._make()
            except Exception as error:  # noqa: BLE001  the request's own failure is reported; the next one tries again
                clear_tracebacks(error)
                return False
            if self._replaced is not None:
                self._replaced.close()
            self._replaced, self.present = self.present, opened
        _log.info("%s refused a request: it is sent once more, with the credentials of this moment", self._where)
        return True
