"""Account of the host slots that passages use together. Sans-IO."""

from __future__ import annotations

from enum import Enum

from tierkv.errors import require


class SlotUse(Enum):
    """Kind of use of a slot on the account."""

    HELD = "held"
    """Granted to a passage that is held, or pinned ahead of it."""
    GATHERED = "gathered"
    """Granted to the next segment of a passage that is copied."""
    COPIED = "copied"
    """Read by a job that copies to the GPU."""


class SlotAccount:
    """Slots whose chunks are coming, held, or being copied, under one cap.

    A passage that is copied holds GPU blocks and waits for slots; one that is held has slots and waits for GPU blocks.
    If either side could take all slots, they could wait for each other without end. So while both sides want slots,
    each has half of the cap in any case. What one side does not want, the other one uses.

    Args:
        chunks_max: cap on all of them together.
    """

    def __init__(self, chunks_max: int) -> None:
        self.chunks_max = chunks_max
        self.copy_chunks_min = max(1, chunks_max // 2)
        """Slots that belong to passages which are copied, while there are any."""
        self.hold_chunks_min = chunks_max - self.copy_chunks_min
        """Slots that belong to passages which are held, while there are any."""
        self.num_copied = 0
        """Number of passages that are copied in segments."""
        self.held = 0
        """Slots granted to passages that are held. In each count: also those that later steps release."""
        self.gathered = 0
        """Slots granted to the next segments of passages that are copied."""
        self.copying = 0
        """Slots that jobs copy to the GPU."""
        self._unreserved = 0  # of these, slots that no passage held before

    @property
    def total(self) -> int:
        """All slots on the account."""
        return self.held + self.gathered + self.copying

    def hold_room(self) -> int:
        """Slots that held passages may take now."""
        used = self.gathered + self.copying
        if self.num_copied and used < self.copy_chunks_min:
            used = self.copy_chunks_min
        return self.chunks_max - self.held - used

    def copy_room(self, *, holds: bool) -> int:
        """Slots that the next segments may take now. holds: whether other passages are held."""
        return self.chunks_max - self.gathered - self.copying - max(self.held, self.hold_chunks_min if holds else 0)

    def granted(self, count: int, *, copies: bool) -> None:
        """Account ``count`` more slots of a passage, or fewer. copies: whether it is copied."""
        if copies:
            self.gathered += count
        else:
            self.held += count

    def begins_to_copy(self, count: int) -> None:
        """Account one more passage that is copied. count: its granted slots."""
        self.num_copied += 1
        self.held -= count
        self.gathered += count

    def sent(self, chunks: int, *, unreserved: int) -> None:
        """Account slots handed to a job. unreserved: those of them that no passage held."""
        self.copying += chunks
        self._unreserved += unreserved

    def released(self, count: int, use: SlotUse) -> None:
        """Account the release of slots."""
        if use is SlotUse.COPIED:
            self.copying -= count
            self._unreserved = max(0, self._unreserved - count)
        else:
            self.granted(-count, copies=use is SlotUse.GATHERED)

    def validate(self, to_release: int) -> None:
        """Check the sum of both sides. to_release: slots that later steps release.

        Raises:
            InvariantError: a count is negative, or all together exceed the cap.
        """
        counts = (self.held, self.gathered, self.copying)
        require(min(counts) >= 0, f"slots on the account are counted wrong: {counts}")
        used = self.total - self._unreserved - to_release
        require(used <= self.chunks_max, f"{used} slots are held or copied for requests, {self.chunks_max} may be")
