"""Export folder: chunks of any tier as files, with a manifest. A place like any other, for backups and moves.

::

    <folder>/tierkv-export.json            the manifest
    <folder>/<fingerprint>/<2 hex>/<32 hex>.frame   one frame, named by a digest of its key

The manifest describes each namespace, and says how many chunks and bytes a complete export of it has. Frames are
written under a temporary name and renamed, so a file with its final name is whole. The next copy to the folder
continues an interrupted one. It is no tier: nothing evicts from it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tierkv.abc import (
    AtRest,
    BackendContext,
    BackendPlugin,
    Capabilities,
    CheckResult,
    DamagedEntry,
    FrameRecogniser,
    ReadRequest,
    ReadResult,
    StoredFrame,
    StoredNamespace,
    WriteRequest,
    WriteResult,
)
from tierkv.abc.places import (
    absolute_path,
    exists,
    make_private_directory,
    open_private,
    read_short_file,
    why_not_writable,
)
from tierkv.errors import BackendError, NamespaceMismatchError, OutOfSpaceError, TierKVError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

MANIFEST = "tierkv-export.json"
FORMAT = "tierkv-export"
VERSION = 1
_DIGEST_BYTES = 16
_NAME = re.compile(r"[0-9a-f]{32}\.frame")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
STALE_S = 3600.0
"""Age in seconds at which a temporary file is taken for one of a process that was killed."""
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Options of an export folder."""

    path: str
    """The folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_path(self.path))


@dataclass(frozen=True, slots=True)
class Exported:
    """Entry of the manifest about one namespace."""

    namespace: Namespace
    """Its description."""
    chunks: int | None = None
    """Chunks of the complete export; None: it was interrupted."""
    frame_bytes: int | None = None
    """Bytes of their frames."""


def is_folder(path: Path) -> bool:
    """Whether a directory is an export folder, as far as it can be looked into."""
    return os.path.isfile(path / MANIFEST)  # noqa: PTH113  unlike Path.is_file, False where access is refused


def read_manifest(path: Path) -> list[Exported]:
    """Return the namespaces of an export folder; none if it has no manifest yet.

    Raises:
        BackendError: the manifest is damaged, of a newer version, or cannot be read.
    """
    file = path / MANIFEST
    try:
        found = json.loads(read_short_file(file))
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise BackendError(
                f"{file} has format {found['format']!r}, version {found['version']!r}; {VERSION} is known"
            )
        return [
            Exported(Namespace.from_description(each["namespace"]), _count(each["chunks"]), _count(each["frame_bytes"]))
            for each in found["namespaces"]
        ]
    except FileNotFoundError:
        return []
    except TierKVError:
        raise
    except OSError as error:
        raise BackendError(f"{file}: {error.strerror or error}") from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise BackendError(f"{file} is damaged ({error}): copy to a new folder, or restore this file") from error


def _count(value: object) -> int | None:
    """Return a count of the manifest.

    Raises:
        ValueError: it is none.
    """
    if value is None or (type(value) is int and value >= 0):
        return value
    raise ValueError(f"{value!r:.40} is no count")


def note_export(path: Path, exported: Exported) -> None:
    """Add a namespace to the manifest, or replace what it says about it.

    Raises:
        BackendError: it cannot be read or written.
    """
    if exported not in read_manifest(path):  # a complete export on a read-only disk is copied to without a change
        _write_manifest(path, [*_others(path, exported.namespace), exported])


def note_removal(path: Path, namespace: Namespace, chunks: int, frame_bytes: int) -> None:
    """Take chunks that are to be removed on purpose out of the manifest's sums, so that they are not missed later.

    It is called before the removal: if that is killed, the manifest has fewer chunks than there are, and
    :func:`restore_sums` corrects it.

    Args:
        path: of the folder.
        namespace: whose chunks.
        chunks: their number; below zero: chunks that stay after all.
        frame_bytes: bytes of their frames.

    Raises:
        BackendError: it cannot be read or written.
    """
    for each in read_manifest(path):
        if each.namespace == namespace and each.chunks is not None and each.frame_bytes is not None:
            left = max(0, each.chunks - chunks), max(0, each.frame_bytes - frame_bytes)
            note_export(path, Exported(namespace, *left))


def restore_sums(path: Path, namespace: Namespace, chunks: int, frame_bytes: int) -> None:
    """Correct a manifest that has fewer chunks than there are, since a removal was killed.

    Args:
        path: of the folder.
        namespace: whose chunks.
        chunks: their number, as listed.
        frame_bytes: bytes of their frames.

    Raises:
        BackendError: it cannot be read or written.
    """
    for each in read_manifest(path):
        if each.namespace == namespace and each.chunks is not None and each.chunks < chunks:
            note_export(path, Exported(namespace, chunks, frame_bytes))


def _others(path: Path, namespace: Namespace) -> list[Exported]:
    fingerprint = namespace.fingerprint()
    return [each for each in read_manifest(path) if each.namespace.fingerprint() != fingerprint]


def _write_manifest(path: Path, exports: list[Exported]) -> None:
    rows = [
        {
            "fingerprint": each.namespace.fingerprint().hex(),
            "namespace": each.namespace.describe(),
            "chunks": each.chunks,
            "frame_bytes": each.frame_bytes,
        }
        for each in exports
    ]
    text = json.dumps({"format": FORMAT, "version": VERSION, "namespaces": rows}, indent=1)
    _tried(path / MANIFEST, lambda: _publish(path / MANIFEST, memoryview(text.encode())))


def _tried(path: Path, action: Callable[[], T], key: Key | None = None) -> T:
    """Run an action on a file; its OSError becomes a BackendError that names the file."""
    try:
        return action()
    except TierKVError:
        raise
    except OSError as error:
        kind = OutOfSpaceError if error.errno in _FULL else BackendError
        fix = "; give a folder that this user can write" if error.errno in _REFUSED else ""
        raise kind(f"{path}: {error.strerror or error}{fix}", tier=FOLDER.name, key=key) from error


def _publish(path: Path, data: memoryview) -> None:
    """Write a file under a temporary name, force it to the device, and rename it."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=open_private) as file:
            file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            temporary.unlink(missing_ok=True)
        raise


