"""Workers of several ranks, each in its own process, and the KV pools that they share with the engine.

The reference engine runs the model in its own process, rank by rank. The demo shows the copies: the process of each
rank maps its own pool and the common host tier, and copies by itself.
"""

from __future__ import annotations

import mmap
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.cli.demo.phases import PhaseFailedError
from tierkv.errors import TierKVError
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup, open_worker
from tierkv.stack.stack import Stack
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

if TYPE_CHECKING:  # a rank's process copies bytes and does not need torch
    from torch import Tensor

    from tierkv.reference.kv_pool import Allocate

JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SharedPages:
    """KV tensor for another process: a file to map, and its shape in blocks."""

    path: str
    num_blocks: int
    page_bytes: int


class SharedMemory:
    """Memory that other processes of this machine can map: files in a directory of the run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._paths: dict[int, Path] = {}

    def allocate(self, size: int) -> memoryview:
        """Allocate ``size`` zero bytes in a new file."""
        path = self._directory / f"kv-{len(self._paths)}"
        with path.open("wb+") as file:
            file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
        self._paths[np.frombuffer(memory, dtype=np.uint8).ctypes.data] = path
        return memoryview(memory)

    def pages(self, tensor: Tensor) -> SharedPages:
        """Location of a tensor of this memory, for another process."""
        blocks = tensor.shape[0]
        return SharedPages(str(self._paths[tensor.data_ptr()]), blocks, tensor.nbytes // blocks)


class RankProcess:
    """Proxy of a rank's worker: the rank's process runs each call.

    Calls wait for the answer. Used on the engine's thread.
    """

    def __init__(self, setup: WorkerSetup, memory: SharedMemory) -> None:
        """Start the process, which opens the worker of ``setup``."""
        context = multiprocessing.get_context("spawn")
        self._memory = memory
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_rank, args=(setup, theirs), name=f"tierkv-demo-rank-{setup.rank}", daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid or 0

    def register_kv_caches(self, caches: Sequence[Sequence[Tensor]]) -> None:
        """Pass the location of the rank's pool to the process."""
        self._call("register", [[self._memory.pages(tensor) for tensor in group] for group in caches])

    def start_step(self, meta: ConnectorMeta) -> None:
        """Flush, submit queued stores, and start loads. Returns when the flushed jobs have ended."""
        self._call("start_step", meta)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """Queue the stores of the step."""
        self._call("queue_stores", meta)

    def get_finished(self) -> WorkerOutput:
        """Return the jobs that ended since the previous call."""
        output: WorkerOutput = self._call("get_finished", None)
        return output

    def copied_bytes(self) -> tuple[int, int]:
        """Bytes stored and loaded so far."""
        counts: tuple[int, int] = self._call("copied_bytes", None)
        return counts

    def close(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()
        self._process.join(JOIN_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, verb: str, argument: object) -> Any:  # noqa: ANN401 - whatever the verb answers
        try:
            self._pipe.send((verb, argument))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(JOIN_TIMEOUT_S)
            raise PhaseFailedError(
                f"the process of worker {self._process.name!r} died with exit code {self._process.exitcode}"
            ) from None
        if isinstance(answer, TierKVError):
            raise answer
        return answer


@contextmanager
def rank_processes(stack: Stack, count: int) -> Iterator[tuple[list[RankProcess], Allocate]]:
    """A process per rank, and the memory in which the engine must make its KV pools."""
    with TemporaryDirectory(prefix="tierkv-demo-kv-") as place, ExitStack() as opened:
        memory = SharedMemory(Path(place))
        ranks = []
        for rank in range(count):
            process = RankProcess(stack.worker_setup(rank), memory)
            opened.callback(process.close)
            ranks.append(process)
        yield ranks, memory.allocate


# -- in the rank's process ---------------------------------------------------------------------------------------------


def _serve_rank(setup: WorkerSetup, engine: Connection) -> None:
    """Do what the engine asks until it hangs up, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the engine, which then hangs up
    with engine, open_worker(setup) as worker, suppress(EOFError, OSError):
        while True:
            verb, argument = engine.recv()
            try:
                answer = _do(worker, verb, argument)
            except TierKVError as error:
                answer = error
            engine.send(answer)


def _do(worker: ProcessWorker, verb: str, argument: Any) -> object:  # noqa: ANN401 - whatever the verb takes
    match verb:
        case "register":
            worker.register_kv_caches([[_mapped(pages) for pages in group] for group in argument])
        case "start_step":
            worker.start_step(argument)
        case "queue_stores":
            worker.queue_stores(argument)
        case "get_finished":
            return worker.get_finished()
        case "copied_bytes":
            return worker.bytes_stored, worker.bytes_loaded
    return None


def _mapped(pages: SharedPages) -> Any:  # noqa: ANN401 - a numpy array [num_blocks, page_bytes]
    with Path(pages.path).open("rb+") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return np.frombuffer(memory, dtype=np.uint8).reshape(pages.num_blocks, pages.page_bytes)
