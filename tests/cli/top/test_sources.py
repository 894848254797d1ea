"""Programs that answer in the place of metrics, and do not end as an answer should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tierkv.cli.top import sources
from tierkv.cli.top.sources import MetricsPort, NoSampleError


@contextmanager
def sending(head: bytes, piece: bytes = b"") -> Iterator[MetricsPort]:
    """Port that sends ``head``, and then ``piece`` again and again while the client listens."""
    listener, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(head)
            while piece and not ended.wait(0.01):
                connection.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield MetricsPort(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
    finally:
        ended.set()
        listener.close()
        thread.join()


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that streams events kept ``tierkv top`` waiting for ever, byte by byte."""
    monkeypatch.setattr(sources, "TIMEOUT_S", 0.3)
    head = b"HTTP/1.1 200 OK\r\n\r\ntierkv_lookups_total 1.0\n"
    with sending(head, b"#") as port, pytest.raises(NoSampleError, match="does not end"):
        port.read()


def test_an_answer_that_was_cut_is_no_sample() -> None:
    """A part of the metrics would read as tiers that are gone."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ntierkv_lookups_total 1.0\n"
    with sending(head) as port, pytest.raises(NoSampleError, match="does not answer"):
        port.read()
