"""Abilities of a backend at rest: storage that is read, checked, copied or emptied without a stack.

The commands ``tierkv ls``, ``verify``, ``rm``, ``gc``, ``copy`` and ``warm`` need the verbs and ``scan`` only. A
backend helps with what it knows beyond them: the namespaces at its place, a way to read beside the process that writes,
the time at which a frame was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tierkv.abc.backend import AsyncBackend, Backend, BackendContext
from tierkv.errors import TierKVError
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace that has data at a place."""

    namespace: Namespace
    """Its description."""
    held_bytes: int | None = None
    """Bytes that its storage takes, free room in preallocated files included; None: unknown."""
    last_used_s: float | None = None
    """Time when a process last opened or closed it for use, in seconds since 1970; None: unknown. Readers beside it and
    upkeep (:attr:`~tierkv.abc.BackendContext.counts_as_use`) leave it."""
    in_use_by: str | None = None
    """The process that has it open, as text; None: none, or unknown."""


class StoredFrame(NamedTuple):
    """One stored frame, as listed by :meth:`SupportsListing.list_frames`."""

    key: Key | None
    """Key of the frame; None: not asked for."""
    frame_bytes: int
    """Stored length of the frame in bytes."""
    stored_at_s: float | None = None
    """Time of its last write, in seconds since 1970; None: unknown."""
    rank: int = 0
    """:attr:`~tierkv.abc.backend.WriteRequest.rank` of that write; 0: unknown."""


class DamagedEntry(NamedTuple):
    """Damage that a listing found in place of a frame."""

    where: str
    """The damaged thing, such as the URL of an object."""
    reason: str
    """The failed check."""
    remove: Callable[[], None] | None = None
    """Removes the damaged thing, or raises a :class:`TierKVError`; None: it cannot be removed alone."""


@runtime_checkable
class SupportsListing(Protocol):
    """Ability to list stored frames in bounded memory, beside other processes. Found by the method."""

    def list_frames(self, *, keys: bool) -> Iterable[StoredFrame | DamagedEntry]:
        """Yield every stored frame, in any order, while other processes may write and delete.

        A frame that is written or deleted meanwhile may be listed or not. Blocks; any thread.

        Args:
            keys: whether keys are needed. Where a key costs a request per frame, False saves it.

        Raises:
            TierKVError: the storage cannot be listed.
        """


@dataclass(frozen=True, slots=True)
class AtRest:
    """Abilities of a backend's plugin at rest. All functions may block."""

    namespaces: Callable[[Any], Iterable[StoredNamespace | TierKVError]]
    """Lists the namespaces at the place that the options name. Opens, locks and changes nothing. An error in place of
    a namespace concerns one whose description cannot be read. Raises a :class:`TierKVError` if the place is not this
    backend's."""
    open_reader: Callable[[BackendContext, Any], Backend | AsyncBackend] | None = None
    """Opens a namespace for reading only, beside a process that writes it. None: ``open`` is used, which may refuse."""
    remove_namespace: Callable[[Any, Namespace], None] | None = None
    """Removes a namespace with its storage. Raises a :class:`TierKVError` if a process has it open. None: its chunks
    are deleted one by one."""
    give_up_room: Callable[[BackendContext, Any], int] | None = None
    """Gives free room in the files of a namespace back to the file system, and keeps every chunk. Returns bytes. Raises
    a :class:`TierKVError` if a process has it open. None: its files have no free room, or keep it."""
    finish_removals: Callable[[Any], int] | None = None
    """Removes what killed calls of ``remove_namespace`` left at the place, beside processes that use other namespaces.
    Returns the bytes of those files. Raises a :class:`TierKVError` if they cannot be removed. None: a killed removal
    leaves nothing, or a namespace that is still listed."""
