"""Backend interface: the verbs that store, read and delete frames.

The framework provides framing, checksums, compression, capacity, eviction, admission, batching, deadlines, retries,
circuit breaking, metrics and deferral. A backend sees *frames*: byte strings that it stores and returns unchanged.

Rules for every verb:

- It takes a batch and returns one result per key, in order. An exception returned as a *value* concerns one key. An
  exception that is *raised* concerns the whole batch.
- It runs on threads of the framework, up to ``preferred_concurrency`` calls at once. The verbs of an
  :class:`AsyncBackend` run on one event loop. No verb runs on the engine's thread.
- It may block. When the deadline of an operation passes, the framework stops waiting for the result.
- Buffers belong to the caller and are valid only during the call.
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
    """Request to read one frame into a buffer."""

    key: Key
    """Key of the frame."""
    buffer: memoryview
    """Writable bytes, at least as long as the longest frame. The frame goes to the start."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Request to store one frame, replacing any frame under the same key."""

    key: Key
    """Key of the frame."""
    frame: memoryview
    """Read-only bytes of the frame."""
    rank: int = 0
    """Place of the chunk in its prompt, an unsigned integer of 64 bits; 0: unknown. A backend that declares
    ``keeps_ranks`` stores it beside the frame, as it is; others get 0."""


ProbeResult = bool | TierKVError
"""Whether the key is stored, or the error for this key."""

ReadResult = int | None | TierKVError
"""Number of bytes placed in the buffer; None if the key is not stored; or the error for this key."""

WriteResult = TierKVError | None
"""None if the frame is stored (and durable, where the backend declares that); or the error for this key."""


class Entry(NamedTuple):
    """One stored frame, as reported by :meth:`SupportsScan.scan`.

    A named tuple, because a scan may report millions of frames: creating a frozen dataclass takes three times as long.
    """

    key: Key
    """Key of the frame."""
    frame_bytes: int
    """Stored length of the frame in bytes."""
    rank: int = 0
    """:attr:`WriteRequest.rank` of the last write; 0: unknown."""


FrameRecogniser = Callable[[memoryview], tuple[Key, int] | None]
"""Function that recognises a frame by its first page.

It takes the first 4,096 bytes of a candidate. It returns the key and the whole length in bytes of the frame that
begins there, or None. Frames of other namespaces give None. The payload is not checked; the read checks it. Never
raises; may be called on any thread.
"""


def recognise_nothing(_page: memoryview) -> None:
    """Default :data:`FrameRecogniser`, for tests whose frames are arbitrary bytes: recognise no frame."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Facts about the tier, given to the plugin's ``open``."""

    tier: str
    """Name of the tier in the configuration, for messages."""
    namespace: Namespace
    """Namespace of the stored bytes. A backend must keep namespaces apart. ``namespace.fingerprint().hex()`` serves as
    a directory name or a key prefix."""
    frame_bytes_max: int
    """Length of the longest frame in bytes."""
    capacity_bytes: int | None
    """Limit of the tier in bytes; None where the configuration sets none."""
    recognise_frame: FrameRecogniser = field(default=recognise_nothing, repr=False, compare=False)
    """Recognises a frame of this namespace by its first page, for a backend whose index was lost."""
    counts_as_use: bool = True
    """Whether this open counts for :attr:`~tierkv.abc.StoredNamespace.last_used_s`. Upkeep does not."""


@runtime_checkable
class Backend(Protocol):
    """Required verbs of a blocking backend."""

    def contains(self, keys: Sequence[Key]) -> Sequence[ProbeResult]:
        """Return whether each key is stored. Must be cheap and read no frame."""

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Fill each buffer with the frame of its key."""

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Store each frame atomically: a reader sees the whole frame or none, also after a crash.

        Need not look whether the key is stored: to replace its frame does no harm.
        """

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete the frame of each key. An absent key is no error."""

    def close(self) -> None:
        """Release all resources. A second call does nothing.

        Abandoned calls may still run, and end later: none may acknowledge a write that the next open would not find.
        """


@runtime_checkable
class AsyncBackend(Protocol):
    """Required verbs of a backend whose library is asynchronous. The contracts are those of :class:`Backend`.

    A verb may be cancelled when its deadline passes or the stack closes. It must not use its buffers after that.
    """

    async def contains(self, keys: Sequence[Key]) -> Sequence[ProbeResult]:
        """Return whether each key is stored."""

    async def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Fill each buffer with the frame of its key."""

    async def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Store each frame atomically."""

    async def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete the frame of each key."""

    async def close(self) -> None:
        """Release all resources."""


@runtime_checkable
class SupportsScan(Protocol):
    """Ability to list the stored frames of the namespace. Declared by ``Capabilities.scan``."""

    def scan(self) -> Iterable[Entry]:
        """Yield every stored frame, oldest first where the backend knows the age.

        The framework orders the frames of one request by their ranks, so that the head of a prompt is evicted last.
        Called once, when the tier opens, on a framework thread.
        """


@runtime_checkable
class SupportsQuarantine(Protocol):
    """Ability to take the storage of a corrupt frame out of service. Found by the method; no capability declares it."""

    def quarantine(self, key: Key, reason: str) -> None:
        """Quarantine the storage of the frame that was last read for ``key``, because the frame failed its check.

        A delete of the key follows. Called on the thread that read the frame. An exception is ignored.

        Args:
            key: key of the corrupt frame.
            reason: the failed check, for logs and ``tierkv check``.
        """


@runtime_checkable
class SupportsRoomLimit(Protocol):
    """Ability to report how much of the capacity is room for frames; the backend itself uses the rest.

    The framework keeps the sum of all frames within this room. For a backend without this ability, it keeps the sum
    within the capacity.
    """

    @property
    def room_bytes(self) -> int:
        """Room for frames in bytes, if all frames have the longest length. Constant while the backend is open."""


__all__ = [
    "AsyncBackend",
    "Backend",
    "BackendContext",
    "Capabilities",
    "Entry",
    "FrameRecogniser",
    "ProbeResult",
    "ReadRequest",
    "ReadResult",
    "SupportsQuarantine",
    "SupportsRoomLimit",
    "SupportsScan",
    "WriteRequest",
    "WriteResult",
    "recognise_nothing",
]
