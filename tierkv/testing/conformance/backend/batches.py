"""Kit: batches and results. A result belongs to its key by its position, and a batch belongs to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_buffer, aligned_copy, make_frame, make_key
from tierkv.types.keys import Key

T = TypeVar("T")


class Batch(Sequence[T]):
    """Sequence that is neither list nor tuple, and cannot be changed, sorted or extended."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Batch[T]: ...

    def __getitem__(self, index: int | slice) -> T | Batch[T]:
        """Return an item, or a slice."""
        return Batch(self._items[index]) if isinstance(index, slice) else self._items[index]

    def __len__(self) -> int:
        """Number of items."""
        return len(self._items)


class BatchTests(KitBase):
    """Sizes, types and ownership of batches and results."""

    def test_batches_of_every_size(self, session: Session) -> None:
        """The framework sends batches of one key up to the preferred batch: no size may be special."""
        size, largest = self.small, self.capabilities.preferred_batch
        for count in sorted({*range(1, min(largest, 16) + 1), *(min(largest, 1 << n) for n in range(4, 12)), largest}):
            keys = [make_key(1000 * count + number) for number in range(count)]
            session.put({key: make_frame(key, count, size) for key in keys})
            assert session.contains(keys) == [True] * count
            assert session.read(keys) == [make_frame(key, count, size) for key in keys]
            session.forget(keys)
            assert session.contains(keys) == [False] * count

    def test_frames_of_many_lengths_in_one_batch(self, session: Session) -> None:
        """Codecs give frames different lengths: a batch must not give a frame its neighbour's length."""
        sizes = [*self.sizes, *reversed(self.sizes)]
        frames = {make_key(number): make_frame(make_key(number), 1, size) for number, size in enumerate(sizes)}
        session.put(frames)
        assert session.read(list(frames)) == list(frames.values())

    def test_old_and_new_keys_in_one_batch(self, session: Session) -> None:
        """A batch of writes may replace some chunks and add others; afterwards both are stored."""
        count = max(2, min(self.capabilities.preferred_batch, 6))
        keys = [make_key(number) for number in range(count)]
        session.put({key: make_frame(key, 1, self.sizes[-1]) for key in keys[::2]})
        session.put({key: make_frame(key, 2, self.small) for key in keys})
        assert session.read(keys) == [make_frame(key, 2, self.small) for key in keys]

    def test_a_key_twice_in_one_write(self, session: Session) -> None:
        """Two requests may finish one chunk in the same step: one of the two frames is stored, intact, and once."""
        key, other, size = make_key(1), make_key(2), self.sizes[-1]
        written = [make_frame(key, version, size) for version in (1, 2)]
        requests = [WriteRequest(key, aligned_copy(frame).toreadonly()) for frame in written]
        requests.insert(1, WriteRequest(other, aligned_copy(make_frame(other, 1, size)).toreadonly()))
        for start in range(0, 3, max(1, self.capabilities.preferred_batch)):
            batch = requests[start : start + self.capabilities.preferred_batch]
            assert session.write_requests(batch) == [None] * len(batch)
        assert session.get(key) in written
        assert session.get(other) == make_frame(other, 1, size)
        if self.capabilities.scan:
            assert session.scan() == {key: size, other: size}
        session.forget([key])
        assert session.contains([key]) == [False], "the second frame of the batch came to light"

    def test_any_sequence_is_a_batch(self, session: Session) -> None:
        """A batch is only promised to be a sequence: a backend may not need a list."""
        key, size = make_key(1), self.small
        request = ReadRequest(key, aligned_buffer(session.buffer_bytes))
        frame = aligned_copy(make_frame(key, 1, size)).toreadonly()
        for kind in (Batch, tuple, list):
            assert session.write_requests(kind([WriteRequest(key, frame)])) == [None]
            assert session.contains(kind([key])) == [True]
            assert session.read_into(kind([request])) == [size]
            assert session.delete(kind([key])) == [None]

    def test_batches_are_left_as_they_were(self, session: Session) -> None:
        """The framework retries from the list that it passed: a backend may neither shorten nor sort it."""
        keys: list[Key] = [make_key(number) for number in (3, 1, 2)][: max(1, self.capabilities.preferred_batch)]
        writes = [WriteRequest(key, aligned_copy(make_frame(key, 1, self.small)).toreadonly()) for key in keys]
        reads = [ReadRequest(key, aligned_buffer(session.buffer_bytes)) for key in keys]
        before = [list(keys), list(writes), list(reads)]
        session.write_requests(writes)
        session.contains(keys)
        session.read_into(reads)
        session.delete(keys)
        assert [keys, writes, reads] == before

    def test_results_belong_to_the_caller(self, session: Session) -> None:
        """A later call must not change the result of an earlier one: results of many calls are read together."""
        present, absent = make_key(1), make_key(2)
        session.put({present: make_frame(present, 1, self.small)})
        first = session.backend_call("contains", [present])
        second = session.backend_call("contains", [absent])
        assert (list(first), list(second)) == ([True], [False]), "an answer changed after it was given"
        read = session.backend_call("read_into", [ReadRequest(present, aligned_buffer(session.buffer_bytes))])
        missed = session.backend_call("read_into", [ReadRequest(absent, aligned_buffer(session.buffer_bytes))])
        assert (list(read), list(missed)) == ([self.small], [None]), "an answer changed after it was given"
