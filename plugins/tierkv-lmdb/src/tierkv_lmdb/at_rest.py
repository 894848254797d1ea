"""Abilities of an LMDB tier at rest: its namespaces, a reader beside their owner, and their removal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from tierkv.abc import BackendContext, StoredNamespace
from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import exists, read_short_file
from tierkv.errors import BackendError, TierKVError
from tierkv.types.namespace import Namespace
from tierkv_lmdb.directory import (
    DATA_FILES,
    LOCK,
    MANIFEST,
    MARKER,
    OwnerLock,
    foreign_content,
    last_used_s,
    lock_holder,
)
from tierkv_lmdb.environments.file_watch import DATA_FILE
from tierkv_lmdb.failures import Failures
from tierkv_lmdb.opening import open_reader
from tierkv_lmdb.options import LmdbOptions, LmdbReaderOptions
from tierkv_lmdb.reader import LmdbReader
from tierkv_lmdb.verification.file_format import DamageError
from tierkv_lmdb.verification.verify import verify

_NAME = re.compile(r"[0-9a-f]{32}")
_TEMPORARY = re.compile(re.escape(MARKER) + r"\.[0-9a-f]{32}")
_REMOVED = re.compile(re.escape(MARKER) + r"\.removed-[0-9a-f]{32}")
_log = plugin_logger(__name__)


def stored_namespaces(options: LmdbOptions | LmdbReaderOptions) -> Iterator[StoredNamespace | TierKVError]:
    """Yield the namespaces below ``path``.

    Raises:
        BackendError: it is no directory of an LMDB tier, or cannot be read.
    """
    root = options.root
    try:
        if not exists(root):
            raise BackendError(f"{root} does not exist: nothing was stored there yet")
        if all(_TEMPORARY.fullmatch(path.name) for path in root.iterdir()):  # of a killed process
            raise BackendError(f"{root} is empty: nothing was stored there yet")
        trouble = f"it has no {MARKER}" if not exists(root / MARKER) else foreign_content(root)
        if trouble:
            raise BackendError(f"{root} is not the directory of an LMDB tier: {trouble}")
        manifests = [path for path in sorted(root.glob(f"*/{MANIFEST}")) if _NAME.fullmatch(path.parent.name)]
    except TierKVError:
        raise
    except OSError as error:
        raise BackendError(f"{root}: cannot be read ({error})") from error
    for manifest in manifests:
        try:
            yield _stored(manifest)
        except FileNotFoundError:  # removed meanwhile
            continue
        except (OSError, ValueError, RecursionError) as error:
            yield BackendError(f"{manifest}: {error}. An engine that opens this namespace writes its description anew")


def _stored(manifest: Path) -> StoredNamespace:
    directory = manifest.parent
    document = json.loads(read_short_file(manifest))
    namespace = Namespace.from_description(document.get("namespace") if isinstance(document, dict) else document)
    if namespace.fingerprint().hex() != directory.name:
        raise ValueError("it describes another namespace than the directory's name")
    files = [status for name in DATA_FILES if (status := _status(directory / name)) is not None]
    held = sum(status.st_blocks * 512 for status in files)
    holder = lock_holder(directory / LOCK)
    return StoredNamespace(namespace, held, last_used_s(directory), holder and f"process {holder}")


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def open_beside(context: BackendContext, options: LmdbOptions | LmdbReaderOptions) -> LmdbReader:
    """Open a reader of one namespace beside its owner. Without an owner, its file is checked first: LMDB trusts it.

    Raises:
        BackendError: the file is damaged, or cannot be read.
    """
    directory = options.root / context.namespace.fingerprint().hex()
    if lock_holder(directory / LOCK) is None:
        try:
            lonely = verify(directory / DATA_FILE, 0)
        except DamageError as error:
            raise BackendError(
                f"{directory}: the data is damaged ({error}). Opened for writing, the namespace starts empty "
                "(`tierkv verify --repair`)",
                tier=context.tier,
            ) from error
        except OSError as error:
            raise BackendError(f"{directory}: cannot be read ({error})", tier=context.tier) from error
        if lonely:
            _log.warning("%s: %d chunks without frame, index entry or length are left out", directory, len(lonely))
    return open_reader(context, LmdbReaderOptions(path=options.path))


def remove_stored(options: LmdbOptions, namespace: Namespace) -> None:
    """Remove a namespace and its files.

    Raises:
        BackendUnavailableError: a process has it open; names it.
        BackendError: it cannot be removed.
    """
    directory = options.root / namespace.fingerprint().hex()
    try:
        lock = OwnerLock.take(directory / LOCK, is_use=False)
    except FileNotFoundError:
        return
    except OSError as error:
        if isinstance(error, TierKVError):
            raise
        raise Failures("LMDB tier", directory).from_cause("remove", error) from error
    try:
        # Renamed first: a removal that is killed leaves no half environment. The next removal completes it.
        directory.rename(directory.with_name(f"{MARKER}.removed-{uuid.uuid4().hex}"))
        _finish_removals(options.root)
    except OSError as error:
        raise Failures("LMDB tier", directory).from_cause("remove", error) from error
    finally:
        lock.release()


def finish_removed(options: LmdbOptions) -> int:
    """Remove what killed removals left below the root. Returns the bytes of their files.

    Raises:
        BackendError: it cannot be removed.
    """
    root = options.root
    try:
        return _finish_removals(root) if exists(root / MARKER) else 0
    except OSError as error:
        raise Failures("LMDB tier", root).from_cause("remove", error) from error


def _finish_removals(root: Path) -> int:
    gone_bytes = 0
    for path in root.iterdir():
        if _REMOVED.fullmatch(path.name):
            files = [status for each in path.glob("*") if (status := _status(each)) is not None]
            with contextlib.suppress(FileNotFoundError):  # another process removes it, too
                shutil.rmtree(path)
            gone_bytes += sum(status.st_blocks * 512 for status in files)
    return gone_bytes
