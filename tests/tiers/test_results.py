"""Promise 3: every error, result or claim of a backend becomes an outcome, and the tier stays usable."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import Bench, delete_chunks, probe_chunks, read_chunks, write_chunks

from tierkv.abc import Capabilities
from tierkv.errors import BackendError, BackendUnavailableError, CorruptFrameError, OutOfSpaceError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.testing import faults
from tierkv.testing.frames import make_key
from tierkv.tiers.results import ERROR_CHARS_MAX
from tierkv.tiers.retry import RetryLimits
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Outcome, OutcomeKind

KEYS = [make_key(number) for number in range(3)]
Make = Callable[..., bytes]


def all_verbs(bench: Bench, make: Make, **declared: Any) -> dict[str, list[Outcome]]:
    """Perform each verb once over all keys. declared: further capabilities."""
    tier = bench.tier(capabilities=Capabilities(preferred_batch=4, **declared))
    refs = [bench.fill(number, key, make(number)) for number, key in enumerate(KEYS)]
    return {
        "write": write_chunks(tier, KEYS, refs),
        "contains": probe_chunks(tier, KEYS),
        "read_into": read_chunks(tier, KEYS, bench.stale([5, 6, 7])),
        "delete": delete_chunks(tier, KEYS),
    }


@pytest.mark.parametrize("verb", ["write", "contains", "read_into", "delete"])
@pytest.mark.parametrize("name", faults.LIES)
def test_an_invalid_result_fails_its_batch(bench: Bench, compressible: Make, verb: Any, name: str) -> None:
    """A result of the wrong shape invalidates its whole batch. The next batch is performed as usual."""
    bench.backend.add(verb, faults.LIES[name], times=1)
    first = all_verbs(bench, compressible)
    assert [o.kind for o in first[verb]] == [OutcomeKind.FAILED] * 3, first[verb]
    assert all(o.error.startswith("BackendError: backend returned") for o in first[verb])
    again = all_verbs(bench, compressible)
    assert [o.kind for outcomes in again.values() for o in outcomes] == [OutcomeKind.OK] * 12


@pytest.mark.parametrize("verb", ["write", "contains", "read_into", "delete"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BackendError("broken"), OutcomeKind.FAILED),
        (OSError(errno.EIO, "broken"), OutcomeKind.FAILED),
        (ValueError("broken"), OutcomeKind.FAILED),
        (SystemExit("broken"), OutcomeKind.FAILED),
        (KeyboardInterrupt("broken"), OutcomeKind.FAILED),
        (asyncio.CancelledError("broken"), OutcomeKind.FAILED),
        (StopIteration("broken"), OutcomeKind.FAILED),
        (MemoryError("broken"), OutcomeKind.FAILED),
        (OutOfSpaceError("broken"), OutcomeKind.NO_SPACE),
        (OSError(errno.ENOSPC, "broken"), OutcomeKind.NO_SPACE),
        (OSError(errno.EDQUOT, "broken"), OutcomeKind.NO_SPACE),
        (CorruptFrameError("broken"), OutcomeKind.CORRUPT),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.value,
)
def test_a_raised_error_is_the_outcome_of_every_key(
    bench: Bench, compressible: Make, verb: Any, error: BaseException, kind: OutcomeKind
) -> None:
    """SystemExit in a plugin must neither end an I/O thread nor lose the operation."""
    bench.backend.add(verb, faults.raise_error(lambda: error), times=1)
    outcomes = all_verbs(bench, compressible)[verb]
    assert [o.kind for o in outcomes] == [kind] * 3
    # Python converts a StopIteration that a coroutine raises to another error, which names it.
    text = "StopIteration" if isinstance(error, StopIteration) else "broken"
    assert all(text in o.error for o in outcomes)


@pytest.mark.parametrize("verb", ["write", "contains", "read_into", "delete"])
def test_a_returned_error_concerns_its_key_alone(bench: Bench, compressible: Make, verb: Any) -> None:
    """One bad chunk in a batch must not fail the others."""
    bench.backend.add(verb, faults.return_error(lambda: ValueError("just this one"), index=1), times=1)
    outcomes = all_verbs(bench, compressible)[verb]
    assert [o.kind for o in outcomes] == [OutcomeKind.OK, OutcomeKind.FAILED, OutcomeKind.OK]
    assert outcomes[1].error == "ValueError: just this one"


class UnprintableError(Exception):
    """Error whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_error_text_is_bounded_and_never_missing(bench: Bench, compressible: Make) -> None:
    """Promise 6 applies to text too, and describing an error must not raise another."""
    bench.backend.add("read_into", faults.raise_error(lambda: ValueError("x" * 10_000)), times=1)
    assert {len(o.error) for o in all_verbs(bench, compressible)["read_into"]} == {ERROR_CHARS_MAX}
    bench.backend.add("read_into", faults.raise_error(UnprintableError), times=1)
    assert all_verbs(bench, compressible)["read_into"][0].error == (
        "UnprintableError: (UnprintableError that cannot be shown)"
    )


