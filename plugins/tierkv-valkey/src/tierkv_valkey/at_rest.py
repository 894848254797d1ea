"""Abilities of a Valkey tier at rest: the namespaces under its prefix, reading without a trace, and removal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.abc import BackendContext, StoredNamespace
from tierkv.errors import BackendError, TierKVError
from tierkv.types.namespace import Namespace
from tierkv_valkey.backend import ValkeyBackend
from tierkv_valkey.descriptions import FINGERPRINT, Description, description_name, parse_description
from tierkv_valkey.failures import Failure
from tierkv_valkey.nodes.directory import Directory
from tierkv_valkey.nodes.exchange import Exchange
from tierkv_valkey.nodes.pipeline import Request
from tierkv_valkey.nodes.replies import Reply
from tierkv_valkey.nodes.scanning import scan_names
from tierkv_valkey.opening import open_directory, open_undescribed
from tierkv_valkey.options import ValkeyOptions

SELF = "valkey tier"


def stored_namespaces(options: ValkeyOptions) -> Iterator[StoredNamespace | TierKVError]:
    """Yield the namespaces under the prefix, by their descriptions. The server does not tell who uses them.

    Raises:
        BackendError: a node does not answer, or refuses; names the remedy.
    """
    with _directory(options, "list") as directory:
        fingerprints = sorted(_fingerprints(directory, options))
        names = [description_name(options.prefix, each) for each in fingerprints]
        contents = _all(directory, names, b"GET", options.timeout_s)
    for fingerprint, name, content in zip(fingerprints, names, contents, strict=True):
        yield _stored(fingerprint, name, content)


def open_beside(context: BackendContext, options: ValkeyOptions) -> ValkeyBackend:
    """Open a namespace for reading; its description is not stored."""
    return open_undescribed(context, options)


def remove_stored(options: ValkeyOptions, namespace: Namespace) -> None:
    """Remove all chunks of a namespace, then its description. Engines that use it go on, and see misses.

    Raises:
        BackendError: a node does not answer, or refuses; names the remedy.
    """
    prefix = f"{options.prefix}:{namespace.fingerprint().hex()}:".encode()
    with _directory(options, "remove chunks of") as directory:
        for names in scan_names(directory, prefix + b"*", options.timeout_s):
            _all(directory, names, b"UNLINK", options.timeout_s)
        _all(directory, [Description.of(options.prefix, namespace).name], b"UNLINK", options.timeout_s)


def _fingerprints(directory: Directory, options: ValkeyOptions) -> set[bytes]:
    """Return the fingerprints that names under the prefix have, chunks and descriptions alike."""
    prefix, found = f"{options.prefix}:".encode(), set[bytes]()
    for names in scan_names(directory, prefix + b"*", options.timeout_s):
        for name in names:
            first, _, rest = name.removeprefix(prefix).partition(b":")
            fingerprint = rest if first == b"namespace" else first
            if FINGERPRINT.fullmatch(fingerprint) and rest:
                found.add(fingerprint)
    return found


def _stored(fingerprint: bytes, name: bytes, content: Reply) -> StoredNamespace | TierKVError:
    if not isinstance(content, bytes):
        return BackendError(
            f"there are chunks of {fingerprint.decode()}, and no {name.decode()} that says whose they are: the server "
            "has evicted it. An engine that writes such chunks stores it anew within ten minutes"
        )
    try:
        return StoredNamespace(parse_description(name, fingerprint, content))
    except BackendError as error:
        return error


def _all(directory: Directory, names: list[bytes], verb: bytes, timeout_s: float) -> list[Reply]:
    """Send one command for each name, and return the replies.

    Raises:
        Exception: the first failure.
    """
    wanted = [Request((verb, name)) for name in names]
    replies = Exchange(directory, names, wanted, lambda _index, reply: reply, lambda _index, error, _node: error).run(
        timeout_s
    )
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


@contextmanager
def _directory(options: ValkeyOptions, verb: str) -> Iterator[Directory]:
    directory: Directory | None = None
    try:
        directory = open_directory(options)
        yield directory
    except Exception as error:  # noqa: BLE001  any error of the client
        raise Failure.of(error).to_error(f"cannot {verb} {options.url}", tier=SELF) from None
    finally:
        if directory is not None:
            directory.close()
