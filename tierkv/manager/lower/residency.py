"""The columns of one lower tier: which chunks are stored, written, read and deleted there, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tierkv.abc import EvictionPolicy
from tierkv.policies.quotas import TenantPolicy
from tierkv.structures.key_table import KeyTable, column, longer
from tierkv.types.keys import Key

STORED, WRITING, DELETING = 1, 2, 4
"""What may be true of a row, in any combination: its frame is at rest here; one is being written; deleted."""


class TierTable:
    """A chunk that is stored, written, read or deleted has a row: a number in all columns, and the policy's handle.

    The policy knows exactly the rows that are stored and not being deleted: they are *listed*.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.num_writing = 0
        self._policy = policy
        if isinstance(policy, TenantPolicy):
            policy.chunk_bytes = self.frame_bytes_of
        self._rows = KeyTable()
        self._flags = bytearray()
        self._frame_bytes = column("Q", 0)
        self._uses = column("I", 0)
        self._evictable = 0
        self._num_deleting = 0
        self._deleting_bytes = 0
        self._frame_bytes_max = 1

    @property
    def policy(self) -> EvictionPolicy:
        """In which order chunks leave."""
        return self._policy

    def __len__(self) -> int:
        """Chunks known to be stored here. Walks over all of them."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Key]:
        """The chunks known to be stored here."""
        return (key for key, row in self._rows.items() if self._flags[row] & STORED)

    def deleting(self) -> Iterator[Key]:
        """The chunks that are being deleted here. Walks over all of them."""
        return (key for key, row in self._rows.items() if self._flags[row] & DELETING)

    def _row(self, key: Key) -> int:
        """The row of a key; a new one if it has none."""
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

    def _leave(self, row: int) -> None:
        """Give up a row that nothing is true of any more."""
        if not self._flags[row] and not self._uses[row]:
            self._rows.discard(row)

    def frame_bytes_of(self, row: int) -> int:
        """Bytes at rest of the chunk in a row."""
        return self._frame_bytes[row]

    def holds(self, key: Key) -> bool:
        """Whether bytes of ``key`` are on this tier's account, or on their way to it."""
        return self._flagged(key, STORED | WRITING)

    def is_idle(self, key: Key) -> bool:
        """Whether ``key`` is stored here, and nobody reads, writes or deletes it."""
        row = self._rows.find(key)
        return row is not None and self._is_listed(row) and not self._uses[row]

    def _flagged(self, key: Key, flag: int) -> bool:
        row = self._rows.find(key)
        return row is not None and bool(self._flags[row] & flag)

    # -- stored ------------------------------------------------------------------------------------------------------

    def _store(self, entries: Sequence[tuple[Key, int]]) -> None:
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
                elif frame_bytes != sizes[row] and row not in new:  # a policy may count bytes: it hears of the new size
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

    def _list(self, rows: Sequence[int], keys: Sequence[Key]) -> None:
        """Tell the policy of rows; they may be evicted when nobody uses them."""
        self._policy.add(rows, keys)
        uses = self._uses
        self._evictable += len([row for row in rows if not uses[row]])

    def _unlist(self, row: int) -> None:
        """Take a row from the policy."""
        self._policy.remove((row,))
        self._evictable -= not self._uses[row]

    def _is_listed(self, row: int) -> bool:
        return self._flags[row] & (STORED | DELETING) == STORED

    # -- reads and writes under way: what they use may not be evicted meanwhile -------------------------------------

    def begin_read(self, keys: Sequence[Key]) -> None:
        """A promotion reads these."""
        rows = self._rows.numbers(keys)
        self._lengthen()
        for row in rows:
            self._use(row)

    def end_read(self, keys: Sequence[Key]) -> None:
        """Undo :meth:`begin_read`."""
        self._end_use(self._rows.known(keys))

    def begin_write(self, keys: Sequence[Key], frame_bytes: int) -> None:
        """These are written here; their frames take at most ``frame_bytes`` together.

        One may be thought to be bad and still be on account: a deletion of the old frame that runs beside the write
        could hit the new one, or leave it with nobody who knows of it.
        """
        rows = self._rows.numbers(keys)
        self._lengthen()
        for row in rows:
            self._use(row)
            self._flags[row] |= WRITING
        self.num_writing += len(rows)
        self.reserved_bytes += frame_bytes

    def end_write(self, keys: Sequence[Key], frame_bytes: int) -> None:
        """Undo :meth:`begin_write` for all of ``keys``, which were to take at most ``frame_bytes`` together."""
        rows = self._rows.known(keys)
        self.reserved_bytes -= frame_bytes
        self.num_writing -= len(rows)
        for row in rows:
            self._flags[row] &= ~WRITING
        self._end_use(rows)

    def is_writing(self, key: Key) -> bool:
        """Whether a chunk is being written here."""
        return self._flagged(key, WRITING)

    def being_deleted(self, chunks: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that are being deleted here, or are about to be."""
        return [chunk for chunk in chunks if self._flagged(chunk[1], DELETING)] if self._num_deleting else []

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
                self._leave(row)
        self._evictable += len(idle)
        self._policy.release(idle)

    def touch(self, keys: Iterable[Key]) -> None:
        """Recency only; tail first."""
        flags = self._flags
        self._policy.touch([row for row in self._rows.known(keys) if flags[row] & (STORED | DELETING) == STORED])

    def next_victim(self) -> list[Key]:
        """One chunk to delete because the place itself said that it is full."""
        return self._evict(1)

    def _evict(self, count: int) -> list[Key]:
        count = min(count, self._evictable)
        return self._evicted(self._policy.evict(count, self._uses) if count else ())

    def trim(self) -> list[Key]:
        """Some chunks to delete, of tenants that are over their quotas."""
        return self._evicted(self._policy.trim(self._uses)) if isinstance(self._policy, TenantPolicy) else []

    def _evicted(self, rows: Sequence[int]) -> list[Key]:
        """The policy has chosen and forgotten these: they are deleted now."""
        self._evictable -= len(rows)
        for row in rows:
            self._begin_deletion(row)
        return [self._rows.key(row) for row in rows]

    def _begin_deletion(self, row: int) -> None:
        self._num_deleting += 1
        if self._flags[row] & STORED:
            self._deleting_bytes += self._frame_bytes[row]
        self._flags[row] |= DELETING

    def _end_deletion(self, row: int) -> None:
        """A row is not being deleted any more, whether its frame is gone or not."""
        if self._flags[row] & DELETING:
            self._num_deleting -= 1
            self._flags[row] &= ~DELETING
            if self._flags[row] & STORED:
                self._deleting_bytes -= self._frame_bytes[row]
                self._list((row,), (self._rows.key(row),))
        self._leave(row)
