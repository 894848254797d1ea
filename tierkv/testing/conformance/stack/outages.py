"""Kit, in a stack: the server of a remote backend is killed or frozen, and returns. The engine sees misses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tierkv.testing.conformance.backend.outages import ENDINGS, HEALED_MAX_S, begin_outage, end_outage
from tierkv.testing.conformance.kit import A, B, StackKit
from tierkv.testing.engines.small_stack import SmallStack


class StackOutageTests(StackKit):
    """Promises 2 and 3 with a real outage."""

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_an_outage_is_a_miss_and_heals(self, place: Path, ending: str) -> None:
        """Misses and hits in the host tier while the server is away; hits from it soon after its return."""
        server = self.need_server()
        with self.stack(place) as stack:
            stack.store_all(A)
            stack.forget_host()
            begin_outage(server, ending)
            try:
                assert stack.load_within_deadline(A) == 0, "hits of a server that is not there"
                stack.store(B)
                assert stack.load_within_deadline(B) == 4, "an outage below hides the host tier's own chunks"
            finally:
                end_outage(server, ending)
            give_up_s = time.monotonic() + HEALED_MAX_S
            while not _serves(stack):
                assert time.monotonic() < give_up_s, "the server has returned, and its chunks are still misses"
                time.sleep(0.05)


def _serves(stack: SmallStack) -> bool:
    """Whether a prompt is stored and found once the stack's own pauses are over."""
    stack.settle()
    stack.until_usable()
    stack.pass_time(60.0)
    stack.forget_host()
    stack.store_all(A)
    return stack.load_cold(A) == 4
