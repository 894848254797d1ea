"""Running of a phase in a new process, which reports progress and errors."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from tierkv.cli.demo.phases import Phase, PhaseFailedError, PhaseResult
from tierkv.errors import TierKVError


def run_in_new_process(phase: Phase, progress: Callable[[int], None]) -> PhaseResult:
    """Run ``phase`` in a process that shares no memory with any other, and wait for it.

    Raises:
        PhaseFailedError: the phase raised, or its process died. The message gives the cause.
    """
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_child, args=(phase, child_end), name=f"tierkv-demo-{phase.name}")
    with _without_interruptions():
        process.start()
    child_end.close()
    result: PhaseResult | None = None
    try:
        while result is None:
            kind, value = parent_end.recv()
            if kind == "progress":
                progress(value)
            elif kind == "error":
                raise PhaseFailedError(value)
            else:
                result = value
    except EOFError:
        process.join()
        raise PhaseFailedError(f"the process of phase {phase.name!r} died with exit code {process.exitcode}") from None
    finally:
        parent_end.close()
        process.join(timeout=60)
        if process.is_alive():
            process.kill()
    return result


@contextmanager
def _without_interruptions() -> Iterator[None]:
    """Put Ctrl-C off. A process that is started meanwhile never gets it: it ends when its connection is closed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(phase: Phase, parent: Connection) -> None:
    from tierkv.cli.demo.serving import run_phase  # noqa: PLC0415 - torch, and only in the child

    with parent, suppress(BrokenPipeError):  # the parent was interrupted
        try:
            parent.send(("result", run_phase(phase, lambda done: parent.send(("progress", done)))))
        except TierKVError as error:
            parent.send(("error", str(error)))
