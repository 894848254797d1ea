"""A server whose certificate is refused: the cause is named, and what to do, through both implementations."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fsspec_support import check, open_at

from tierkv.errors import BackendUnavailableError


def certificate(folder: Path) -> Path:
    """File of a key and of a certificate that no machine trusts."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    path = folder / "server.pem"
    path.write_bytes(text)
    return path


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Address of a server with such a certificate; it never comes to a request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                    secured.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"https://localhost:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_refused_certificate_is_named(endpoint: str, url: str, options: dict[str, Any]) -> None:
    """An expired certificate was "no connection", with the advice to look whether the server runs."""
    secured = options | {"endpoint_url": endpoint}
    with pytest.raises(BackendUnavailableError, match="the certificate of the server is refused") as refused:
        open_at(url, **secured)
    assert "let this machine trust its issuer" in str(refused.value)
    found = check(url, **secured)["access"]
    assert "the certificate of the server is refused" in found.detail
    assert "SSL_CERT_FILE" in found.fix
