"""Export of spans: the tracer that a description asks for, and the end of its exporter."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tierkv._version import __version__
from tierkv.config.values import OWN_TRACER
from tierkv.dispatch.threads.spawn import OneShot, start_thread, wait_until

EXPORT_TIMEOUT_S = 5.0


def open_tracer(where: str) -> tuple[trace.Tracer, Callable[[float], None]]:
    """Return a tracer, and a function that exports what is pending within some seconds.

    Args:
        where: ``"program"`` for the tracer provider that the program has set, or the URL of a collector that takes
            OTLP over HTTP.
    """
    if where == OWN_TRACER:
        return trace.get_tracer("tierkv", __version__), lambda _timeout_s: None
    resource = Resource({SERVICE_NAME: "tierkv"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=where, timeout=EXPORT_TIMEOUT_S)))

    def shut_down(timeout_s: float) -> None:
        handle = start_thread("tierkv-spans", OneShot(provider.shutdown))
        wait_until(lambda: not handle.is_alive(), timeout_s, time.monotonic, time.sleep)

    return provider.get_tracer("tierkv", __version__), shut_down
