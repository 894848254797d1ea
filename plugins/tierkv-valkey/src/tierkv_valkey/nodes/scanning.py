"""Names on all nodes, page by page: the server never blocks for long, and memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from redis.exceptions import ResponseError

from tierkv_valkey.nodes.asking import ask_one
from tierkv_valkey.nodes.directory import Directory
from tierkv_valkey.nodes.replies import Reply

PAGE_NAMES = b"1000"
"""Names that the server looks at for one page. It answers other clients between two pages."""


def page_in(reply: Reply) -> tuple[bytes, list[bytes]]:
    """Return the next cursor and the names of a page.

    Raises:
        ResponseError: the reply is no page.
    """
    match reply:
        case [bytes(cursor), list(found)] if cursor.isdigit():
            names = [name for name in found if isinstance(name, bytes)]
            if len(names) == len(found):
                return cursor, names
    raise ResponseError(f"the reply to SCAN is not understood: {reply!r:.40}")


def scan_names(directory: Directory, pattern: bytes, timeout_s: float) -> Iterator[list[bytes]]:
    """Yield names that fit a pattern, node after node.

    Names that are stored, removed or moved meanwhile may be missing, or come twice: the server says no more. Within a
    page, a name comes once.

    Raises:
        redis.exceptions.RedisError, OSError: a node does not answer, or refuses.
    """
    for node in directory.nodes():
        cursor = b"0"
        while True:
            command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", PAGE_NAMES)
            cursor, names = page_in(ask_one(node, timeout_s, command))
            if names:
                yield list(dict.fromkeys(names))
            if cursor == b"0":
                break
