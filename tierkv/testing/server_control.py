"""Control of the server behind a remote backend, for the kit's tests of outages."""

from __future__ import annotations

from typing import Protocol


class ServerControl(Protocol):
    """A server, or several that serve one tier. Data that it loses by a stop are lost; no test expects them back."""

    def stop(self) -> None:
        """Kill it, without a goodbye to its clients."""

    def start(self) -> None:
        """Start it again at the same address, and return when it answers."""

    def suspend(self) -> None:
        """Freeze it: the system accepts connections for it, and nothing answers.

        SIGSTOP does that, once the process has stopped: wait for it.
        """

    def resume(self) -> None:
        """End the freeze, and return when it answers."""
