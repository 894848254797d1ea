"""The queue of ghosts as a list: what the compact one is compared with, and what textbook policies keep ghosts in."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.policies.ghost import STEPS_MAX


@dataclass
class NaiveGhosts:
    """Entries (mark or key, note), oldest first; None is a hole."""

    ghosts_max: int
    entries: list[tuple[object, bytes] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(entry is not None for entry in self.entries)

    def __contains__(self, mark: object) -> bool:
        return self.get(mark) is not None

    def _place(self, mark: object) -> int:
        return next((i for i, entry in enumerate(self.entries) if entry is not None and entry[0] == mark), -1)

    def get(self, mark: object) -> bytes | None:
        at = self._place(mark)
        entry = self.entries[at] if at >= 0 else None
        return None if entry is None else entry[1]

    def pop(self, mark: object) -> bytes | None:
        note = self.get(mark)
        if note is not None:
            self.entries[self._place(mark)] = None
        return note

    def push(self, mark: object, note: bytes = b"") -> None:
        if self.ghosts_max:
            self.entries.append((mark, note))
            for _ in range(STEPS_MAX):
                if len(self) > self.ghosts_max or len(self.entries) > 2 * self.ghosts_max:
                    del self.entries[0]

    def drop_oldest(self) -> None:
        count = len(self)
        for _ in range(STEPS_MAX):
            if count and len(self) == count:
                del self.entries[0]
