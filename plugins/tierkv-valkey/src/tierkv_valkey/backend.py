"""Backend of a Valkey tier: frames as values ``<prefix>:<fingerprint>:<chunk key in hex>``.

Names have no hash tag, so the chunks of one prompt spread over all slots of a cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar, cast

from tierkv.abc import DamagedEntry, ProbeResult, ReadRequest, ReadResult, StoredFrame, WriteRequest, WriteResult
from tierkv.errors import BackendError, TierKVError
from tierkv.types.keys import Key
from tierkv_valkey.descriptions import REPEAT_S, Description
from tierkv_valkey.failures import Failure
from tierkv_valkey.nodes.directory import Directory
from tierkv_valkey.nodes.exchange import Exchange
from tierkv_valkey.nodes.node import Node
from tierkv_valkey.nodes.pipeline import Command, Request
from tierkv_valkey.nodes.replies import Reply
from tierkv_valkey.nodes.scanning import scan_names

R = TypeVar("R")


class ValkeyBackend:
    """One namespace of a Valkey tier. Verbs may be called on any threads.

    Args:
        directory: nodes of the tier; closed by :meth:`close`.
        prefix: first part of all names.
        tier: name of the tier, for messages.
        ttl_s: seconds after which the server removes a frame; None: it does not.
        timeout_s: seconds for the first reply of every node of a call.
        description: stored from time to time by the calls that write; None: never.
        clock: seconds, for the time between two descriptions.
    """

    def __init__(  # noqa: PLR0913  each is named at the one call
        self,
        directory: Directory,
        *,
        prefix: bytes,
        tier: str,
        ttl_s: float | None,
        timeout_s: float,
        description: Description | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._tier = tier
        self._expiry = _expiry(ttl_s)
        self._description = description
        self._description_expiry = _expiry(None if ttl_s is None else ttl_s + 2 * REPEAT_S)  # outlives the chunks
        self._clock = clock
        self._described_s = -math.inf
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
        results = self._exchange("write", keys, names, wanted, _no_result)
        if self._clock() >= self._described_s + REPEAT_S:
            self.describe()
        return results

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Unlink each name: the server frees the memory on a thread of its own. Absent ones are no error."""
        names = [self._name(key) for key in keys]
        return self._exchange("delete", keys, names, [Request((b"UNLINK", name)) for name in names], _no_result)

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame | DamagedEntry]:  # noqa: ARG002  keys cost nothing
        """Yield the frames of all nodes, page by page. A server keeps no time of a store.

        Frames that are stored, deleted or moved to another node meanwhile may be missing, or come twice.

        Raises:
            TierKVError: a node does not answer, or refuses.
        """
        try:
            for names in scan_names(self._directory, self._prefix + b"*", self._timeout_s):
                wanted = [Request((b"STRLEN", name)) for name in names]
                lengths = Exchange(self._directory, names, wanted, _take, _keep_error).run(self._timeout_s)
                for name, length in zip(names, lengths, strict=True):
                    yield from self._listed(name, length)
        except Exception as error:  # noqa: BLE001  any error of the client
            raise Failure.of(error).to_error("cannot list the chunks", tier=self._tier) from None

    def describe(self) -> None:
        """Store the description of the namespace. A failure harms tools alone; it is stored again after `REPEAT_S`."""
        if self._description is None:
            return
        self._described_s = self._clock()
        name, content = self._description.name, self._description.content
        wanted = Request((b"SET", name, content, *self._description_expiry))
        Exchange(self._directory, [name], [wanted], _take, _keep_error).run(self._timeout_s)

    def close(self) -> None:
        """Refuse further calls. A call in flight ends by its timeouts and closes its connection then."""
        self._closed = True
        self._directory.close()

    def _name(self, key: Key) -> bytes:
        return self._prefix + key.hex().encode()

    def _listed(self, name: bytes, length: Reply) -> Iterator[StoredFrame | DamagedEntry]:
        """Yield the entry of a name; nothing for one that is gone."""
        key = _key_of(name.removeprefix(self._prefix))
        if isinstance(length, int) and key is not None:
            if length:
                yield StoredFrame(key, length)
        elif isinstance(length, int) or "WRONGTYPE" in str(length):
            reason = "its name has no chunk key" if isinstance(length, int) else "its value is not text"
            yield DamagedEntry(name.decode(errors="replace"), reason, partial(self._remove, name))
        elif isinstance(length, Exception):
            raise length

    def _remove(self, name: bytes) -> None:
        wanted = Request((b"UNLINK", name))
        (error,) = Exchange(self._directory, [name], [wanted], _no_result, _keep_error).run(self._timeout_s)
        if error is not None:
            what = f"cannot remove {name.decode(errors='replace')}"
            raise Failure.of(error).to_error(what, tier=self._tier) from None

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
            is_of_part = node is not None and self._directory.others_serve(node, bytes(wanted[index].words[0]))
            return Failure.of(error).to_error(what, tier=self._tier, key=keys[index], is_of_part=is_of_part)

        return Exchange(self._directory, names, wanted, take, error_of).run(self._timeout_s)


def _no_result(_index: int, _reply: Reply) -> None:
    return None


def _take(_index: int, reply: Reply) -> Reply:
    return reply


def _keep_error(_index: int, error: Exception, _node: Node | None) -> Exception:
    return error


def _expiry(ttl_s: float | None) -> Command:
    return () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))


def _key_of(text: bytes) -> Key | None:
    try:
        key = Key(bytes.fromhex(text.decode()))
    except ValueError:
        return None
    return key if key and key.hex().encode() == text else None  # other letters and spaces are another name
