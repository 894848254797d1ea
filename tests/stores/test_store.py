"""The open store: opening without a stack, checked reads, second looks, foreign backends that break their contract."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filled_stores import FRAME_BYTES, chunk_key, fill, model_namespace, place_at, sealed_frame

from tierkv.abc import StoredFrame, WriteRequest
from tierkv.errors import BackendUnavailableError, CorruptFrameError, NoThreadError, TierKVError
from tierkv.stores.places import Place
from tierkv.stores.store import Store
from tierkv.stores.verification import Verified, verify_store

NAMESPACE = model_namespace()
NO_THREAD = r"thread '{}' cannot be started beside \d+ others .*ulimit -u"


def refuse(_thread: threading.Thread) -> None:
    """Refuse a thread as the system does."""
    raise RuntimeError("can't start new thread")


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    """A disk with ten chunks."""
    place = place_at(tmp_path / "disk", "disk")
    fill(place, NAMESPACE, range(10))
    return place


def test_a_store_for_writing_is_refused_while_a_process_has_it(disk: Place) -> None:
    """A tool that changed an engine's files under it would break the engine; the error says which process it is."""
    with Store(disk, NAMESPACE, writes=True):
        with pytest.raises(BackendUnavailableError, match="in use by this process"):
            Store(disk, NAMESPACE, writes=True)
        with Store(disk, NAMESPACE, writes=False) as reader:
            assert len(list(reader.list_frames())) == 10


def test_a_chunk_that_its_owner_replaced_is_no_damage(disk: Place) -> None:
    """Beside an engine a listing is old at once: pages with another chunk are looked at again, not reported."""
    with Store(disk, NAMESPACE, writes=True) as owner:
        reader = Store(disk, NAMESPACE, writes=False)
        with reader:
            listed = [each for each in reader.list_frames() if isinstance(each, StoredFrame)]
            assert owner.delete([chunk_key(number) for number in range(10)]) == [None] * 10
            # Pages are used again in another order, so old places hold chunks with other keys.
            for number in reversed(range(10, 20)):
                assert owner.write([WriteRequest(chunk_key(number), sealed_frame(NAMESPACE, number))]) == [None]
            found = {each.listed.key: each for batch in reader.read_all(listed) for each in batch}
    assert len(found) == 10
    assert all(each.error is None and each.header is None for each in found.values())


def test_frames_of_another_namespace_are_damage(disk: Place) -> None:
    """A file of another model under this name would be wrong bytes."""
    other = model_namespace(dtype="float16")
    fill(disk, other, range(1))
    with Store(disk, other, writes=True) as store, Store(disk, NAMESPACE, writes=False) as mine:
        frame = mine.read_one(StoredFrame(chunk_key(3), FRAME_BYTES))
        assert frame.header is not None
        assert store.write([store.for_write(chunk_key(3), frame.frame, frame.header, 0)]) == [None]
        found = store.read_one(StoredFrame(chunk_key(3), FRAME_BYTES))
    assert isinstance(found.error, CorruptFrameError)
    assert "namespace" in str(found.error)


class Unruly:
    """A backend that breaks its contract in every verb."""

    def contains(self, keys: Sequence[bytes]) -> list[Any]:
        return [1] * len(keys)

    def read_into(self, requests: Sequence[Any]) -> list[Any]:
        raise RuntimeError("out of order")

    def write(self, requests: Sequence[Any]) -> list[Any]:
        return []

    def delete(self, keys: Sequence[bytes]) -> None:
        return None

    def list_frames(self, *, keys: bool) -> list[StoredFrame]:
        return [StoredFrame(chunk_key(1), 10)]

    def close(self) -> None: ...


def test_a_backend_that_breaks_its_contract_gives_named_errors(disk: Place) -> None:
    """Third-party backends are used by these tools as well: their faults are lines for the user, never tracebacks."""
    plugin = replace(disk.backend, open=lambda _context, _options: Unruly(), at_rest=None)
    with Store(replace(disk, backend=plugin), NAMESPACE, writes=True) as store:
        for result in (store.contains([chunk_key(1)]), store.delete([chunk_key(1)])):
            assert isinstance(result[0], TierKVError)
        findings = list(verify_store(store, Verified()))
    assert [(finding.kind.value, "out of order" in finding.reason) for finding in findings] == [("unreadable", True)]


def test_a_thread_that_the_system_refuses_is_named(disk: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tierkv verify` in a container at its limit of threads ended with a bare "can't start new thread"."""

    async def contains(_keys: object) -> list[bool]:
        return []

    remote = replace(disk.backend, open=lambda _context, _options: SimpleNamespace(contains=contains), at_rest=None)
    with Store(disk, NAMESPACE, writes=False) as store:
        listed = [each for each in store.list_frames() if isinstance(each, StoredFrame)]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(NoThreadError, match=NO_THREAD.format("tierkv-disk")):
                store.read_one(listed[0])
            with pytest.raises(NoThreadError, match=NO_THREAD.format("tierkv-store-loop")):
                Store(replace(disk, backend=remote), NAMESPACE, writes=True)
