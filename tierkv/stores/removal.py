"""Removal: chunks by choice, whole namespaces, or the oldest down to a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tierkv.abc import DamagedEntry, StoredFrame, StoredNamespace
from tierkv.errors import TierKVError
from tierkv.stores.export_sums import ExportSums
from tierkv.stores.findings import Finding, FindingKind, Progress, no_progress
from tierkv.stores.places import Place
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import Store, context_of
from tierkv.types.keys import Key

DELETED_AT_ONCE = 256
"""Chunks per deletion."""
BUCKET_S = 60.0
"""Chunks written within such a time count as equally old: ages are added up without a list of all chunks."""


@dataclass(slots=True)
class Removed:
    """Sums of a removal; of a dry run, what it would remove."""

    chunks: int = 0
    """Chunks that were removed."""
    frame_bytes: int = 0
    """Bytes of their frames."""
    namespaces: int = 0
    """Whole namespaces among them."""
    unknown_age: int = 0
    """Chunks that were kept because the backend does not know when they were stored."""
    failed: int = 0
    """Chunks that could not be removed."""
    named: set[str] = field(default_factory=set)
    """Chosen keys that name a chunk, whether it could be removed or not."""


def remove_chunks(
    store: Store, frames: Iterable[StoredFrame], sums: Removed, *, dry_run: bool, progress: Progress = no_progress
) -> Iterator[Finding]:
    """Delete chunks; yield those that cannot be deleted. A dry run only counts.

    Args:
        store: open for writing, unless it is a dry run.
        frames: chunks of the store.
        sums: added to.
        dry_run: whether nothing is deleted.
        progress: receives what was deleted.

    Raises:
        BackendError: the manifest of an export folder cannot be written.
    """
    source, manifest = iter(frames), None if dry_run else ExportSums(store)
    while batch := list(islice(source, DELETED_AT_ONCE)):
        keys = [each.key for each in batch if each.key is not None]
        if manifest is not None:
            manifest.take_out(batch)
        failures = [None] * len(batch) if dry_run else store.delete(keys)
        for frame, error in zip(batch, failures, strict=True):
            if error is None:
                sums.chunks += 1
                sums.frame_bytes += frame.frame_bytes
            else:
                sums.failed += 1
                yield _finding(store, FindingKind.INCOMPLETE, frame.key, f"cannot be removed: {error}")
        if manifest is not None:
            manifest.put_back([frame for frame, error in zip(batch, failures, strict=True) if error is not None])
        progress(len(batch), sum(each.frame_bytes for each in batch))


def chosen_frames(store: Store, chosen: ChunkFilter, sums: Removed) -> Iterator[StoredFrame]:
    """Yield the chosen chunks of a store. Those of unknown age are counted where age matters."""
    for entry in store.list_frames():
        if not isinstance(entry, DamagedEntry):
            matches = chosen.matches(entry)
            sums.unknown_age += matches is None
            if matches is not False:
                sums.named |= chosen.names_of(entry)
            if matches:
                yield entry


def remove_namespace(
    place: Place, stored: StoredNamespace, sums: Removed, *, dry_run: bool, progress: Progress = no_progress
) -> Iterator[Finding]:
    """Remove a namespace whole: with its storage, where the backend can do that, otherwise chunk by chunk.

    Raises:
        BackendError: it cannot be opened or removed, for instance because an engine uses it.
    """
    remove = None if place.backend.at_rest is None else place.backend.at_rest.remove_namespace
    if stored.in_use_by is not None:
        remove = None  # the open below refuses, and says why
    if remove is None and not dry_run:
        failed = sums.failed
        with Store(place, stored.namespace, writes=True, is_upkeep=True) as store:
            yield from remove_chunks(store, _sound(store.list_frames()), sums, dry_run=False, progress=progress)
        sums.namespaces += sums.failed == failed
        return
    with Store(place, stored.namespace, writes=False) as store:
        whole = Counter[str]()
        for frame in _sound(store.list_frames(keys=False)):
            whole.update(chunks=1, frame_bytes=frame.frame_bytes)
    if remove is not None and not dry_run:
        remove(place.options, stored.namespace)  # what it refuses is not counted
    sums.chunks += whole["chunks"]
    sums.frame_bytes += whole["frame_bytes"]
    sums.namespaces += 1


def finish_removals(places: Iterable[Place]) -> Iterator[int | Finding]:
    """Remove what killed removals left at each place. Yields bytes of files, or the finding that some stay."""
    for place in places:
        finish = None if place.backend.at_rest is None else place.backend.at_rest.finish_removals
        try:
            yield 0 if finish is None else finish(place.options)
        except TierKVError as error:
            yield Finding(FindingKind.INCOMPLETE, place.name, "", place.where, str(error))


def _sound(listed: Iterable[StoredFrame | DamagedEntry]) -> Iterator[StoredFrame]:
    return (each for each in listed if isinstance(each, StoredFrame))


@dataclass(slots=True)
class Collection:
    """Plan of a removal of the oldest chunks: every chunk of an older bucket, and some of the last one."""

    total_bytes: int = 0
    """Bytes of all frames before."""
    last_bucket: float = float("-inf")
    """Bucket of which only a part goes."""
    last_bytes: int = 0
    """Bytes to remove of that bucket."""
    buckets: Counter[float] = field(default_factory=Counter)
    """Bytes by bucket."""


def plan_collection(stores: Sequence[tuple[Place, StoredNamespace]], to_bytes: int) -> Collection:
    """Add up bytes by age, and find the age beyond which chunks go, so that ``to_bytes`` stay.

    The age of a chunk is the time of its last write. Where the backend does not know it, it is the last use of the
    namespace, and within it the order of writing.

    Raises:
        BackendError: a store cannot be listed.
    """
    plan = Collection()
    for place, stored in stores:
        with Store(place, stored.namespace, writes=False) as store:
            for frame in store.list_frames(keys=False):
                if isinstance(frame, StoredFrame):
                    plan.buckets[_bucket(frame, stored)] += frame.frame_bytes
    plan.total_bytes = plan.buckets.total()
    excess = plan.total_bytes - to_bytes
    for bucket in sorted(plan.buckets):
        if excess <= 0:
            break
        plan.last_bucket, plan.last_bytes = bucket, min(excess, plan.buckets[bucket])
        excess -= plan.buckets[bucket]
    return plan


def collect(  # noqa: PLR0913 - what to remove, and how
    place: Place,
    stored: StoredNamespace,
    plan: Collection,
    sums: Removed,
    *,
    dry_run: bool,
    progress: Progress = no_progress,
) -> Iterator[Finding]:
    """Remove the chunks of one store that the plan names. ``plan.last_bytes`` is reduced by what goes.

    Raises:
        BackendError: the store cannot be opened for writing, for instance because an engine uses it.
    """
    with Store(place, stored.namespace, writes=not dry_run, is_upkeep=True) as store:
        yield from remove_chunks(store, _collected(store, stored, plan), sums, dry_run=dry_run, progress=progress)


def _collected(store: Store, stored: StoredNamespace, plan: Collection) -> Iterator[StoredFrame]:
    for frame in store.list_frames(oldest_first=True):
        if isinstance(frame, DamagedEntry):
            continue
        bucket = _bucket(frame, stored)
        if bucket == plan.last_bucket and plan.last_bytes > 0:
            plan.last_bytes -= frame.frame_bytes
            yield frame
        elif bucket < plan.last_bucket:
            yield frame


def _bucket(frame: StoredFrame, stored: StoredNamespace) -> float:
    at = stored.last_used_s if frame.stored_at_s is None else frame.stored_at_s
    return 0.0 if at is None else at // BUCKET_S


def give_up_room(place: Place, stored: StoredNamespace) -> int | None:
    """Let a backend give the room of removed chunks back to its file system. Returns bytes; None: it has no such room.

    Raises:
        BackendError: the store cannot be opened.
    """
    ability = None if place.backend.at_rest is None else place.backend.at_rest.give_up_room
    return None if ability is None else ability(context_of(place, stored.namespace, is_upkeep=True), place.options)


def refusal(place: Place, stored: StoredNamespace, error: TierKVError) -> Finding:
    """Return the finding that a store was left alone."""
    return Finding(
        FindingKind.INCOMPLETE, place.name, stored.namespace.fingerprint().hex(), stored.namespace.model, str(error)
    )


def _finding(store: Store, kind: FindingKind, key: Key | None, reason: str) -> Finding:
    return Finding(kind, store.place.name, store.namespace.fingerprint().hex(), (key or b"").hex(), reason)
