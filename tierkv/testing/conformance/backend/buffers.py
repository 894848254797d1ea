"""Kit: buffers. They are slots of an arena shared with other chunks, and belong to the caller outside of a call."""

from __future__ import annotations

import gc
import mmap
import time

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_buffer, aligned_copy, make_frame, make_key

UNMAP_ATTEMPTS = 50


class BufferTests(KitBase):
    """Ownership of buffers."""

    def test_buffers_belong_to_the_caller(self, session: Session) -> None:
        """The slot of a write is reused as soon as the write has returned: no stored frame may refer to it."""
        key, size = make_key(1), self.sizes[-1]
        buffer = aligned_copy(make_frame(key, 1, size))
        assert session.write_requests([WriteRequest(key, buffer.toreadonly())]) == [None]
        buffer[:] = b"\xaa" * size
        assert session.get(key) == make_frame(key, 1, size)
        request = ReadRequest(key, aligned_buffer(session.buffer_bytes))
        assert session.read_into([request]) == [size]
        request.buffer[:] = b"\xbb" * len(request.buffer)
        assert session.get(key) == make_frame(key, 1, size)

    def test_no_buffer_is_kept(self, session: Session) -> None:
        """A view that a backend keeps prevents the arena from being unmapped at close."""
        key, size = make_key(1), self.small
        frame, buffer = aligned_copy(make_frame(key, 1, size)), aligned_buffer(session.buffer_bytes)
        session.write_requests([WriteRequest(key, frame[:])])
        session.read_into([ReadRequest(key, buffer[:])])
        self._is_free("write", frame)
        self._is_free("read_into", buffer)

    def test_no_buffer_is_kept_by_a_miss(self, session: Session) -> None:
        """A kept error keeps the frames of its traceback, and those keep the buffer, for ever after one miss."""
        buffer = aligned_buffer(session.buffer_bytes)
        assert session.read_into([ReadRequest(make_key(1), buffer[:])]) == [None]
        self._is_free("read_into of an absent key", buffer)

    def test_reads_stay_inside_their_buffer(self, session: Session) -> None:
        """Slots are adjacent: a byte before or behind the buffer belongs to another chunk."""
        key = make_key(1)
        length = session.buffer_bytes
        slots = aligned_buffer(3 * length)
        for size in self.sizes:
            session.put({key: make_frame(key, 1, size)})
            slots[:] = b"\x5a" * len(slots)
            assert session.read_into([ReadRequest(key, slots[length : 2 * length])]) == [size]
            assert bytes(slots[length : length + size]) == make_frame(key, 1, size)
            assert bytes(slots[:length]) == b"\x5a" * length, "a read wrote before its buffer"
            assert bytes(slots[2 * length :]) == b"\x5a" * length, "a read wrote behind its buffer"

    def test_frames_are_not_changed_by_a_write(self, session: Session) -> None:
        """The slot stays readable in the host tier while it is written below: it must not be changed in place."""
        key, size = make_key(1), self.sizes[-1]
        source = aligned_copy(make_frame(key, 1, size))
        assert session.write_requests([WriteRequest(key, source.toreadonly())]) == [None]
        assert bytes(source) == make_frame(key, 1, size)

    def test_a_buffer_longer_than_any_frame(self, session: Session) -> None:
        """Slots are rounded up: a read returns the length of the frame, not of the buffer."""
        key = make_key(1)
        for size in self.sizes:
            session.put({key: make_frame(key, 1, size)})
            buffer = aligned_buffer(2 * session.buffer_bytes)
            assert session.read_into([ReadRequest(key, buffer)]) == [size]
            assert bytes(buffer[:size]) == make_frame(key, 1, size)

    def test_what_was_in_the_buffer_does_not_matter(self, session: Session) -> None:
        """A slot contains the bytes of its previous chunk: none of them may appear in a read."""
        key = make_key(1)
        for size in self.sizes:
            session.put({key: make_frame(key, 1, size)})
            for filling in (b"\x00", b"\xff", b"\x5a"):
                buffer = aligned_buffer(session.buffer_bytes)
                buffer[:] = filling * len(buffer)
                assert session.read_into([ReadRequest(key, buffer)]) == [size]
                assert bytes(buffer[:size]) == make_frame(key, 1, size), f"over {filling!r}"

    @staticmethod
    def _is_free(verb: str, view: memoryview) -> None:
        memory = view.obj
        assert isinstance(memory, mmap.mmap)
        view.release()
        assert _can_be_unmapped(memory), f"{verb} returned, and something still holds a view of its buffer"


def _can_be_unmapped(memory: mmap.mmap) -> bool:
    """Whether every view is released. A loop may need a moment to drop a finished call, and cycles a collection."""
    for attempt in range(UNMAP_ATTEMPTS):
        if attempt % 10 == 0:
            gc.collect()
        try:
            memory.close()
        except BufferError:
            time.sleep(0.01)
        else:
            return True
    return False
