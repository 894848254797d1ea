"""Tier over real files: chunks are restored exactly, and every failure is a miss with a reason."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from panics import Panic
from tier_bench import CODECS, PAYLOAD_BYTES, Bench, delete_chunks, probe_chunks, read_chunks, write_chunks

from tierkv.abc import Capabilities, CodecFrame
from tierkv.errors import EngineProtocolError, PluginError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes, parse_header
from tierkv.frames.sealer import FrameSealer
from tierkv.testing.frames import make_key
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Outcome, OutcomeKind, Verb

KEYS = [make_key(number) for number in range(8)]
RAW_FRAME_BYTES = frame_bytes(PAYLOAD_BYTES)
Make = Callable[..., bytes]


def kinds(outcomes: list[Outcome]) -> list[OutcomeKind]:
    """Return the kind of each outcome."""
    return [outcome.kind for outcome in outcomes]


def store(bench: Bench, make: Make, count: int = 3, codec: str = "none", **changes: object) -> list[bytes]:
    """Write chunks 0 to ``count`` - 1; returns their payloads."""
    payloads = [make(number) for number in range(count)]
    refs = [bench.fill(number, KEYS[number], payload) for number, payload in enumerate(payloads)]
    outcomes = write_chunks(bench.tier(codec, **changes), KEYS[:count], refs)
    assert kinds(outcomes) == [OutcomeKind.OK] * count, outcomes
    return payloads


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_written_chunks_are_read_back(bench: Bench, compressible: Make, codec: str) -> None:
    """Chunks are read in another order, into slots full of another chunk's bytes."""
    payloads = store(bench, compressible, codec=codec)
    outcomes = read_chunks(bench.tier(codec), KEYS[2::-1], bench.stale([5, 6, 7]))
    assert kinds(outcomes) == [OutcomeKind.OK] * 3, outcomes
    assert [bench.payload(slot, key) for slot, key in zip([5, 6, 7], KEYS[2::-1], strict=True)] == payloads[::-1]
    assert [o.frame_bytes for o in outcomes] == [bench.file(key).stat().st_size for key in KEYS[2::-1]]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=st.one_of(
        st.binary(min_size=1, max_size=PAYLOAD_BYTES),
        st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=3), st.integers(1, PAYLOAD_BYTES // 3)),
    ),
    written=st.sampled_from(["none", "zstd"]),
    read=st.sampled_from(["none", "zstd"]),
    alignment=st.sampled_from([1, 512, 4096]),
)
def test_any_payload_by_any_codec(bench: Bench, payload: bytes, written: str, read: str, alignment: int) -> None:
    """Frames name their codec, so a tier whose codec was changed reads its old and new frames."""
    ref = bench.fill(0, KEYS[0], payload)
    capabilities = Capabilities(alignment=alignment)
    (stored,) = write_chunks(bench.tier(written, capabilities=capabilities), KEYS[:1], [ref])
    assert stored.kind is OutcomeKind.OK
    at_rest = bench.file(KEYS[0]).read_bytes()
    assert stored.frame_bytes == len(at_rest)
    assert len(at_rest) % alignment == 0
    (outcome,) = read_chunks(bench.tier(read), KEYS[:1], bench.stale([1]))
    assert outcome == Outcome(OutcomeKind.OK, len(at_rest))
    assert bench.payload(1, KEYS[0]) == payload
    assert bytes(bench.arena.slot(0)[: frame_bytes(len(payload))]) == bytes(
        bench.arena.slot(1)[: frame_bytes(len(payload))]
    )


def test_a_raw_frame_at_rest_is_the_slot(bench: Bench, compressible: Make) -> None:
    """Decision 3: no copy, no second form. The file equals the slot, byte for byte."""
    store(bench, compressible, count=1)
    assert bench.file(KEYS[0]).read_bytes() == bytes(bench.arena.slot(0)[:RAW_FRAME_BYTES])


