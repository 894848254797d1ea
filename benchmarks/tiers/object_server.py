"""``python -m benchmarks.tiers.object_server``: the part of S3 that a tier needs, with the objects in memory.

It says its port, and runs until its standard input ends. It checks no signature and forces nothing to a disk, so that
what is measured against it is the client; for a server that people run, see :mod:`benchmarks.tiers.object_store`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """PUT (also on condition), GET (also a range from the start), HEAD, and DELETE of one or several."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, bytearray] = {}  # noqa: RUF012  all connections serve the same ones

    def do_PUT(self) -> None:
        """Store an object."""
        content = bytearray(int(self.headers["Content-Length"]))
        view, done = memoryview(content), 0
        while done < len(content):
            got = self.rfile.readinto(view[done:])
            if not got:
                return
            done += got
        if self.headers.get("If-None-Match") == "*" and self._name in self.objects:
            self._answer(HTTPStatus.PRECONDITION_FAILED)
            return
        self.objects[self._name] = content
        self._answer(HTTPStatus.OK)

    def do_GET(self) -> None:
        """Send an object."""
        content = self.objects.get(self._name)
        if content is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        end = len(content)
        if "Range" in self.headers:
            end = min(end, int(self.headers["Range"].rpartition("-")[2]) + 1)
            self._answer(HTTPStatus.PARTIAL_CONTENT, end, f"bytes 0-{end - 1}/{len(content)}")
        else:
            self._answer(HTTPStatus.OK, end)
        self.wfile.write(memoryview(content)[:end])

    def do_HEAD(self) -> None:
        """Send the length of an object."""
        content = self.objects.get(self._name)
        if content is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, len(content))

    def do_DELETE(self) -> None:
        """Delete an object."""
        self.objects.pop(self._name, None)
        self._answer(HTTPStatus.NO_CONTENT)

    def do_POST(self) -> None:
        """Delete several objects, of a DeleteObjects request."""
        bucket = self._name.rstrip("/")
        request = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", request)
        for key in keys:
            self.objects.pop(f"{bucket}/{key}", None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        answer = f"<DeleteResult>{gone}</DeleteResult>".encode()
        self._answer(HTTPStatus.OK, len(answer))
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's name
        """Log nothing."""

    @property
    def _name(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self, status: HTTPStatus, length: int = 0, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Mon, 01 Jun 2026 00:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    """Server to which all threads of a benchmark may connect at once."""

    request_queue_size = 128


def main() -> None:
    """Serve until the other end of the standard input is closed."""
    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # connections are other threads' business, and there is nothing to save


if __name__ == "__main__":
    main()
