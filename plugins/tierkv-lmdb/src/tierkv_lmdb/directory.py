"""Directory of an LMDB tier: its marker, its manifests, its owner, and whether its data can be trusted.

::

    <path>/tierkv-lmdb.json                   marker of this program, with the version of the layout
    <path>/<fingerprint hex>/namespace.json   description of the namespace
    <path>/<fingerprint hex>/owner.lock       flock of the process that has the namespace open; holds its pid
    <path>/<fingerprint hex>/unsynced         exists while data is written without syncing; holds the boot id
    <path>/<fingerprint hex>/damage.json      exists after damage: how often the namespace started empty, and why
    <path>/<fingerprint hex>/data.mdb, lock.mdb
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc.held_locks import HeldLock
from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import exists, make_private_directory, set_aside
from tierkv.errors import BackendError, BackendUnavailableError, NamespaceMismatchError
from tierkv.types.namespace import Namespace
from tierkv_lmdb.documents import has_bad_byte, read_json, text_of

FORMAT = {"format": "tierkv-lmdb", "version": 1}
MARKER = "tierkv-lmdb.json"
MANIFEST = "namespace.json"
LOCK = "owner.lock"
UNSYNCED = "unsynced"
LOSSES = "damage.json"
LOSSES_MAX = 10**9
"""Largest count of losses that is believed."""
DATA_FILES = ("data.mdb", "lock.mdb")
LOCK_TRIES_S = (0.05, 0.1, 0.2)
"""Pauses between tries for the lock, in seconds: `tierkv check` holds it for an instant."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = plugin_logger(__name__)


