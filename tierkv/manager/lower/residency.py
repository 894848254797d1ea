"""Chunks in one lower tier: which are stored, written, read and deleted there, and their bytes.

The bytes of the tier are accounted here. Used bytes are those of stored frames, until their deletion is confirmed.
Reserved bytes are upper bounds for writes under way, and for writes that ended in an unknown way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tierkv.abc import EvictionPolicy
from tierkv.errors import require
from tierkv.policies.quotas import TenantPolicy
from tierkv.structures.key_table import KEY_BYTES_MIN, SHARD_BYTE, KeyTable, column, longer
from tierkv.types.keys import Key

STORED, WRITING, DELETING = 1, 2, 4
"""Flags of a row, in any combination: a frame is at rest in the tier; one is being written; one is being deleted."""

HEADROOM_FRAMES_MIN, HEADROOM_FRAMES_MAX = 8, 512
"""Bounds of the frames for which a full tier makes room at once, so that the next write need not wait."""

_LOAD_KEYS = 4096
"""Keys of an index that are added to the policy at once."""


class Residency:
    """Columns of one tier. Sans-IO, single-threaded; O(1) amortised per key.

    A chunk that is stored, written, read or deleted has a row: its index in all columns, and the handle that the policy
    knows it by. The policy knows exactly the rows that are stored and not being deleted: they are *listed*.

    Args:
        name: of the tier, for error messages.
        policy: decides the eviction order.
        capacity_bytes: bytes at rest, or None if the tier limits itself.
        delete_retry_s: seconds after which a failed deletion of an uncertain chunk is retried.
    """

    def __init__(self, name: str, policy: EvictionPolicy, capacity_bytes: int | None, delete_retry_s: float) -> None:
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of the stored frames."""
        self.reserved_bytes = 0
        """Upper bound for the bytes of writes under way and of uncertain chunks."""
        self.num_writing = 0
        """Number of chunks being written."""
        self.num_deleting = 0
        """Number of chunks whose deletion is due or under way."""
        self.uncertain: dict[Key, int] = {}
        """Bytes that stay reserved for a chunk until its deletion is confirmed."""
        self._name = name
        self._delete_retry_s = delete_retry_s
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        if self._tenants is not None:
            self._tenants.chunk_bytes = self.frame_bytes_of
        self._rows = KeyTable()
        self._flags = bytearray()
        self._frame_bytes = column("Q", 0)
        self._uses = column("I", 0)
        self._evictable = 0
        self._deleting_bytes = 0
        self._frame_bytes_max = 1
        self._deletions: list[Key] = []
        self._retries: deque[tuple[float, Key]] = deque()

    def __len__(self) -> int:
        """Number of stored chunks. O(rows)."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Key]:
        """The stored chunks."""
        return (key for key, row in self._rows.items() if self._flags[row] & STORED)

    def deleting(self) -> Iterator[Key]:
        """The chunks whose deletion is due or under way. O(rows)."""
        return (key for key, row in self._rows.items() if self._flags[row] & DELETING)

    def listed(self) -> Iterator[tuple[Key, int, bool]]:
        """Each chunk that the policy knows, with its frame's bytes, and whether a read or write uses it. O(rows)."""
        return (
            (key, self._frame_bytes[row], bool(self._uses[row]))
            for key, row in self._rows.items()
            if self._is_listed(row)
        )

    # -- rows --------------------------------------------------------------------------------------------------------

    def _row(self, key: Key) -> int:
        """Row of a key; a new one if it has none."""
        row = self._rows.find(key)
        if row is not None:
            return row
        row = self._rows.add(key)
        self._lengthen()
        return row

    def _lengthen(self) -> None:
        length = self._rows.length
        if length > len(self._flags):
            self._flags.extend(bytes(length - len(self._flags)))
            self._frame_bytes, self._uses = longer(self._frame_bytes, length), longer(self._uses, length)

    def _discard_unused(self, row: int) -> None:
        """Give up a row without flags and uses."""
        if not self._flags[row] and not self._uses[row]:
            self._rows.discard(row)

    def _is_listed(self, row: int) -> bool:
        return self._flags[row] & (STORED | DELETING) == STORED

    # -- questions ---------------------------------------------------------------------------------------------------

    def flags_of(self, key: Key) -> int:
        """Flags of a key; 0 if it has no row."""
        row = self._rows.shards[key[SHARD_BYTE]].get(key)
        return 0 if row is None else self._flags[row]

    def without_flags(self, chunks: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that are neither stored nor written nor deleted here."""
        flags, shards = self._flags, self._rows.shards
        rows = [shards[key[SHARD_BYTE]].get(key) for _, key in chunks]
        return [chunk for chunk, row in zip(chunks, rows, strict=True) if row is None or not flags[row]]

    def being_deleted(self, chunks: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, whose deletion is due or under way."""
        return [chunk for chunk in chunks if self.flags_of(chunk[1]) & DELETING] if self.num_deleting else []

    def has_bytes_of(self, key: Key) -> bool:
        """Whether ``key`` is stored or being written."""
        return bool(self.flags_of(key) & (STORED | WRITING))

    def is_writing(self, key: Key) -> bool:
        """Whether ``key`` is being written."""
        return bool(self.flags_of(key) & WRITING)

    def is_idle(self, key: Key) -> bool:
        """Whether ``key`` is stored, and not being read, written or deleted."""
        row = self._rows.find(key)
        return row is not None and self._is_listed(row) and not self._uses[row]

    def frame_bytes_of(self, row: int) -> int:
        """Bytes at rest of the chunk in a row."""
        return self._frame_bytes[row]

    # -- stored ------------------------------------------------------------------------------------------------------

    def load_index(self, entries: Iterable[tuple[Key, int]]) -> None:
        """Add chunks that the backend found at rest, oldest first: keys, each with the bytes of its frame.

        Ignores keys that are too short to be ours, and chunks whose deletion is due or under way.
        """
        rest = iter(entries)
        while batch := list(islice(rest, _LOAD_KEYS)):
            usual = [(key, size) for key, size in batch if len(key) >= KEY_BYTES_MIN and size >= 0]
            if self.num_deleting:
                usual = [entry for entry in usual if not self.flags_of(entry[0]) & DELETING]
            self.add(usual)

    def add(self, entries: Sequence[tuple[Key, int]]) -> None:
        """Account chunks as stored: keys, each with the bytes of its frame."""
        rows = self._rows.numbers([key for key, _ in entries])
        self._lengthen()
        flags, sizes = self._flags, self._frame_bytes
        new: dict[int, Key] = {}
        used_bytes = self.used_bytes
        for row, (key, frame_bytes) in zip(rows, entries, strict=True):
            known = flags[row]
            if known & STORED:
                used_bytes -= sizes[row]
                if known & DELETING:
                    self._deleting_bytes += frame_bytes - sizes[row]
                elif frame_bytes != sizes[row] and row not in new:  # a policy may count bytes: it needs the new size
                    self._unlist(row)
                    new[row] = key
            else:
                flags[row] = known | STORED
                if not known & DELETING:
                    new[row] = key
            sizes[row] = frame_bytes
            used_bytes += frame_bytes
        self.used_bytes = used_bytes
        self._frame_bytes_max = max([self._frame_bytes_max, *[frame_bytes for _, frame_bytes in entries]])
        self._list(list(new), list(new.values()))

    def discard(self, key: Key) -> bool:
        """Account a chunk as not stored any more. Returns whether it was."""
        row = self._rows.find(key)
        if row is None or not self._flags[row] & STORED:
            return False
        if self._is_listed(row):
            self._unlist(row)
        else:
            self._deleting_bytes -= self._frame_bytes[row]
        self._flags[row] &= ~STORED
        self.used_bytes -= self._frame_bytes[row]
        self._discard_unused(row)
        return True

    def _list(self, rows: Sequence[int], keys: Sequence[Key]) -> None:
        """Add rows to the policy."""
        self.policy.add(rows, keys)
        uses = self._uses
        self._evictable += len([row for row in rows if not uses[row]])

    def _unlist(self, row: int) -> None:
        """Remove a row from the policy."""
        self.policy.remove((row,))
        self._evictable -= not self._uses[row]

    def touch(self, keys: Iterable[Key]) -> None:
        """Update recency in the policy; the tail of a prefix comes first (S54)."""
        flags = self._flags
        self.policy.touch([row for row in self._rows.known(keys) if flags[row] & (STORED | DELETING) == STORED])

    # -- reads and writes under way: the chunks that they use are not evicted meanwhile ------------------------------

    def begin_read(self, keys: Sequence[Key]) -> None:
        """Protect chunks from eviction while they are read."""
        rows = self._rows.numbers(keys)
        self._lengthen()
        for row in rows:
            self._use(row)

    def end_read(self, keys: Sequence[Key]) -> None:
        """Undo :meth:`begin_read`."""
        self._end_use(self._rows.known(keys))

    def begin_write(self, keys: Sequence[Key], frame_bytes: int) -> None:
        """Reserve ``frame_bytes``, an upper bound for the frames of ``keys`` together, while they are written.

        A chunk may be written although its old frame is still accounted and possibly corrupt. A deletion of the old
        frame beside the write could delete the new frame, or leave a frame that is not accounted.
        """
        rows = self._rows.numbers(keys)
        self._lengthen()
        for row in rows:
            self._use(row)
            self._flags[row] |= WRITING
        self.num_writing += len(rows)
        self.reserved_bytes += frame_bytes

    def end_write(self, keys: Sequence[Key], frame_bytes: int) -> None:
        """Undo :meth:`begin_write` for all of ``keys``; ``frame_bytes`` was reserved for them together."""
        rows = self._rows.known(keys)
        self.reserved_bytes -= frame_bytes
        self.num_writing -= len(rows)
        for row in rows:
            self._flags[row] &= ~WRITING
        self._end_use(rows)

    def _use(self, row: int) -> None:
        if not self._uses[row] and self._is_listed(row):
            self._evictable -= 1
        self._uses[row] += 1

    def _end_use(self, rows: Iterable[int]) -> None:
        idle, uses, flags = [], self._uses, self._flags
        for row in rows:
            left = uses[row] - 1
            uses[row] = left
            if left:
                continue
            if flags[row] & (STORED | DELETING) == STORED:
                idle.append(row)
            else:
                self._discard_unused(row)
        self._evictable += len(idle)
        self.policy.release(idle)

    # -- room --------------------------------------------------------------------------------------------------------

    def has_room(self, frame_bytes: int) -> bool:
        """Whether a frame of that size fits beside everything stored and being written."""
        capacity = self.capacity_bytes
        return capacity is None or self.used_bytes + self.reserved_bytes + frame_bytes <= capacity

    def may_get_room(self, frame_bytes: int) -> bool:
        """Whether writes or deletions under way may make room for a frame of that size."""
        capacity = self.capacity_bytes
        return capacity is None or (frame_bytes <= capacity and bool(self.num_deleting or self.reserved_bytes))

    def frames_free(self, frame_bytes: int, frames_max: int) -> int:
        """Number of frames of that size that fit, up to ``frames_max``."""
        capacity = self.capacity_bytes
        free = frames_max if capacity is None else (capacity - self.used_bytes - self.reserved_bytes) // frame_bytes
        return max(0, min(free, frames_max))

    # -- eviction and deletion ---------------------------------------------------------------------------------------

    def evict_for(self, frame_bytes: int, waiting: int = 0) -> list[Key]:
        """Schedule deletions to make room for the ``waiting`` frames of that size, and for a few more.

        Evicts at most a quarter of the tier at once: chunks evicted in one step should be replaced soon. The bytes of
        the victims count as used until the deletion is confirmed.

        Returns:
            The evicted chunks.
        """
        capacity = self.capacity_bytes
        if capacity is None or frame_bytes > capacity:
            return []
        frames = min(max(waiting, HEADROOM_FRAMES_MIN), HEADROOM_FRAMES_MAX)
        headroom = max(frame_bytes, min(capacity // 4, frames * frame_bytes))
        missing = self.used_bytes + self.reserved_bytes + headroom - capacity - self._deleting_bytes
        evicted: list[Key] = []
        while missing > 0 and self._evictable:
            # As many as are needed even if all of them are of the largest size.
            before = self._deleting_bytes
            victims = self.evict(max(1, missing // self._frame_bytes_max))
            if not victims:
                break
            evicted += victims
            missing -= self._deleting_bytes - before
        return evicted

    def evict(self, count: int) -> list[Key]:
        """Schedule the deletion of up to ``count`` victims of the policy. Returns them."""
        count = min(count, self._evictable)
        return self._delete_victims(self.policy.evict(count, self._uses) if count else ())

    def evict_over_quota(self) -> list[Key]:
        """Schedule the deletion of some chunks of tenants that are over their quotas. Returns them."""
        return [] if self._tenants is None else self._delete_victims(self._tenants.trim(self._uses))

    def _delete_victims(self, rows: Sequence[int]) -> list[Key]:
        """Begin to delete rows that the policy has chosen and removed."""
        self._evictable -= len(rows)
        for row in rows:
            self._begin_deletion(row)
        keys = [self._rows.key(row) for row in rows]
        self._deletions.extend(keys)
        return keys

    def schedule_delete(self, key: Key) -> None:
        """Delete a chunk for another reason than room, such as a corrupt frame."""
        row = self._row(key)
        if self._is_listed(row):
            self._unlist(row)
        if not self._flags[row] & DELETING:
            self._begin_deletion(row)
        self._deletions.append(key)

    def mark_uncertain(self, key: Key, frame_bytes: int) -> None:
        """Delete a chunk whose write failed, because its frame may be in the tier all the same.

        Its bytes, at most ``frame_bytes``, stay reserved until the deletion is confirmed. It is not read meanwhile.
        """
        if self.flags_of(key) & STORED:
            self.schedule_delete(key)
            return
        self._begin_deletion(self._row(key))
        self.reserved_bytes += frame_bytes
        self.uncertain[key] = frame_bytes
        self._deletions.append(key)

    def take_deletions(self, now: float) -> list[Key]:
        """Take the chunks to delete now: those scheduled since the last call, and retries that are due."""
        retries = self._retries
        while retries and retries[0][0] <= now:
            self._deletions.append(retries.popleft()[1])
        deletions, self._deletions = self._deletions, []
        return deletions

    def end_uncertain(self, key: Key, now: float, *, ok: bool) -> None:
        """End the deletion of an uncertain chunk. If it failed, its bytes stay reserved and it is retried later."""
        if ok:
            self.reserved_bytes -= self.uncertain.pop(key)
            self.end_deletion(key)
        else:
            self._retries.append((now + self._delete_retry_s, key))

    def _begin_deletion(self, row: int) -> None:
        self.num_deleting += 1
        if self._flags[row] & STORED:
            self._deleting_bytes += self._frame_bytes[row]
        self._flags[row] |= DELETING

    def end_deletion(self, key: Key) -> None:
        """End a deletion, whether the frame is gone or not. A chunk that is still stored is listed again."""
        row = self._row(key)
        if self._flags[row] & DELETING:
            self.num_deleting -= 1
            self._flags[row] &= ~DELETING
            if self._flags[row] & STORED:
                self._deleting_bytes -= self._frame_bytes[row]
                self._list((row,), (key,))
        self._discard_unused(row)

    # -- check -------------------------------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether no read, write or deletion is due or under way. O(rows)."""
        return not (self.num_deleting or any(self._uses))

    def validate(self) -> None:
        """Check the account of bytes and the policy against the rows.

        Raises:
            InvariantError: they differ.
        """
        what = f"tier {self._name}"
        rows = [row for _, row in self._rows.items()]
        stored = [row for row in rows if self._flags[row] & STORED]
        require(self.used_bytes == sum(self._frame_bytes[row] for row in stored), f"{what}: bytes are counted wrong")
        unsure = sum(self.uncertain.values())
        require(self.reserved_bytes >= unsure, f"{what}: {self.reserved_bytes} bytes are reserved, {unsure} uncertain")
        deleted = all(self.flags_of(key) & DELETING for key in self.uncertain)
        require(deleted, f"{what}: an uncertain chunk is not being deleted")
        require(all(self._flags[row] or self._uses[row] for row in rows), f"{what}: a row has neither flags nor uses")
        writing = sum(bool(self._flags[row] & WRITING) for row in rows)
        require(writing == self.num_writing, f"{what}: {writing} chunks are written, {self.num_writing} are counted")
        listed = [row for row in stored if self._is_listed(row)]
        require(len(listed) == len(self.policy), f"{what}: {len(listed)} chunks, the policy has {len(self.policy)}")
        idle = sum(not self._uses[row] for row in listed)
        require(idle == self._evictable, f"{what}: {idle} chunks are evictable, {self._evictable} are counted")
        deleting = sum(self._frame_bytes[row] for row in stored if not self._is_listed(row))
        require(deleting == self._deleting_bytes, f"{what}: {deleting} bytes are deleted, not {self._deleting_bytes}")
        capacity, total = self.capacity_bytes, self.used_bytes + self.reserved_bytes
        # A tier that was opened over its capacity (the user made it smaller) may stay over it until it has shrunk, but
        # must not grow meanwhile.
        fits = capacity is None or total <= capacity or not self.reserved_bytes
        require(fits, f"{what} is over its capacity: {total} > {capacity}")
