"""Kit: stored frames after a close and after random histories, the result of ``scan``, and unusable directories."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest

from tierkv.errors import NamespaceMismatchError, TierKVError
from tierkv.testing.conformance.kit import KIB, KitBase
from tierkv.testing.conformance.model import run_against_a_dict
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key

OTHER_USER = 12345
"""Number of a user who does not run the tests."""


class DurabilityTests(KitBase):
    """Reopen and scan."""

    def test_random_histories_equal_a_dict(self, place: Path) -> None:
        """Write, overwrite, delete, read, scan and (if durable) reopen in any order act as on a dict."""
        self.need()
        numbers = itertools.count()
        run_against_a_dict(
            self.open,
            lambda: place.with_name(f"place-{next(numbers)}"),
            sizes=self.sizes,
            examples=self.model_examples,
            steps=self.model_steps,
        )

    def test_reopen_finds_everything(self, place: Path) -> None:
        """Acknowledged frames are kept, deleted ones do not return."""
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
        """A server that stops and starts again, or a tool that only reads, removes nothing."""
        self.need("durable")
        key, size = make_key(1), self.sizes[-1]
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size)})
        for _ in range(2):
            self.open(place).close()
        with self.open(place) as session:
            assert session.get(key) == make_frame(key, 1, size)

    def test_many_frames(self, place: Path) -> None:
        """More than one page of a listing, a node of a tree, a growth of a file: all are found, also after a reopen."""
        self.need()
        size = self.small
        frames = {make_key(number): make_frame(make_key(number), 1, size) for number in range(self.many_frames)}
        # Capacity for the longest frames: a backend may use the same space for every frame.
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
        """Check that all of ``frames`` are stored, and (where scan lists them) no others."""
        if self.capabilities.scan:
            assert session.scan() == {key: len(frame) for key, frame in frames.items()}
        for key in list(frames)[:: max(1, len(frames) // 64)]:
            assert session.contains([key]) == [True]
            assert session.get(key) == frames[key]

    def test_scan_tells_keys_and_lengths(self, session: Session) -> None:
        """At open the framework computes the tier's usage from ``scan`` alone: no key and no byte may be missing."""
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


class PlaceTests(KitBase):
    """Directories in which a backend cannot or must not work. Only for backends with files at ``place``."""

    def test_foreign_directory_is_left_alone(self, place: Path) -> None:
        """A path that is the user's documents by mistake: refused, or used without changing them."""
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
        """The error names the path, is no traceback of a library, and the file is kept."""
        self.need_local()
        place.write_bytes(b"x" * 10 * KIB)
        with pytest.raises(TierKVError) as failure:
            self.open(place).close()
        assert str(place) in str(failure.value)
        assert place.read_bytes() == b"x" * 10 * KIB

    def test_path_under_a_file(self, place: Path) -> None:
        """The path is refused as well if a parent of it is a file."""
        self.need_local()
        place.write_bytes(b"")
        with pytest.raises(TierKVError) as failure:
            self.open(place / "below").close()
        assert str(place) in str(failure.value)

    def test_path_cannot_be_written(self, place: Path) -> None:
        """A directory without permission fails at open, where an operator reads the error, not at the first store."""
        self.need_local()
        sealed = self.sealed_directory(place) / "tier"
        with pytest.raises(TierKVError) as failure:
            self.open(sealed).close()
        assert str(sealed) in str(failure.value)

    def test_files_are_private(self, place: Path) -> None:
        """A place that all users may read exposes no frame, under any umask: a prompt can be guessed from its KV."""
        self.need_local()
        place.mkdir(0o755)
        key = make_key(1)
        umask = os.umask(0)
        try:
            with self.open(place) as session:
                session.put({key: make_frame(key, 1, self.small)})
        finally:
            os.umask(umask)
        made = sorted(place.rglob("*"))
        exposed = [f"{path} ({stat.filemode(path.stat().st_mode)})" for path in made if path.stat().st_mode & 0o077]
        assert made, "nothing was stored at the place"
        assert not exposed, f"other users can use {exposed}: see tierkv.abc.places"

    @pytest.mark.parametrize("why", ["writable", "owned"])
    def test_a_place_that_others_can_change_is_refused(
        self, place: Path, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A user who can replace stored files decides what a tier serves. The error names the path and the fix."""
        self.need_local()
        place.mkdir(0o700)
        fix = "chmod" if why == "writable" else "chown"
        if why == "writable":
            place.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(place, OTHER_USER, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
        with pytest.raises(TierKVError, match=fix) as failure:
            self.open(place).close()
        assert str(place) in str(failure.value)
        assert not list(place.iterdir()), "files were created in a place that was refused"
        if self.plugin.check is not None:
            findings = self.plugin.check(self.make_options(place), self.capacity_bytes)
            assert any(not finding.ok and fix in finding.detail for finding in findings), "`tierkv check` passes it"

    def sealed_directory(self, place: Path) -> Path:
        """A directory in which no file can be created, not even by root (hence sysfs)."""
        sysfs = Path("/sys/kernel")
        if sysfs.is_dir():
            return sysfs
        place.mkdir(mode=0o500)
        if os.access(place, os.W_OK):
            self.not_applicable("no directory here is closed to this user")
        return place
