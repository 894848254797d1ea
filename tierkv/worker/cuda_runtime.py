"""Interface to a GPU's runtime, and its implementation for CUDA through torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of this process, not only for the current one."""


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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

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


def _cudart() -> Any:  # noqa: ANN401 - a module made of C functions
    """Return CUDA's runtime as bundled with torch."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no annotation there


def _swallow_error(device: torch.device) -> None:
    """Clear CUDA's last error, which it would report again at the next launch, by launching an empty operation."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
