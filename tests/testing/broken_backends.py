"""Broken backends: one broken promise per class, which the kit must notice. Each is plain_files with a real mistake."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from broken_registry import noticed_by
from plain_files import AsyncPlainFiles, PlainFiles, PlainOptions

from tierkv.abc import (
    BackendContext,
    Entry,
    ReadRequest,
    ReadResult,
    WriteRequest,
    WriteResult,
)
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.types.keys import Key


@noticed_by("test_declaration_is_consistent", shared=True)
class AuthoritativeAndShared(PlainFiles):
    """Declares two things that exclude each other."""


@noticed_by("test_declaration_is_consistent", alignment=1000)
class OddAlignment(PlainFiles):
    """Declares an alignment that no memory has."""


@noticed_by("test_contains_answers_true_or_false")
class CountsKeys(PlainFiles):
    """Passes on a server's counts."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [int(found) for found in super().contains(keys)]  # type: ignore[misc]


@noticed_by("test_round_trip_of_every_size")
class ReturnsTheFrame(PlainFiles):
    """Returns the bytes, in place of copying them to the buffer."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        length = super().read_one(request)
        return length if length is None else b"a frame"  # type: ignore[return-value]


@noticed_by("test_contains_answers_true_or_false")
class SaysTrueForStored(PlainFiles):
    """Returns True for a frame that was stored."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return super().write_one(request) or True  # type: ignore[return-value]


@noticed_by("test_empty_batches")
class ForgetsToReturn(PlainFiles):
    """Deletes, and returns nothing."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        super().delete(keys)
        return None  # type: ignore[return-value]


@noticed_by("test_scan_yields_keys_as_they_were_given")
class YieldsPairs(PlainFiles):
    """Yields plain tuples."""

    def scan(self) -> Iterable[Entry]:
        for entry in super().scan():
            yield (entry.key, entry.frame_bytes)  # type: ignore[misc]


@noticed_by("test_declaration_is_consistent")
class HasNoDelete(PlainFiles):
    """Lacks a verb."""

    def __getattribute__(self, name: str) -> Any:
        if name == "delete":
            raise AttributeError(name)
        return super().__getattribute__(name)


@noticed_by("test_scan_yields_keys_as_they_were_given")
class ListsItsOwnNames(PlainFiles):
    """Yields names as its storage has them."""

    def scan(self) -> Iterable[Entry]:
        for entry in super().scan():
            yield entry._replace(key=Key(b"frame:" + entry.key))


@noticed_by("test_declaration_is_consistent")
class HalfAsync(AsyncPlainFiles):
    """Forgot one async."""

    def close(self) -> None:  # type: ignore[override]
        """Is no coroutine."""
        self.files.close()


@noticed_by("test_empty_batches")
class WantsOneAtLeast(PlainFiles):
    """Looks at the first of a batch."""

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        assert requests[0].key
        return super().read_into(requests)


@noticed_by("test_a_key_twice_in_one_batch")
class TakesABatchForASet(PlainFiles):
    """Serves each key once."""

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        wanted = {request.key: request for request in requests}
        results = dict(zip(wanted, super().read_into(list(wanted.values())), strict=True))
        return [results[request.key] for request in requests]


@noticed_by("test_read_only_refuses", read_only=True)
class OnlySaysReadOnly(PlainFiles):
    """Writes all the same."""


@noticed_by(
    "test_sharers_see_each_other", "test_sees_what_another_process_wrote", shared=True, authoritative_index=False
)
class LooksOnlyAtOpen(PlainFiles):
    """Is shared, and remembers from its opening what was there."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.lock.close()
        self.known = {entry.key for entry in self.scan()}

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [key in self.known for key in keys]


@noticed_by("test_results_are_in_the_order_of_the_batch")
class SortsItsAnswers(PlainFiles):
    """Answers in an order of its own."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return super().contains(sorted(keys))


@noticed_by("test_results_are_in_the_order_of_the_batch")
class AnswersTheFirst(PlainFiles):
    """Answers fewer keys than it was asked."""

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        return super().read_into(requests[:1])


@noticed_by("test_absent_is_none")
class MissIsAnError(PlainFiles):
    """Tells a miss as an error."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        result = super().read_one(request)
        return BackendError("no such file") if result is None else result


@noticed_by("test_round_trip_of_every_size")
class PadsToPages(PlainFiles):
    """Forgets the true length."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        padded = bytes(request.frame).ljust(-(-len(request.frame) // 4096) * 4096, b"\0")
        return super().write_one(WriteRequest(request.key, memoryview(padded)))


@noticed_by("test_overwrite_replaces")
class KeepsTheFirst(PlainFiles):
    """Does not write what seems to be there."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return None if self.path(request.key).exists() else super().write_one(request)


