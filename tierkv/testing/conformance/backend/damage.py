"""Kit: stored bytes that changed past the backend. Damage affects one chunk, and only until it is stored again.

The backend may return wrong bytes, a miss or an error for the damaged key: the tier verifies the frame's checksum. It
may not damage other keys, refuse to store the key again, or report previous bytes of the buffer.
"""

from __future__ import annotations

from pathlib import Path

from tierkv.abc import ReadRequest
from tierkv.testing import raw as raws
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_buffer, make_frame, make_key
from tierkv.testing.raw import Damage
from tierkv.types.keys import Key

HURT, SECOND, FINE, LAST = (make_key(number) for number in range(1, 5))
ALL = [HURT, SECOND, FINE, LAST]


class DamageTests(KitBase):
    """Needs raw access (:meth:`KitBase.raw`), and data that outlives the backend."""

    def test_raw_access_tells_the_truth(self, place: Path) -> None:
        """All tests of damage depend on the raw accessors: they must list every frame, and restore what they remove."""
        self.need("durable")
        self.need_raw()
        size = self.sizes[-1]
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size) for key in ALL})
            session.forget([LAST])
        raw = self.raw(place, self.context())
        assert raw.count() == 3
        for key in (HURT, SECOND, FINE):
            raw.write(key, raw.read(key))
        with self.open(place) as session:
            assert session.read(ALL) == [*(make_frame(key, 1, size) for key in (HURT, SECOND, FINE)), None]

    def test_a_flipped_bit_stays_with_one_key(self, place: Path) -> None:
        """Media lose single bits; a backend with checks of its own may refuse that chunk, but no other."""
        self._damaged_at_rest(place, raws.flip(lambda length: length // 2))

    def test_a_truncated_entry_stays_with_one_key(self, place: Path) -> None:
        """A crash or a full disk truncates a file: half a frame is not a frame."""
        self._damaged_at_rest(place, raws.truncate)

    def test_an_empty_entry_stays_with_one_key(self, place: Path) -> None:
        """Many file systems leave files of length zero after a power cut."""
        self._damaged_at_rest(place, raws.empty)

    def test_rubbish_stays_with_one_key(self, place: Path) -> None:
        """A misdirected write stores foreign bytes there."""
        self._damaged_at_rest(place, raws.fill_with_rubbish)

    def test_a_removed_entry_stays_with_one_key(self, place: Path) -> None:
        """A cleanup script removes one file while the server is down."""
        self._damaged_at_rest(place, raws.remove, forget=False)

    def test_swapped_entries_harm_nobody_else(self, place: Path) -> None:
        """Two entries are exchanged: each is intact, so only the key in the frame shows it; neighbours are fine."""
        self._damaged_at_rest(place, lambda raw, key: raws.swap(raw, key, SECOND), hurt=(HURT, SECOND))

    def test_a_cut_read_shows_nothing_of_the_buffer(self, place: Path) -> None:
        """A truncated file once was a hit with another chunk's stale bytes: a read reports only bytes that it read."""
        self.need("durable")
        self.need_raw()
        with self.open(place) as session:
            session.put({HURT: make_frame(HURT, 1, self.sizes[-1])})
        raws.truncate(self.raw(place, self.context()), HURT)
        with self.open(place) as session:
            told = [self._read_over(session, HURT, filling) for filling in (b"\x5a", b"\xa5")]
        assert told[0] == told[1], "the read tells bytes that were in the buffer before"

    def test_a_damaged_entry_can_be_deleted(self, place: Path) -> None:
        """Quarantine is a deletion: a bad frame that cannot be deleted is a false hit for ever."""
        self.need("durable")
        self.need_raw()
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, self.sizes[-1]) for key in ALL})
        raws.fill_with_rubbish(self.raw(place, self.context()), HURT)
        for _ in range(2):
            with self.open(place) as session:
                session.forget([HURT])
                assert session.contains([HURT]) == [False]
                assert session.get(HURT) is None
                assert session.get(FINE) == make_frame(FINE, 1, self.sizes[-1])

    def test_removed_behind_the_back(self, session: Session, place: Path) -> None:
        """An object deleted out of band is a miss or an error for that key, and can be stored again."""
        self._damaged_while_open(session, place, raws.remove, forget=False)

    def test_damaged_behind_the_back(self, session: Session, place: Path) -> None:
        """Bytes may also change under an open backend: its caches must not hide new frames from other readers."""
        self._damaged_while_open(session, place, raws.fill_with_rubbish)

    def _damaged_at_rest(
        self, place: Path, damage: Damage, hurt: tuple[Key, ...] = (HURT,), *, forget: bool = True
    ) -> None:
        self.need("durable")
        self.need_raw()
        size = self.sizes[-1]
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size) for key in ALL})
        damage(self.raw(place, self.context()), HURT)
        with self.open(place) as session:
            self._check_neighbours(session, hurt, size)
            self._heal(session, hurt, size, forget=forget)
        with self.open(place) as session:
            assert session.read(ALL) == [make_frame(key, 2 if key in hurt else 1, size) for key in ALL]

    def _damaged_while_open(self, session: Session, place: Path, damage: Damage, *, forget: bool = True) -> None:
        self.need_raw(live=True)
        size = self.sizes[-1]
        session.put({key: make_frame(key, 1, size) for key in ALL})
        assert session.get(HURT) == make_frame(HURT, 1, size)
        damage(self.raw(place, self.context()), HURT)
        self._check_neighbours(session, (HURT,), size)
        self._heal(session, (HURT,), size, forget=forget)

    @staticmethod
    def _check_neighbours(session: Session, hurt: tuple[Key, ...], size: int) -> None:
        """One batch contains the damaged keys: each key gets a result, and the other frames are intact."""
        for key, frame in zip(ALL, session.read(ALL), strict=True):
            if key in hurt:
                assert frame != make_frame(key, 1, size), "the damage changed nothing"
            else:
                assert frame == make_frame(key, 1, size), f"{hurt[0].hex()} was damaged, {key.hex()} suffers: {frame!r}"

    @staticmethod
    def _heal(session: Session, hurt: tuple[Key, ...], size: int, *, forget: bool) -> None:
        """Do as the framework does: delete a bad frame (not an absent one), and store it again later."""
        if forget:
            session.forget(hurt)
        session.put({key: make_frame(key, 2, size) for key in hurt})
        assert session.read(list(hurt)) == [make_frame(key, 2, size) for key in hurt]

    @staticmethod
    def _read_over(session: Session, key: Key, filling: bytes) -> bytes | None:
        buffer = aligned_buffer(session.buffer_bytes)
        buffer[:] = filling * len(buffer)
        (result,) = session.read_into([ReadRequest(key, buffer)])
        return bytes(buffer[:result]) if isinstance(result, int) else None
