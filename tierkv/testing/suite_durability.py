"""Kit, part 2: what stays after a close, a kill and a thousand random histories; and what ``scan`` tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.errors import NamespaceMismatchError, TierKVError
from tierkv.testing.crash import CrashWriter, Orders
from tierkv.testing.frames import make_frame, make_key
from tierkv.testing.kit import KIB, KitBase
from tierkv.testing.model import run_against_a_dict
from tierkv.testing.session import Session
from tierkv.types.keys import Key


class DurabilityTests(KitBase):
    """Reopen, scan, kill -9, damage."""

    def test_random_histories_equal_a_dict(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Write, overwrite, delete, read, scan and (if durable) reopen in any order act as on a dict."""
        self.need()
        run_against_a_dict(
            self.open,
            lambda: tmp_path_factory.mktemp("model") / "place",
            sizes=self.sizes,
            examples=self.model_examples,
            steps=self.model_steps,
        )

    def test_reopen_finds_everything(self, place: Path) -> None:
        """What was acknowledged stays, what was deleted stays gone."""
        self.need("durable")
        frames = {make_key(size): make_frame(make_key(size), 1, size) for size in self.sizes}
        gone = make_key(0)
        with self.open(place) as session:
            session.put(frames | {gone: make_frame(gone, 1, self.small)})
            session.forget([gone])
        with self.open(place) as session:
            assert session.get(gone) is None
            for key, frame in frames.items():
                assert session.get(key) == frame
            assert session.contains([gone, *frames][: self.capabilities.preferred_batch])[0] is False

    def test_reopen_without_writing_changes_nothing(self, place: Path) -> None:
        """A server that starts and stops again, or a tool that only looks, takes nothing away."""
        self.need("durable")
        key, size = make_key(1), self.sizes[-1]
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size)})
        for _ in range(2):
            self.open(place).close()
        with self.open(place) as session:
            assert session.get(key) == make_frame(key, 1, size)

    def test_many_frames(self, place: Path) -> None:
        """More than one page of a listing, one node of a tree, one growth of a file; all found, also after a reopen."""
        self.need()
        size = self.small
        frames = {make_key(number): make_frame(make_key(number), 1, size) for number in range(self.many_frames)}
        # Room for the longest frames: a backend may give every frame the same place.
        capacity_bytes = 2 * self.many_frames * self.frame_bytes_max
        with self.open(place, capacity_bytes=capacity_bytes) as session:
            session.put(frames)
            self.audit(session, frames)
            if not self.capabilities.durable:
                return
        with self.open(place, capacity_bytes=capacity_bytes) as session:
            self.audit(session, frames)
            session.forget(list(frames)[::2])
            self.audit(session, dict(list(frames.items())[1::2]))

    def audit(self, session: Session, frames: dict[Key, bytes]) -> None:
        """Check that all of ``frames`` are there, and (if scan can tell) nothing else."""
        if self.capabilities.scan:
            assert session.scan() == {key: len(frame) for key, frame in frames.items()}
        for key in list(frames)[:: max(1, len(frames) // 64)]:
            assert session.contains([key]) == [True]
            assert session.get(key) == frames[key]

    def test_scan_tells_keys_and_lengths(self, session: Session) -> None:
        """At open the framework counts the tier's usage from ``scan`` alone: no key and no byte may be missing."""
        self.need("scan")
        assert session.scan() == {}
        frames = {make_key(size): make_frame(make_key(size), 1, size) for size in self.sizes}
        session.put(frames)
        assert session.scan() == {key: len(frame) for key, frame in frames.items()}
        first = next(iter(frames))
        session.put({first: make_frame(first, 2, self.sizes[-1])})
        session.forget(list(frames)[1:2])
        expected = {key: len(frame) for key, frame in frames.items()} | {first: self.sizes[-1]}
        del expected[list(frames)[1]]
        assert session.scan() == expected

    def test_second_open_is_refused(self, place: Path) -> None:
        """An authoritative index is only true while nobody else writes.

        A second owner of the same namespace must be told, by an error that names the place; the first must not notice.
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
        """Every change acknowledged before a kill is there; of the one in flight, per key either all or nothing.

        The writer is killed in the middle of writes, overwrites and deletes, several times on the same data.
        """
        self.need("durable")
        writer = CrashWriter(
            Orders(self.plugin, self.context(), self.make_options(place), tuple(self.sizes), seed=self.crash_seed)
        )
        for round_number in range(self.crash_rounds):
            writer.write_until_killed(operations=7 + 11 * round_number)
            with self.open(place) as session:
                writer.ledger.verify(session)
        assert writer.ledger.acknowledged >= self.crash_rounds

    def test_damage_stays_with_one_key(self, place: Path) -> None:
        """Bytes flipped at rest concern one key, and not for ever.

        The read gives bytes, a miss or an error for it (the frame's checksum above decides); other keys are whole; the
        key can be stored again.
        """
        self.need("durable")
        hurt, fine, size = make_key(1), make_key(2), max(self.sizes)
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size) for key in (hurt, fine)})
        self.damage(place, hurt)
        with self.open(place) as session:
            seen, whole = session.read([hurt, fine])
            assert seen != make_frame(hurt, 1, size), "damage() changed nothing"
            assert whole == make_frame(fine, 1, size)
            session.forget([hurt])
            session.put({hurt: make_frame(hurt, 2, size)})
            assert session.get(hurt) == make_frame(hurt, 2, size)

    def test_removed_behind_the_back(self, session: Session, place: Path) -> None:
        """An object deleted out of band is a miss or an error for that key, and can be stored again."""
        key, other, size = make_key(1), make_key(2), max(self.sizes)
        session.put({k: make_frame(k, 1, size) for k in (key, other)})
        self.raw_remove(place, key)
        seen, whole = session.read([key, other])
        assert seen is None or isinstance(seen, TierKVError)
        assert whole == make_frame(other, 1, size)
        session.put({key: make_frame(key, 2, size)})
        assert session.get(key) == make_frame(key, 2, size)

    def test_sharers_see_each_other(self, place: Path) -> None:
        """What one process stored in a shared tier is a hit for the other, without a reopen."""
        self.need("shared")
        key, size = make_key(1), self.sizes[-1]
        with self.open(place) as one, self.open(place) as two:
            one.put({key: make_frame(key, 1, size)})
            assert two.contains([key]) == [True]
            assert two.get(key) == make_frame(key, 1, size)
            two.forget([key])
            assert one.get(key) is None


class PlaceTests(KitBase):
    """Places where a backend cannot or must not work. Only for backends with files at ``place``."""

    def test_foreign_directory_is_left_alone(self, place: Path) -> None:
        """A path that points at somebody's documents by mistake: refused, or used without touching them."""
        self.need_local()
        place.mkdir()
        (place / "thesis.txt").write_text("the only copy")
        (place / "data.mdb").mkdir()
        try:
            with self.open(place) as session:
                key = make_key(1)
                session.put({key: make_frame(key, 1, self.small)})
                session.forget([key])
        except NamespaceMismatchError as error:
            assert str(place) in str(error)
            assert sorted(path.name for path in place.iterdir()) == ["data.mdb", "thesis.txt"]
        assert (place / "thesis.txt").read_text() == "the only copy"
        assert (place / "data.mdb").is_dir()

    def test_path_is_a_file(self, place: Path) -> None:
        """The error names the path, is no traceback of the library underneath, and the file stays."""
        self.need_local()
        place.write_bytes(b"x" * 10 * KIB)
        with pytest.raises(TierKVError) as failure:
            self.open(place).close()
        assert str(place) in str(failure.value)
        assert place.read_bytes() == b"x" * 10 * KIB

    def test_path_under_a_file(self, place: Path) -> None:
        """The same where a parent of the path is a file."""
        self.need_local()
        place.write_bytes(b"")
        with pytest.raises(TierKVError) as failure:
            self.open(place / "below").close()
        assert str(place) in str(failure.value)

    def test_path_cannot_be_written(self, place: Path) -> None:
        """A place without permission fails at open, where a person reads it, not at the first store."""
        self.need_local()
        sealed = self.sealed_directory(place) / "tier"
        with pytest.raises(TierKVError) as failure:
            self.open(sealed).close()
        assert str(sealed) in str(failure.value)

    def need_local(self) -> None:
        """Skip unless data lies in files at ``place``."""
        self.need()
        if not self.local_place:
            pytest.skip("local_place is False")

    @staticmethod
    def sealed_directory(place: Path) -> Path:
        """A directory in which nothing can be created, for root neither (hence sysfs, where nobody can)."""
        sysfs = Path("/sys/kernel")
        if sysfs.is_dir():
            return sysfs
        place.mkdir(mode=0o500)
        try:
            (place / "probe").touch()
        except OSError:
            return place
        pytest.skip("no directory here is closed to this user")
