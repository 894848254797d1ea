"""Commands of one call, on their way to the nodes of their names and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from redis.exceptions import AskError, MovedError, ReadOnlyError

from tierkv_valkey.nodes.directory import Directory
from tierkv_valkey.nodes.node import Node
from tierkv_valkey.nodes.pipeline import Pipeline, Request
from tierkv_valkey.nodes.replies import Reply

ROUNDS_MAX = 4
"""Times that a command is sent: once, and after that to the nodes that replies name."""
ASKING = Request((b"ASKING",))
R = TypeVar("R")
E = TypeVar("E")


class Exchange(Generic[R, E]):
    """Commands of one call, by number. Used by one thread, once.

    Args:
        directory: finds the nodes.
        names: name of each command.
        requests: in the order of the results.
        take: makes the result of a reply that is no error.
        error_of: makes the result of a failure; the node is None where none is known.
    """

    def __init__(
        self,
        directory: Directory,
        names: Sequence[bytes],
        requests: Sequence[Request],
        take: Callable[[int, Reply], R],
        error_of: Callable[[int, Exception, Node | None], E],
    ) -> None:
        self._directory = directory
        self._names = names
        self._requests = requests
        self._take = take
        self._error_of = error_of
        self._results: list[R | E | None] = [None] * len(requests)
        self._redirects: dict[int, AskError] = {}

    def run(self, timeout_s: float) -> list[R | E]:
        """Send all commands, follow redirects, and return one result per command.

        Args:
            timeout_s: seconds for the first reply of every node of a round.
        """
        groups = self._grouped()
        for rounds_left in range(ROUNDS_MAX - 1, -1, -1):
            self._redirects = {}
            self._round(groups, time.monotonic() + timeout_s)
            if not self._redirects:
                break
            if rounds_left:
                groups = self._followed()
            else:
                for index, redirect in self._redirects.items():
                    self._results[index] = self._error_of(index, redirect, None)
        return cast("list[R | E]", self._results)

    def _grouped(self) -> dict[Node, list[int | None]]:
        """Numbers of the commands by node."""
        groups: dict[Node, list[int | None]] = {}
        for index, name in enumerate(self._names):
            try:
                groups.setdefault(self._directory.node_of(name), []).append(index)
            except Exception as error:  # noqa: BLE001  any error of the client becomes this command's result
                self._results[index] = self._error_of(index, error, None)
        return groups

    def _followed(self) -> dict[Node, list[int | None]]:
        """Numbers of the redirected commands by node; None is for ASKING, which precedes a command."""
        groups: dict[Node, list[int | None]] = {}
        for index, redirect in self._redirects.items():
            node = self._directory.follow(redirect)
            if node is None:
                self._results[index] = self._error_of(index, redirect, None)
                continue
            moved = isinstance(redirect, MovedError)
            groups.setdefault(node, []).extend([index] if moved else [None, index])
        return groups

    def _round(self, groups: dict[Node, list[int | None]], deadline_s: float) -> None:
        """Send one pipeline to each node, then read the replies: the nodes work side by side."""
        pipelines: list[tuple[Pipeline, list[int | None]]] = []
        for node, indices in groups.items():
            pipeline = Pipeline(node, [ASKING if index is None else self._requests[index] for index in indices])
            pipeline.send()
            pipelines.append((pipeline, indices))
        for pipeline, indices in pipelines:
            self._receive(pipeline, indices, deadline_s)

    def _receive(self, pipeline: Pipeline, indices: Sequence[int | None], deadline_s: float) -> None:
        def settle(number: int, reply: Reply) -> None:
            index = indices[number]
            if index is not None:
                self._settle(index, reply, pipeline.node)

        pipeline.receive(settle, deadline_s)
        if pipeline.failure is not None:
            self._directory.note_failure(pipeline.node)

    def _settle(self, index: int, reply: Reply, node: Node) -> None:
        if isinstance(reply, AskError):
            self._redirects[index] = reply
        elif isinstance(reply, Exception):
            self._results[index] = self._error_of(index, reply, node)
            if isinstance(reply, ReadOnlyError):  # a replica: the primary is another server by now
                self._directory.note_failure(node)
        else:
            self._results[index] = self._take(index, reply)
