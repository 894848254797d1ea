"""Metrics of a stack over HTTP, for Prometheus: a server of its own, for programs that have none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from socketserver import StreamRequestHandler
from types import TracebackType
from typing import Self, cast

from prometheus_client import CollectorRegistry, start_http_server

from tierkv.errors import ConfigError
from tierkv.metrics.prometheus import StackCollector
from tierkv.metrics.watched import Watched

PORT_MAX = 65_535
"""Largest number of a port."""
CLIENT_TIMEOUT_S = 10.0
"""Seconds that a client may be silent, or read nothing. Each connection has a thread and a descriptor until its end."""


class _ImpatientHandler(StreamRequestHandler):
    """Ends a connection that makes no progress, and says nothing."""

    timeout = CLIENT_TIMEOUT_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()


class MetricsServer:
    """HTTP server on a daemon thread. Made by :func:`serve_metrics`."""

    url: str
    """Address of the metrics."""
    port: int
    """Port that it listens on."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        """Listen. Raises OSError if that is not possible."""
        self._server, self._thread = start_http_server(port, address, registry)
        handler = cast("type[StreamRequestHandler]", self._server.RequestHandlerClass)
        self._server.RequestHandlerClass = type("Handler", (_ImpatientHandler, handler), {})
        self.port = self._server.server_port
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop to listen, and wait for the thread. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def serve_metrics(
    stack: Watched, port: int = 0, *, address: str = "127.0.0.1", labels: Mapping[str, str] | None = None
) -> MetricsServer:
    """Serve the metrics of a stack over HTTP, on a thread of their own. Any thread; the engine never waits for it.

    A server that exports metrics already registers a :class:`tierkv.metrics.prometheus.StackCollector` instead; vLLM
    exports those of its stacks by itself.

    Args:
        stack: an open stack. Close the server when the stack is closed.
        port: port to listen on; 0: a free one, see :attr:`MetricsServer.port`.
        address: address to listen on. The default serves programs of this machine only, because every client is
            answered; ``0.0.0.0`` serves every other machine as well.
        labels: constant labels of every series.

    Raises:
        ConfigError: it is no stack, or the address or the port cannot be used.
    """
    if not hasattr(stack, "metrics"):
        raise ConfigError(f"serve_metrics: stack = {stack!r:.80}: give an open stack")
    if type(port) is not int or not 0 <= port <= PORT_MAX:
        raise ConfigError(f"serve_metrics: port = {port!r:.80}: give a whole number up to {PORT_MAX}; 0 for a free one")
    registry = CollectorRegistry()
    registry.register(StackCollector(stack, labels))
    try:
        return MetricsServer(registry, address, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the metrics cannot be served at {address}:{port}: {error}; use another port, or 0 for a free one"
        ) from error