@noticed_by("test_overwrite_replaces")
class KeepsTheTail(PlainFiles):
    """Overwrites in place, without cutting off."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        path = self.path(request.key)
        path.touch()
        with path.open("r+b") as file:
            file.write(request.frame)
        return None


@noticed_by("test_delete_forgets", "test_bad_frames_are_quarantined")
class NeverDeletes(PlainFiles):
    """Never deletes."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        return [None] * len(keys)


@noticed_by("test_delete_of_an_absent_key_is_fine")
class DeleteMustFind(PlainFiles):
    """Fails to delete what is not there."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        missing = [not self.path(key).exists() for key in keys]
        super().delete(keys)
        return [BackendError("not there") if absent else None for absent in missing]


@noticed_by("test_odd_keys")
class StripsZeros(PlainFiles):
    """Takes keys for C strings."""

    def path(self, key: Key) -> Path:
        return super().path(Key(key.rstrip(b"\0")))


@noticed_by("test_odd_keys")
class FoldsCase(PlainFiles):
    """Stores on a case-insensitive file system."""

    def path(self, key: Key) -> Path:
        return super().path(Key(key.lower()))


@noticed_by("test_buffers_belong_to_the_caller")
class WritesLater(PlainFiles):
    """Keeps the caller's buffer and writes when it is asked for the frame."""

    later: WriteRequest | None = None

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.later = request
        return None

    def read_one(self, request: ReadRequest) -> ReadResult:
        if self.later is not None:
            super().write_one(self.later)
            self.later = None
        return super().read_one(request)


@noticed_by("test_no_buffer_is_kept")
class KeepsAView(PlainFiles):
    """Never lets go of the last buffer that it saw."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        self.last = request.buffer
        return super().read_one(request)

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.last = memoryview(request.frame)
        return super().write_one(request)


@noticed_by("test_namespaces_are_apart")
class OneForAll(PlainFiles):
    """Puts all namespaces into one directory."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.root = Path(options.path)


@noticed_by("test_no_capacity_means_no_limit_of_ours")
class NeedsACapacity(PlainFiles):
    """Reckons with a number that may be absent."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        assert self.capacity_bytes is not None
        return super().write_one(request)


@noticed_by("test_close_twice")
class ClosesOnce(PlainFiles):
    """Cannot be closed again."""

    def close(self) -> None:
        if self.lock.closed:
            raise BackendError("closed already")
        super().close()


@noticed_by("test_reopen_finds_everything", "test_a_restart_finds_everything")
class StartsEmpty(PlainFiles):
    """Declares durable, and clears its directory at open."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.delete([entry.key for entry in self.scan()])


@noticed_by("test_reopen_without_writing_changes_nothing")
class TidiesUp(PlainFiles):
    """Takes a session without a write for one without use, and clears its directory."""

    wrote = False

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.wrote = True
        return super().write_one(request)

    def close(self) -> None:
        if not self.wrote:
            self.delete([entry.key for entry in self.scan()])
        super().close()


@noticed_by("test_many_frames")
class ScansOnePage(PlainFiles):
    """Never asks for the second page of a listing."""

    def scan(self) -> Iterable[Entry]:
        return list(super().scan())[:1000]


@noticed_by("test_random_histories_equal_a_dict", "test_deleted_stays_deleted", "test_many_reopenings")
class RisesFromTheDead(PlainFiles):
    """Forgets at a reopen that something was deleted: a mistake of three steps, which random histories find."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        for key in keys:
            if self.path(key).exists():
                self.path(key).rename(self.path(key).with_suffix(".deleted"))
        return [None] * len(keys)

    def close(self) -> None:
        for path in self.root.glob("*.deleted"):
            path.rename(path.with_suffix(".frame"))
        super().close()


@noticed_by("test_kill_minus_nine")
class WritesAtClose(PlainFiles):
    """Acknowledges what is in memory only."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.frames: dict[Key, bytes] = {}

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [key in self.frames or there for key, there in zip(keys, super().contains(keys), strict=True)]

    def read_one(self, request: ReadRequest) -> ReadResult:
        frame = self.frames.get(request.key)
        if frame is None:
            return super().read_one(request)
        request.buffer[: len(frame)] = frame
        return len(frame)

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.frames[request.key] = bytes(request.frame)
        return None

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        for key in keys:
            self.frames.pop(key, None)
        return super().delete(keys)

    def close(self) -> None:
        for key, frame in self.frames.items():
            super().write_one(WriteRequest(key, memoryview(frame)))
        super().close()