@pytest.mark.parametrize(
    "fault",
    [
        faults.corrupt(20),
        faults.corrupt(HEADER_BYTES + 5000, flip=0x80),
        faults.short_read(HEADER_BYTES + 5000, honest=False),
    ],
)
def test_wrong_bytes_are_corrupt(bench: Bench, compressible: Make, fault: faults.Fault) -> None:
    """Promise 1: the results have the right shape, the bytes are wrong."""
    bench.backend.add("read_into", fault)
    assert [o.kind for o in all_verbs(bench, compressible)["read_into"]] == [OutcomeKind.CORRUPT] * 3


def test_the_frame_of_another_chunk_is_damage_only_where_the_tier_has_an_index(
    bench: Bench, compressible: Make
) -> None:
    """A proxy may mix up its answers: the objects in the shared bucket are whole, and must not be deleted."""
    bench.backend.add("read_into", faults.swap())
    assert [o.kind for o in all_verbs(bench, compressible)["read_into"]] == [OutcomeKind.FAILED] * 3
    indexed = all_verbs(bench, compressible, authoritative_index=True)
    assert [o.kind for o in indexed["read_into"]] == [OutcomeKind.CORRUPT] * 3


@pytest.mark.parametrize("length", [0, 100, HEADER_BYTES, HEADER_BYTES + 5000])
def test_a_part_of_a_frame_is_damage_only_where_the_tier_has_an_index(
    bench: Bench, compressible: Make, length: int
) -> None:
    """A proxy may end an answer early: the object in the shared bucket is whole, and must not be deleted."""
    rule = bench.backend.add("read_into", faults.short_read(length))
    assert [o.kind for o in all_verbs(bench, compressible)["read_into"]] == [OutcomeKind.FAILED] * 3
    indexed = all_verbs(bench, compressible, authoritative_index=True)
    assert [o.kind for o in indexed["read_into"]] == [OutcomeKind.CORRUPT] * 3
    rule.times_left = 1
    tier = bench.tier(retry=RetryLimits(attempts=2, base_delay_s=0.0))
    write_chunks(tier, KEYS, [bench.fill(number, key, compressible(number)) for number, key in enumerate(KEYS)])
    assert [o.kind for o in read_chunks(tier, KEYS, bench.stale([5, 6, 7]))] == [OutcomeKind.OK] * 3, "tried again"


@pytest.mark.parametrize(
    "fault", [faults.corrupt(0, flip=0xFF), faults.claim_without_reading(HEADER_BYTES + 12_288)], ids=["page", "claim"]
)
def test_bytes_that_are_no_frame_are_damage_only_where_the_tier_has_an_index(
    bench: Bench, compressible: Make, fault: faults.Fault
) -> None:
    """A proxy may send its own page with status 200: the object in the shared bucket is whole, and stays."""
    bench.backend.add("read_into", fault)
    assert [o.kind for o in all_verbs(bench, compressible)["read_into"]] == [OutcomeKind.FAILED] * 3
    indexed = all_verbs(bench, compressible, authoritative_index=True)
    assert [o.kind for o in indexed["read_into"]] == [OutcomeKind.CORRUPT] * 3


