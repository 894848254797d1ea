"""Spans of real stacks, exported over HTTP to a collector in this process: the way of a chunk in one trace."""

from __future__ import annotations

import errno
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from stack_bed import Faults

from tierkv import open_stack
from tierkv.errors import ConfigError
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, HandRequest, Prompt, engine_spec
from tierkv.testing.faults import raise_error


@dataclass
class Collector:
    """Spans that an HTTP server has received."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def named(self, name: str) -> list[Any]:
        """Spans of one name."""
        return [span for span in self.spans if span.name == name]

    def ancestors(self, span: Any) -> list[str]:
        """Names of a span's parents, the nearest first."""
        by_id = {one.span_id: one for one in self.spans}
        names = []
        while span.parent_span_id in by_id:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names


def facts(span: Any) -> dict[str, Any]:
    """Attributes of a span."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector of OTLP over HTTP."""
    received = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in request.resource_spans:
                received.services |= {one.value.string_value for one in resource.resource.attributes}
                received.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        received.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        yield received
        server.shutdown()
        thread.join()


@contextmanager
def engine_on(place: Path, faults: Faults, **record: Any) -> Iterator[HandEngine]:
    """An engine over a small host tier and a disk, with a record."""
    disk = {"name": "disk", "backend": "faulty", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    config = {
        "host": {"capacity": 12 * SLOT_BYTES},
        "lookup": {"recompute": "off"},
        "tiers": [disk],
        "record": record,
    }
    with open_stack(config, engine_spec(), plugins=faults.registry()) as stack:
        yield HandEngine(stack)


def test_the_way_of_a_chunk_is_one_trace(tmp_path: Path, collector: Collector) -> None:
    """Stored, written to the disk; later asked for, read from there, loaded: who waits for what is visible."""
    with engine_on(tmp_path, Faults(), spans=collector.url) as engine:
        for number in range(5):
            engine.store(Prompt(number))
            assert engine.stack.flush()
        engine.stack.reset_cache()
        assert engine.load(Prompt(0)) == 4
    assert "tierkv" in collector.services
    assert len(collector.named("tierkv request")) == 6
    writes, (load,) = collector.named("tierkv tier write"), collector.named("tierkv load")
    reads = collector.named("tierkv tier read")
    assert sum(facts(span)["tierkv_chunks"] for span in writes) == 20
    assert {tuple(collector.ancestors(span)) for span in writes} == {("tierkv store", "tierkv request")}
    assert sum(facts(span)["tierkv_chunks"] for span in reads) == 4
    assert {tuple(collector.ancestors(span)) for span in reads} == {("tierkv lookup", "tierkv request")}
    assert {facts(span)["tierkv_tier"] for span in (*reads, *writes)} == {"disk"}
    assert collector.ancestors(load) == ["tierkv request"]
    assert {span.trace_id for span in reads} == {load.trace_id}
    (root,) = [span for span in collector.named("tierkv request") if span.trace_id == load.trace_id]
    assert facts(root)["tierkv_tokens_loaded_disk"] == 64
    (lookup,) = [span for span in collector.named("tierkv lookup") if span.trace_id == load.trace_id]
    assert facts(lookup)["tierkv_tokens_hit"] == 64
    assert lookup.start_time_unix_nano <= reads[0].start_time_unix_nano <= reads[0].end_time_unix_nano
    assert reads[-1].end_time_unix_nano <= load.end_time_unix_nano <= root.end_time_unix_nano


def test_a_failed_read_is_an_error_with_its_reason(tmp_path: Path, collector: Collector) -> None:
    """The slow or failed request is found by its status, and the span names the cause."""
    faults = Faults()
    with engine_on(tmp_path, faults, spans=collector.url) as engine:
        engine.store(Prompt(0))
        assert engine.stack.flush()
        engine.stack.reset_cache()
        faults.last.add("read_into", raise_error(lambda: OSError(errno.EIO, "worn out")))
        assert engine.load(Prompt(0)) == 0
    failed = [span for span in collector.named("tierkv tier read") if span.status.code == 2]
    assert failed
    assert "worn out" in failed[0].status.message
    assert facts(failed[0])["tierkv_failed"] == facts(failed[0])["tierkv_chunks"]


def test_a_request_joins_the_trace_of_its_client(tmp_path: Path, collector: Collector) -> None:
    """A server that traces its requests finds tierkv's part in the same trace."""
    with engine_on(tmp_path, Faults(), spans=collector.url) as engine:
        request = engine.arrive(Prompt(1))
        request.__dict__["trace_headers"] = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        assert engine.lookup(request) == 0
        engine.end(request)
    assert {span.trace_id.hex() for span in collector.spans} == {"ab" * 16}
    (root,) = collector.named("tierkv request")
    assert root.parent_span_id.hex() == "cd" * 8


def test_record_and_spans_go_together(tmp_path: Path, collector: Collector) -> None:
    """One does not replace the other."""
    with engine_on(tmp_path, Faults(), spans=collector.url, path=str(tmp_path / "run.jsonl")) as engine:
        engine.store(Prompt(1))
    assert collector.named("tierkv store")
    assert '"is":"finished"' in (tmp_path / "run.jsonl").read_text(encoding="utf-8")


def test_a_collector_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    """The engine serves, and a close ends in time, where no collector answers."""
    with engine_on(tmp_path, Faults(), spans="http://127.0.0.1:1/v1/traces") as engine:
        engine.store(Prompt(1))
        assert engine.load(Prompt(1)) == 4
        assert engine.stack.close(timeout_s=5.0)


def test_the_state_is_bounded(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never ends its requests, and chunks that are never written, must not fill the memory."""
    monkeypatch.setattr("tierkv.recording.spans.REQUESTS_MAX", 3)
    monkeypatch.setattr("tierkv.recording.spans.KEYS_MAX", 5)
    with engine_on(tmp_path, Faults(), spans=collector.url) as engine:
        for number in range(6):
            request: HandRequest = engine.arrive(Prompt(number))
            engine.ask(request)
            engine.store(Prompt(100 + number))
        (journal,) = engine.stack._journal._all  # type: ignore[attr-defined]
        assert len(journal._requests) <= 3  # type: ignore[attr-defined]
        assert len(journal._owners) <= 5  # type: ignore[attr-defined]
    assert not journal._ops  # type: ignore[attr-defined]
    assert len(collector.named("tierkv request")) >= 12


@pytest.mark.parametrize("where", ["collector:4317", "grpc://127.0.0.1:4317"])
def test_another_target_is_refused(tmp_path: Path, where: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(ConfigError, match=r'record\.spans = .*give "program", or the URL of a collector'):
        open_stack({"host": {"capacity": "1MiB"}, "record": {"spans": where}}, engine_spec())


def test_without_the_extra_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry is optional."""
    monkeypatch.setitem(__import__("sys").modules, "tierkv.recording.exporting", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"):
        open_stack({"host": {"capacity": "1MiB"}, "record": {"spans": "program"}}, engine_spec())


def test_no_spans_cost_nothing() -> None:
    """Without the key, OpenTelemetry is not even imported."""
    with open_stack({"host": {"capacity": "1MiB"}}, engine_spec()) as stack:
        assert not stack._journal.is_kept
