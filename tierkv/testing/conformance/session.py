"""Session: one opened backend behind blocking verbs, for both interfaces.

Every call checks the shape of the answer, so that each test of the kit also tests the contract's first rule.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar, cast

from tierkv.abc import (
    AsyncBackend,
    Backend,
    BackendContext,
    BackendPlugin,
    Entry,
    ReadRequest,
    ReadResult,
    SupportsScan,
    WriteRequest,
    WriteResult,
)
from tierkv.errors import TierKVError
from tierkv.testing.frames import Frame, aligned_buffers, aligned_copy, make_frame
from tierkv.types.keys import Key

CALL_TIMEOUT_S = 120.0
T = TypeVar("T")
Outcome: TypeAlias = tuple[object, BaseException | None]
"""Result of a call, or what it raised."""


def is_async(backend: Backend | AsyncBackend) -> bool:
    """Whether the verbs are coroutines. ``isinstance`` does not help: both interfaces have the same names."""
    return inspect.iscoroutinefunction(backend.contains)


class Session:
    """Opened backend with blocking verbs. Several threads may call them; async verbs all run on one loop.

    Raises whatever ``plugin.open`` raises. Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self, plugin: BackendPlugin, context: BackendContext, options: object) -> None:
        self.plugin = plugin
        self.context = context
        self.backend = plugin.open(context, options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        if is_async(self.backend):
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="conformance-loop", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Verbs, checked against the contract.

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Ask for existence; checks one bool per key."""
        answers = _in_order("contains", self._call(self.backend.contains, keys), len(keys))
        for answer in answers:
            assert isinstance(answer, bool), f"contains answered {answer!r}: return True or False, or raise the error"
        return [bool(answer) for answer in answers]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read; checks one int, None or TierKVError per key."""
        results = _in_order("read_into", self._call(self.backend.read_into, requests), len(requests))
        for result in results:
            is_allowed = result is None or (isinstance(result, int | TierKVError) and not isinstance(result, bool))
            assert is_allowed, (
                f"read_into answered {result!r:.60}: copy the frame to request.buffer and return its length in bytes; "
                "None for an absent key, or a BackendError"
            )
        return results

    def write_requests(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Write; checks None or TierKVError per key."""
        return self._check_write_results("write", self._call(self.backend.write, requests), len(requests))

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Delete; checks None or TierKVError per key."""
        return self._check_write_results("delete", self._call(self.backend.delete, keys), len(keys))

    def scan(self) -> dict[Key, int]:
        """List everything stored, as key -> frame_bytes; checks that no key is listed twice."""
        found: dict[Key, int] = {}
        for entry in cast("SupportsScan", self.backend).scan():
            assert isinstance(entry, Entry), f"scan yielded {entry!r:.60}: yield tierkv.abc.Entry(key, frame_bytes)"
            assert entry.key not in found, f"scan listed {entry.key.hex()} twice"
            found[entry.key] = entry.frame_bytes
        return found

    def scan_ranks(self) -> list[tuple[Key, int]]:
        """List the key and the rank of everything stored, in the order of ``scan``."""
        return [(entry.key, entry.rank) for entry in cast("SupportsScan", self.backend).scan()]

    def close(self) -> None:
        """Close the backend once, then the loop. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self.close_backend()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def backend_call(self, verb: str, batch: Sequence[Any]) -> Sequence[Any]:
        """Call a verb and return its result unchecked."""
        return cast("Sequence[Any]", self._call(getattr(self.backend, verb), batch))

    def close_backend(self) -> None:
        """Close the backend only, at every call; for the test of a second close."""
        self._call(self.backend.close)

    # Shorthands on bytes.

    def write(self, frames: Mapping[Key, bytes]) -> list[WriteResult]:
        """Write copies of ``frames`` in aligned memory, in batches that the backend prefers."""
        results: list[WriteResult] = []
        for batch in self._batches(list(frames.items())):
            results += self.write_requests([WriteRequest(key, aligned_copy(f).toreadonly()) for key, f in batch])
        return results

    def write_any(self, keys: Sequence[Key], size: int) -> list[WriteResult]:
        """Write frames of version 1, also under keys that the framework never uses; a raised error is every key's."""
        results: list[WriteResult] = []
        for batch in self._batches(keys):
            frames = [WriteRequest(key, aligned_copy(make_frame(key, 1, size)).toreadonly()) for key in batch]
            try:
                results += self.write_requests(frames)
            except TierKVError as error:
                results += [error] * len(batch)
        return results

    def put(self, frames: Mapping[Key, bytes]) -> None:
        """Write, and assert that every frame was stored."""
        for key, result in zip(frames, self.write(frames), strict=True):
            assert result is None, f"write of {key.hex()} failed: {result!r}"

    def read(self, keys: Sequence[Key]) -> list[bytes | TierKVError | None]:
        """Read frames as bytes, in batches that the backend prefers; errors are returned in place."""
        frames: list[bytes | TierKVError | None] = []
        for batch in self._batches(keys):
            buffers = aligned_buffers(len(batch), self.buffer_bytes)
            requests = [ReadRequest(key, buffer) for key, buffer in zip(batch, buffers, strict=True)]
            for request, result in zip(requests, self.read_into(requests), strict=True):
                if isinstance(result, int):
                    assert 0 <= result <= self.buffer_bytes, f"read_into placed {result} bytes in {self.buffer_bytes}"
                    frames.append(Frame(request.buffer[:result]))
                else:
                    frames.append(result)
        return frames

    def get(self, key: Key) -> bytes | None:
        """Read one frame, and assert that there was no error."""
        (frame,) = self.read([key])
        assert not isinstance(frame, TierKVError), f"read of {key.hex()} failed: {frame!r}"
        return frame

    def forget(self, keys: Iterable[Key]) -> None:
        """Delete, and assert that there was no error."""
        for batch in self._batches(list(keys)):
            assert self.delete(batch) == [None] * len(batch)

    @property
    def buffer_bytes(self) -> int:
        """Length of a read buffer: the longest frame, rounded up to the declared alignment."""
        alignment = self.plugin.capabilities.alignment
        return -(-self.context.frame_bytes_max // alignment) * alignment

    def _batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        size = self.plugin.capabilities.preferred_batch
        return (items[start : start + size] for start in range(0, len(items), size))

    def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of an async backend."""
        assert self._loop is not None, "a blocking backend has no loop"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    def _call(self, method: Callable[..., T | Coroutine[Any, Any, T]], *arguments: object) -> T:
        """Call a verb off this thread: one that never returns, or ends its thread, fails the test with a sentence."""
        call, verb = partial(method, *arguments), getattr(method, "__name__", "a call")
        if self._loop is None:
            outcome = _outcome_on_thread(call, f"conformance-{verb}")
        else:
            ended = asyncio.run_coroutine_threadsafe(_outcome_of(call), self._loop)
            outcome = ended.result() if wait([ended], CALL_TIMEOUT_S).done else None
            ended.cancel()
        assert outcome is not None, (
            f"{verb} has not returned after {CALL_TIMEOUT_S:g} s: bound each wait of a call, also for a lock, and end "
            "it with DeadlineExceededError; a tier has few threads, and a call that hangs keeps one"
        )
        result, error = outcome
        if error is None:
            return cast("T", result)
        assert isinstance(error, Exception), (
            f"{verb} raised {error!r}, which is no Exception: raise a BackendError, or return one for a key"
        )
        raise error

    @staticmethod
    def _check_write_results(verb: str, answer: Sequence[WriteResult], count: int) -> list[WriteResult]:
        results = _in_order(verb, answer, count)
        for result in results:
            is_allowed = result is None or isinstance(result, TierKVError)
            assert is_allowed, f"{verb} answered {result!r:.60}: return None where it succeeded, or a BackendError"
        return results


def _in_order(verb: str, answer: object, count: int) -> list[Any]:
    """The answer of a verb as a list, of one result for each key."""
    results = list(answer) if isinstance(answer, Iterable) else []
    said = f"{len(results)} results" if isinstance(answer, Iterable) else repr(answer)
    assert isinstance(answer, Iterable) and len(results) == count, (
        f"{verb} returned {said} for {count} keys: return a list with one result for each key, in their order"
    )
    return results


def _outcome_on_thread(call: Callable[[], object], name: str) -> Outcome | None:
    """Result or error of a blocking call. None: it has not returned in time, and keeps its thread."""
    outcomes: list[Outcome] = []

    def run() -> None:
        try:
            outcomes.append((call(), None))
        except BaseException as error:  # noqa: BLE001  it is raised again, or explained, by the caller
            outcomes.append((None, error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(CALL_TIMEOUT_S)
    return outcomes[0] if outcomes else None


async def _outcome_of(call: Callable[[], Any]) -> Outcome:
    """Result or error of an async verb, as a value: one that is no Exception would end the loop."""
    try:
        return await call(), None
    except BaseException as error:  # noqa: BLE001  likewise
        return None, error
