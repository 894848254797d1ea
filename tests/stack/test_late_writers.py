"""A backend whose threads write to the buffers of reads that have ended, in a whole stack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack_bed import opened, prompts_of, serve, stack_config

from tierkv.abc import BackendContext, BackendPlugin, ReadRequest, ReadResult
from tierkv.frames.frame import HEADER_BYTES
from tierkv.hookspecs import hookimpl
from tierkv.memory.arena import Bytes
from tierkv.plugins.loading import load_plugins

pytestmark = [pytest.mark.needs_torch]
Expected = Callable[..., list[list[int]]]
PROMPTS = prompts_of(11, 2)


class Scribbler:
    """Disk backend that keeps the buffers of reads. A thread of it writes to them without end."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._kept: list[Bytes] = []
        self._ends = threading.Event()
        self.rounds = 0
        self._thread = threading.Thread(target=self._scribble, daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Read, then give the buffers to the thread."""
        results: Sequence[ReadResult] = self._inner.read_into(requests)
        buffers = [np.frombuffer(request.buffer, np.uint8) for request in requests]
        threading.Timer(0.01, self._kept.extend, [buffers]).start()  # after the end of the call
        return results

    def close(self) -> None:
        """End the thread, and close the disk."""
        self._ends.set()
        self._thread.join()
        self._kept.clear()
        self._inner.close()

    def _scribble(self) -> None:
        while not self._ends.wait(0.001):
            for buffer in list(self._kept):
                buffer[HEADER_BYTES : HEADER_BYTES + 64] = 0x66
                self.rounds += 1


@pytest.fixture
def scribbling() -> tuple[Any, list[Scribbler]]:
    """Registry in which ``scribbler`` is such a backend, and the backends that were opened."""
    inner = load_plugins().require_backend("disk").plugin
    backends: list[Scribbler] = []

    def open_scribbler(context: BackendContext, options: Any) -> Any:
        backends.append(Scribbler(inner.open(context, options)))
        return backends[-1]

    honest = replace(inner.capabilities, reads_end_with_call=False)
    plugin = replace(inner, name="scribbler", open=open_scribbler, check=None, capabilities=honest)

    class ScribblerPlugin:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_backends(self) -> list[BackendPlugin]:
            return [plugin]

    return load_plugins([ScribblerPlugin()]), backends


def test_late_writes_reach_no_chunk(
    tmp_path: Path, expected: Expected, scribbling: tuple[Any, list[Scribbler]]
) -> None:
    """Before, such a write between the check of a chunk and its copy put wrong bytes on the GPU."""
    registry, backends = scribbling
    config = stack_config(tmp_path)
    disk = {**config["tiers"][0], "backend": "scribbler"}
    with opened({**config, "tiers": [disk]}, plugins=registry) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    with opened({**config, "tiers": [disk]}, plugins=registry) as stack:
        for _ in range(4):  # chunks that stay in the host tier are loaded again, while the thread writes
            assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.tokens_loaded["scribbler"] >= 112
        assert backends[-1].rounds
        assert not stack.metrics.counters.loads_failed
        assert not stack.metrics.counters.chunks_corrupt
