"""What a backend can do, declared flat. Tests and the dispatcher read this record, never a backend's name."""

from __future__ import annotations

from dataclasses import dataclass

KEYS_PER_READ_MIN = 4
"""Operations of fewer keys would cost the engine's thread more than they gain."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A backend's declaration about itself.

    durable: what ``write`` acknowledged survives kill -9 and a reopen.
    shared: other processes may add or remove chunks while the stack runs.
    authoritative_index: what ``scan`` tells at open plus what this process did since is the whole truth, so existence
        is known without asking. Needs ``scan``; excludes ``shared``.
    scan: implements :class:`~tierkv.abc.backend.SupportsScan`.
    read_only: ``write`` and ``delete`` always refuse.
    bounded: the backend keeps within ``BackendContext.capacity_bytes`` when the framework does; False for places whose
        size is somebody else's business.
    alignment: buffers given to ``write`` and ``read_into`` start at a multiple of this many bytes and have a length
        that is one (1: no wish). 4096 suits O_DIRECT.
    preferred_batch: keys per call that suit it best; the framework never exceeds it.
    preferred_read_batch: the same for ``read_into`` alone, where less suits it; None: no wish. A frame is checked when
        the call that read it ends, so where calls cost little, 1 has it checked while the processor's cache holds it.
    preferred_concurrency: calls at once that suit it best; the framework never exceeds it.
    """

    durable: bool = False
    shared: bool = False
    authoritative_index: bool = False
    scan: bool = False
    read_only: bool = False
    bounded: bool = True
    alignment: int = 1
    preferred_batch: int = 8
    preferred_read_batch: int | None = None
    preferred_concurrency: int = 2

    @property
    def keys_per_read(self) -> int:
        """Keys of one operation that reads. Few where the backend prefers few: its threads then share a load evenly."""
        if self.preferred_read_batch is None:
            return self.preferred_batch
        return min(self.preferred_batch, max(self.preferred_read_batch, KEYS_PER_READ_MIN))
