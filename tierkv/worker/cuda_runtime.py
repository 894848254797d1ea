"""What copies need of a GPU's runtime, and CUDA's, through torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of this process, not only for the one in use."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it has run."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    """Work that runs in order, beside that of other streams."""

    def use(self) -> AbstractContextManager[None]:
        """Enqueue on it what follows on this thread."""

    def wait_event(self, event: Event) -> None:
        """Let work enqueued from now on run behind the event."""

    def record_event(self) -> Event:
        """A point behind everything enqueued so far."""

    def synchronize(self) -> None:
        """Wait for everything enqueued so far."""


class Device(Protocol):
    """A GPU."""

    def now(self) -> Event:
        """A point behind everything that the caller's thread has enqueued on its own stream."""

    def stream(self) -> Stream:
        """A new stream."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the device."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned bytes on the host."""

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """Block ids on the device, for the stream in use."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory, so that copies to and from it run by themselves. Whether that went well."""

    def unregister(self, address: int) -> None:
        """Unpin it."""


class CudaStream:
    """A stream of torch's."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Enqueue on it. KV tensors may have been made in inference mode, which is a matter of the thread."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def wait_event(self, event: Event) -> None:
        """Let work enqueued from now on run behind the event."""
        self._stream.wait_event(cast("torch.cuda.Event", event))

    def record_event(self) -> Event:
        """A point behind everything enqueued so far."""
        event: Event = self._stream.record_event()
        return event

    def synchronize(self) -> None:
        """Wait for everything enqueued so far."""
        self._stream.synchronize()


class CudaDevice:
    """A GPU through torch.

    Args:
        device: of the KV tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Event:
        """A point behind the compute stream's work so far."""
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def stream(self) -> Stream:
        """A new stream."""
        return CudaStream(self._device)

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned bytes on the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """Block ids on the device. Through pinned memory, or the copy would wait for the stream."""
        return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory. False, and a warning, where CUDA refuses."""
        error = int(_cudart().cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE))
        if error:
            _log.warning(
                "CUDA error %d: the host tier's %d bytes cannot be pinned (is `ulimit -l` too low?); copies go through "
                "a pinned buffer and are slower", error, num_bytes,
            )  # fmt: skip
            _swallow_error(self._device)
        return not error

    def unregister(self, address: int) -> None:
        """Unpin it."""
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:  # noqa: ANN401 - a module made of C functions
    """CUDA's runtime, which torch brings and does not type."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no annotation there


def _swallow_error(device: torch.device) -> None:
    """CUDA tells its last error once more at the next launch, which had no part in it: launch something for that."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
