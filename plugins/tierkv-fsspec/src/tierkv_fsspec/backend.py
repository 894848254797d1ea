"""Frames as objects: ``<url>/<fingerprint>/<2 hex>/<32 hex>``, the name a digest of the key.

Digests have one length, need no escaping and never clash with other names; the key itself is in the frame.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tierkv.abc import ProbeResult, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, TierKVError
from tierkv.types.keys import Key
from tierkv_fsspec.knowledge import Absences, Listing
from tierkv_fsspec.store import Store, TooLongError
from tierkv_fsspec.troubles import Kind, Trouble, forget_frames

_log = logging.getLogger(__name__)

DIGEST_BYTES = 16
A = TypeVar("A")
R = TypeVar("R")


def object_name(key: Key) -> str:
    """Name of a key's object below the namespace."""
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()
    return f"{digest[:2]}/{digest}"


class FsspecBackend:
    """One namespace of an fsspec tier. Verbs may be called on any threads.

    ``concurrent_requests`` bounds requests in flight over all calls. ``listing`` is what is known from :meth:`warm_up`.
    """

    def __init__(
        self,
        store: Store,
        *,
        url: str,
        tier: str,
        concurrent_requests: int,
        listing: Listing,
    ) -> None:
        self._store = store
        self._url = url
        self._tier = tier
        self._pool = ThreadPoolExecutor(concurrent_requests, thread_name_prefix=f"tierkv-{tier}")
        self._listing = listing
        self._absences = Absences()
        self._closed = False
        self._warming: threading.Thread | None = None

    def warm_up(self) -> None:
        """List what is stored, on a thread of its own. Questions that come meanwhile are asked of the server."""
        self._warming = threading.Thread(target=self._list, name=f"tierkv-{self._tier}-warm-up", daemon=True)
        self._warming.start()

    def contains(self, keys: Sequence[Key]) -> list[ProbeResult]:
        """Ask for each object, but for those that were listed at open and are asked for the first time."""
        if self._closed:
            raise self._is_closed()
        answers: list[ProbeResult] = [self._listing.take(object_name(key)) for key in keys]
        unknown = [index for index, listed in enumerate(answers) if not listed]
        asked = self._each(self._exists, [keys[index] for index in unknown])
        for index, answer in zip(unknown, asked, strict=True):
            answers[index] = answer
        return answers

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Fetch each object whole."""
        return self._each(self._read, requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store each frame, unless it is there already.

        One that was asked for and absent a moment ago is stored on the condition that nobody else has stored it since.
        """
        return self._each(self._write, requests)

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Remove each object."""
        return self._each(self._delete, keys)

    def close(self) -> None:
        """Start nothing more. A call that was given up ends by its timeouts."""
        if not self._closed:
            self._closed = True
            self._listing.stop()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._store.close()

    def _each(self, action: Callable[[A], R], items: Sequence[A]) -> list[R]:
        if self._closed:
            raise self._is_closed()
        if len(items) <= 1 or not self._store.is_remote:
            return [action(item) for item in items]
        futures: list[Future[R]] = []
        with contextlib.suppress(RuntimeError):  # closed by another thread just now
            for item in items:
                futures.append(self._pool.submit(action, item))
        ended = [_await_end(future) for future in futures]  # all, whatever happened: they use the caller's buffers
        if len(futures) < len(items) or not all(ended):
            raise self._is_closed()
        return [future.result() for future in futures]

    def _is_closed(self) -> BackendError:
        return BackendError(f"{self._tier} ({self._url}) is closed", tier=self._tier)

    def _list(self) -> None:
        try:
            self._listing.fill(self._store.pages())
        except Exception as error:  # noqa: BLE001  a listing saves questions; without one they are asked
            trouble = Trouble.of(error)
            forget_frames(error)
            _log.info("%s: %s was not listed: %s (%s)", self._tier, self._url, trouble.kind.value, trouble.detail)

    def _exists(self, key: Key) -> ProbeResult:
        name = object_name(key)
        try:
            present = self._store.exists(name)
        except Exception as error:  # noqa: BLE001  whatever a storage library raises becomes this key's result
            return self._failure("look for", key, error)
        if not present:
            self._absences.note(name)
        return present

    def _read(self, request: ReadRequest) -> ReadResult:
        name = object_name(request.key)
        try:
            return self._store.read_into(name, request.buffer)
        except FileNotFoundError as error:
            forget_frames(error)
            self._listing.forget(name)
            self._absences.note(name)
            return None
        except TooLongError as error:
            return BackendError(f"{self._where(request.key)}: {error}", tier=self._tier, key=request.key)
        except Exception as error:  # noqa: BLE001  whatever a storage library raises becomes this key's result
            return self._failure("read", request.key, error)

    def _write(self, request: WriteRequest) -> WriteResult:
        name = object_name(request.key)
        self._listing.forget(name)
        try:
            if self._absences.take(name) and self._store.create(name, request.frame):
                return None
            if not self._store.holds(name, request.frame):
                self._store.write(name, request.frame)
        except Exception as error:  # noqa: BLE001  whatever a storage library raises becomes this key's result
            return self._failure("write", request.key, error)
        return None

    def _delete(self, key: Key) -> WriteResult:
        name = object_name(key)
        self._listing.forget(name)
        try:
            self._store.delete(name)
        except Exception as error:  # noqa: BLE001  whatever a storage library raises becomes this key's result
            return self._failure("delete", key, error)
        return None

    def _failure(self, verb: str, key: Key, error: Exception) -> TierKVError:
        trouble = Trouble.of(error)
        forget_frames(error)
        if trouble.kind is Kind.ABSENT:  # of a write: what it should lie in is gone
            trouble = Trouble(Kind.NO_BUCKET, trouble.detail)
        return trouble.to_error(f"cannot {verb} {self._where(key)}", tier=self._tier, key=key)

    def _where(self, key: Key) -> str:
        return f"{self._url}/{object_name(key)}"


class FsspecReader(FsspecBackend):
    """The same for a place that is others' to fill: each write and each deletion is an error."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Refuse."""
        return [self._refusal(request.key) for request in requests]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Refuse."""
        return [self._refusal(key) for key in keys]

    def _refusal(self, key: Key) -> BackendError:
        message = f'{self._where(key)} is not written or removed: the tier\'s backend is "fsspec-read-only"'
        return BackendError(message, tier=self._tier, key=key)


def _await_end(future: Future[Any]) -> bool:
    """Wait for a request, and tell whether it ran.

    ``concurrent.futures.wait`` would wait for ever for one that the pool cancelled at its shutdown.
    """
    try:
        future.exception()
    except CancelledError:
        return False
    return True
