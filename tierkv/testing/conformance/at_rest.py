"""Kit: the backend at rest, under the tools that list, check, move and remove what it keeps, without a stack.

The tools use the verbs and a listing (``scan``, or ``list_frames``), so every backend has them. What a plugin declares
in ``at_rest`` beyond that is tested as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tierkv.abc import AtRest, StoredFrame, StoredNamespace, SupportsListing, WriteRequest, recognise_nothing
from tierkv.errors import TierKVError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.plugins.origins import Origin
from tierkv.stores.copying import Copied, StoreCopy
from tierkv.stores.findings import FindingKind
from tierkv.stores.places import Place, folder_place
from tierkv.stores.removal import Removed, chosen_frames, collect, plan_collection, remove_chunks
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import Store, context_of
from tierkv.stores.verification import Verified, verify_store
from tierkv.testing import raw as raws
from tierkv.testing.conformance.crash import Orders, held_elsewhere
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.frames import aligned_buffer
from tierkv.types.keys import Key, make_key, make_scope, tenant_of_salt
from tierkv.types.namespace import Namespace

CHUNKS = 12
SALT = "customer"


class AtRestTests(KitBase):
    """Tools on a store without a stack."""

    def test_tools_list_and_verify_what_is_stored(self, place: Path) -> None:
        """An operator asks what a tier keeps, and whether it is whole: every chunk is found once, and passes."""
        self._stored_chunks(place)
        with self._tool_store(place, writes=False) as store:
            listed = [frame for frame in store.list_frames() if isinstance(frame, StoredFrame)]
            assert sorted(frame.key or b"" for frame in listed) == sorted(chunk_keys())
            assert {frame.frame_bytes for frame in listed} == {self._sealed_bytes}
            without_keys = [frame for frame in store.list_frames(keys=False) if isinstance(frame, StoredFrame)]
            assert sum(frame.frame_bytes for frame in without_keys) == CHUNKS * self._sealed_bytes
            sums = Verified()
            assert list(verify_store(store, sums)) == []
            assert (sums.chunks, sums.frame_bytes) == (CHUNKS, CHUNKS * self._sealed_bytes)

    def test_tools_copy_chunks_out_and_back(self, place: Path, tmp_path: Path) -> None:
        """A tier is moved to another machine as a folder: every byte arrives, and a repeated copy has nothing to do."""
        self._stored_chunks(place)
        folder = folder_place(str(tmp_path / "folder"))
        new = place.with_name("new-place")
        with self._tool_store(place, writes=False) as source, Store(folder, self._kit_namespace, writes=True) as target:
            sums = Copied()
            assert list(StoreCopy(source, target, folder, sums).run()) == []
            assert (sums.chunks, sums.present) == (CHUNKS, 0)
        with Store(folder, self._kit_namespace, writes=False) as source, self._tool_store(new, writes=True) as target:
            for copied, present in ((CHUNKS, 0), (0, CHUNKS)):
                sums = Copied()
                assert list(StoreCopy(source, target, self._tool_place(new), sums).run()) == []
                assert (sums.chunks, sums.present) == (copied, present)
        with self._tool_store(new, writes=False) as store:
            frames = [StoredFrame(key, 0) for key in chunk_keys()]
            read = {found.listed.key: found for batch in store.read_all(frames) for found in batch}
            for key in chunk_keys():
                assert read[key].header is not None, read[key].error
            last = store.read_one(StoredFrame(chunk_keys()[-1], 0))
            assert bytes(last.frame) == self._sealed(CHUNKS - 1)

    def test_tools_remove_chosen_chunks(self, place: Path) -> None:
        """A customer leaves: the chunks of that tenant go, all of them, and no other."""
        self._stored_chunks(place)
        mine = [key for number, key in enumerate(chunk_keys()) if number % 2]
        with self._tool_store(place, writes=True) as store:
            sums = Removed()
            chosen = ChunkFilter(tenant=tenant_of_salt(SALT))
            assert list(remove_chunks(store, chosen_frames(store, chosen, sums), sums, dry_run=True)) == []
            assert sums.chunks == len(mine)
            assert store.contains(chunk_keys()) == [True] * CHUNKS
            assert list(remove_chunks(store, chosen_frames(store, chosen, sums), sums, dry_run=False)) == []
            assert store.contains(chunk_keys()) == [key not in mine for key in chunk_keys()]

    def test_tools_remove_down_to_a_size(self, place: Path) -> None:
        """A disk is too full: chunks go until the rest has the wished size, and not one more."""
        self._stored_chunks(place)
        where, stored = self._tool_place(place), StoredNamespace(self._kit_namespace)
        plan = plan_collection([(where, stored)], 5 * self._sealed_bytes)
        sums = Removed()
        assert list(collect(where, stored, plan, sums, dry_run=False)) == []
        with self._tool_store(place, writes=False) as store:
            assert sum(map(bool, store.contains(chunk_keys()))) == 5
        assert sums.chunks == CHUNKS - 5

    def test_tools_find_and_remove_damage(self, place: Path) -> None:
        """A device damages a chunk at rest: verification names that one, and a repair removes it, and no other."""
        self.need_raw()
        self._stored_chunks(place)
        hurt = chunk_keys()[3]
        raw = self.raw(place, context_of(self._tool_place(place), self._kit_namespace))
        raws.flip(lambda length: length - 1 if length < 2 * HEADER_BYTES else 2 * HEADER_BYTES - 1)(raw, hurt)
        with self._tool_store(place, writes=False) as store:
            findings = list(verify_store(store, Verified()))
        assert [(finding.kind, finding.subject) for finding in findings] == [(FindingKind.DAMAGED, hurt.hex())]
        with self._tool_store(place, writes=True) as store:
            sums = Verified()
            assert [finding.action for finding in verify_store(store, sums, repair=True)] == ["removed"]
            assert sums.removed == 1
        with self._tool_store(place, writes=False) as store:
            assert list(verify_store(store, Verified())) == []
            assert store.contains(chunk_keys()) == [key != hurt for key in chunk_keys()]

    def test_namespaces_are_listed_by_their_descriptions(self, place: Path) -> None:
        """Tools name what is stored by its model; a listing that opens or locks a namespace would disturb an engine."""
        at_rest = self._at_rest()
        self._stored_chunks(place)
        other = self.context("another-model").namespace
        with Store(self._tool_place(place), other, writes=True) as store:
            self._store_frames(store, {chunk_keys()[0]: self._sealed_for(chunk_keys()[0], 0, other)})
            listed = list(at_rest.namespaces(self.make_options(place)))
        found = {each.namespace for each in listed if isinstance(each, StoredNamespace)}
        assert found == {self._kit_namespace, other}, listed

    def test_a_namespace_is_removed_with_its_storage(self, place: Path) -> None:
        """A model is no longer served: its namespace goes, and the other one keeps its chunks."""
        remove = self._at_rest().remove_namespace
        if remove is None:
            self.not_applicable("at_rest has no remove_namespace")
        self._stored_chunks(place)
        other = self.context("another-model").namespace
        with Store(self._tool_place(place), other, writes=True) as store:
            self._store_frames(store, {chunk_keys()[0]: self._sealed_for(chunk_keys()[0], 0, other)})
        remove(self.make_options(place), other)
        listed = list(self._at_rest().namespaces(self.make_options(place)))
        assert [each.namespace for each in listed if isinstance(each, StoredNamespace)] == [self._kit_namespace]
        with self._tool_store(place, writes=False) as store:
            assert store.contains(chunk_keys()) == [True] * CHUNKS

    def test_room_is_given_up_without_a_chunk(self, place: Path) -> None:
        """Files give free room back to the file system; a chunk that went with it would be a loss."""
        give_up_room = self._at_rest().give_up_room
        if give_up_room is None:
            self.not_applicable("at_rest has no give_up_room")
        self._stored_chunks(place)
        context = context_of(self._tool_place(place), self._kit_namespace)
        assert give_up_room(context, self.make_options(place)) > 0
        assert give_up_room(context, self.make_options(place)) == 0
        with self._tool_store(place, writes=False) as store:
            assert list(verify_store(store, Verified())) == []
            assert store.contains(chunk_keys()) == [True] * CHUNKS

    def test_a_reader_works_beside_the_writer(self, place: Path) -> None:
        """Tools look at a tier while its engine serves: they see its chunks, change nothing, and do not disturb it."""
        if self._at_rest().open_reader is None:
            self.not_applicable("at_rest has no open_reader")
        self._stored_chunks(place)
        context = context_of(self._tool_place(place), self._kit_namespace)
        orders = Orders(self.plugin, replace(context, recognise_frame=recognise_nothing), self.make_options(place), ())
        with held_elsewhere(orders) as error:
            assert not error
            with self._tool_store(place, writes=False) as reader:
                assert list(verify_store(reader, Verified())) == []
                if not self.capabilities.shared:
                    refused = reader.delete(chunk_keys()[:1])
                    assert isinstance(refused[0], TierKVError), "a reader has deleted a chunk of the writer"
            listed = list(self._at_rest().namespaces(self.make_options(place)))
            if self.capabilities.authoritative_index:
                users = [each.in_use_by for each in listed if isinstance(each, StoredNamespace)]
                assert any(users), "nothing says which process has the namespace open"
        with self._tool_store(place, writes=True) as writer:
            assert writer.contains(chunk_keys()) == [True] * CHUNKS

    # Helpers of these tests.

    @property
    def _kit_namespace(self) -> Namespace:
        return self.context().namespace

    @property
    def _sealed_bytes(self) -> int:
        return frame_bytes(self._kit_namespace.payload_bytes_max)

    def _at_rest(self) -> AtRest:
        self.need()
        if self.plugin.at_rest is None:
            self.not_applicable("the plugin declares no at_rest")
        return self.plugin.at_rest

    def _tool_place(self, place: Path) -> Place:
        options = self.make_options(place)
        capacity = None if self.capabilities.shared else self.capacity_bytes
        return Place(self.plugin.name, str(place), self.plugin, options, Origin("conformance"), capacity)

    def _tool_store(self, place: Path, *, writes: bool) -> Store:
        return Store(self._tool_place(place), self._kit_namespace, writes=writes)

    def _stored_chunks(self, place: Path) -> None:
        """Write the chunks; skip if nothing could list them, or if they end with this process."""
        self.need()
        if not (self.capabilities.durable or self.capabilities.shared):
            self.not_applicable("declares neither durable nor shared: another process finds nothing")
        with self._tool_store(place, writes=True) as store:
            if not self.capabilities.scan and not isinstance(store.backend, SupportsListing):
                self.not_applicable("it has neither scan nor list_frames")
            self._store_frames(store, {key: self._sealed(number) for number, key in enumerate(chunk_keys())})

    def _store_frames(self, store: Store, frames: dict[Key, bytes]) -> None:
        requests = []
        for key, frame in frames.items():
            buffer = aligned_buffer(len(frame))
            buffer[:] = frame
            requests.append(WriteRequest(key, buffer.toreadonly()))
        assert store.write(requests) == [None] * len(frames)

    def _sealed(self, number: int) -> bytes:
        return self._sealed_for(chunk_keys()[number], number, self._kit_namespace)

    def _sealed_for(self, key: Key, number: int, namespace: Namespace) -> bytes:
        """Return a sealed frame, as a tier would write it."""
        size = namespace.payload_bytes_max
        slot = aligned_buffer(self._sealed_bytes)
        slot[HEADER_BYTES : HEADER_BYTES + size] = bytes([number + 1]) * size
        FrameSealer(namespace.fingerprint()).seal(slot, key, size)
        return bytes(slot)


def chunk_keys() -> list[Key]:
    """Return the keys of the stored chunks: every second one belongs to a tenant."""
    scopes = (make_scope(None, None), make_scope(SALT, None))
    return [make_key(number.to_bytes(32, "big"), 0, scopes[number % 2]) for number in range(CHUNKS)]
