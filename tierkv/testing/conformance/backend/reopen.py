"""Kit: results of a second, a tenth and a differently configured open."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tierkv.abc import WriteRequest
from tierkv.errors import TierKVError
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.frames import aligned_copy, make_frame, make_key
from tierkv.types.keys import Key

REOPENINGS = 10
RANK_MAX = (1 << 64) - 1


class ReopenTests(KitBase):
    """Only for backends that declare ``durable``."""

    def test_deleted_stays_deleted(self, place: Path) -> None:
        """A chunk was deleted because it was bad or expired: it may not return with the next start."""
        self.need("durable")
        frames = {make_key(number): make_frame(make_key(number), 1, self.small) for number in range(12)}
        with self.open(place) as session:
            session.put(frames)
            session.forget(frames)
        with self.open(place) as session:
            assert session.read(list(frames)) == [None] * len(frames)
            if self.capabilities.scan:
                assert session.scan() == {}

    def test_the_last_write_counts(self, place: Path) -> None:
        """Of several writes of a key, longer and shorter ones, the last acknowledged is found after a reopen."""
        self.need("durable")
        key = make_key(1)
        for last in self.sizes:
            with self.open(place) as session:
                for version, size in enumerate([*reversed(self.sizes), last]):
                    session.put({key: make_frame(key, version, size)})
            with self.open(place) as session:
                assert session.get(key) == make_frame(key, len(self.sizes), last)

    def test_many_reopenings(self, place: Path) -> None:
        """Ten starts with a little work in each: no frame is lost, no deleted one returns, no phantom appears."""
        self.need("durable")
        rng = random.Random(7)
        keys = [make_key(number) for number in range(20)]
        model: dict[Key, bytes] = {}
        for version in range(REOPENINGS):
            with self.open(place) as session:
                assert session.read(keys) == [model.get(key) for key in keys], f"at opening {version}"
                if self.capabilities.scan:
                    assert session.scan() == {key: len(frame) for key, frame in model.items()}
                chosen = rng.sample(keys, 8)
                written = {key: make_frame(key, version, rng.choice(self.sizes)) for key in chosen[:5]}
                session.put(written)
                session.forget(chosen[5:])
            model = {key: frame for key, frame in (model | written).items() if key not in chosen[5:]}

    def test_scan_tells_the_same_each_time(self, place: Path) -> None:
        """Usage is counted from ``scan`` before the first store: it must be what it was when the tier was closed."""
        self.need("durable", "scan")
        frames = {make_key(size): make_frame(make_key(size), 1, size) for size in self.sizes}
        with self.open(place) as session:
            session.put(frames)
            told = session.scan()
            assert session.scan() == told, "a second scan of an open backend tells something else"
        for _ in range(2):
            with self.open(place) as session:
                assert session.scan() == told

    def test_scan_tells_ranks_in_write_order(self, place: Path) -> None:
        """The head of a prompt stays longest after a restart only if ranks and order outlive rewrites and deletions."""
        self.need("durable", "keeps_ranks")
        keys = [make_key(number) for number in range(6)]
        written = [*zip(keys, (0, 1, 7 << 32 | 4096, RANK_MAX, 5 << 32, 9), strict=True), (keys[1], 3), (keys[3], 0)]
        expected: dict[Key, int] = {}
        with self.open(place) as session:
            for version, (key, rank) in enumerate(written):  # one call each: within a call there is no order
                frame = aligned_copy(make_frame(key, version, self.sizes[version % len(self.sizes)])).toreadonly()
                assert session.write_requests([WriteRequest(key, frame, rank)]) == [None]
                expected.pop(key, None)
                expected[key] = rank
            session.forget(keys[4:5])
            del expected[keys[4]]
            assert session.scan_ranks() == list(expected.items())
        for _ in range(2):
            with self.open(place) as session:
                assert session.scan_ranks() == list(expected.items())

    def test_another_capacity_is_not_a_fresh_start(self, place: Path) -> None:
        """Users change ``capacity`` and restart: more loses nothing, less loses only frames beyond the new capacity."""
        self.need("durable", "bounded")
        size = self.frame_bytes_max
        frames = self.full_capacity_bytes // size // 2
        keys = [make_key(number) for number in range(frames)]
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            session.put({key: make_frame(key, 1, size) for key in keys})
        with self.open(place, capacity_bytes=2 * self.full_capacity_bytes) as session:
            for key in keys:
                assert session.get(key) == make_frame(key, 1, size), "lost by a larger capacity"
        less = self.full_capacity_bytes // 4
        with self.open(place, capacity_bytes=less) as session:
            kept = [key for key in keys if session.get(key) == make_frame(key, 1, size)]
            assert len(kept) >= less // size // 2, f"a capacity of {less} bytes keeps {len(kept)} frames of {size}"
            assert session.read(keys) == [make_frame(key, 1, size) if key in kept else None for key in keys]
            if self.capabilities.scan:
                assert session.scan() == dict.fromkeys(kept, size)
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            assert session.read(keys) == [make_frame(key, 1, size) if key in kept else None for key in keys]

    def test_longer_frames_are_opened_or_refused(self, place: Path) -> None:
        """A stack may reopen with longer frames: the backend serves both lengths, or refuses and changes nothing."""
        self.need("durable")
        key, size = make_key(1), self.sizes[-1]
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size)})
        longer = replace(self.context(), frame_bytes_max=2 * self.frame_bytes_max)
        try:
            with self.open_with(place, longer) as session:
                assert session.get(key) in {None, make_frame(key, 1, size)}
                other = make_key(2)
                session.put({other: make_frame(other, 1, 2 * self.frame_bytes_max)})
                assert session.get(other) == make_frame(other, 1, 2 * self.frame_bytes_max)
        except TierKVError as error:
            if self.local_place:
                assert str(place) in str(error)
            with self.open(place) as session:
                assert session.get(key) == make_frame(key, 1, size), "refused, and lost what was there"
