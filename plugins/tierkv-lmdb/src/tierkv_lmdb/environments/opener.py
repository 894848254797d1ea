"""Opening of the environment of one namespace: check the file, start empty after damage, open it with LMDB."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import lmdb

from tierkv.abc import BackendContext
from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import exists, has_other_file_system, make_private_directory
from tierkv.errors import BackendError, BackendUnavailableError
from tierkv.types.keys import Key
from tierkv_lmdb.directory import (
    LOCK,
    UNSYNCED,
    OwnerLock,
    boot_id,
    claim_namespace,
    claim_root,
    record_loss,
    set_foreign_data_aside,
    sync_directory,
    write_durably,
)
from tierkv_lmdb.environments.environment import DATABASES, Environment, Release
from tierkv_lmdb.environments.file_watch import DATA_FILE
from tierkv_lmdb.environments.trouble import Trouble, trouble_of
from tierkv_lmdb.options import LmdbOptions, Sizes
from tierkv_lmdb.verification.file_format import DamageError
from tierkv_lmdb.verification.verify import used_bytes, verify

_log = plugin_logger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentOpener:
    """Function that opens the environment of a namespace whose owner lock is held."""

    directory: Path
    """Directory of the namespace."""
    lock: OwnerLock
    """Its owner lock."""
    context: BackendContext
    """Facts about the tier."""
    options: LmdbOptions
    """Options of the tier."""
    mount_point: Path
    """Directory in which its file system is mounted."""

    def __call__(self, release: Release, trouble: Trouble | None) -> Environment:
        """Open the environment. If its data is damaged, start empty, with a warning.

        Args:
            release: called once, when the environment has been closed.
            trouble: why the previous environment was closed; None for the first one.

        Raises:
            BackendError: it cannot be opened, or another process may use the directory.
            OSError: the directory cannot be used.
        """
        if not self.lock.is_at(self.directory / LOCK):
            self._take_again()
        set_foreign_data_aside(self.directory)
        if trouble is not None and trouble.is_damage:
            record_loss(self.directory, trouble.reason)
        try:
            return self._open_checked(release)
        except DamageError as error:
            reason = str(error)
        except lmdb.Error as error:
            found = trouble_of(error)
            if found is None or not found.is_damage:
                raise BackendError(f"{self.directory}: LMDB cannot open its data ({error})") from error
            reason = found.reason
        record_loss(self.directory, reason)
        return self._open(release)

    def _take_again(self) -> None:
        """Create and lock the directory again, if it was removed with all of its files. A moved one may return.

        Another file system in its place is used: the one that had the directory was unmounted.

        Raises:
            BackendError: the lock file still exists elsewhere, another process has the directory, or it is foreign.
            OSError: the directory cannot be created.
        """
        held = os.fstat(self.lock.held.fd)
        if held.st_nlink and not has_other_file_system(self.mount_point, held.st_dev):
            raise BackendUnavailableError(
                f"{self.directory} was moved or replaced under this process: put it back, or close the stack and open "
                "it again"
            )
        claim_root(self.options.root)
        make_private_directory(self.directory)
        self.lock.take_again(self.directory / LOCK)
        claim_namespace(self.directory, self.context.namespace)

    def sizes(self) -> Sizes:
        """Division of the capacity, with the map no smaller than the data.

        Raises:
            BackendError: the capacity has no room for one frame.
            DamageError: the data file is damaged.
        """
        disk = os.statvfs(self.directory)
        capacity_bytes = self.context.capacity_bytes
        try:
            return Sizes.of(
                self.options,
                disk.f_blocks * disk.f_frsize if capacity_bytes is None else capacity_bytes,
                frame_bytes_max=self.context.frame_bytes_max,
                file_bytes=used_bytes(self.directory / DATA_FILE),
                page_bytes=os.sysconf("SC_PAGESIZE"),
            )
        except ValueError as error:
            raise BackendError(f"{self.directory}: {error}") from error

    def _open_checked(self, release: Release) -> Environment:
        data = self.directory / DATA_FILE
        lonely = verify(data, self.context.capacity_bytes or 0)
        environment = self._open(release)
        try:
            if lonely:
                _log.warning("%s: %d chunks without frame, index entry or length dropped", self.directory, len(lonely))
                environment.delete(map(Key, lonely))
        except BaseException:
            environment.close()
            raise
        return environment

    def _open(self, release: Release) -> Environment:
        if self.options.durability == "none":
            write_durably(self.directory / UNSYNCED, boot_id())
        sizes = self.sizes()
        env = self._open_lmdb(sizes.map_bytes)
        try:
            if self.options.durability != "none" and exists(self.directory / UNSYNCED):
                env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
                (self.directory / UNSYNCED).unlink()
            env.reader_check()
            sync_directory(self.directory)
            return Environment(
                env, name=self.context.tier, map_bytes_max=sizes.map_bytes_max, read_only=False, release=release
            )
        except BaseException:
            env.close()
            raise

    def _open_lmdb(self, map_bytes: int) -> lmdb.Environment:
        try:
            env = lmdb.open(
                str(self.directory),
                map_size=map_bytes,
                max_dbs=len(DATABASES),
                mode=0o600,
                sync=self.options.durability != "none",
                # With "batch" a call syncs once more at its end. Until then a crash may undo, but never damage.
                metasync=self.options.durability == "always",
            )
        except lmdb.MemoryError as error:
            raise BackendError(
                f"{self.directory}: cannot map {map_bytes} bytes of address space ({error}). Raise the limit on "
                f"virtual memory (ulimit -v)"
            ) from error
        _fill_up(env, self.directory / DATA_FILE)
        return env


def _fill_up(env: lmdb.Environment, data: Path) -> None:
    """Lengthen the file by free pages that were never written: reading past its end is a SIGBUS."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if data.stat().st_size < needed:
        os.truncate(data, needed)
