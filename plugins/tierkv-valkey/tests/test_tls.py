"""TLS: certificates that fit, that do not, and servers that speak clear text.

The server's own TLS is used where the program has it. A terminator in front of the server, as deployments have it, runs
everywhere.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from valkey_servers import ValkeyServer, find_program, free_port
from valkey_support import frames, opened

import tierkv_valkey
from tierkv.errors import BackendError
from tierkv_valkey import ValkeyOptions


@dataclass
class Secured:
    """A server behind TLS, and the files of certificates."""

    port: int
    ca: str
    cert: str
    key: str
    other_ca: str

    @property
    def url(self) -> str:
        return f"valkeys://127.0.0.1:{self.port}"


def has_tls(program: str) -> bool:
    """Whether the program was built with TLS."""
    command = [program, "--port", "0", "--tls-port", str(free_port()), "--save", ""]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)  # no certificate: it ends
    return "Missing implement" not in ended.stdout and "Bad directive" not in ended.stdout + ended.stderr


@contextlib.contextmanager
def terminated(target: int, certificates: ssl.SSLContext) -> Iterator[int]:
    """A TLS terminator in front of a server. Yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = [listener]

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(plain: socket.socket) -> None:
        with contextlib.suppress(OSError):
            secure = certificates.wrap_socket(plain, server_side=True)
            behind = socket.create_connection(("127.0.0.1", target))
            open_sockets.extend((secure, behind))
            threading.Thread(target=pump, args=(secure, behind), daemon=True).start()
            pump(behind, secure)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                open_sockets.append(plain)
                threading.Thread(target=serve, args=(plain,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        for item in open_sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()


@pytest.fixture(params=["terminator", "server"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Secured]:
    """A server behind a terminator, or with its own TLS."""
    authority, other = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem", "other.pem")]
    authority.cert_pem.write_to_path(files[0])
    issued.cert_chain_pems[0].write_to_path(files[1])
    issued.private_key_pem.write_to_path(files[2])
    other.cert_pem.write_to_path(files[3])
    ca, cert, key, other_ca = map(str, files)
    if request.param == "terminator":
        certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issued.configure_cert(certificates)
        with ValkeyServer(tmp_path / "server") as server, terminated(server.port, certificates) as port:
            yield Secured(port, ca, cert, key, other_ca)
        return
    if not has_tls(find_program()):
        pytest.skip("this valkey-server was built without TLS; the session `valkey` uses Debian's, which has it")
    port = free_port()
    tls = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca]
    with ValkeyServer(tmp_path / "server", "--tls-port", str(port), *tls):
        yield Secured(port, ca, cert, key, other_ca)


def test_frames_pass_over_tls(secured: Secured) -> None:
    """Certificates of the server and of the client, both checked."""
    stored = frames(40, 64 << 10)
    with opened(secured.url, ca_file=secured.ca, cert_file=secured.cert, key_file=secured.key) as tier:
        tier.put(stored)
        assert tier.read(list(stored)) == list(stored.values())


def test_a_certificate_of_another_authority_is_refused(secured: Secured) -> None:
    """An unchecked certificate would hand the password to any server that listens there."""
    with pytest.raises(BackendError, match=r"encrypted connection failed.*Check ca_file"):
        opened(secured.url, ca_file=secured.other_ca, cert_file=secured.cert, key_file=secured.key)


def test_the_system_trusts_no_certificate_of_ours(secured: Secured) -> None:
    """Without ca_file the system's authorities count; the check says which option to look at."""
    options = ValkeyOptions(url=secured.url, cert_file=secured.cert, key_file=secured.key)
    assert tierkv_valkey.PLUGIN.check is not None
    found = [line for line in tierkv_valkey.PLUGIN.check(options, None) if not line.ok]
    assert found
    assert all("ca_file" in line.fix for line in found)


def test_clear_text_is_named_where_tls_was_asked_for(tmp_path: Path) -> None:
    """valkeys:// with the port of clear text is a common mistake: the message says what to look at."""
    with ValkeyServer(tmp_path / "server") as server, pytest.raises(BackendError, match="port of valkeys:// has TLS"):
        opened(server.url.replace("valkey://", "valkeys://"))