def test_an_encoded_frame_is_shorter_and_names_its_codec(bench: Bench, compressible: Make) -> None:
    """Compression must reach the disk, and the raw checksum must stay that of the origin."""
    store(bench, compressible, count=1, codec="zstd")
    at_rest = bench.file(KEYS[0]).read_bytes()
    header, origin = parse_header(memoryview(at_rest)), bench.sealer.check_slot(bench.arena.slot(0), KEYS[0])
    assert (header.codec, header.raw_bytes, header.raw_checksum) == ("zstd", PAYLOAD_BYTES, origin.raw_checksum)
    assert len(at_rest) == HEADER_BYTES + header.stored_bytes < RAW_FRAME_BYTES


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_checksums_of_parts_travel_with_the_payload(bench: Bench, compressible: Make, codec: str) -> None:
    """Every codec preserves the checksums of the workers. Damage in one part is detected by the read."""
    ref = bench.fill(0, KEYS[0], compressible(0), parts=4)
    tier = bench.tier(codec)
    assert kinds(write_chunks(tier, KEYS[:1], [ref])) == [OutcomeKind.OK]
    origin = bench.sealer.check_slot(bench.arena.slot(0), KEYS[0])
    at_rest = parse_header(memoryview(bench.file(KEYS[0]).read_bytes()))
    assert (at_rest.codec, at_rest.part_checksums) == (codec, origin.part_checksums)
    assert kinds(read_chunks(tier, KEYS[:1], bench.stale([1]))) == [OutcomeKind.OK]
    assert bytes(bench.arena.slot(1)[:RAW_FRAME_BYTES]) == bytes(bench.arena.slot(0)[:RAW_FRAME_BYTES])
    damaged = bytearray(bench.file(KEYS[0]).read_bytes())
    damaged[HEADER_BYTES + at_rest.stored_bytes // 2] ^= 1
    bench.file(KEYS[0]).write_bytes(damaged)
    assert kinds(read_chunks(tier, KEYS[:1], bench.stale([1]))) == [OutcomeKind.CORRUPT]


class OneByteOff:
    """Codec that restores all but the last byte."""

    encode = staticmethod(CODECS["zstd"].encode)

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        CODECS["zstd"].decode(stored, out, frame)
        out[-1] ^= 1


def test_a_codec_that_changes_one_part_is_detected(bench: Bench, compressible: Make) -> None:
    """The stored checksum covers the encoded bytes only. The parts' checksums cover what the workers wrote."""
    write_chunks(bench.tier("zstd"), KEYS[:1], [bench.fill(0, KEYS[0], compressible(0), parts=4)])
    (outcome,) = read_chunks(bench.tier("zstd", codecs={"zstd": OneByteOff()}), KEYS[:1], bench.stale([1]))
    assert outcome.kind is OutcomeKind.CORRUPT
    assert "did not give back" in outcome.error
    assert "checksum of part 3" in outcome.error


def test_padding_at_rest_is_zero(bench: Bench, compressible: Make) -> None:
    """Staging buffers are reused: bytes of another chunk must not be written with this one."""
    tier = bench.tier("zstd", capabilities=Capabilities(alignment=4096, preferred_batch=1))
    refs = [bench.fill(0, KEYS[0], os.urandom(5000) + bytes(5000)), bench.fill(1, KEYS[1], compressible(1))]
    assert kinds(write_chunks(tier, KEYS[:2], refs)) == [OutcomeKind.OK] * 2
    at_rest = bench.file(KEYS[1]).read_bytes()
    end = HEADER_BYTES + parse_header(memoryview(at_rest)).stored_bytes
    assert at_rest[end:] == bytes(len(at_rest) - end) != b""


def test_what_does_not_shrink_is_stored_raw(bench: Bench) -> None:
    """A codec may only ever save bytes, also if padding undoes the savings."""
    ref = bench.fill(0, KEYS[0], os.urandom(PAYLOAD_BYTES))
    write_chunks(bench.tier("zstd"), KEYS[:1], [ref])
    assert parse_header(memoryview(bench.file(KEYS[0]).read_bytes())).codec == "none"
    # 150 random bytes and 3,800 zeros shrink, but into the same number of pages
    ref = bench.fill(0, KEYS[1], os.urandom(150) + bytes(3800))
    write_chunks(bench.tier("zstd", capabilities=Capabilities(alignment=4096)), KEYS[1:2], [ref])
    assert parse_header(memoryview(bench.file(KEYS[1]).read_bytes())).codec == "none"


def test_presence_and_deletion(bench: Bench, compressible: Make) -> None:
    """Probe and delete, over more keys than one batch holds."""
    store(bench, compressible)
    tier = bench.tier()
    assert kinds(probe_chunks(tier, KEYS)) == [OutcomeKind.OK] * 3 + [OutcomeKind.ABSENT] * 5
    assert kinds(delete_chunks(tier, KEYS[1:7])) == [OutcomeKind.OK] * 6
    assert kinds(probe_chunks(tier, KEYS)) == [OutcomeKind.OK] + [OutcomeKind.ABSENT] * 7
    assert kinds(read_chunks(tier, KEYS[:2], bench.stale([6, 7]))) == [OutcomeKind.OK, OutcomeKind.ABSENT]


def test_batches_keep_the_preferred_length(bench: Bench, compressible: Make) -> None:
    """preferred_batch is a promise to the backend's author."""
    sizes: list[int] = []

    def note(batch: object, inner: Callable[[object], object]) -> object:
        sizes.append(len(batch))  # type: ignore[arg-type]  # faults get sequences
        return inner(batch)

    for verb in ("write", "read_into", "contains", "delete"):
        bench.backend.add(verb, note)  # type: ignore[arg-type]  # literal names
    store(bench, compressible, count=8)
    tier = bench.tier(capabilities=Capabilities(preferred_batch=3))
    refs = bench.stale(range(8))
    for outcomes in (read_chunks(tier, KEYS, refs), probe_chunks(tier, KEYS), delete_chunks(tier, KEYS)):
        assert kinds(outcomes) == [OutcomeKind.OK] * 8
    assert sizes == [4, 4] + [3, 3, 2] * 3


@pytest.mark.parametrize(("wish", "sizes"), [(None, [3, 1]), (0, [1, 1, 1, 1]), (2, [2, 2]), (9, [3, 1])])
def test_reads_have_batches_of_their_own(bench: Bench, compressible: Make, wish: int | None, sizes: list[int]) -> None:
    """A call has the bytes that the backend prefers, in one frame or in many; and never more keys than allowed."""
    noted: list[int] = []

    def note(batch: object, inner: Callable[[object], object]) -> object:
        noted.append(len(batch))  # type: ignore[arg-type]  # faults get sequences
        return inner(batch)

    store(bench, compressible, count=4)
    bench.backend.add("read_into", note)
    read_bytes = None if wish is None else max(1, wish * bench.arena.slot_bytes)
    tier = bench.tier(capabilities=Capabilities(preferred_batch=3, preferred_read_bytes=read_bytes))
    assert kinds(read_chunks(tier, KEYS[:4], bench.stale(range(4)))) == [OutcomeKind.OK] * 4
    assert noted == sizes


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_kind_of_damage_at_rest_is_corrupt(bench: Bench, compressible: Make, codec: str) -> None:
    """Promise 1, end to end: flipped, cut, grown, empty, swapped, foreign. Damage affects one chunk only."""
    store(bench, compressible, codec=codec)
    good = bench.file(KEYS[0]).read_bytes()
    other = bench.file(KEYS[1]).read_bytes()
    used = HEADER_BYTES + parse_header(memoryview(good)).stored_bytes
    damages = {
        "header": bytes([*good[:100], good[100] ^ 1, *good[101:]]),
        "first byte": bytes([*good[:HEADER_BYTES], good[HEADER_BYTES] ^ 0x80, *good[HEADER_BYTES + 1 :]]),
        "last byte": bytes([*good[: used - 1], good[used - 1] ^ 1, *good[used:]]),
        "cut in payload": good[: used - 1],
        "header only": good[:HEADER_BYTES],
        "cut in header": good[:1000],
        "empty": b"",
        "grown": good + bytes(4096),
        "another chunk": other,
        "zeros": bytes(len(good)),
    }
    tier = bench.tier(codec, capabilities=Capabilities(preferred_batch=4, authoritative_index=True))
    for name, damage in damages.items():
        bench.file(KEYS[0]).write_bytes(damage)
        outcomes = read_chunks(tier, KEYS[:3], bench.stale([5, 6, 7]))
        assert kinds(outcomes) == [OutcomeKind.CORRUPT, OutcomeKind.OK, OutcomeKind.OK], (name, outcomes)
        assert outcomes[0].error.partition(":")[0].removesuffix("FrameError") in {"Corrupt", "Cut", "No", "Other"}, name
        assert outcomes[0].frame_bytes == 0


def test_a_short_frame_does_not_borrow_from_the_slot(bench: Bench, compressible: Make) -> None:
    """The slot may still hold this chunk from an earlier read. Bytes that were not read now must not count."""
    store(bench, compressible, count=1)
    path = bench.file(KEYS[0])
    path.write_bytes(path.read_bytes()[: HEADER_BYTES + 100])
    (outcome,) = read_chunks(bench.tier(), KEYS[:1], [bench.fill(0, KEYS[0], compressible(0))])
    assert outcome.kind is OutcomeKind.FAILED


def test_missing_padding_is_filled_with_zeros(bench: Bench, compressible: Make) -> None:
    """A backend with a smaller alignment stores less padding. Old bytes must not take its place."""
    store(bench, compressible, count=1)
    path = bench.file(KEYS[0])
    path.write_bytes(path.read_bytes()[: HEADER_BYTES + PAYLOAD_BYTES])
    (outcome,) = read_chunks(bench.tier(), KEYS[:1], bench.stale([4]))
    assert outcome == Outcome(OutcomeKind.OK, HEADER_BYTES + PAYLOAD_BYTES)
    assert bench.arena.slot(4)[:RAW_FRAME_BYTES] == bench.arena.slot(0)[:RAW_FRAME_BYTES]


def test_foreign_namespace_is_corrupt(bench: Bench, compressible: Make) -> None:
    """Frames of another model in the same directory must never be loaded."""
    store(bench, compressible, count=1)
    (outcome,) = read_chunks(bench.tier(sealer=FrameSealer(bytes(16))), KEYS[:1], bench.stale([4]))
    assert outcome.kind is OutcomeKind.CORRUPT
    assert "namespace" in outcome.error


def test_a_missing_codec_is_a_miss_with_a_reason(bench: Bench, compressible: Make) -> None:
    """The frame is intact and another process may read it. Calling it corrupt would delete it."""
    store(bench, compressible, count=1, codec="zstd")
    (outcome,) = read_chunks(bench.tier(codecs={"none": CODECS["none"]}), KEYS[:1], bench.stale([4]))
    assert outcome.kind is OutcomeKind.UNREADABLE
    assert "'zstd'" in outcome.error


class ReverseCodec:
    """Codec that encodes to half and decodes to something else."""

    def __init__(self, encoded: object = None, error: BaseException | None = None) -> None:
        self.encoded = encoded
        self.error = error

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        if self.error:
            raise self.error
        return self.encoded if self.encoded is not None else len(raw) // 2  # type: ignore[return-value]  # the lie

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        if self.error:
            raise self.error
        out[:] = bytes(len(out))


def test_a_codec_that_decodes_wrongly_is_seen(bench: Bench, compressible: Make) -> None:
    """The raw checksum of the origin also guards against codecs."""
    codecs = {**CODECS, "reverse": ReverseCodec()}
    store(bench, compressible, count=1, codec="reverse", codecs=codecs)
    (outcome,) = read_chunks(bench.tier(codecs=codecs), KEYS[:1], bench.stale([4]))
    assert outcome.kind is OutcomeKind.CORRUPT
    assert "did not give back" in outcome.error


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_codec_that_raises_fails_its_chunk_only(bench: Bench, compressible: Make, error: type[BaseException]) -> None:
    """Codecs are plugins too (promise 3)."""
    store(bench, compressible, count=2, codec="reverse", codecs={**CODECS, "reverse": ReverseCodec()})
    write_chunks(bench.tier(), KEYS[1:2], [bench.fill(1, KEYS[1], compressible(1))])
    broken = {**CODECS, "reverse": ReverseCodec(error=error("no"))}
    outcomes = read_chunks(bench.tier(codecs=broken), KEYS[:2], bench.stale([4, 5]))
    assert kinds(outcomes) == [OutcomeKind.FAILED, OutcomeKind.OK]
    assert outcomes[0].error == f"{error.__name__}: no"
    (outcome,) = write_chunks(bench.tier("reverse", codecs=broken), KEYS[:1], [bench.fill(0, KEYS[0], compressible(0))])
    assert (outcome.kind, outcome.error) == (OutcomeKind.FAILED, f"{error.__name__}: no")


@pytest.mark.parametrize("encoded", [0, -5, PAYLOAD_BYTES, 10**9, "many", True])
def test_a_codec_with_invalid_lengths_writes_nothing(bench: Bench, compressible: Make, encoded: object) -> None:
    """Its result is used as a length of memory."""
    codecs = {**CODECS, "reverse": ReverseCodec(encoded=encoded)}
    (outcome,) = write_chunks(bench.tier("reverse", codecs=codecs), KEYS[:1], [bench.fill(0, KEYS[0], compressible(0))])
    assert outcome.kind is OutcomeKind.FAILED
    assert not bench.file(KEYS[0]).exists()


def test_foreign_bytes_are_never_written(bench: Bench, compressible: Make) -> None:
    """A slot that was given to another chunk meanwhile must not be stored under this key."""
    refs = [bench.fill(0, KEYS[5], compressible(5)), bench.fill(1, KEYS[1], compressible(1)), *bench.stale([2])]
    outcomes = write_chunks(bench.tier(), KEYS[:3], refs)
    assert kinds(outcomes) == [OutcomeKind.CORRUPT, OutcomeKind.OK, OutcomeKind.CORRUPT]
    assert [bench.file(key).exists() for key in KEYS[:3]] == [False, True, False]


def test_a_read_only_tier_is_never_changed(bench: Bench, compressible: Make) -> None:
    """The framework never calls write or delete on a tier that declares read_only."""
    tier = bench.tier(capabilities=Capabilities(read_only=True))
    assert kinds(write_chunks(tier, KEYS[:1], [bench.fill(0, KEYS[0], compressible(0))])) == [OutcomeKind.REFUSED]
    assert kinds(delete_chunks(tier, KEYS[:2])) == [OutcomeKind.REFUSED] * 2
    assert bench.backend.calls == []


@pytest.mark.parametrize("alignment", [0, 24, 8192])
def test_an_alignment_that_cannot_be_served_is_refused(bench: Bench, alignment: int) -> None:
    """Slots are aligned to 4096. A backend that needs more must fail at open, not at its first write."""
    with pytest.raises(PluginError, match=f"alignment {alignment}"):
        bench.tier(capabilities=Capabilities(alignment=alignment))


def test_an_unknown_codec_is_refused(bench: Bench) -> None:
    """It must fail at open, not at the first write."""
    with pytest.raises(PluginError, match="'lz4'"):
        bench.tier("lz4")


def test_slots_and_keys_must_agree(bench: Bench) -> None:
    """One missing slot would shift every chunk behind it."""
    with pytest.raises(EngineProtocolError):
        read_chunks(bench.tier(), KEYS[:2], bench.stale([1]))
    with pytest.raises(EngineProtocolError):
        bench.tier().perform(Verb.PROBE, KEYS[:1], bench.stale([1]))


def test_staging_is_reused(bench: Bench, compressible: Make) -> None:
    """Fresh memory is ten times slower to fill, and must not grow with the number of writes."""
    tier = bench.tier("zstd", capabilities=Capabilities(preferred_batch=2))
    refs = [bench.fill(number, KEYS[number], compressible(number)) for number in range(8)]
    for _ in range(3):
        assert kinds(write_chunks(tier, KEYS, refs)) == [OutcomeKind.OK] * 8
        assert kinds(read_chunks(tier, KEYS, refs)) == [OutcomeKind.OK] * 8
    assert len(tier._framer._staging._free) == 2


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_async_backend_has_the_same_outcomes(async_bench: Bench, compressible: Make, codec: str) -> None:
    """One implementation serves both kinds. Here two operations run at once on an event loop."""
    bench = async_bench
    tier = bench.tier(codec, asynchronous=True)
    payloads = [compressible(number) for number in range(4)]
    refs = [bench.fill(number, KEYS[number], payload) for number, payload in enumerate(payloads)]

    async def story() -> list[list[OutcomeKind]]:
        both = await asyncio.gather(
            tier.perform_async(Verb.WRITE, KEYS[:2], refs[:2]), tier.perform_async(Verb.WRITE, KEYS[2:4], refs[2:])
        )
        wrote = [kinds(performed.outcomes) for performed in both]
        read = await tier.perform_async(Verb.READ, KEYS[:5], bench.stale([3, 4, 5, 6, 7]))
        return [*wrote, kinds(read.outcomes), kinds((await tier.perform_async(Verb.PROBE, KEYS[3:5])).outcomes)]

    ok, absent = OutcomeKind.OK, OutcomeKind.ABSENT
    assert asyncio.run(story()) == [[ok, ok], [ok, ok], [ok, ok, ok, ok, absent], [ok, absent]]
    assert [bench.payload(number + 3, KEYS[number]) for number in range(4)] == payloads


def test_an_async_verb_on_a_plain_thread_is_refused(async_bench: Bench) -> None:
    """The mistake must raise an error, not return a coroutine that is never awaited."""
    with pytest.raises(EngineProtocolError, match="perform_async"):
        probe_chunks(async_bench.tier(asynchronous=True), [Key(b"k")])
