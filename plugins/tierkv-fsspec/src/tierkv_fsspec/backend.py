"""Backend of an fsspec tier: frames as objects ``<url>/<fingerprint>/<2 hex>/<32 hex>``, named by a digest of the key.

Digests have one length, need no escaping and never clash with other names. The key itself is in the frame.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from tierkv.abc import (
    DamagedEntry,
    FrameRecogniser,
    ProbeResult,
    ReadRequest,
    ReadResult,
    StoredFrame,
    WriteRequest,
    WriteResult,
    recognise_nothing,
)
from tierkv.abc.logs import plugin_logger
from tierkv.errors import BackendError, BackendUnavailableError, TierKVError
from tierkv.types.keys import Key
from tierkv_fsspec.failures import Failure, FailureKind, clear_tracebacks
from tierkv_fsspec.manifest import MANIFEST, REPEAT_S
from tierkv_fsspec.presence_hints import AbsentNames, ListedNames
from tierkv_fsspec.stores.request_batch import RequestBatch
from tierkv_fsspec.stores.store import HEAD_BYTES, ListedObject, Store, TooLongError

_log = plugin_logger(__name__)

DIGEST_BYTES = 16
HEADS_AT_ONCE = 64
"""Heads of objects that a listing reads ahead."""
_FRAME_NAME = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{30}")
A = TypeVar("A")
R = TypeVar("R")


def object_name(key: Key) -> str:
    """Name of a key's object within the namespace."""
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()
    return f"{digest[:2]}/{digest}"


