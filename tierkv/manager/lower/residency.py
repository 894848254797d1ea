"""Chunks in one lower tier: which are stored, written, read and deleted there, and their bytes.

The bytes of the tier are accounted here. Used bytes are those of stored frames, until their deletion is confirmed.
Reserved bytes are upper bounds for writes under way, and for writes that ended in an unknown way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tierkv.abc import EvictionPolicy
from tierkv.errors import require
from tierkv.manager.lower.deletions import DeletionQueue
from tierkv.manager.lower.row_table import DELETING, EVICTING, STORED, WRITING, RowTable
from tierkv.policies.eviction_list import EvictionList
from tierkv.structures.key_table import KEY_BYTES_MIN, KeyDirectory
from tierkv.types.keys import Key
from tierkv.types.tier_ops import TierContent

HEADROOM_FRAMES_MIN, HEADROOM_FRAMES_MAX = 8, 512
"""Bounds of the frames for which a full tier makes room at once, so that the next write need not wait."""

EVICTION_PAUSE_S = 1.0
"""Seconds between two evictions of one chunk each, while none can be deleted."""

_LOAD_KEYS = 1 << 16
"""Keys of an index that are added to the policy at once."""


class Residency:
    """Account of one tier. Sans-IO, single-threaded; O(1) amortised per key.

    A chunk that is stored, written, read or deleted has a row: its index in all columns, and the handle that the policy
    knows it by.

    Args:
        name: of the tier, for error messages.
        policy: decides the eviction order.
        capacity_bytes: bytes at rest, or None if the tier limits itself.
        delete_retry_s: seconds after which a deletion is repeated.
        directory: shared with other tiers, so that one lookup finds a key in all of them; None: one of its own.
    """

    def __init__(
        self,
        name: str,
        policy: EvictionPolicy,
        capacity_bytes: int | None,
        delete_retry_s: float,
        directory: KeyDirectory | None = None,
    ) -> None:
        self.spare = (0.0, 0)
        """Share of the capacity that is kept free, and the longest frame for which it is."""
        self.policy = policy
        self.capacity_bytes = capacity_bytes  # less while the backend reports that it is full
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
        self.evict_again_s = 0.0
        """Time from which one chunk may be evicted as a trial, since an eviction failed; 0: none has."""
        self.rows = RowTable(directory)
        """Columns by row, with every question about one chunk."""
        self._name = name
        self.listed = EvictionList(policy, self.rows.keys.key)
        """Rows that the policy knows: stored, and not being deleted."""
        self.has_quotas = self.listed.tenants is not None
        """Whether the policy keeps quotas of tenants."""
        if self.listed.tenants is not None:
            self.listed.tenants.chunk_bytes = self.rows.frame_bytes_of
        self._deleting_bytes = 0
        self._frame_bytes_max = 1
        self._deletions = DeletionQueue(delete_retry_s)

    def __len__(self) -> int:
        """Number of stored chunks. O(rows)."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Key]:
        """The stored chunks."""
        return self.rows.stored()

    def being_deleted(self, chunks: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, whose deletion is due or under way."""
        return [chunk for chunk in chunks if self.rows.flags_of(chunk[1]) & DELETING] if self.num_deleting else []

    # -- stored ------------------------------------------------------------------------------------------------------

    def load_index(self, content: TierContent) -> None:
        """Add chunks that the backend found at rest.

        Ignores keys that are too short to be ours, and chunks whose deletion is due or under way.
        """
        for first in range(0, len(content), _LOAD_KEYS):
            part = content.part(first, first + _LOAD_KEYS)
            if rows := self.rows.add_stored(part):  # nearly always, at an open
                self.used_bytes += sum(part.frame_bytes)
                self._frame_bytes_max = max(self._frame_bytes_max, *part.frame_bytes)
                self.listed.order.add(rows, part.keys)
                self.listed.evictable += len(rows)
                continue
            flags_of = self.rows.flags_of
            self.add(part.only([len(key) >= KEY_BYTES_MIN and not flags_of(key) & DELETING for key in part.keys]))

    def add(self, content: TierContent, ranks: Sequence[int] = ()) -> None:
        """Account chunks as stored.

        ranks: one per chunk (:mod:`tierkv.policies.prefix_order`); empty: unknown.
        """
        keys, lengths = content.keys, content.frame_bytes
        rows = self.rows.rows_of(keys)
        self.rows.written.note(rows, content.ranks)
        self._frame_bytes_max = max([self._frame_bytes_max, *lengths])  # of a damaged index perhaps none
        if self.rows.shift(rows, (1, 1), (WRITING, WRITING | STORED)):  # usual: new chunks were written
            self.rows.set_frame_bytes(rows, lengths)
            self.used_bytes += sum(lengths)
            self._list(rows, keys, ranks)
            return
        flags, sizes = self.rows.flags, self.rows.frame_bytes
        new: dict[int, Key] = {}
        used_bytes = self.used_bytes
        for row, key, frame_bytes in zip(rows, keys, lengths, strict=True):
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
        if len(new) < len(rows) and ranks:
            ranks = list(map(dict(zip(rows, ranks, strict=True)).__getitem__, new))
        self._list(list(new), list(new.values()), ranks)

    def discard(self, key: Key) -> bool:
        """Account a chunk as not stored any more. Returns whether it was."""
        row = self.rows.keys.find(key)
        if row is None or not self.rows.flags[row] & STORED:
            return False
        if self.rows.is_listed(row):
            self._unlist(row)
        else:
            self._deleting_bytes -= self.rows.frame_bytes[row]
        self.rows.flags[row] &= ~STORED
        self.used_bytes -= self.rows.frame_bytes[row]
        self.rows.discard_unused(row)
        return True

    def _list(self, rows: Sequence[int], keys: Sequence[Key], ranks: Sequence[int] = ()) -> None:
        """Add rows to the policy."""
        self.listed.order.add(rows, keys, ranks)
        uses = self.rows.uses
        self.listed.evictable += list(map(uses.__getitem__, rows)).count(0)

    def _unlist(self, row: int) -> None:
        """Remove a row from the policy."""
        self.listed.remove((row,))
        self.listed.evictable -= not self.rows.uses[row]

    def continue_prefix(self, rows: Sequence[int], ranks: Sequence[int], *, again: bool = False) -> None:
        """Rank stored chunks anew, in prefix order, because a request continues them; the head is the most recent.

        again: it has computed and stored them again, and they come anywhere in its prefix.
        """
        (self.listed.order.mark_again if again else self.listed.order.mark)(rows, ranks)
        self.policy.release(rows[::-1])

    # -- reads and writes under way: the chunks that they use are not evicted meanwhile ------------------------------

    def begin_read(self, keys: Sequence[Key]) -> list[int]:
        """Protect chunks from eviction while they are read. Returns the rank of each; 0: unknown."""
        rows = self.rows.rows_of(keys)
        self.listed.evictable -= self.rows.begin_use(rows)
        return self.listed.order.ranks_at(rows)

    def end_read(self, keys: Sequence[Key]) -> None:
        """Undo :meth:`begin_read`; keys in prefix order."""
        idle = self.rows.end_use(self.rows.keys.known(keys))
        self.listed.evictable += len(idle)
        self.policy.release(idle[::-1])  # tail first: the head of a prefix stays longest (S54)

    def begin_write(self, keys: Sequence[Key], frame_bytes: int) -> None:
        """Reserve ``frame_bytes``, an upper bound for the frames of ``keys`` together, while they are written.

        A chunk may be written although its old frame is still accounted and possibly corrupt. A deletion of the old
        frame beside the write could delete the new frame, or leave a frame that is not accounted.
        """
        rows = self.rows.add(keys)
        self.listed.evictable -= self.rows.begin_use(rows, WRITING)
        self.num_writing += len(rows)
        self.reserved_bytes += frame_bytes

    def end_write(self, keys: Sequence[Key], frame_bytes: int) -> None:
        """Undo :meth:`begin_write` for all of ``keys``; ``frame_bytes`` was reserved for them together.

        Does not count as use: the order stays that of the prefix.
        """
        rows = self.rows.keys.known(keys)
        self.reserved_bytes -= frame_bytes
        self.num_writing -= len(rows)
        idle = self.rows.end_use(rows, WRITING)
        self.listed.evictable += len(idle)
        self.listed.release_after_write(idle)

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

    def victims_max(self, wanted: int, now: float) -> int:
        """Number of chunks, up to ``wanted``, that may be evicted now: one in a while after a failure."""
        if not self.evict_again_s:
            return wanted
        return min(wanted, 1) if now >= self.evict_again_s else 0

    def evict_for(self, frame_bytes: int, waiting: int, victims_max: int, rank: int = 0) -> list[Key]:
        """Schedule deletions to make room for the ``waiting`` frames of that size, and for a few more.

        Evicts at most a quarter of the tier at once: chunks evicted in one step should be replaced soon. The bytes of
        the victims count as used until the deletion is confirmed. Evicts none of the prefix that the frame of a chunk
        of that ``rank`` continues. A later call chooses the victims that are left over.

        Returns:
            The evicted chunks, at most ``victims_max``.
        """
        capacity = self.capacity_bytes
        if capacity is None or frame_bytes > capacity:
            return []
        frames = min(max(waiting, HEADROOM_FRAMES_MIN), HEADROOM_FRAMES_MAX)
        spare = int(capacity * self.spare[0]) if frame_bytes <= self.spare[1] else 0
        headroom = max(frame_bytes, min(capacity // 4, max(frames * frame_bytes, spare)))
        missing = self.used_bytes + self.reserved_bytes + headroom - capacity - self._deleting_bytes
        evicted: list[Key] = []
        while missing > 0 and self.listed.evictable and len(evicted) < victims_max:
            # As many as are needed even if all of them are of the largest size.
            wanted = min(max(1, missing // self._frame_bytes_max), victims_max - len(evicted), self.listed.evictable)
            before, victims = self._deleting_bytes, self.evict(wanted, rank)
            evicted += victims
            missing -= self._deleting_bytes - before
            if len(victims) < wanted:  # chunks that others need were passed over, and that costs: the rest comes later
                break
        return evicted

    def evict(self, count: int, rank: int = 0) -> list[Key]:
        """Schedule the deletion of up to ``count`` victims of the policy. Returns them. rank: as :meth:`evict_for`."""
        count = min(count, self.listed.evictable)
        return self._delete_victims(self.listed.evict(count, self.rows.uses, rank))

    def evict_over_quota(self, victims_max: int) -> list[Key]:
        """Schedule the deletion of up to ``victims_max`` chunks of tenants that are over their quotas. Returns them."""
        return self._delete_victims(self.listed.evict_over_quota(self.rows.uses, victims_max))

    def _delete_victims(self, rows: Sequence[int]) -> list[Key]:
        """Begin to delete rows that the policy has chosen and removed."""
        if rows and self.evict_again_s:
            self.evict_again_s = math.inf  # until that deletion ends
        for row in rows:
            self._begin_deletion(row, EVICTING)
        keys = [self.rows.keys.key(row) for row in rows]
        self._deletions.schedule(keys)
        return keys

    def schedule_delete(self, key: Key) -> None:
        """Delete a chunk for another reason than room, such as a corrupt frame."""
        row = self.rows.row_of(key)
        self.rows.flags[row] &= ~EVICTING
        if self.rows.is_listed(row):
            self._unlist(row)
        if not self.rows.flags[row] & DELETING:  # a second deletion could delete what is written after the first one
            self._begin_deletion(row)
            self._deletions.schedule((key,))

    def mark_uncertain(self, key: Key, frame_bytes: int) -> None:
        """Delete a chunk whose write failed, because its frame may still be in the tier.

        Its bytes, at most ``frame_bytes``, stay reserved until the deletion is confirmed. It is not read meanwhile.
        """
        if self.rows.flags_of(key) & STORED:
            self.schedule_delete(key)
            return
        self._begin_deletion(self.rows.row_of(key))
        self.reserved_bytes += frame_bytes
        self.uncertain[key] = frame_bytes
        self._deletions.schedule((key,))

    def take_deletions(self, now: float, keys_max: int) -> list[Key]:
        """Take up to ``keys_max`` chunks to delete now: those scheduled first, and retries that are due."""
        return self._deletions.take(now, keys_max)

    @property
    def num_deletions_under_way(self) -> int:
        """Number of chunks whose deletion was taken and has not ended."""
        return self.num_deleting - len(self._deletions)

    def retry_deletion(self, key: Key, now: float, *, soon: bool) -> None:
        """Repeat a deletion later; ``soon`` if it was not tried. The chunk is absent, its bytes stay on the account."""
        if soon:
            self._deletions.schedule((key,))
        else:
            self._deletions.retry(key, now)

    def not_deleted(self, key: Key, now: float) -> bool:
        """End a deletion that failed. Returns whether it was an eviction: then further ones pause."""
        was_eviction = bool(self.rows.flags_of(key) & EVICTING)
        self.end_deletion(key)
        if was_eviction or self.evict_again_s:
            self.evict_again_s = now + EVICTION_PAUSE_S
        return was_eviction

    def end_uncertain(self, key: Key) -> None:
        """End the deletion of an uncertain chunk, whose frame is gone."""
        self.reserved_bytes -= self.uncertain.pop(key)
        self.end_deletion(key)

    def _begin_deletion(self, row: int, flag: int = 0) -> None:
        self.num_deleting += 1
        if self.rows.flags[row] & STORED:
            self._deleting_bytes += self.rows.frame_bytes[row]
        self.rows.flags[row] |= DELETING | flag

    def end_deletion(self, key: Key) -> None:
        """End a deletion, whether the frame is gone or not. A chunk that is still stored is listed again."""
        row = self.rows.row_of(key)
        if self.rows.flags[row] & DELETING:
            self.num_deleting -= 1
            self.rows.flags[row] &= ~(DELETING | EVICTING)
            if self.rows.flags[row] & STORED:
                self._deleting_bytes -= self.rows.frame_bytes[row]
                self._list((row,), (key,))
            else:
                self.evict_again_s = 0.0
        self.rows.discard_unused(row)

    # -- check -------------------------------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether no read, write or deletion is due or under way. O(rows)."""
        return not (self.num_deleting or any(self.rows.uses))

    def validate(self, capacity: int | None) -> None:
        """Check the account of bytes and the policy against the rows, and the bytes against the tier's capacity.

        Raises:
            InvariantError: they differ.
        """
        what, table, rows = f"tier {self._name}", self.rows, [row for _, row in self.rows.keys.items()]
        stored = [row for row in rows if table.flags[row] & STORED]
        require(self.used_bytes == sum(table.frame_bytes[row] for row in stored), f"{what}: bytes are counted wrong")
        unsure = sum(self.uncertain.values())
        require(self.reserved_bytes >= unsure, f"{what}: {self.reserved_bytes} bytes are reserved, {unsure} uncertain")
        deleted = all(table.flags_of(key) & DELETING for key in self.uncertain)
        require(deleted, f"{what}: an uncertain chunk is not being deleted")
        found = table.keys.find_all([key for key, _ in table.keys.items()])
        require(found == rows, f"{what}: the directory leads to other rows")
        require(all(table.flags[row] or table.uses[row] for row in rows), f"{what}: a row has neither flags nor uses")
        writing = sum(bool(table.flags[row] & WRITING) for row in rows)
        require(writing == self.num_writing, f"{what}: {writing} chunks are written, {self.num_writing} are counted")
        listed = [row for row in stored if table.is_listed(row)]
        require(len(listed) == len(self.policy), f"{what}: {len(listed)} chunks, the policy has {len(self.policy)}")
        known = set(self.listed.order.ranked()) <= set(listed)
        require(known, f"{what}: a chunk has a rank that the policy does not know")
        idle, counted = sum(not table.uses[row] for row in listed), self.listed.evictable
        require(idle == counted, f"{what}: {idle} chunks are evictable, {counted} are counted")
        deleting = sum(table.frame_bytes[row] for row in stored if not table.is_listed(row))
        require(deleting == self._deleting_bytes, f"{what}: {deleting} bytes are deleted, not {self._deleting_bytes}")
        total = self.used_bytes + self.reserved_bytes
        # A tier whose capacity the user made smaller may stay over it until it has shrunk, but must not grow meanwhile.
        fits = capacity is None or total <= capacity or not self.reserved_bytes
        require(fits, f"{what} is over its capacity: {total} > {capacity}")
