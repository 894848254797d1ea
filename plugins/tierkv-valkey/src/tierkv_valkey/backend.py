"""Backend of a Valkey tier: frames as values ``<prefix>:<fingerprint>:<chunk key in hex>``.

Names have no hash tag, so the chunks of one prompt spread over all slots of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from tierkv.abc import ProbeResult, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, TierKVError
from tierkv.types.keys import Key
from tierkv_valkey.failures import Failure
from tierkv_valkey.nodes.directory import Directory
from tierkv_valkey.nodes.exchange import Exchange
from tierkv_valkey.nodes.node import Node
from tierkv_valkey.nodes.pipeline import Command, Request
from tierkv_valkey.nodes.replies import Reply

R = TypeVar("R")


class ValkeyBackend:
    """One namespace of a Valkey tier. Verbs may be called on any threads.

    Args:
        directory: nodes of the tier; closed by :meth:`close`.
        prefix: first part of all names.
        tier: name of the tier, for messages.
        ttl_s: seconds after which the server removes a frame; None: it does not.
        timeout_s: seconds for the first reply of every node of a call.
    """

    def __init__(
        self, directory: Directory, *, prefix: bytes, tier: str, ttl_s: float | None, timeout_s: float
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._tier = tier
        self._expiry: Command = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        self._timeout_s = timeout_s
        self._closed = False

    def contains(self, keys: Sequence[Key]) -> list[ProbeResult]:
        """Whether each name is there; reads no value."""
        names = [self._name(key) for key in keys]
        wanted = [Request((b"EXISTS", name)) for name in names]
        return self._exchange("look for", keys, names, wanted, lambda _index, reply: reply == 1)

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read each value straight into its caller's buffer."""
        keys = [request.key for request in requests]
        names = [self._name(key) for key in keys]
        wanted = [Request((b"GET", name), request.buffer) for name, request in zip(names, requests, strict=True)]
        return self._exchange("read", keys, names, wanted, lambda _index, reply: cast("int | None", reply))

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Set each value whole: a reader sees the previous one or this one."""
        keys = [request.key for request in requests]
        names = [self._name(key) for key in keys]
        wanted = [
            Request((b"SET", name, request.frame, *self._expiry)) for name, request in zip(names, requests, strict=True)
        ]
        return self._exchange("write", keys, names, wanted, _no_result)

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Unlink each name: the server frees the memory on a thread of its own. Absent ones are no error."""
        names = [self._name(key) for key in keys]
        return self._exchange("delete", keys, names, [Request((b"UNLINK", name)) for name in names], _no_result)

    def close(self) -> None:
        """Refuse further calls. A call in flight ends by its timeouts and closes its connection then."""
        self._closed = True
        self._directory.close()

    def _name(self, key: Key) -> bytes:
        return self._prefix + key.hex().encode()

    def _exchange(
        self,
        verb: str,
        keys: Sequence[Key],
        names: Sequence[bytes],
        wanted: Sequence[Request],
        take: Callable[[int, Reply], R],
    ) -> list[R | TierKVError]:
        if self._closed:
            raise BackendError(f"{self._tier} is closed", tier=self._tier)

        def error_of(index: int, error: Exception, node: Node | None) -> TierKVError:
            place = "" if node is None else f" at {node}"
            what = f"cannot {verb} {names[index].decode()}{place}"
            return Failure.of(error).to_error(what, tier=self._tier, key=keys[index])

        return Exchange(self._directory, names, wanted, take, error_of).run(self._timeout_s)


def _no_result(_index: int, _reply: Reply) -> None:
    return None
