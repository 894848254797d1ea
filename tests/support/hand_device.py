"""Simulated GPU on the CPU: work runs at once, but the test decides when events have passed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch

from tierkv.worker.cuda.batch_copy import Numbers
from tierkv.worker.cuda.runtime import Event, Stream


class HandEvent:
    """Event that passes when the device is released, or when a thread waits for it."""

    def __init__(self, device: HandDevice) -> None:
        self._device = device
        self._number = device.recorded
        device.recorded += 1

    def query(self) -> bool:
        """Whether the device has reached the event."""
        if self._device.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._device.queries += 1
        return self._number < self._device.passed

    def elapsed_time(self, end_event: HandEvent) -> float:
        """Return one millisecond per recorded point."""
        return float(end_event._number - self._number)

    def synchronize(self) -> None:
        """Get so far."""
        self._device.waits += 1
        self._device.passed = max(self._device.passed, self._number + 1)


class HandStream:
    """Stream that records the events it waits for."""

    def __init__(self, device: HandDevice) -> None:
        self._device = device
        self.waited_for: list[Event] = []

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Make it the current stream."""
        yield

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)

    def record_event(self) -> Event:
        return HandEvent(self._device)

    def synchronize(self) -> None:
        """Everything has run already."""
        self._device.synchronized += 1


class HandDevice:
    """Simulated device. ``pinnable``: whether memory can be pinned. ``has_batches``: whether copies come in batches.

    Attributes:
        batches: number of copies of each batch.
    """

    def __init__(self, *, pinnable: bool = True, has_batches: bool = True) -> None:
        self.pinnable = pinnable
        self.has_batches = has_batches
        self.batches: list[int] = []
        self.is_broken = False
        self.is_full = False
        self.recorded = self.passed = self.queries = self.waits = self.synchronized = 0
        self.streams: list[HandStream] = []
        self.registered: dict[int, int] = {}

    def let_go(self) -> None:
        """Let all enqueued work pass."""
        self.passed = self.recorded

    def now(self) -> Event:
        return HandEvent(self)

    def stream(self) -> Stream:
        stream = HandStream(self)
        self.streams.append(stream)
        return stream

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xCD, dtype=torch.uint8)

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.tensor(ids, dtype=torch.int64)

    def copy_batch(self, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        if self.is_full:
            raise RuntimeError("CUDA error 2: out of memory")
        assert self.has_batches
        self.batches.append(len(sizes))
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def register(self, address: int, num_bytes: int) -> bool:
        if self.pinnable:
            assert address not in self.registered
            self.registered[address] = num_bytes
        return self.pinnable

    def unregister(self, address: int) -> None:
        del self.registered[address]