class FsspecBackend:
    """One namespace of an fsspec tier. Verbs may be called on any threads.

    Args:
        store: objects of the namespace; closed by :meth:`close`.
        url: of the namespace, for messages.
        tier: name of the tier, for messages.
        concurrent_requests: bound of the requests in flight over all calls.
        listed: names to be filled by :meth:`warm_up`.
        recognise: finds the key of a frame by its first page, for listings.
        manifest: stored from time to time by the calls that write, if it is gone; None: never.
        clock: seconds, for the time between two such stores.
    """

    def __init__(  # noqa: PLR0913 - the facts about one namespace
        self,
        store: Store,
        *,
        url: str,
        tier: str,
        concurrent_requests: int,
        listed: ListedNames,
        recognise: FrameRecogniser = recognise_nothing,
        manifest: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._url = url
        self._tier = tier
        self._pool = ThreadPoolExecutor(concurrent_requests, thread_name_prefix=f"tierkv-{tier}")
        self._listed = listed
        self._recognise = recognise
        self._absent = AbsentNames()
        self._manifest = manifest
        self._clock = clock
        self._described_s = clock()
        self._closed = False
        self._warming: threading.Thread | None = None

    def warm_up(self) -> None:
        """List the stored objects on a separate thread. Lookups in the meantime are sent to the server.

        All of them are where no thread can be started: that is slower, and no reason to do without the tier.
        """
        warming = threading.Thread(target=self._list, name=f"tierkv-{self._tier}-warm-up", daemon=True)
        with contextlib.suppress(RuntimeError):
            warming.start()
            self._warming = warming

    def contains(self, keys: Sequence[Key]) -> list[ProbeResult]:
        """Whether each object is stored. Objects listed at open need no request the first time they are looked up."""
        if self._closed:
            raise self._closed_error()
        answers: list[ProbeResult] = [self._listed.take_listed(object_name(key)) for key in keys]
        unknown = [index for index, listed in enumerate(answers) if not listed]
        asked = self._each(self._exists, [keys[index] for index in unknown])
        for index, answer in zip(unknown, asked, strict=True):
            answers[index] = answer
        return answers

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Fetch each object whole into its caller's buffer."""
        return self._each(self._read, requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store each frame, unless it is stored already.

        A frame that was absent at a recent lookup is stored with a conditional request, which fails if another engine
        has stored it since.
        """
        results = self._each(self._write, requests)
        if self._clock() >= self._described_s + REPEAT_S:
            self._describe()
        return results

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Delete each object; absent ones are no error."""
        return self._each(self._delete, keys)

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame | DamagedEntry]:
        """Yield every object of the namespace. A key costs a request for the object's head.

        Raises:
            BackendError: they cannot be listed.
        """
        try:
            for page in self._store.list_objects():
                frames = [each for each in page if _FRAME_NAME.fullmatch(each.name)]
                if not keys:
                    yield from (StoredFrame(None, each.size, each.modified_s) for each in frames)
                    continue
                for start in range(0, len(frames), HEADS_AT_ONCE):
                    heads = self._each(self._recognised, frames[start : start + HEADS_AT_ONCE])
                    yield from (found for found in heads if found is not None)
        except FileNotFoundError as error:  # a directory without any frame
            clear_tracebacks(error)
        except TierKVError:
            raise
        except Exception as error:  # noqa: BLE001  any error of a storage library; its text may hold credentials
            raise Failure.of(error).to_error(f"cannot list {self._url}", tier=self._tier) from None

    def _recognised(self, found: ListedObject) -> StoredFrame | DamagedEntry | None:
        """Key of an object by its head; None if it was deleted meanwhile."""
        try:
            head = self._store.read_head(found.name) if found.size else b""  # servers refuse a range of nothing
        except FileNotFoundError as error:
            clear_tracebacks(error)
            return None
        if len(head) < min(HEAD_BYTES, found.size):
            part = f"{len(head)} of its first {min(HEAD_BYTES, found.size)} bytes arrived. Try again"
            raise BackendUnavailableError(f"cannot read {self._url}/{found.name}: {part}", tier=self._tier)
        frame = self._recognise(memoryview(head)) if len(head) >= HEAD_BYTES else None
        if frame is None or object_name(frame[0]) != found.name:
            where = f"{self._url}/{found.name}"
            return DamagedEntry(where, "no frame of this namespace and name", partial(self._remove_object, found.name))
        return StoredFrame(frame[0], found.size, found.modified_s)

    def _remove_object(self, name: str) -> None:
        try:
            self._store.delete(name)
        except Exception as error:  # noqa: BLE001  any error of a storage library; its text may hold credentials
            raise Failure.of(error).to_error(f"cannot delete {self._url}/{name}", tier=self._tier) from None

    def remove_all(self) -> None:
        """Delete every object of the namespace, the manifest last.

        Raises:
            BackendError: an object cannot be deleted.
        """
        try:
            for page in self._store.list_objects():
                self._each(self._remove_object, [each.name for each in page if _FRAME_NAME.fullmatch(each.name)])
        except FileNotFoundError as error:
            clear_tracebacks(error)
        except TierKVError:
            raise
        except Exception as error:  # noqa: BLE001  any error of a storage library; its text may hold credentials
            raise Failure.of(error).to_error(f"cannot list {self._url}", tier=self._tier) from None
        self._remove_object(MANIFEST)

    def close(self) -> None:
        """Start no further request. A call in flight ends by its timeouts."""
        if not self._closed:
            self._closed = True
            self._listed.stop()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._store.close()

    def object_url(self, key: Key) -> str:
        """URL of a key's object, for messages."""
        return f"{self._url}/{object_name(key)}"

    def _each(self, action: Callable[[A], R], items: Sequence[A]) -> list[R]:
        if self._closed:
            raise self._closed_error()
        if len(items) <= 1 or not self._store.is_remote:
            return [action(item) for item in items]
        results = RequestBatch(action, items).send(self._pool, lambda: self._closed)
        if results is None:
            raise self._closed_error()
        return results

    def _closed_error(self) -> BackendError:
        return BackendError(f"{self._tier} ({self._url}) is closed", tier=self._tier)

    def _list(self) -> None:
        try:
            self._listed.add_pages(self._store.list_names())
        except Exception as error:  # noqa: BLE001  a listing only saves requests
            failure = Failure.of(error)
            clear_tracebacks(error)
            _log.info("%s: %s was not listed: %s (%s)", self._tier, self._url, failure.kind.value, failure.detail)

    def _exists(self, key: Key) -> ProbeResult:
        name = object_name(key)
        try:
            present = self._store.exists(name)
        except Exception as error:  # noqa: BLE001  any error of a storage library becomes this key's result
            return self._error_for("look for", key, error)
        if not present:
            self._absent.note_absent(name)
        return present

    def _read(self, request: ReadRequest) -> ReadResult:
        name = object_name(request.key)
        try:
            return self._store.read_into(name, request.buffer)
        except FileNotFoundError as error:
            clear_tracebacks(error)
            self._listed.forget_name(name)
            self._absent.note_absent(name)
            return None
        except TooLongError as error:
            return BackendError(f"{self.object_url(request.key)}: {error}", tier=self._tier, key=request.key)
        except Exception as error:  # noqa: BLE001  any error of a storage library becomes this key's result
            return self._error_for("read", request.key, error)

    def _write(self, request: WriteRequest) -> WriteResult:
        name = object_name(request.key)
        self._listed.forget_name(name)
        try:
            if self._absent.take_absent(name) and self._store.create(name, request.frame):
                return None
            if not self._store.holds_same(name, request.frame):
                self._store.write(name, request.frame)
        except Exception as error:  # noqa: BLE001  any error of a storage library becomes this key's result
            return self._error_for("write", request.key, error)
        return None

    def _delete(self, key: Key) -> WriteResult:
        name = object_name(key)
        self._listed.forget_name(name)
        try:
            self._store.delete(name)
        except Exception as error:  # noqa: BLE001  any error of a storage library becomes this key's result
            return self._error_for("delete", key, error)
        return None

    def _describe(self) -> None:
        """Store the manifest, unless it is there. A failure harms tools alone; it is tried again after `REPEAT_S`."""
        self._described_s = self._clock()
        if self._manifest is None:
            return
        try:
            self._store.create(MANIFEST, self._manifest)
        except Exception as error:  # noqa: BLE001  any error of a storage library
            clear_tracebacks(error)

    def _error_for(self, verb: str, key: Key, error: Exception) -> TierKVError:
        failure = Failure.of(error)
        clear_tracebacks(error)
        if failure.kind is FailureKind.ABSENT:  # of a write: its bucket is missing
            failure = Failure(FailureKind.NO_BUCKET, failure.detail)
        return failure.to_error(f"cannot {verb} {self.object_url(key)}", tier=self._tier, key=key)
