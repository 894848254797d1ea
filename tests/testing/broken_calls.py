"""Mistakes with batches, keys, buffers, threads and loops. Each is plain_files, broken in one way."""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from broken_registry import noticed_by
from plain_files import AsyncPlainFiles, PlainFiles, PlainOptions

from tierkv.abc import BackendContext, CheckResult, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError
from tierkv.types.keys import Key

# -- batches ---------------------------------------------------------------------------------------------------------


@noticed_by("test_batches_of_every_size")
class ServesThree(PlainFiles):
    """Has room for three in its scratch list."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        return [*super().write(requests[:3]), *([None] * len(requests[3:]))]


@noticed_by("test_scan_yields_keys_as_they_were_given")
class LosesTheThird(PlainFiles):
    """Acknowledges a write that it has not made."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        return [*super().write([*requests[:2], *requests[3:]]), *([None] * len(requests[2:3]))]


@noticed_by("test_frames_of_many_lengths_in_one_batch")
class OneLengthPerBatch(PlainFiles):
    """Looks at the first result alone."""

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        results = super().read_into(requests)
        return [results[0]] * len(results)


@noticed_by("test_old_and_new_keys_in_one_batch")
class SkipsWhatSeemsKnown(PlainFiles):
    """Takes a batch whose first key it has for one that was written before."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        if self.path(requests[0].key).exists():
            return [None] * len(requests)
        return super().write(requests)


@noticed_by("test_a_key_twice_in_one_write")
class WritesASet(PlainFiles):
    """Answers for each key once."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        return super().write(list({request.key: request for request in requests}.values()))


@noticed_by("test_any_sequence_is_a_batch")
class AddsLists(PlainFiles):
    """Believes that every batch is a list."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return super().contains(keys + [])  # type: ignore[operator]  # noqa: RUF005  # the mistake


@noticed_by("test_batches_are_left_as_they_were")
class PopsItsBatch(PlainFiles):
    """Eats what it is given."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        taken = [keys.pop(0) for _ in range(len(keys))] if isinstance(keys, list) else list(keys)
        return super().delete(taken)


@noticed_by("test_results_belong_to_the_caller")
class OneListForAll(PlainFiles):
    """Saves an allocation."""

    answers: ClassVar[list[bool]] = []

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self.answers[:] = super().contains(keys)
        return self.answers


# -- keys ------------------------------------------------------------------------------------------------------------


@noticed_by("test_keys_of_every_length")
class RefusesLongKeys(PlainFiles):
    """Knows one hash function."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return BackendError("what a key") if len(request.key) > 36 else super().write_one(request)


@noticed_by("test_keys_that_begin_alike")
class CutsKeys(PlainFiles):
    """Twenty bytes are enough."""

    def path(self, key: Key) -> Path:
        return super().path(Key(key[:20]))


@noticed_by("test_keys_that_differ_in_one_bit")
class SevenBits(PlainFiles):
    """Takes keys for ASCII."""

    def path(self, key: Key) -> Path:
        return super().path(Key(bytes(byte & 0x7F for byte in key)))


@noticed_by("test_oversized_keys")
class LongNamesRaise(PlainFiles):
    """Fails a whole batch for a name that is too long."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        if len(request.key) > 100:
            raise BackendError("name too long")
        return super().write_one(request)


class NamedDirectory(PlainFiles):
    """Names its directory after something else than the fingerprint."""

    def name(self, context: BackendContext) -> str:
        raise NotImplementedError

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.root = Path(options.path) / self.name(context)
        self.root.mkdir(exist_ok=True)


@noticed_by("test_namespaces_with_like_names")
class SlashesToDashes(NamedDirectory):
    """Makes a file name of a model's name."""

    def name(self, context: BackendContext) -> str:
        return context.namespace.model.replace("/", "-")


@noticed_by("test_namespaces_with_long_and_odd_names")
class NameIsTheDirectory(NamedDirectory):
    """Uses the model's name, carefully encoded."""

    def name(self, context: BackendContext) -> str:
        return context.namespace.model.encode().hex() or "-"


@noticed_by("test_every_field_of_the_namespace_counts", "test_another_layout_is_another_namespace")
class KnowsTheModelAlone(NamedDirectory):
    """Takes all weights, types and layouts of a model for one."""

    def name(self, context: BackendContext) -> str:
        return context.namespace.model.encode().hex()


# -- buffers ---------------------------------------------------------------------------------------------------------


@noticed_by("test_no_buffer_is_kept_by_a_miss")
class RemembersItsMisses(PlainFiles):
    """Keeps the request that it could not serve."""

    missed: ReadRequest | None = None

    def read_one(self, request: ReadRequest) -> ReadResult:
        result = super().read_one(request)
        self.missed = request if result is None else None
        return result