class WritesInPlace(PlainFiles):
    """Publishes a frame before it is whole."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        with self.path(request.key).open("wb", buffering=0) as file:
            for start in range(0, len(request.frame), 1024):
                file.write(request.frame[start : start + 1024])
                time.sleep(0.00001)
        return None


@noticed_by("test_kill_minus_nine")
class TornByAKill(WritesInPlace):
    """The kill comes between two pieces."""


@noticed_by("test_readers_see_old_or_new_but_whole")
class TornForReaders(WritesInPlace):
    """A reader comes between two pieces."""


@noticed_by("test_writers_of_one_key_at_once")
class TornByWriters(WritesInPlace):
    """A second writer comes between two pieces."""


@noticed_by("test_distinct_keys_at_once")
class OneTemporary(PlainFiles):
    """Two threads share a temporary file."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        temporary = self.root / "the.tmp"
        try:
            temporary.write_bytes(request.frame)
            time.sleep(0)
            temporary.rename(self.path(request.key))
        except OSError as error:
            return BackendError(str(error))
        return None


@noticed_by(
    "test_scan_tells_keys_and_lengths",
    "test_the_capacity_is_never_exceeded",
    "test_usage_is_known_before_the_first_store",
    "test_a_smaller_capacity_is_kept_too",
)
class ScansNoLengths(PlainFiles):
    """Usage after a restart would be zero, and the capacity overrun."""

    def scan(self) -> Iterable[Entry]:
        return [Entry(entry.key, 0) for entry in super().scan()]


@noticed_by("test_declaration_is_consistent")
class DeclaresScan:
    """Has no scan, by any name."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        files = PlainFiles(context, options)
        self.contains, self.read_into, self.write = files.contains, files.read_into, files.write
        self.delete, self.close = files.delete, files.close


@noticed_by("test_second_open_is_refused", "test_second_process_is_refused")
class HasNoLock(PlainFiles):
    """Lets two processes believe that each knows everything."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.lock.close()


@noticed_by("test_churn_within_capacity_is_never_refused")
class NeverGivesBack(PlainFiles):
    """Counts what was ever written against the capacity."""

    written_bytes = 0

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.written_bytes += len(request.frame)
        if self.capacity_bytes is not None and self.written_bytes > self.capacity_bytes:
            return OutOfSpaceError("full")
        return super().write_one(request)


@noticed_by("test_full_keeps_what_is_there")
class FullIsAnyError(PlainFiles):
    """Says something else than OutOfSpaceError, so that the framework would retry instead of evict."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        result = super().write_one(request)
        return BackendError("something is wrong") if isinstance(result, OutOfSpaceError) else result


@noticed_by("test_full_keeps_what_is_there")
class FullLosesTheOldest(PlainFiles):
    """Evicts by itself."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        result = super().write_one(request)
        if isinstance(result, OutOfSpaceError):
            self.delete([entry.key for entry in self.scan()][:1])
        return result


@noticed_by("test_foreign_directory_is_left_alone")
class CleansUp(PlainFiles):
    """Wants an empty directory, and makes it one."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        for path in Path(options.path).glob("*"):
            if path.name != context.namespace.fingerprint().hex():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        super().__init__(context, options)


@noticed_by("test_files_are_private")
class LeavesModesToTheUmask(PlainFiles):
    """Creates files and directories with the modes that the library defaults to."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.path(request.key).write_bytes(request.frame)
        return None


@noticed_by("test_a_place_that_others_can_change_is_refused")
class TrustsEveryPlace(PlainFiles):
    """Opens any directory in which it can write."""

    def prepare(self, place: Path) -> None:
        place.mkdir(0o700, parents=True, exist_ok=True)


class RaisesWhatItMeets(PlainFiles):
    """Lets errors of the library underneath through."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        try:
            super().__init__(context, options)
        except BackendError as error:
            raise OSError(str(error)) from error


@noticed_by("test_path_is_a_file")
class RawErrorAtAFile(RaisesWhatItMeets):
    """Error for a path that is a file."""


@noticed_by("test_path_under_a_file")
class RawErrorBelowAFile(RaisesWhatItMeets):
    """Error for a parent that is a file."""


@noticed_by("test_path_cannot_be_written")
class RawErrorWithoutPermission(RaisesWhatItMeets):
    """Error for a directory in which no file can be created."""


@noticed_by("test_removed_behind_the_back", "test_damaged_behind_the_back")
class NeverLooksAgain(PlainFiles):
    """Answers from memory what is gone from disk."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.seen: dict[Key, bytes] = {}

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.seen[request.key] = bytes(request.frame)
        return super().write_one(request)

    def read_one(self, request: ReadRequest) -> ReadResult:
        frame = self.seen.get(request.key)
        if frame is None:
            return super().read_one(request)
        request.buffer[: len(frame)] = frame
        return len(frame)
