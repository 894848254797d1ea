"""Interface to a GPU's runtime, and its implementation for CUDA through torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import numpy as np
import torch

from tierkv.worker.cuda.batch_copy import BatchCopy, Numbers, load_batch_copy

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of this process, not only for the current one."""
_TRIAL_BYTES = 4096
"""Bytes that are copied to the device and back at the start, in four copies each way."""


class Event(Protocol):
    """Point in a stream."""

    def query(self) -> bool:
        """Whether all work before it has run."""

    def synchronize(self) -> None:
        """Wait until all work before it has run."""

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401 - an event of the same runtime
        """Return the milliseconds from this point to a later one. Both must have passed."""


class Stream(Protocol):
    """Queue of device work that runs in order, concurrently with other streams."""

    def use(self) -> AbstractContextManager[None]:
        """Make it the current stream of this thread within a ``with`` block."""

    def wait_event(self, event: Event) -> None:
        """Make work that is enqueued from now on run after the event."""

    def record_event(self) -> Event:
        """Return a point behind all work enqueued so far."""

    def synchronize(self) -> None:
        """Wait for all work enqueued so far."""


class Device(Protocol):
    """GPU."""

    has_batches: bool
    """Whether there is :meth:`copy_batch`."""

    def now(self) -> Event:
        """Return a point behind the work that the caller's thread has enqueued on its current stream."""

    def stream(self) -> Stream:
        """Create a stream."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate pinned bytes on the host."""

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """Copy block ids to the device, on the current stream."""

    def copy_batch(self, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        """Enqueue copies between the device and pinned memory, on the current stream, which is not the default one.

        Args:
            targets: addresses.
            sources: addresses, as many.
            sizes: bytes, as many.

        Raises:
            RuntimeError: the driver refuses.
        """

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory, so that copies run asynchronously. Returns whether it succeeded."""

    def unregister(self, address: int) -> None:
        """Unpin host memory."""


class CudaStream:
    """Stream of torch.

    Args:
        device: device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Make it the current stream, in inference mode.

        KV tensors may have been made in inference mode, which is a property of the thread.
        """
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def wait_event(self, event: Event) -> None:
        """Make work that is enqueued from now on run after the event."""
        self._stream.wait_event(cast("torch.cuda.Event", event))

    def record_event(self) -> Event:
        """Return a point behind all work enqueued so far."""
        timed = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
        event: Event = self._stream.record_event(timed)
        return event

    def synchronize(self) -> None:
        """Wait for all work enqueued so far."""
        self._stream.synchronize()


class CudaDevice:
    """GPU through torch.

    Args:
        device: device of the KV tensors.
        batch_copy: the driver's call for many copies; None: the driver has none.
    """

    def __init__(self, device: torch.device, batch_copy: BatchCopy | None = None) -> None:
        self._device = device
        self._batch_copy = batch_copy
        self.has_batches = batch_copy is not None and self._batches_are_right()

    def now(self) -> Event:
        """Return a point behind the current stream's work so far."""
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def stream(self) -> Stream:
        """Create a stream."""
        return CudaStream(self._device)

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate pinned bytes on the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """Copy block ids to the device, through pinned memory: otherwise the copy would wait for the stream."""
        return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def copy_batch(self, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        """Enqueue copies on the current stream."""
        if self._batch_copy is None:
            raise RuntimeError("this driver has no call for many copies")
        self._batch_copy(targets, sources, sizes, torch.cuda.current_stream(self._device).cuda_stream)

    def _batches_are_right(self) -> bool:
        """Copy some bytes to the device and back. A driver that fails at this gets copies one by one."""
        try:
            with CudaStream(self._device).use():
                there, here = self.memory(_TRIAL_BYTES), self.pinned(2 * _TRIAL_BYTES)
                here.copy_(torch.arange(2 * _TRIAL_BYTES) % 251)
                rows = np.arange(0, _TRIAL_BYTES, _TRIAL_BYTES // 4, dtype=np.uint64)
                sizes = np.full(len(rows), _TRIAL_BYTES // 4, np.uint64)
                away, back = rows + np.uint64(here.data_ptr()), rows[::-1] + np.uint64(here.data_ptr() + _TRIAL_BYTES)
                device = rows + np.uint64(there.data_ptr())
                self.copy_batch(device, away, sizes)
                self.copy_batch(back, device, sizes)
                torch.cuda.current_stream(self._device).synchronize()
            first, second = here.view(2, 4, -1)
            is_right = torch.equal(first, second.flip(0))
            reason = "it copied wrong bytes"
        except RuntimeError as error:
            is_right, reason = False, str(error)
        if not is_right:
            _log.warning("the driver's copies in batches are not used: %s; copies of small chunks are slower", reason)
        return is_right

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory. Logs a warning and returns False if CUDA refuses."""
        with torch.cuda.device(self._device):  # with another current device, the call would create a context there
            error = int(_cudart().cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE))
        if error:
            _log.warning(
                "CUDA error %d: the host tier's %d bytes cannot be pinned (is `ulimit -l` too low?); copies go through "
                "a pinned buffer and are slower", error, num_bytes,
            )  # fmt: skip
            _swallow_error(self._device)
        return not error

    def unregister(self, address: int) -> None:
        """Unpin host memory."""
        _cudart().cudaHostUnregister(address)


def cuda_device(device: torch.device) -> CudaDevice:
    """Return the GPU of a torch device, with the driver's call for many copies if it has one that works."""
    return CudaDevice(device, load_batch_copy())


def _cudart() -> Any:  # noqa: ANN401 - a module made of C functions
    """Return CUDA's runtime as bundled with torch."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no annotation there


def _swallow_error(device: torch.device) -> None:
    """Clear CUDA's last error, which it would report again at the next launch, by launching an empty operation."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
