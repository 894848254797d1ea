"""Kit, part 2: the four verbs on one opened backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from tierkv.abc import ReadRequest, WriteResult
from tierkv.errors import TierKVError
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_buffer, make_frame, make_key
from tierkv.types.keys import Key

ODD_KEYS = [
    Key(b"\x00" * 20),
    Key(b"\x00" * 36),
    Key(b"\xff" * 36),
    Key(b"/" * 36),
    Key(b"../" * 12),
    Key(b"a/b\\c:*?'<>|%00 \n.tmp" + b"\x00" * 15),
    Key(b"UPPER-lower-case-must-not-collide-xx"),
    Key(b"upper-LOWER-case-must-not-collide-xx"),
    Key(bytes(range(64))),
    Key(bytes(range(192, 256))),
    Key(b"\x00" * 35 + b"\x01"),
]
"""Keys are opaque, 20 to 64 bytes; each of these once broke a file name, a string or a prefix comparison."""


class ContractTests(KitBase):
    """Shapes, round trips, presence."""

    def test_empty_batches(self, session: Session) -> None:
        """A batch whose keys were all found elsewhere is empty; that is not an error."""
        assert session.contains([]) == []
        assert session.read_into([]) == []
        assert session.write_requests([]) == []
        assert session.delete([]) == []

    def test_round_trip_of_every_size(self, session: Session) -> None:
        """A read returns a frame byte for byte with its own length, whatever the length."""
        frames = {make_key(size): make_frame(make_key(size), 1, size) for size in self.sizes}
        session.put(frames)
        for key, frame in frames.items():
            assert session.get(key) == frame, f"a frame of {len(frame)} bytes came back changed"

    def test_results_are_in_the_order_of_the_batch(self, session: Session) -> None:
        """Results contain no key: a result at the wrong position is another chunk's data."""
        size = self.small
        keys = [make_key(number) for number in range(2 * self.capabilities.preferred_batch)]
        stored = keys[::2]
        session.put({key: make_frame(key, 1, size) for key in stored})
        backwards = keys[::-1]
        for start in range(0, len(keys), self.capabilities.preferred_batch):
            batch = backwards[start : start + self.capabilities.preferred_batch]
            assert session.contains(batch) == [key in stored for key in batch]
            assert session.read(batch) == [make_frame(key, 1, size) if key in stored else None for key in batch]

    def test_a_key_twice_in_one_batch(self, session: Session) -> None:
        """Two requests may need one chunk in the same step; each gets a result."""
        key, absent, size = make_key(1), make_key(2), self.small
        session.put({key: make_frame(key, 1, size)})
        assert session.contains([key, absent, key]) == [True, False, True]
        requests = [ReadRequest(k, aligned_buffer(session.buffer_bytes)) for k in (key, absent, key)]
        assert session.read_into(requests) == [size, None, size]
        assert bytes(requests[0].buffer[:size]) == bytes(requests[2].buffer[:size]) == make_frame(key, 1, size)

    def test_absent_is_none(self, session: Session) -> None:
        """A miss is not an error."""
        assert session.get(make_key(1)) is None
        assert session.contains([make_key(1)]) == [False]

    def test_overwrite_replaces(self, session: Session) -> None:
        """After a second write no byte of the first is visible, also where the second is shorter or longer."""
        key = make_key(1)
        for version, size in enumerate([*self.sizes, *reversed(self.sizes)]):
            session.put({key: make_frame(key, version, size)})
            assert session.get(key) == make_frame(key, version, size)

    def test_delete_forgets(self, session: Session) -> None:
        """A deleted chunk is a miss, its neighbours are kept, and it can be stored again."""
        gone, kept, size = make_key(1), make_key(2), self.sizes[-1]
        session.put({key: make_frame(key, 1, size) for key in (gone, kept)})
        session.forget([gone])
        assert session.contains([gone, kept]) == [False, True]
        assert session.get(gone) is None
        assert session.get(kept) == make_frame(kept, 1, size)
        session.put({gone: make_frame(gone, 2, size)})
        assert session.get(gone) == make_frame(gone, 2, size)

    def test_delete_of_an_absent_key_is_fine(self, session: Session) -> None:
        """Two evictions may choose one victim."""
        session.put({make_key(1): make_frame(make_key(1), 1, self.small)})
        assert session.delete([make_key(2), make_key(1), make_key(2)]) == [None, None, None]
        assert session.delete([make_key(1)]) == [None]

    def test_odd_keys(self, session: Session) -> None:
        """Keys are opaque bytes: no value may be lost, leave the directory, or be taken for another."""
        size = self.small
        frames = {key: make_frame(key, 1, size) for key in ODD_KEYS}
        session.put(frames)
        assert session.read(ODD_KEYS) == list(frames.values())
        if self.capabilities.scan:
            assert session.scan() == dict.fromkeys(ODD_KEYS, size)
        session.forget(ODD_KEYS[:1])
        assert session.contains(ODD_KEYS) == [False] + [True] * (len(ODD_KEYS) - 1)

    def test_namespaces_are_apart(self, place: Path) -> None:
        """Chunks of another model under the same key are other chunks; both may be open at once (two ranks)."""
        self.need()
        key, size = make_key(1), self.small
        with self.open(place, model="one") as one, self.open(place, model="two") as two:
            one.put({key: make_frame(key, 1, size)})
            assert two.contains([key]) == [False]
            assert two.get(key) is None
            if self.capabilities.scan:
                assert two.scan() == {}
            two.put({key: make_frame(key, 2, size)})
            two.forget([make_key(2)])
            assert one.get(key) == make_frame(key, 1, size)
            one.forget([key])
            assert two.get(key) == make_frame(key, 2, size)

    def test_no_capacity_means_no_limit_of_ours(self, place: Path) -> None:
        """A configuration may set no capacity; then the space of the device is the bound."""
        self.need()
        context = dataclasses.replace(self.context(), capacity_bytes=None)
        with Session(self.plugin, context, self.make_options(place)) as session:
            session.put({make_key(1): make_frame(make_key(1), 1, self.small)})

    def test_read_only_refuses(self, place: Path) -> None:
        """A tier declared read_only reports an error instead of ignoring writes."""
        if not self.capabilities.read_only:
            self.not_applicable("does not declare read_only")
        with self.open(place) as session:
            attempts: list[Callable[[], list[WriteResult]]] = [
                lambda: session.write({make_key(1): b"\x00" * 4096}),
                lambda: session.delete([make_key(1)]),
            ]
            for attempt in attempts:
                try:
                    (result,) = attempt()
                except TierKVError as error:
                    result = error
                assert isinstance(result, TierKVError), "a read_only tier pretended to change something"