@noticed_by("test_reads_stay_inside_their_buffer")
class ClearsThePage(PlainFiles):
    """Goes to the memory behind the view."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        memory = request.buffer.obj
        if isinstance(memory, mmap.mmap):
            memory[:16] = bytes(16)
        return super().read_one(request)


@noticed_by("test_frames_are_not_changed_by_a_write")
class EncryptsInPlace(PlainFiles):
    """Works in the caller's memory."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        memory = request.frame.obj
        result = super().write_one(request)
        if isinstance(memory, mmap.mmap):
            memory[0] ^= 0xFF
        return result


@noticed_by("test_a_buffer_longer_than_any_frame")
class TellsTheBuffersLength(PlainFiles):
    """Takes the buffer's length for the frame's, where the buffer is longer than frames are."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.frame_bytes_max = context.frame_bytes_max

    def read_one(self, request: ReadRequest) -> ReadResult:
        result = super().read_one(request)
        return len(request.buffer) if result and len(request.buffer) > self.frame_bytes_max else result


@noticed_by("test_what_was_in_the_buffer_does_not_matter")
class SkipsZeros(PlainFiles):
    """Stores sparsely, and believes that memory is zero."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        before = bytes(request.buffer)
        result = super().read_one(request)
        for index, byte in enumerate(request.buffer[: result or 0] if isinstance(result, int) else b""):
            if not byte:
                request.buffer[index] = before[index]
        return result


# -- opening, threads, options ---------------------------------------------------------------------------------------


@noticed_by("test_every_call_on_another_thread")
class LivesOnOneThread(PlainFiles):
    """Belongs to the thread that opened it."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        self.thread = threading.get_ident()
        super().__init__(context, options)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        if threading.get_ident() != self.thread:
            raise BackendError("another thread")
        return super().contains(keys)


@noticed_by("test_opening_and_closing_leaks_nothing")
class NeverClosesItsLog(PlainFiles):
    """Leaves a file open each time."""

    logs: ClassVar[list[Any]] = []

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.logs.append((self.root / "log").open("w"))


@noticed_by("test_a_failed_opening_leaves_nothing")
class NeverClosesWhatFails(PlainFiles):
    """Leaves a file open where it could not open the rest."""

    left: ClassVar[list[Any]] = []

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        try:
            super().__init__(context, options)
        except BackendError:
            self.left.append(Path("/dev/null").open("rb"))  # noqa: SIM115  # the mistake
            raise


@noticed_by("test_nothing_is_acknowledged_after_close")
class AcknowledgesAfterClose(PlainFiles):
    """Says yes to everything, and has no file any more."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return None if self.lock.closed else super().write_one(request)


@noticed_by("test_close_while_calls_run")
class CloseTakesWhatIsRead(PlainFiles):
    """Removes all files at close that it takes for temporary: also those that others read."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.read_now: list[Key] = []

    def read_one(self, request: ReadRequest) -> ReadResult:
        self.read_now.append(request.key)
        time.sleep(0.005)
        try:
            return super().read_one(request)
        finally:
            self.read_now.remove(request.key)

    def close(self) -> None:
        self.delete(list(self.read_now))
        super().close()


@dataclass(frozen=True, slots=True)
class PickyOptions(PlainOptions):
    """Wants to be given a URL by users, and a path by its own tests."""

    def __post_init__(self) -> None:
        """Refuse paths."""
        if "://" not in self.path:
            raise ValueError("path must be a URL")


@noticed_by("test_options_come_from_a_configuration", options=PickyOptions)
class RefusesItsOwnOptions(PlainFiles):
    """Cannot be configured."""


@noticed_by("test_an_unknown_option_is_an_error", options=dict)
class TakesAnyOption(PlainFiles):
    """Has no list of its options."""


def curious(options: PlainOptions, _capacity_bytes: int | None) -> Iterable[CheckResult]:
    """A check that tries whether it can write, and leaves its trial."""
    place = Path(options.path)
    place.mkdir(exist_ok=True, parents=True)
    with (place / "trial").open("ab") as trial:
        trial.write(b"x")
    return [CheckResult("place", ok=True, detail="can be written")]


@noticed_by("test_check_only_looks", check=curious)
class ChecksByWriting(PlainFiles):
    """Its check leaves a file behind."""


# -- event loop ------------------------------------------------------------------------------------------------------


@noticed_by("test_async_verbs_let_the_loop_turn")
class BlocksTheLoop(AsyncPlainFiles):
    """Is async by name."""

    async def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        return self.files.write(requests)


@noticed_by("test_async_calls_at_once")
class OneCallAtATime(AsyncPlainFiles):
    """Keeps the current batch in itself."""

    batch: Sequence[WriteRequest] = ()

    async def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        self.batch = requests
        await asyncio.sleep(0)
        return await super().write(self.batch)


@noticed_by("test_cancelled_calls_do_no_harm")
class LosesConnections(AsyncPlainFiles):
    """Gives a connection back only where a call ends well."""

    free = 8

    async def contains(self, keys: Sequence[Key]) -> list[bool]:
        if not self.free:
            raise BackendError("no connection is free")
        self.free -= 1
        answers = await super().contains(keys)
        self.free += 1
        return answers
