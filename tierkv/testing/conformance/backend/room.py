"""Kit: answers of a full tier, and its use of the machine. Only for backends that declare ``bounded``."""

from __future__ import annotations

from pathlib import Path

from tierkv.errors import OutOfSpaceError
from tierkv.testing.conformance.kit import MIB, KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key


class RoomTests(KitBase):
    """Full tiers, key by key."""

    def test_refusals_are_per_key(self, place: Path) -> None:
        """At the capacity a batch fits in part: each key is stored and acknowledged, or neither."""
        self.need("bounded")
        size, batch = self.frame_bytes_max, max(2, min(self.capabilities.preferred_batch, 8))
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            for start in range(0, 3 * (self.full_capacity_bytes // size), batch):
                keys = [make_key(start + number) for number in range(batch)]
                results = session.write({key: make_frame(key, 1, size) for key in keys})
                for key, result in zip(keys, results, strict=True):
                    if result is None:
                        assert session.get(key) == make_frame(key, 1, size), "acknowledged, and not stored"
                    else:
                        assert isinstance(result, OutOfSpaceError), f"a full tier says OutOfSpaceError, not {result!r}"
                        assert session.get(key) is None, "refused, and stored"
                if any(results):
                    return

    def test_a_refused_overwrite_does_not_tear(self, place: Path) -> None:
        """A longer frame for a key of a full tier is refused: then the key has its old frame or none, never a part."""
        self.need("bounded")
        step = self.sizes[0] if self.capabilities.alignment == 1 else self.capabilities.alignment
        short, long = max(step, 4096), self.frame_bytes_max
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            key = make_key(0)
            session.put({key: make_frame(key, 1, short)})
            self._fill(session)
            for number in range(20_000, 20_000 + long // short):  # what a long frame has left
                session.write({make_key(number): make_frame(make_key(number), 1, short)})
            for version in (2, 3):
                (result,) = session.write({key: make_frame(key, version, long)})
                found = session.get(key)
                if result is None:
                    assert found == make_frame(key, version, long)
                else:
                    assert found in {None, make_frame(key, 1, short), make_frame(key, 2, long)}

    def test_a_refused_key_is_not_barred(self, place: Path) -> None:
        """One failed write once barred its key for ever: after a deletion the key is stored like any other."""
        self.need("bounded")
        size = self.frame_bytes_max
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            stored, refused = self._fill(session)
            if refused is None:
                self.not_applicable("grows beyond its capacity")
            session.forget(stored[: max(4, len(stored) // 4)])
            for version in range(2, 6):
                session.put({refused: make_frame(refused, version, size)})
                assert session.get(refused) == make_frame(refused, version, size)

    def test_deleted_bytes_come_back_after_a_restart(self, place: Path) -> None:
        """Usage that a restart forgot once exceeded a capacity by ten terabytes: usage is equal before and after."""
        self.need("bounded", "durable")
        size = self.frame_bytes_max
        half = self.full_capacity_bytes // size // 2
        for number in range(4):
            keys = [make_key(100 * number + i) for i in range(half)]
            with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
                session.put({key: make_frame(key, 1, size) for key in keys})
                assert session.read(keys[:4]) == [make_frame(key, 1, size) for key in keys[:4]]
            with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
                session.forget(keys)

    def test_the_place_does_not_outgrow_its_capacity(self, place: Path) -> None:
        """A framework that respects the capacity must never fill the machine's disk."""
        self.need("bounded")
        self.need_local()
        size = self.frame_bytes_max
        resident_max = self.full_capacity_bytes // size * 3 // 4
        allowed = int(self.full_capacity_bytes * self.place_bytes_per_capacity) + 4 * MIB
        resident: list[Key] = []
        for opening in range(2 if self.capabilities.durable else 1):
            with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
                for number in range(3 * resident_max):
                    if len(resident) == resident_max:
                        session.forget([resident.pop(0)])
                    key = make_key(10_000 * opening + number)
                    if session.write({key: make_frame(key, 1, size)}) == [None]:
                        resident.append(key)
                used = disk_usage(place)
                assert used <= allowed, f"{used} bytes at the place, {allowed} are allowed"

    def _fill(self, session: Session) -> tuple[list[Key], Key | None]:
        """Write until the first refusal, or three times the capacity. Returns stored and refused keys."""
        stored: list[Key] = []
        for number in range(1, 3 * (self.full_capacity_bytes // self.frame_bytes_max)):
            key = make_key(number)
            if session.write({key: make_frame(key, 1, self.frame_bytes_max)}) != [None]:
                return stored, key
            stored.append(key)
        return stored, None


def disk_usage(place: Path) -> int:
    """Bytes that the file system allocated to all files below ``place``."""
    return sum(path.lstat().st_blocks * 512 for path in place.rglob("*"))
