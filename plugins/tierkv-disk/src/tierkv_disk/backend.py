"""Backend of a disk tier: the open namespace, and another one in its place after its directory was removed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tierkv.abc import Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.abc.logs import plugin_logger
from tierkv.abc.unlisted import UnlistedChunks
from tierkv.errors import TierKVError
from tierkv.types.keys import Key
from tierkv_disk.open_namespace import OpenNamespace
from tierkv_disk.recovery.recovery import RecoveryReport

RENEWAL_S = 1.0
"""Seconds between two attempts to begin a removed directory again."""
logger = plugin_logger("tierkv_disk")


class DiskBackend:
    """Backend of one namespace, with scan and quarantine. All verbs may be called on several threads at once.

    A directory that was removed with its files never comes back, and one whose file system was replaced by another is
    not waited for. The next write begins it again, as an open does. Until that succeeds the open files are still read.

    Args:
        open_namespace: opens the namespace; called again after its directory was removed or replaced.
        clock: monotonic time in seconds.

    Attributes:
        current: the open namespace.

    Raises:
        BackendError: as ``open_namespace``.
        OSError: as ``open_namespace``.
    """

    def __init__(
        self, open_namespace: Callable[[], OpenNamespace], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open = open_namespace
        self._clock = clock
        self._renewing = threading.Lock()  # held by the one thread that opens, and for an instant by close
        self._again_s = 0.0
        self._refusal = ""
        self._is_closed = False
        self._unlisted = UnlistedChunks()
        self.current = open_namespace()

    @property
    def recovery(self) -> RecoveryReport:
        """Report on the recovery at the last open."""
        return self.current.recovery

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is in the table. No I/O."""
        return self.current.contains(keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read each frame into its caller's buffer; a read that the medium fails quarantines the pages."""
        return self.current.read_into(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store frames; with durability "batch" or "always" they are on the device when this returns."""
        if self.current.is_removed():
            self._renew()
        results = self.current.write(requests)
        return self._unlisted.write_over(requests, results, self.current.write, self.current.delete)

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Remove keys with one append to the log; absent keys are no error."""
        return self.current.delete(keys)

    def scan(self) -> Iterable[Entry]:
        """All stored keys with their frame lengths, oldest first."""
        return self.current.scan()

    def quarantine(self, key: Key, reason: str) -> None:
        """Quarantine the frame's pages: they are not reused when the frame is deleted."""
        self.current.quarantine(key, reason)

    def close(self) -> None:
        """Refuse further calls. Files stay open and locked until the last call in flight has ended."""
        self._is_closed = True
        if self._renewing.acquire(blocking=False):  # otherwise the thread that opens closes what it has opened
            self._renewing.release()
            self.current.close()

    def _renew(self) -> None:
        """Open the namespace again, if that is due and no other thread does. A failure is logged once."""
        if self._clock() < self._again_s or not self._renewing.acquire(blocking=False):
            return
        removed = self.current
        try:
            if self._is_closed or not removed.is_removed():
                return
            self._again_s = self._clock() + RENEWAL_S
            self.current = self._open()
            with contextlib.suppress(OSError):  # its device is gone, perhaps
                removed.close()
            chunks = self._unlisted.replace(self.current.scan())
            found = f"with {chunks} stored chunks: a restart finds them, new ones replace them" if chunks else "empty"
            logger.warning("tier %s: %s was begun again, %s", removed.tier, removed.directory, found)
            self._refusal = ""
        except (TierKVError, OSError) as error:
            if not self._refusal:
                logger.warning("tier %s: %s cannot be begun again: %s", removed.tier, removed.directory, error)
            self._refusal = str(error)
        finally:
            self._renewing.release()
            if self._is_closed:
                self.current.close()
