"""Kit: other processes, some killed during a call, some refused, some sharing the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.errors import TierKVError
from tierkv.testing.conformance.crash import CrashWriter, Orders, kill_while_opening, open_elsewhere
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.frames import make_frame, make_key

OPENING_KILLS_S = (0.0, 0.004, 0.05)
"""Seconds between the begin of an open and the kill."""


class ProcessTests(KitBase):
    """kill -9, a second owner, and sharing processes."""

    def test_second_open_is_refused(self, place: Path) -> None:
        """An authoritative index is only correct while no other process writes.

        A second owner of the same namespace gets an error that names the directory; the first is not affected.
        """
        self.need("authoritative_index")
        key, size = make_key(1), self.small
        with self.open(place) as first:
            first.put({key: make_frame(key, 1, size)})
            with pytest.raises(TierKVError) as refused:
                self.open(place).close()
            if self.local_place:
                assert str(place) in str(refused.value)
            assert first.get(key) == make_frame(key, 1, size)
        with self.open(place) as again:
            assert again.get(key) == make_frame(key, 1, size)

    def test_kill_minus_nine(self, place: Path) -> None:
        """Every change acknowledged before a kill is kept; each key of the one in flight has its old or its new frame.

        The writer is killed in the middle of writes, overwrites and deletes, several times on the same data.
        """
        self.need("durable")
        writer = CrashWriter(self.orders(place))
        for round_number in range(self.crash_rounds):
            writer.write_until_killed(operations=7 + 11 * round_number)
            with self.open(place) as session:
                writer.ledger.verify(session)
        assert writer.ledger.acknowledged >= self.crash_rounds

    def test_sharers_see_each_other(self, place: Path) -> None:
        """Frames that one process stored in a shared tier are hits for the other, without a reopen."""
        self.need("shared")
        key, size = make_key(1), self.sizes[-1]
        with self.open(place) as one, self.open(place) as two:
            one.put({key: make_frame(key, 1, size)})
            assert two.contains([key]) == [True]
            assert two.get(key) == make_frame(key, 1, size)
            two.forget([key])
            assert one.get(key) is None

    def test_killed_while_opening(self, place: Path) -> None:
        """The first start creates files: a kill during it may not leave a directory that never opens."""
        self.need("durable")
        for number, delay_s in enumerate(OPENING_KILLS_S):
            new = place.with_name(f"{place.name}-{number}")
            kill_while_opening(self.orders(new), delay_s)
            with self.open(new) as session:
                key = make_key(1)
                session.put({key: make_frame(key, 1, self.small)})
                assert session.get(key) == make_frame(key, 1, self.small)

    def test_second_process_is_refused(self, place: Path) -> None:
        """Two servers with one directory are the most common mistake: the second gets an error, and changes nothing."""
        self.need("authoritative_index")
        key, size = make_key(1), self.small
        with self.open(place) as first:
            first.put({key: make_frame(key, 1, size)})
            refusal = open_elsewhere(self.orders(place))
            assert refusal, "another process opened the place, too"
            if self.local_place:
                assert str(place) in refusal
            assert first.get(key) == make_frame(key, 1, size)

    def test_sees_what_another_process_wrote(self, place: Path) -> None:
        """Engines that share a tier find frames that others stored meanwhile: without a reopen, and intact."""
        self.need("shared", "durable")
        writer = CrashWriter(self.orders(place))
        with self.open(place) as session:
            writer.ledger.verify(session)
            writer.write_until_killed(operations=10)
            writer.ledger.verify(session)

    def orders(self, place: Path) -> Orders:
        """Instructions to another process."""
        options = self.make_options(place)
        return Orders(self.plugin, self.context(), options, tuple(self.sizes), seed=self.crash_seed)
