"""The backend interface: a backend moves bytes; the framework does the rest.

Framing, checksums, compression, capacity, eviction, admission, batching, deadlines, retries, breaker, metrics and
deferral come from the framework. A backend sees *frames*: byte strings that it stores and returns unchanged.

Rules for every verb:

- Takes a batch, returns one result per key, in order. A result that is an exception *value* concerns that key alone;
  an exception *raised* concerns the whole batch.
- Called on threads of the framework, up to ``preferred_concurrency`` at once (:class:`AsyncBackend`: on one event
  loop). Never called on the engine's thread. May block; the framework's deadline will not wait for it.
- Buffers belong to the caller and are valid during the call only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from tierkv.abc.capabilities import Capabilities
from tierkv.errors import TierKVError
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read the frame of ``key`` into the start of ``buffer`` (writable bytes, at least as long as any frame)."""

    key: Key
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Store ``frame`` (read-only bytes) under ``key``, replacing what is there."""

    key: Key
    frame: memoryview


ProbeResult = bool | TierKVError
"""Whether the key is stored; or what went wrong for this key."""

ReadResult = int | None | TierKVError
"""Bytes placed in the buffer; or None: no such key; or what went wrong for this key."""

WriteResult = TierKVError | None
"""None: stored (and durable, if so declared); or what went wrong for this key."""


class Entry(NamedTuple):
    """One stored frame, as told by ``scan``.

    A named tuple, because a tier tells of millions at once: a frozen dataclass takes three times as long to make.
    """

    key: Key
    frame_bytes: int


FrameRecogniser = Callable[[memoryview], tuple[Key, int] | None]
"""From the first 4,096 bytes of what may be a frame: its key and its whole length in bytes; or None.

None also for frames of other namespaces. Says nothing of the payload: that is checked when the frame is read. Never
raises; any thread.
"""


def recognise_nothing(_page: memoryview) -> None:
    """The :data:`FrameRecogniser` of whoever knows no frames, such as a test whose frames are arbitrary bytes."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What the framework tells a backend when it opens it.

    tier: the tier's name in the configuration, for messages.
    namespace: whose bytes these are. A backend keeps namespaces apart; ``namespace.fingerprint().hex()`` is a fine
        directory name or prefix.
    frame_bytes_max: no frame is longer.
    capacity_bytes: the tier's limit, or None where the configuration sets none.
    recognise_frame: recognises a frame of this namespace by its first page, for a backend whose index was lost.
    """

    tier: str
    namespace: Namespace
    frame_bytes_max: int
    capacity_bytes: int | None
    recognise_frame: FrameRecogniser = field(default=recognise_nothing, repr=False, compare=False)


@runtime_checkable
class Backend(Protocol):
    """The required verbs of a blocking backend."""

    def contains(self, keys: Sequence[Key]) -> Sequence[ProbeResult]:
        """Whether each key is stored. Cheap; reads no frame."""

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Fill each buffer with its key's frame."""

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Store each frame so that a reader sees all of it or nothing, also after a crash."""

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Forget each key. An absent key is no error."""

    def close(self) -> None:
        """Release everything. Called once, after the last other call returned or was given up."""


@runtime_checkable
class AsyncBackend(Protocol):
    """The same verbs for libraries that are async at heart.

    A verb may be cancelled, when its deadline has passed or the stack closes; it must not touch its buffers after that.
    """

    async def contains(self, keys: Sequence[Key]) -> Sequence[ProbeResult]:
        """See :meth:`Backend.contains`."""

    async def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """See :meth:`Backend.read_into`."""

    async def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """See :meth:`Backend.write`."""

    async def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """See :meth:`Backend.delete`."""

    async def close(self) -> None:
        """See :meth:`Backend.close`."""


@runtime_checkable
class SupportsScan(Protocol):
    """Ability: tell everything that is stored in this namespace. Declared by ``Capabilities.scan``."""

    def scan(self) -> Iterable[Entry]:
        """Every stored frame, oldest first where the backend knows. Called once, at open, on a framework thread."""


@runtime_checkable
class SupportsQuarantine(Protocol):
    """Ability: keep the places of bad frames out of service. Found by the method; no capability declares it."""

    def quarantine(self, key: Key, reason: str) -> None:
        """The frame that was read for ``key`` did not check out; a delete will follow. ``reason``: for people."""


@runtime_checkable
class SupportsRoomLimit(Protocol):
    """Ability: of its capacity, only so much is room for frames; the rest the backend needs itself.

    The framework keeps the sum of frames within it. Without this ability, it does so with the capacity.
    """

    @property
    def room_bytes(self) -> int:
        """Bytes of frames, the longest kind taken. Does not change while the backend is open."""


__all__ = [
    "AsyncBackend",
    "Backend",
    "BackendContext",
    "Capabilities",
    "Entry",
    "ProbeResult",
    "ReadRequest",
    "ReadResult",
    "SupportsQuarantine",
    "SupportsRoomLimit",
    "SupportsScan",
    "WriteRequest",
    "WriteResult",
]