@dataclass(slots=True)
class OwnerLock:
    """Exclusive right to open one namespace, from :meth:`take` to :meth:`release`.

    The modification time of the file is the time of the last use: readers change those of the data files.
    """

    held: HeldLock
    is_use: bool = True
    """Whether :meth:`take` and :meth:`release` are uses of the namespace."""

    @classmethod
    def take(cls, path: Path, *, is_use: bool = True, sleep: Callable[[float], None] = time.sleep) -> OwnerLock:
        """Lock the file at ``path``; created if absent. A link is not followed: the file is truncated.

        A directory or a pipe of that name holds no lock of ours: it is set aside. Otherwise it would keep the tier out
        for ever.

        Args:
            path: of the lock file.
            is_use: whether now is the time of the last use, and that of :meth:`release` later.
            sleep: waits between tries, for this number of seconds.

        Raises:
            BackendUnavailableError: another process, or another backend of this process, holds the lock.
            BackendError: a link is there, or a file that has a second name: it leads to a file outside the directory.
            OSError: the file cannot be opened or created.
        """
        if is_foreign(path):
            if _leads_elsewhere(path):
                raise BackendError(f"{path} is not a regular file with one name: remove it")
            _set_aside(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            for pause_s in (*LOCK_TRIES_S, None):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if pause_s is None:
                        raise BackendUnavailableError(_in_use(path)) from None
                    sleep(pause_s)
                else:
                    break
            before = os.fstat(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            if not is_use:
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        except BaseException:
            os.close(fd)
            raise
        return cls(HeldLock(fd), is_use)

    def is_at(self, path: Path) -> bool:
        """Whether this process holds the lock, and its file is still at ``path``: no other locks it. Raises OSError."""
        try:
            return self.held.fd >= 0 and os.path.samestat(os.fstat(self.held.fd), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def take_again(self, path: Path) -> None:
        """Lock the file at ``path`` in place of one that was removed. Raises as :meth:`take`; then nothing changes."""
        taken = OwnerLock.take(path, is_use=self.is_use)
        self.held.release()
        self.held = taken.held

    def release(self) -> None:
        """Unlock the file."""
        if self.is_use:
            with contextlib.suppress(OSError):  # the order of removal suffers; the lock must not stay
                os.utime(self.held.fd)
        self.held.release()


def last_used_s(directory: Path) -> float | None:
    """Time of the last open or close of the namespace for use, in seconds since 1970; None: never."""
    try:
        return (directory / LOCK).lstat().st_mtime
    except FileNotFoundError:
        return None


def _in_use(path: Path) -> str:
    pid = text_of(path) or "unknown"
    where = "this process" if pid == str(os.getpid()) else f"process {pid}"
    return (
        f"{path.parent}: in use by {where}. One process at a time may open a namespace of an LMDB tier: stop that one, "
        f"or give each its own path"
    )


def lock_holder(path: Path) -> str | None:
    """Pid (as text, for messages) of the process that holds the lock file at ``path``, or None. Changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
    finally:
        os.close(fd)
    return None


def claim_root(root: Path) -> None:
    """Make ``root`` a tierkv-lmdb directory, or check that it is one.

    Raises:
        NamespaceMismatchError: it holds other files, or a layout that this version does not know.
        BackendError: other users may change its files.
        OSError: it cannot be created or written.
    """
    make_private_directory(root)
    trouble = foreign_content(root)
    if trouble:
        raise NamespaceMismatchError(trouble)
    if read_json(root / MARKER) != FORMAT:
        if not os.path.lexists(root / MARKER) and any(_NAMESPACE.fullmatch(path.name) for path in root.iterdir()):
            _log.warning("%s has no %s: it is written anew", root, MARKER)
        _begin_anew(root / MARKER, json.dumps(FORMAT))
    elif not os.access(root, os.W_OK):
        raise PermissionError(f"no permission to write in {root}")


def require_root(root: Path) -> None:
    """Check that ``root`` may be read: it is a tierkv-lmdb directory, or may become one. Changes nothing.

    Raises:
        NamespaceMismatchError: it holds other files, or a layout that this version does not know.
        OSError: it is not a directory, or cannot be read.
    """
    if not exists(root):
        if not next(path for path in root.absolute().parents if exists(path)).is_dir():
            raise NotADirectoryError(f"a part of {root} is not a directory")
        _log.warning("%s does not exist yet; until it is written, all of its chunks are misses", root)
        return
    trouble = foreign_content(root)
    if trouble:
        raise NamespaceMismatchError(trouble)


def foreign_content(root: Path) -> str | None:
    """Reason why an existing ``root`` is not a tierkv-lmdb directory; None if it is one or may become one."""
    names = {path.name for path in root.iterdir()}
    found = read_json(root / MARKER)
    if found == FORMAT:
        return None
    if isinstance(found, dict) and not has_bad_byte(root / MARKER, found, json.dumps(FORMAT)):
        return f"{root / MARKER} holds {found!r}, and this version of tierkv-lmdb reads {FORMAT!r}: give another path"
    is_damaged = MARKER in names
    foreign = sorted(
        name
        for name in names
        if not (name.startswith(MARKER) or name == "lost+found" or (is_damaged and _NAMESPACE.fullmatch(name)))
    )
    if not foreign or (not is_damaged and _lost_its_marker(root, foreign)):
        return None
    no_marker = "its marker is damaged, and it has" if is_damaged else f"it has no {MARKER} but"
    return f"{root} is not a directory of tierkv-lmdb: {no_marker} {foreign[0]!r}. Give an empty or new path"


def _lost_its_marker(root: Path, names: Sequence[str]) -> bool:
    """Whether names in a directory without a marker are all namespaces, and a manifest shows whose, or all are empty.

    A tool that removes old files leaves empty directories.
    """
    if not all(map(_NAMESPACE.fullmatch, names)):
        return False
    manifests = [read_json(root / name / MANIFEST) for name in names]
    return any(
        isinstance(manifest, dict) and manifest.get("format") == FORMAT["format"] for manifest in manifests
    ) or all((root / name).is_dir() and not any((root / name).iterdir()) for name in names)


def claim_namespace(directory: Path, namespace: Namespace) -> None:
    """Write the manifest of the namespace, or compare with the existing one. The caller holds the lock.

    A damaged manifest is written anew, and the data stays: each frame names its namespace, and is checked.

    Raises:
        NamespaceMismatchError: the manifest describes another namespace.
        OSError: it cannot be written.
    """
    if not has_manifest(directory, namespace):
        _begin_anew(directory / MANIFEST, _manifest_text(namespace))


def has_manifest(directory: Path, namespace: Namespace) -> bool:
    """Whether a directory has the manifest of a namespace. False: it has none, or a damaged one.

    Raises:
        NamespaceMismatchError: the manifest describes another namespace.
    """
    manifest, wanted = directory / MANIFEST, _description(namespace)
    found = read_json(manifest)
    if found == wanted:
        return True
    # With this fingerprint, which is the directory's name as well, it can describe no other namespace.
    is_other = isinstance(found, dict) and (
        found.get("fingerprint") != directory.name or any(found.get(name) != value for name, value in FORMAT.items())
    )
    if is_other and not has_bad_byte(manifest, found, _manifest_text(namespace)):
        raise NamespaceMismatchError(
            f"{manifest} does not describe this namespace ({namespace.model!r}, fingerprint {directory.name}) but "
            f"{str(found)[:200]}. If the directory is not needed, remove {directory}"
        )
    return False


def _begin_anew(path: Path, text: str) -> None:
    """Write a file; what is there already is damaged, and is set aside."""
    if os.path.lexists(path):
        aside = set_aside(path)
        _log.warning("%s is damaged: it is kept as %s, and written anew", path, aside.name)
    write_durably(path, text)


def _description(namespace: Namespace) -> object:
    plain = FORMAT | {"fingerprint": namespace.fingerprint().hex(), "namespace": namespace.describe()}
    return json.loads(json.dumps(plain))


def _manifest_text(namespace: Namespace) -> str:
    return json.dumps(_description(namespace), indent=1, sort_keys=True)


def drop_unsynced_data(directory: Path) -> None:
    """Remove data that was not synced when the machine went down: LMDB may crash on reading it."""
    marker = directory / UNSYNCED
    if not os.path.lexists(marker) or is_of_this_boot(directory):
        return
    _log.warning("%s: the machine went down while data was not synced (durability = none); starting empty", directory)
    drop_data(directory)
    marker.unlink()


def is_of_this_boot(directory: Path) -> bool:
    """Whether the marker of unsynced data was written since the machine started. A damaged one was not."""
    return text_of(directory / UNSYNCED) == boot_id()


def is_foreign(path: Path) -> bool:
    """Whether something else than a regular file with one name is there. LMDB would write where a link leads."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(status.st_mode) or status.st_nlink > 1


def _leads_elsewhere(path: Path) -> bool:
    """Whether a link or a file is at ``path``, and neither a directory nor a pipe."""
    mode = path.lstat().st_mode
    return stat.S_ISLNK(mode) or stat.S_ISREG(mode)


def _set_aside(path: Path) -> None:
    aside = set_aside(path)
    _log.warning("%s is not a regular file with one name: it is kept as %s", path, aside.name)


def foreign_data(directory: Path) -> list[Path]:
    """Links, directories, pipes and the like that have the name of a data file."""
    return [path for path in (directory / name for name in DATA_FILES) if is_foreign(path)]


def set_foreign_data_aside(directory: Path) -> None:
    """Rename what has the name of a data file and is none; the namespace starts empty then.

    Raises:
        OSError: it cannot be renamed.
    """
    for path in foreign_data(directory):
        _set_aside(path)


def drop_data(directory: Path) -> None:
    """Remove the data of a namespace, which no process of this tier may have open. Readers find the next file."""
    for name in DATA_FILES:
        (directory / name).unlink(missing_ok=True)


def record_loss(directory: Path, reason: str) -> None:
    """Remove the damaged data of a namespace, log it, and count it in ``damage.json`` for ``tierkv check``.

    Raises:
        OSError: the data cannot be removed.
    """
    _log.warning("%s: the data is damaged (%s); the namespace starts empty", directory, reason)
    drop_data(directory)
    losses = {"count": read_losses(directory)[0] + 1, "last": reason[:200]}
    try:
        write_durably(directory / LOSSES, json.dumps(losses))
    except OSError as error:
        _log.warning("%s: not counted in %s: %s", directory, LOSSES, error)


def read_losses(directory: Path) -> tuple[int, str]:
    """Number of times that a namespace started empty after damage, and the last reason. Unreadable counts as none."""
    found = read_json(directory / LOSSES)
    if not isinstance(found, dict) or not isinstance(count := found.get("count"), int):
        return 0, ""
    return min(max(count, 0), LOSSES_MAX), str(found.get("last", ""))[:200]


def boot_id() -> str:
    """Identifier of this boot of the machine; a fresh value if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def write_durably(path: Path, text: str) -> None:
    """Create or replace a file atomically and durably."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
