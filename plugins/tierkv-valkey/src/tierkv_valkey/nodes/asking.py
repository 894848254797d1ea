"""Questions to one node outside of the data path: topology, and what ``check`` looks at."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tierkv_valkey.nodes.node import Node
from tierkv_valkey.nodes.pipeline import Command, Pipeline, Request
from tierkv_valkey.nodes.replies import Reply


def ask(node: Node, timeout_s: float, *commands: Command) -> list[Reply]:
    """Send commands to a node and return the replies. Error replies are values.

    Raises:
        redis.exceptions.RedisError, OSError: the node does not answer.
    """
    replies: list[Reply] = []
    pipeline = Pipeline(node, [Request(words) for words in commands])
    pipeline.send()
    pipeline.receive(lambda _number, reply: replies.append(reply), time.monotonic() + timeout_s)
    if pipeline.failure is not None:
        raise pipeline.failure
    return replies


def ask_one(node: Node, timeout_s: float, command: Command) -> Reply:
    """Send one command and return its reply.

    Raises:
        redis.exceptions.RedisError, OSError: the node does not answer, or answers with an error.
    """
    (reply,) = ask(node, timeout_s, command)
    if isinstance(reply, Exception):
        raise reply
    return reply


def first_answer(nodes: Sequence[Node], timeout_s: float, command: Command) -> tuple[Node, Reply]:
    """Ask one node after the other, resting ones last, until one answers.

    Raises:
        Exception: the error of the last one.
    """
    last: Exception = OSError("no node is known")
    for node in sorted(nodes, key=lambda node: node.is_resting):
        try:
            return node, ask_one(node, timeout_s, command)
        except Exception as error:  # noqa: BLE001  the next node is asked; the last error is raised
            last = error
    raise last