class FolderBackend:
    """Chunks of one namespace in an export folder. One process writes at a time; any threads.

    Args:
        context: gives the namespace.
        options: gives the folder.
        writes: whether frames are written or deleted; otherwise nothing is created.

    Raises:
        NamespaceMismatchError: the folder holds other files.
        BackendError: it cannot be used.
    """

    def __init__(self, context: BackendContext, options: FolderOptions, *, writes: bool = True) -> None:
        self._root = Path(options.path)
        self._tier = context.tier
        self._recognise: FrameRecogniser = context.recognise_frame
        self._directory = self._root / context.namespace.fingerprint().hex()
        if writes:
            _tried(self._root, lambda: self._prepare(context.namespace))

    def _prepare(self, namespace: Namespace) -> None:
        self._make_root()
        if not is_folder(self._root):
            foreign = next((each.name for each in self._root.iterdir() if not _TEMPORARY.fullmatch(each.name)), None)
            if foreign is not None:
                raise NamespaceMismatchError(
                    f"{self._root} holds {foreign!r} and no {MANIFEST}: give a new or empty folder, or an export",
                    tier=self._tier,
                )
            _write_manifest(self._root, [])
        make_private_directory(self._directory)
        for file in self._directory.glob("*/.*.tmp"):  # of a copy that was killed; another one may run now
            if _TEMPORARY.fullmatch(file.name) and time.time() - file.stat().st_mtime > STALE_S:
                file.unlink(missing_ok=True)
        fingerprint = namespace.fingerprint()
        if all(each.namespace.fingerprint() != fingerprint for each in read_manifest(self._root)):
            note_export(self._root, Exported(namespace))

    def _make_root(self) -> None:
        try:
            make_private_directory(self._root)
        except OSError as error:
            if error.errno in _FULL | _REFUSED:
                raise
            fault = f"{self._root}: no folder can be made there ({error.strerror or error}); give another one"
            raise BackendError(fault, tier=self._tier) from error

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a file."""
        return [self._path(key).is_file() for key in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read each file into its buffer."""
        return [self._one(self._read, request.key, request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Write each frame to a file of its own."""
        return [self._one(self._write, request.key, request) for request in requests]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Remove each file; an absent one is no error."""
        return [self._one(lambda key: self._path(key).unlink(missing_ok=True), key, key) for key in keys]

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame | DamagedEntry]:
        """Yield every file; a key costs a read of its first page."""
        try:
            with os.scandir(self._directory) as entries:
                folders = sorted(each.path for each in entries if each.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return
        except OSError as error:
            raise BackendError(f"{self._directory}: {error.strerror or error}", tier=self._tier) from error
        for folder in folders:
            with os.scandir(folder) as files:
                for entry in files:
                    if _NAME.fullmatch(entry.name) and (found := self._listed(Path(entry.path), keys=keys)) is not None:
                        yield found

    def close(self) -> None:
        """Release nothing: no file stays open."""

    def _listed(self, path: Path, *, keys: bool) -> StoredFrame | DamagedEntry | None:
        try:
            status = path.stat()
            if not keys:
                return StoredFrame(None, status.st_size, status.st_mtime)
            with path.open("rb") as file:
                page = file.read(HEADER_BYTES)
        except FileNotFoundError:  # removed meanwhile
            return None
        except OSError as error:
            return DamagedEntry(str(path), error.strerror or str(error))
        found = self._recognise(memoryview(page)) if len(page) == HEADER_BYTES else None
        if found is None or self._path(found[0]) != path:
            return DamagedEntry(str(path), "no frame of this namespace and name", lambda: _tried(path, path.unlink))
        return StoredFrame(found[0], status.st_size, status.st_mtime)

    def _read(self, request: ReadRequest) -> int | None:
        try:
            with self._path(request.key).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > len(request.buffer):
                    raise BackendError(f"a frame of {size} bytes does not fit the buffer of {len(request.buffer)}")
                return file.readinto(request.buffer)
        except FileNotFoundError:
            return None

    def _write(self, request: WriteRequest) -> None:
        path = self._path(request.key)
        make_private_directory(path.parent)
        _publish(path, request.frame)

    def _one(self, action: Callable[[A], R], key: Key, item: A) -> R | TierKVError:
        try:
            return _tried(self._path(key), lambda: action(item), key)
        except TierKVError as error:
            return error

    def _path(self, key: Key) -> Path:
        name = hashlib.blake2b(key, digest_size=_DIGEST_BYTES).hexdigest()
        return self._directory / name[:2] / f"{name}.frame"


def _namespaces(options: FolderOptions) -> Iterator[StoredNamespace | TierKVError]:
    path = Path(options.path)
    if not is_folder(path):
        raise BackendError(f"{path} is not an export folder: it has no {MANIFEST}")
    for each in read_manifest(path):
        yield StoredNamespace(each.namespace)


def _remove(options: FolderOptions, namespace: Namespace) -> None:
    path = Path(options.path)
    directory = path / namespace.fingerprint().hex()
    if exists(directory):
        note_export(path, Exported(namespace, 0, 0))  # if this removal is killed, no chunk is missed
        _tried(directory, lambda: shutil.rmtree(directory))
    _write_manifest(path, _others(path, namespace))


def _check(options: FolderOptions, _capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check whether files can be created in the folder, or in the nearest parent that is there."""
    path = Path(options.path)
    try:
        why = why_not_writable(next(each for each in (path, *path.parents) if exists(each)))
    except OSError as error:
        why = f"{path}: {error.strerror}"
    fix = "give another folder, or let this user write there" if why else ""
    yield CheckResult("path", ok=not why, detail=why or f"{path} can be written", fix=fix)


def _open_reader(context: BackendContext, options: FolderOptions) -> FolderBackend:
    return FolderBackend(context, options, writes=False)


FOLDER = BackendPlugin(
    name="folder",
    summary="export folder: chunks as files with a manifest",
    options=FolderOptions,
    capabilities=Capabilities(durable=True, shared=True, bounded=False, preferred_batch=16, preferred_concurrency=4),
    open=FolderBackend,
    check=_check,
    at_rest=AtRest(_namespaces, _open_reader, _remove),
)
"""The export folder as a backend. It is not registered: no stack can use it as a tier."""
