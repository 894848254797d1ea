"""Summaries: chunks, bytes and ages of a store, as a whole or by tenant, group, age or codec. One pass, no list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from tierkv.abc import DamagedEntry, StoredFrame, StoredNamespace
from tierkv.errors import TierKVError
from tierkv.stores.findings import Progress, no_progress
from tierkv.stores.places import Place
from tierkv.stores.selection import tenant_text
from tierkv.stores.store import Store
from tierkv.types.keys import split_key

SAMPLED = 16
"""Chunks of a store that are read to name its codecs."""
AGES = ((3600.0, "under 1 h"), (86_400.0, "1 h to 1 d"), (604_800.0, "1 d to 1 w"), (2_592_000.0, "1 w to 30 d"))
GROUPINGS = ("namespace", "tenant", "group", "age", "codec")
"""Labels that ``tierkv du`` can add up by."""
_PROGRESS_EVERY = 1000


@dataclass(slots=True)
class Summary:
    """Sums over one store."""

    place: Place
    """Place of the store."""
    stored: StoredNamespace
    """Its namespace."""
    chunks: int = 0
    """Number of chunks."""
    frame_bytes: int = 0
    """Bytes of their frames."""
    damaged: int = 0
    """Damaged entries of the listing."""
    oldest_s: float | None = None
    """Time of the oldest write, in seconds since 1970; None: unknown."""
    newest_s: float | None = None
    """Time of the newest write; None: unknown."""
    codecs: list[str] = field(default_factory=list)
    """Codecs of a sample."""
    error: str = ""
    """Reason why it could not be listed; the sums are then of a part, or of nothing."""


def summarise(place: Place, stored: StoredNamespace, *, progress: Progress = no_progress) -> Summary:
    """Open a store for reading and add up its chunks. An error becomes :attr:`Summary.error`."""
    summary = Summary(place, stored)
    try:
        with Store(place, stored.namespace, writes=False) as store:
            for found in store.list_frames(keys=False):
                if isinstance(found, DamagedEntry):
                    summary.damaged += 1
                else:
                    _add(summary, found)
                    if summary.chunks % _PROGRESS_EVERY == 0:
                        progress(_PROGRESS_EVERY, 0)
            summary.codecs = _sampled_codecs(store)
    except TierKVError as error:
        summary.error = str(error)
    return summary


def _add(summary: Summary, found: StoredFrame) -> None:
    summary.chunks += 1
    summary.frame_bytes += found.frame_bytes
    at = found.stored_at_s
    if at is not None:
        summary.oldest_s = at if summary.oldest_s is None else min(summary.oldest_s, at)
        summary.newest_s = at if summary.newest_s is None else max(summary.newest_s, at)


def _sampled_codecs(store: Store) -> list[str]:
    listing = store.list_frames()
    sample = [found for found in islice(listing, SAMPLED) if isinstance(found, StoredFrame)]
    codecs = {found.header.codec for batch in store.read_all(sample) for found in batch if found.header is not None}
    return sorted(codecs)


@dataclass(slots=True)
class Usage:
    """Chunks and bytes by label."""

    chunks: Counter[str] = field(default_factory=Counter)
    """Number of chunks by label."""
    frame_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of their frames by label."""


def add_usage(store: Store, usage: Usage, by: str, now_s: float, *, progress: Progress = no_progress) -> None:
    """Add the chunks of a store to ``usage``.

    Args:
        store: open for reading.
        usage: added to.
        by: one of :data:`GROUPINGS`.
        now_s: the present, in seconds since 1970.
        progress: receives what was counted.

    Raises:
        BackendError: the store cannot be listed.
    """
    for label, size in _labelled(store, by, now_s):
        usage.chunks[label] += 1
        usage.frame_bytes[label] += size
        progress(1, size)


def _labelled(store: Store, by: str, now_s: float) -> Iterator[tuple[str, int]]:
    frames = (
        found for found in store.list_frames(keys=by in ("tenant", "group", "codec")) if isinstance(found, StoredFrame)
    )
    if by == "codec":
        for batch in store.read_all(frames):
            for read in batch:
                yield ("damaged" if read.header is None else read.header.codec), read.listed.frame_bytes
        return
    for found in frames:
        yield _label(store, found, by, now_s), found.frame_bytes


def _label(store: Store, found: StoredFrame, by: str, now_s: float) -> str:
    if by == "namespace":
        return store.namespace.model
    if by == "age":
        return age_class(found.stored_at_s, now_s)
    key = found.key or b""
    if by == "tenant":
        return tenant_text(key)
    try:
        return f"group {split_key(key)[1]}"
    except ValueError:
        return "unknown"


def age_class(stored_at_s: float | None, now_s: float) -> str:
    """Name the class of an age."""
    if stored_at_s is None:
        return "unknown"
    return next((name for limit_s, name in AGES if now_s - stored_at_s < limit_s), "over 30 d")