@pytest.mark.parametrize("offset", [0, 20, HEADER_BYTES + 5000])
def test_bytes_that_the_network_damaged_are_read_again(bench: Bench, compressible: Make, offset: int) -> None:
    """The next read of a shared tier shows that the frame is whole: no hit is lost, and nothing is deleted."""
    bench.backend.add("read_into", faults.corrupt(offset, flip=0x10), times=1)
    tier = bench.tier(retry=RetryLimits(attempts=2, base_delay_s=0.0))
    write_chunks(tier, KEYS, [bench.fill(number, key, compressible(number)) for number, key in enumerate(KEYS)])
    assert [o.kind for o in read_chunks(tier, KEYS, bench.stale([5, 6, 7]))] == [OutcomeKind.OK] * 3
    bench.backend.add("read_into", faults.corrupt(offset, flip=0x10), times=1)
    indexed = Capabilities(preferred_batch=4, authoritative_index=True)
    tier = bench.tier(capabilities=indexed, retry=RetryLimits(attempts=2, base_delay_s=0.0))
    assert [o.kind for o in read_chunks(tier, KEYS, bench.stale([5, 6, 7]))] == [OutcomeKind.CORRUPT] * 3


def test_a_truncated_write_is_found_when_read(bench: Bench, compressible: Make) -> None:
    """The backend acknowledged the write. The read detects the damage."""
    bench.backend.add("write", faults.write_half())
    assert [o.kind for o in all_verbs(bench, compressible)["read_into"]] == [OutcomeKind.FAILED] * 3


def test_a_forgotten_write_is_absent_when_read(bench: Bench, compressible: Make) -> None:
    """The backend acknowledged the write. The read reports a miss."""
    bench.backend.add("write", faults.forget())
    assert [o.kind for o in all_verbs(bench, compressible)["read_into"]] == [OutcomeKind.ABSENT] * 3


def test_a_kept_buffer_is_released(bench: Bench, compressible: Make) -> None:
    """Buffers are valid during the call only. A later access must raise, not change a slot in use."""
    kept: list[memoryview] = []

    def keep(batch: Any, inner: Callable[[Any], Any]) -> object:
        kept.extend(getattr(request, "buffer", None) or request.frame for request in batch)
        return inner(batch)

    bench.backend.add("read_into", keep)
    bench.backend.add("write", keep)
    all_verbs(bench, compressible)
    assert len(kept) == 6
    for view in kept:
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_frames_cannot_be_changed_by_the_backend(bench: Bench, compressible: Make) -> None:
    """The written slot is also the source of later loads to the GPU."""
    flags: list[bool] = []

    def look(batch: Any, inner: Callable[[Any], Any]) -> object:
        flags.extend(request.frame.readonly for request in batch)
        return inner(batch)

    bench.backend.add("write", look)
    all_verbs(bench, compressible)
    assert flags == [True] * 3


def test_unavailable_is_a_failure_with_its_name(bench: Bench, compressible: Make) -> None:
    """Operators read this text in the log."""
    bench.backend.add("contains", faults.raise_error(lambda: BackendUnavailableError("no route to bucket")))
    assert all_verbs(bench, compressible)["contains"][0] == Outcome(
        OutcomeKind.FAILED, error="BackendUnavailableError: no route to bucket"
    )


@pytest.mark.parametrize("helpful", [True, False])
def test_a_backend_is_notified_of_corrupt_frames(
    bench: Bench, compressible: Make, monkeypatch: pytest.MonkeyPatch, *, helpful: bool
) -> None:
    """Only frames that failed a check are reported. An error of the backend does not change the miss."""
    notices: list[tuple[Key, str]] = []

    def quarantine(key: Key, reason: str) -> None:
        notices.append((key, reason))
        if not helpful:
            raise SystemError("broken")

    monkeypatch.setattr(bench.backend, "quarantine", quarantine, raising=False)
    tier = bench.tier(retry=RetryLimits(attempts=3, base_delay_s=0.0))
    write_chunks(tier, KEYS, [bench.fill(number, key, compressible(number)) for number, key in enumerate(KEYS)])
    content = bytearray(bench.file(KEYS[1]).read_bytes())
    content[HEADER_BYTES + 5] ^= 1
    bench.file(KEYS[1]).write_bytes(content)
    bench.file(KEYS[2]).unlink()
    outcomes = read_chunks(tier, KEYS, bench.stale([5, 6, 7]))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.OK, OutcomeKind.CORRUPT, OutcomeKind.ABSENT]
    assert [key for key, _ in notices] == [KEYS[1]]
    assert "checksum" in notices[0][1]
