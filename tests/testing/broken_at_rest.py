"""Broken tools at rest: listing, copying, removing, reading beside a writer. Each is plain_files, broken in one way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from broken_registry import noticed_by
from plain_files import SHARED, PlainFiles, PlainOptions, SharedPlainFiles

from tierkv.abc import AtRest, BackendContext, BackendPlugin, Entry, StoredNamespace, WriteRequest, WriteResult
from tierkv.abc.places import open_private
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

# -- the verbs that every tool uses ----------------------------------------------------------------------------------


@noticed_by("test_tools_list_and_verify_what_is_stored")
class ListsWithoutTheLast(PlainFiles):
    """Lists one chunk less than it has."""

    def scan(self) -> Iterable[Entry]:
        return list(super().scan())[:-1]


@noticed_by("test_tools_copy_chunks_out_and_back")
class KeepsItsFirstBatch(PlainFiles):
    """Forgets each batch but the first of an opening."""

    is_first = True

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        if not self.is_first:
            return [None] * len(requests)
        self.is_first = False
        return super().write(requests)


@noticed_by("test_tools_remove_chosen_chunks", "test_tools_find_and_remove_damage")
class DeletesTheNeighbours(PlainFiles):
    """Removes all chunks of a group of four for one of them."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        stored = [entry.key for entry in self.scan()]
        groups = {stored.index(key) // 4 for key in keys if key in stored}
        super().delete([key for number, key in enumerate(stored) if number // 4 in groups])
        return [None] * len(keys)


@noticed_by("test_tools_remove_down_to_a_size")
class ListsHalfOfEachLength(PlainFiles):
    """Tells lengths as the compressed file system has them, and not those of its frames."""

    def scan(self) -> Iterable[Entry]:
        return [Entry(entry.key, entry.frame_bytes // 2) for entry in super().scan()]


# -- what a plugin declares beyond the verbs -------------------------------------------------------------------------


class DescribedFiles(PlainFiles):
    """Keeps the description of its namespace, and room for later beside its files."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        describe(self.root, context.namespace)


class SharedDescribedFiles(SharedPlainFiles):
    """Described files for any number of processes."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        describe(self.root, context.namespace)


def describe(root: Path, namespace: Namespace) -> None:
    """Write what `namespaces` lists, and the room that `give_up_room` gives up."""
    for name, data in (("namespace.json", json.dumps(namespace.describe()).encode()), ("room", bytes(4096))):
        with open(root / name, "wb", opener=open_private) as file:
            file.write(data)


def namespaces(options: PlainOptions) -> Iterator[StoredNamespace]:
    """List by the descriptions."""
    for path in sorted(Path(options.path).glob("*/namespace.json")):
        yield StoredNamespace(Namespace.from_description(json.loads(path.read_text())))


def remove_namespace(options: PlainOptions, namespace: Namespace) -> None:
    """Remove the namespace's folder."""
    shutil.rmtree(Path(options.path) / namespace.fingerprint().hex())


def give_up_room(context: BackendContext, options: PlainOptions) -> int:
    """Remove the room."""
    room = Path(options.path) / context.namespace.fingerprint().hex() / "room"
    given = room.stat().st_size if room.exists() else 0
    room.unlink(missing_ok=True)
    return given


def open_reader(context: BackendContext, options: PlainOptions) -> SharedPlainFiles:
    """Open beside the writer: the files need no lock to be read."""
    return SharedDescribedFiles(context, options)


AT_REST = AtRest(namespaces, open_reader, remove_namespace, give_up_room)
AT_REST_PLUGIN = BackendPlugin(
    "plain-shared", "one file per chunk", PlainOptions, SHARED, SharedDescribedFiles, at_rest=AT_REST
)
"""The unbroken one, which must pass."""


def hide_namespaces(_options: PlainOptions) -> list[StoredNamespace]:
    """List nothing."""
    return []


def remove_everything(options: PlainOptions, _namespace: Namespace) -> None:
    """Remove the whole place."""
    shutil.rmtree(options.path)


def give_up_too_much(context: BackendContext, options: PlainOptions) -> int:
    """Give up a chunk with the room."""
    next((Path(options.path) / context.namespace.fingerprint().hex()).glob("*.frame")).unlink(missing_ok=True)
    return give_up_room(context, options)


@noticed_by("test_namespaces_are_listed_by_their_descriptions", at_rest=replace(AT_REST, namespaces=hide_namespaces))
class HidesItsNamespaces(DescribedFiles):
    """Lists nothing."""


@noticed_by(
    "test_a_namespace_is_removed_with_its_storage", at_rest=replace(AT_REST, remove_namespace=remove_everything)
)
class RemovesEveryNamespace(DescribedFiles):
    """Removes all that is there for one namespace."""


@noticed_by("test_room_is_given_up_without_a_chunk", at_rest=replace(AT_REST, give_up_room=give_up_too_much))
class GivesUpAChunk(DescribedFiles):
    """Loses a chunk with the free room."""


@noticed_by("test_a_reader_works_beside_the_writer", at_rest=AT_REST)
class LetsReadersDelete(DescribedFiles):
    """Opens for reading what can write, beside a process that relies on its own index."""
