"""Open store: the chunks of one namespace at a place, behind blocking verbs whose results are checked."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import mmap
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self, cast

from tierkv.abc import (
    AsyncBackend,
    Backend,
    BackendContext,
    DamagedEntry,
    ReadRequest,
    StoredFrame,
    SupportsListing,
    SupportsQuarantine,
    SupportsScan,
    WriteRequest,
)
from tierkv.dispatch.threads.spawn import no_thread
from tierkv.errors import BackendError, CorruptFrameError, TierKVError
from tierkv.frames.frame import HEADER_BYTES, NO_CODEC, CutFrameError, FrameHeader, frame_bytes, pad
from tierkv.frames.recognition import recognise_frame
from tierkv.frames.sealer import FrameSealer
from tierkv.plugins.calls import PLUGIN_FAULTS, open_value
from tierkv.stores.places import Place
from tierkv.tiers.results import checked_results, explain
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

BATCH_BYTES_MAX = 32 << 20
"""Bytes of frames per call, unless one frame is longer."""
DOUBTFUL_MAX = 4096
"""Failed frames that are kept for a second look."""


class ReadFrame(NamedTuple):
    """One frame that was read and checked."""

    listed: StoredFrame
    """As the listing has it."""
    header: FrameHeader | None
    """Its header; None: it is absent, or ``error`` says why not."""
    frame: memoryview
    """Header page and payload, without padding. Valid until the next batch is taken; empty without a header."""
    error: TierKVError | None = None
    """:class:`CorruptFrameError`: it is damaged. Another error: it cannot be read."""


class Store:
    """One namespace at a place, opened without a stack. Use it as a context manager. One thread.

    Args:
        place: where it is.
        namespace: whose chunks.
        writes: whether frames are written or deleted. If not, it is opened beside the process that writes it, where the
            backend can do that.
        is_upkeep: whether the open leaves the time of the namespace's last use. Otherwise a namespace that is checked
            or shrunk every night would never count as unused.

    Attributes:
        place: where it is.
        namespace: whose chunks.
        is_live: whether other processes may change it meanwhile.

    Raises:
        BackendError: it cannot be opened, for instance because an engine has it open; says what to do.
    """

    def __init__(self, place: Place, namespace: Namespace, *, writes: bool, is_upkeep: bool = False) -> None:
        plugin = place.backend
        self.place = place
        self.capabilities = plugin.capabilities
        self.namespace = namespace_at(place, namespace)
        self._sealer = FrameSealer(_origin(namespace))
        self.frame_bytes_max = frame_bytes(namespace.payload_bytes_max)
        self._buffer_bytes = pad(self.frame_bytes_max, max(HEADER_BYTES, self.capabilities.alignment))
        context = context_of(place, namespace, is_upkeep=is_upkeep)
        reader = None if writes or plugin.at_rest is None else plugin.at_rest.open_reader
        self.is_live = self.capabilities.shared or reader is not None
        self._make: Callable[[], Backend | AsyncBackend] = partial(
            open_value,
            f"backend {plugin.name!r}",
            place.origin,
            partial(reader or plugin.open, context, place.options),
            tier=place.name,
            error=BackendError,
        )
        self.backend = self._make()
        self._is_open = True
        self._loop = _Loop() if inspect.iscoroutinefunction(self.backend.contains) else None
        width = max(1, self.capabilities.preferred_concurrency)
        self._pool = ThreadPoolExecutor(width, thread_name_prefix=f"tierkv-{place.name}")
        self._width = width

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the backend."""
        self._pool.shutdown()
        try:
            if self._is_open:
                self._run(self.backend.close())
        finally:
            if self._loop is not None:
                self._loop.stop()

    def list_frames(self, *, keys: bool = True, oldest_first: bool = False) -> Iterator[StoredFrame | DamagedEntry]:
        """Yield every stored frame, and damage that the listing finds.

        Args:
            keys: whether keys are needed.
            oldest_first: whether a backend that does not know times should list in the order of writing, if it can.

        Raises:
            BackendError: the backend cannot list them.
        """
        backend = self.backend
        by_scan = self.capabilities.scan and isinstance(backend, SupportsScan)
        try:
            if isinstance(backend, SupportsListing) and not (oldest_first and by_scan):
                yield from backend.list_frames(keys=keys)
            elif by_scan:
                for entry in cast("SupportsScan", backend).scan():
                    yield StoredFrame(entry.key, entry.frame_bytes, None, entry.rank)
            else:
                raise BackendError(
                    f"backend {self.place.backend.name!r} cannot list its chunks: it has neither scan nor list_frames",
                    tier=self.place.name,
                )
        except TierKVError:
            raise
        except PLUGIN_FAULTS as error:
            raise BackendError(
                f"{self.place.where} cannot be listed: {explain(error)}", tier=self.place.name
            ) from error

    def contains(self, keys: Sequence[Key]) -> list[bool | TierKVError]:
        """Whether each key is stored, or an error."""
        return self._in_batches("contains", keys, self.capabilities.preferred_batch, _is_bool)

    def write(self, requests: Sequence[WriteRequest]) -> list[TierKVError | None]:
        """Store frames: None, or the error, for each."""
        size = max((len(request.frame) for request in requests), default=1)
        return self._in_batches("write", requests, self.capabilities.keys_per_write(size), _is_none)

    def delete(self, keys: Sequence[Key]) -> list[TierKVError | None]:
        """Delete chunks: None, or the error, for each."""
        return self._in_batches("delete", keys, self.capabilities.preferred_batch, _is_none)

    def remove_damaged(self, key: Key, reason: str) -> TierKVError | None:
        """Delete a damaged chunk; a backend that can keeps its storage out of service. Returns an error or None."""
        if isinstance(self.backend, SupportsQuarantine) and self._loop is None:
            with contextlib.suppress(*PLUGIN_FAULTS):  # optional, as in a tier
                self.backend.quarantine(key, reason)
        return self.delete([key])[0]

    def for_write(self, key: Key, frame: memoryview, header: FrameHeader, rank: int) -> WriteRequest:
        """Make the request that stores a checked frame here: padded to this backend's alignment, in aligned memory."""
        alignment = HEADER_BYTES if header.codec == NO_CODEC else self.capabilities.alignment
        padded = memoryview(mmap.mmap(-1, pad(len(frame), max(1, alignment))))
        padded[: len(frame)] = frame
        return WriteRequest(key, padded.toreadonly(), rank if self.capabilities.keeps_ranks else 0)

    def read_all(self, listed: Iterable[StoredFrame]) -> Iterator[list[ReadFrame]]:
        """Read and check frames, in batches; up to ``preferred_concurrency`` batches at once.

        In a store that other processes change, frames that fail are read again at the end, by a new reader: their
        writer may have replaced them meanwhile.
        """
        doubtful: list[ReadFrame] = []
        for frames in self._read_once(listed):
            if self.is_live and len(doubtful) < DOUBTFUL_MAX:
                doubtful += [found for found in frames if found.error is not None]
                frames = [found for found in frames if found.error is None]  # noqa: PLW2901 - the others come later
            if frames:
                yield frames
        if doubtful and self._reopen():
            yield from self._read_once([found.listed for found in doubtful])
        elif doubtful:
            yield doubtful

    def read_one(self, listed: StoredFrame) -> ReadFrame:
        """Read and check one frame."""
        return next(self.read_all([listed]))[0]

    def _reopen(self) -> bool:
        """Open a reader anew, so that it sees the present state. Returns whether it is open."""
        if self.capabilities.shared:
            return True  # it has no state
        self._run(self.backend.close())
        try:
            self.backend = self._make()
        except TierKVError:
            self._is_open = False
        return self._is_open

    def _read_once(self, listed: Iterable[StoredFrame]) -> Iterator[list[ReadFrame]]:
        size = self._buffer_bytes
        count = min(self.capabilities.keys_per_read_call(self.frame_bytes_max), max(1, BATCH_BYTES_MAX // size))
        free: queue.SimpleQueue[list[memoryview]] = queue.SimpleQueue()
        for _ in range(self._width):
            free.put([memoryview(mmap.mmap(-1, size)) for _ in range(count)])
        source = iter(listed)
        running: deque[Future[tuple[list[ReadFrame], list[memoryview]]]] = deque()

        def start() -> None:
            batch = list(islice(source, count))
            if batch:
                running.append(self._submit(batch, free.get()))

        for _ in range(self._width):
            start()
        while running:
            frames, buffers = running.popleft().result()
            yield frames
            free.put(buffers)
            start()

    def _submit(self, batch: list[StoredFrame], buffers: list[memoryview]) -> Future[Any]:
        try:
            return self._pool.submit(self._read_batch, batch, buffers)
        except RuntimeError as error:
            raise no_thread(f"tierkv-{self.place.name}", error) from error

    def _read_batch(
        self, batch: list[StoredFrame], buffers: list[memoryview]
    ) -> tuple[list[ReadFrame], list[memoryview]]:
        requests = [ReadRequest(cast("Key", each.key), buffer) for each, buffer in zip(batch, buffers, strict=False)]
        results = self._call("read_into", requests, self._is_length)
        found = [
            self._checked(each, buffer, result) for each, buffer, result in zip(batch, buffers, results, strict=False)
        ]
        return found, buffers

    def _checked(self, listed: StoredFrame, buffer: memoryview, result: int | TierKVError | None) -> ReadFrame:
        nothing = memoryview(b"")
        if result is None or isinstance(result, TierKVError):
            return ReadFrame(listed, None, nothing, result)
        try:
            header = self._sealer.check_frame(buffer[:result], cast("Key", listed.key))
        except CorruptFrameError as error:
            is_part = isinstance(error, CutFrameError) and result < listed.frame_bytes
            if is_part and not self.capabilities.authoritative_index:
                part = f"{result} of its {listed.frame_bytes} bytes arrived, and nothing shows that it is damaged"
                return ReadFrame(listed, None, nothing, BackendError(part, tier=self.place.name, key=listed.key))
            return ReadFrame(listed, None, nothing, error)
        return ReadFrame(listed, header, buffer[: HEADER_BYTES + header.stored_bytes])

    def _is_length(self, result: object) -> bool:
        return result is None or (type(result) is int and 0 <= result <= self._buffer_bytes)

    def _in_batches(
        self, verb: str, items: Sequence[Any], count: int, is_allowed: Callable[[object], bool]
    ) -> list[Any]:
        parts = [items[start : start + count] for start in range(0, len(items), max(1, count))]
        return [result for part in parts for result in self._call(verb, part, is_allowed)]

    def _call(self, verb: str, items: Sequence[Any], is_allowed: Callable[[object], bool]) -> list[Any]:
        """Call a verb. Whatever it raises becomes the result of every item."""
        try:
            results = checked_results(
                self._run(getattr(self.backend, verb)(items)), len(items), is_allowed, self.place.name
            )
        except PLUGIN_FAULTS as error:
            results = [error] * len(items)
        return [self._as_error(each) if isinstance(each, BaseException) else each for each in results]

    def _as_error(self, error: BaseException) -> TierKVError:
        return error if isinstance(error, TierKVError) else BackendError(explain(error), tier=self.place.name)

    def _run(self, result: Any) -> Any:  # noqa: ANN401 - what the verb returns
        return result if self._loop is None else self._loop.run(result)


def namespace_at(place: Place, namespace: Namespace) -> Namespace:
    """Return the namespace under which a place keeps chunks: shared places have no replicas."""
    return replace(namespace, replica=0) if place.backend.capabilities.shared else namespace


def context_of(place: Place, namespace: Namespace, *, is_upkeep: bool = False) -> BackendContext:
    """Return the context with which a stack would open the backend; for upkeep, one that does not count as use."""
    return BackendContext(
        place.name,
        namespace_at(place, namespace),
        frame_bytes(namespace.payload_bytes_max),
        place.capacity_bytes,
        partial(recognise_frame, _origin(namespace), place.backend.capabilities.alignment),
        counts_as_use=not is_upkeep,
    )


def _origin(namespace: Namespace) -> bytes:
    """Fingerprint in the headers of frames. Frames of all replicas are equal, and name none."""
    return replace(namespace, replica=0).fingerprint()


class _Loop:
    """Event loop on a thread, for an async backend."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tierkv-store-loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise no_thread(self._thread.name, error) from error

    def run(self, result: Any) -> Any:  # noqa: ANN401 - any coroutine
        return asyncio.run_coroutine_threadsafe(result, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _is_bool(result: object) -> bool:
    return isinstance(result, bool)


def _is_none(result: object) -> bool:
    return result is None
