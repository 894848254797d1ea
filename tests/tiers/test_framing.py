"""Frames of every codec in a tier: readable configurations, bytes at rest, detected damage."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from codec_parts import KEY, aes, open_codec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from tier_bench import CODECS, PAYLOAD_BYTES, Bench, compressible, make_bench, read_chunks, write_chunks

from tierkv.abc import Capabilities
from tierkv.frames.frame import HEADER_BYTES, checksum_of_parts, pack_header, parse_header
from tierkv.testing.frames import make_key
from tierkv.tiers.framing import FrameRules
from tierkv.types import keys
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.tier_ops import OutcomeKind
from tierkv.types.transfers import SlotRef

KEYS = [make_key(number) for number in range(4)]
ALL = {**CODECS, "aes-256-gcm": aes(inner="zstd")}
RULES = {"fp8": FrameRules(lossy=True), "int8": FrameRules(lossy=True), "aes-256-gcm": FrameRules(conceals=True)}
LOSSY = ("fp8", "int8")
EXACT = ("none", "zstd", "bf16", "aes-256-gcm")
OK, CORRUPT, UNREADABLE = OutcomeKind.OK, OutcomeKind.CORRUPT, OutcomeKind.UNREADABLE


def rules_of(codec: str, *, accepts_lossy: bool = True, accepts_clear: bool = False) -> FrameRules:
    """Rules of a tier that writes with ``codec``."""
    rules = RULES.get(codec, FrameRules())
    return FrameRules(rules.lossy, rules.conceals, accepts_lossy, accepts_clear)


def kv(seed: int = 0, size: int = PAYLOAD_BYTES) -> bytes:
    """Return bfloat16 values that every codec shortens."""
    values = np.random.default_rng(seed).normal(size=size // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def stored(bench: Bench, codec: str, payload: bytes, parts: int = 1, slot: int = 0) -> bytes:
    """Write a chunk; returns its bytes at rest."""
    ref = bench.fill(slot, KEYS[0], payload, parts=parts)
    (outcome,) = write_chunks(bench.tier(codec, codecs=ALL, rules=rules_of(codec)), KEYS[:1], [ref])
    assert outcome.kind is OK, outcome
    return bench.file(KEYS[0]).read_bytes()


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("reader", ALL)
@pytest.mark.parametrize("writer", ALL)
def test_every_configuration_reads_frames_of_every_other(bench: Bench, writer: str, reader: str, parts: int) -> None:
    """The codec of a tier may be changed without losing chunks, to encryption with ``accept_clear``.

    This includes chunks of several parts, whose digests a frame may withhold.
    """
    payload = kv()
    at_rest = parse_header(memoryview(stored(bench, writer, payload, parts)))
    assert at_rest.codec == writer
    assert (at_rest.withheld, at_rest.approximate) == (writer in {*LOSSY, "aes-256-gcm"}, writer in LOSSY)
    rules = rules_of(reader, accepts_clear=True)
    (outcome,) = read_chunks(bench.tier(reader, codecs=ALL, rules=rules), KEYS[:1], bench.stale([1]))
    assert outcome.kind is OK, outcome
    assert outcome.is_clear == (reader == "aes-256-gcm" != writer)
    found = bench.payload(1, KEYS[0])  # checks checksums, those of parts as well
    assert (found == payload) == (writer in EXACT)
    assert len(parse_header(bench.arena.slot(1)).part_checksums) == (parts if parts > 1 else 0)
    if writer in EXACT:
        assert bytes(bench.arena.slot(1))[:HEADER_BYTES] == bytes(bench.arena.slot(0))[:HEADER_BYTES]


@pytest.mark.parametrize("writer", LOSSY)
def test_an_exact_tier_returns_no_approximation(bench: Bench, writer: str) -> None:
    """Without `lossy = true`, approximations at rest are misses, not damage."""
    stored(bench, writer, kv())
    tier = bench.tier("none", codecs=ALL)
    (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
    assert outcome.kind is UNREADABLE
    assert "lossy = true" in outcome.error
    assert bench.file(KEYS[0]).exists()


@pytest.mark.parametrize("through", ["none", "zstd", "aes-256-gcm"])
def test_an_approximation_stays_marked(
    bench: Bench, tmp_path: Path, through: str, request: pytest.FixtureRequest
) -> None:
    """Lossy tiers receive it with its mark. Exact tiers refuse it, whatever the manager requests."""
    stored(bench, "fp8", kv())
    lossy = bench.tier(through, codecs=ALL, rules=rules_of(through, accepts_clear=True))
    read_chunks(lossy, KEYS[:1], bench.stale([1]))
    assert parse_header(bench.arena.slot(1)).approximate
    below = make_bench(tmp_path / "below", beside=bench)
    request.addfinalizer(below.backend.close)
    (refused,) = write_chunks(
        below.tier(through, codecs=ALL, rules=rules_of(through, accepts_lossy=False)), KEYS[:1], [SlotRef(1, 1)]
    )
    assert refused.kind is OutcomeKind.REFUSED
    assert "lossy tier" in refused.error
    assert not below.file(KEYS[0]).exists()
    (outcome,) = write_chunks(below.tier(through, codecs=ALL, rules=rules_of(through)), KEYS[:1], [SlotRef(1, 1)])
    assert outcome.kind is OK
    assert parse_header(memoryview(below.file(KEYS[0]).read_bytes())).approximate
    before = bench.payload(1, KEYS[0])
    (outcome,) = read_chunks(below.tier("none", codecs=ALL, rules=rules_of("none")), KEYS[:1], bench.stale([2]))
    assert outcome.kind is OK
    assert bench.payload(2, KEYS[0]) == before
    assert parse_header(bench.arena.slot(2)).approximate


@pytest.mark.parametrize("codec", LOSSY)
def test_a_new_chunk_is_exact_again(bench: Bench, codec: str) -> None:
    """Slots are reused: the mark of the previous chunk must not stay."""
    stored(bench, codec, kv())
    read_chunks(bench.tier(codec, codecs=ALL, rules=rules_of(codec)), KEYS[:1], bench.stale([1]))
    bench.fill(1, KEYS[1], kv(1))
    assert not parse_header(bench.arena.slot(1)).approximate


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("codec", [*LOSSY, "aes-256-gcm"])
def test_damage_in_the_host_tier_is_not_sealed_again(bench: Bench, codec: str, parts: int) -> None:
    """These frames withhold the raw checksum.

    A byte that changed before encoding must be detected when the frame is written or read.
    """
    ref = bench.fill(0, KEYS[0], kv(), parts=parts)
    bench.arena.slot(0)[HEADER_BYTES + 4321] ^= 1
    tier = bench.tier(codec, codecs=ALL, rules=rules_of(codec))
    (outcome,) = write_chunks(tier, KEYS[:1], [ref])
    if codec in LOSSY:
        assert outcome.kind is CORRUPT
        assert not bench.file(KEYS[0]).exists()
    else:
        (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
        assert outcome.kind is CORRUPT
        assert "did not give back" in outcome.error


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("parts", [1, 5])
def test_a_flipped_bit_at_rest_is_a_miss(bench: Bench, codec: str, parts: int) -> None:
    """In header, notes, part table and payload. Only the padding is not verified."""
    frame = stored(bench, codec, kv(), parts)
    header = parse_header(memoryview(frame))
    rng = random.Random(5)
    places = [*rng.sample(range(HEADER_BYTES + header.stored_bytes), 60), *range(4032, 4096, 5), 10, 340, 362, 366]
    for place in places:
        damaged = bytearray(frame)
        damaged[place] ^= 1 << rng.randrange(8)
        bench.file(KEYS[0]).write_bytes(damaged)
        tier = bench.tier(codec, codecs=ALL, rules=rules_of(codec))
        (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
        assert outcome.kind is CORRUPT, (place, outcome)


PATTERN = b"a prompt that nobody else may see"


@pytest.mark.parametrize("payload", [PATTERN * 300, PATTERN + os.urandom(9900)], ids=["shrinks", "noise"])
@pytest.mark.parametrize("inner", ["none", "zstd", "bf16"])
@pytest.mark.parametrize("alignment", [1, 4096])
def test_an_encrypted_tier_holds_nothing_in_the_clear(bench: Bench, payload: bytes, inner: str, alignment: int) -> None:
    """Neither payload nor checksum is in the clear, also if the payload does not shrink.

    The frame is at most as long as a raw one, so it fits every slot.
    """
    codecs = {**ALL, "aes-256-gcm": aes(inner=inner)}
    capabilities = Capabilities(preferred_batch=4, alignment=alignment)
    tier = bench.tier("aes-256-gcm", codecs=codecs, rules=RULES["aes-256-gcm"], capabilities=capabilities)
    payload = payload[:9900]
    for parts in (1, 3):
        ref = bench.fill(0, KEYS[0], payload, parts=parts)
        origin = parse_header(bench.arena.slot(0))
        assert write_chunks(tier, KEYS[:1], [ref])[0].kind is OK
        at_rest = b"".join(path.read_bytes() for path in bench.place.rglob("*") if path.is_file())
        assert KEYS[0] in at_rest  # the search can find something
        assert not any(payload[start : start + 16] in at_rest for start in range(0, len(payload) - 16, 16))
        assert not any(digest in at_rest for digest in (origin.raw_checksum, *origin.part_checksums))
        assert len(bench.file(KEYS[0]).read_bytes()) <= HEADER_BYTES + 3 * 4096
        (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
        assert outcome.kind is OK, outcome
        assert bench.payload(1, KEYS[0]) == payload


def test_a_codec_that_conceals_must_conceal_all_payloads(bench: Bench) -> None:
    """If such a codec declines, the chunk fails and is never stored raw."""
    rules = FrameRules(conceals=True)
    ref = bench.fill(0, KEYS[0], os.urandom(PAYLOAD_BYTES))
    (outcome,) = write_chunks(bench.tier("zstd", rules=rules), KEYS[:1], [ref])
    assert outcome.kind is OutcomeKind.FAILED
    assert "encoded 10000 bytes to None" in outcome.error
    assert not bench.file(KEYS[0]).exists()


def test_a_codec_that_loses_the_raw_checksum(bench: Bench) -> None:
    """A payload without a verified checksum is refused."""
    ref = bench.fill(0, KEYS[0], compressible(0))
    tier = bench.tier("zstd", rules=FrameRules(conceals=True))
    assert write_chunks(tier, KEYS[:1], [ref])[0].kind is OK
    (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
    assert outcome.kind is CORRUPT
    assert "did not give back" in outcome.error


def test_a_wrong_key_is_a_miss(bench: Bench) -> None:
    """With a wrong key all chunks of a tier are misses. The error names the option that fixes it."""
    stored(bench, "aes-256-gcm", kv())
    before = bench.file(KEYS[0]).read_bytes()
    tier = bench.tier("aes-256-gcm", codecs={"aes-256-gcm": aes(bytes(range(32, 64)))}, rules=RULES["aes-256-gcm"])
    (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
    assert outcome.kind is UNREADABLE
    assert "previous_key_env" in outcome.error
    assert bench.file(KEYS[0]).read_bytes() == before


def test_encrypted_frames_cannot_replace_each_other(bench: Bench) -> None:
    """The tag reveals a copy of a frame under another key, even with a rewritten header."""
    frame = bytearray(stored(bench, "aes-256-gcm", kv()))
    header = parse_header(memoryview(frame))._replace(key=KEYS[1])
    pack_header(header, memoryview(frame))
    bench.file(KEYS[1]).parent.mkdir(parents=True, exist_ok=True)
    bench.file(KEYS[1]).write_bytes(frame)
    tier = bench.tier("aes-256-gcm", codecs=ALL, rules=RULES["aes-256-gcm"])
    (outcome,) = read_chunks(tier, KEYS[1:2], bench.stale([1]))
    assert outcome.kind is CORRUPT
    assert "does not match its authentication tag" in outcome.error


@pytest.mark.parametrize("writer", ["none", "zstd", "bf16", "int8"])
def test_an_encrypted_tier_refuses_frames_in_the_clear(
    bench: Bench, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums need no key: a user who may write to the storage could otherwise choose the bytes on the GPU.

    The storage is not at fault, so no page of it is quarantined.
    """
    quarantined: list[bytes] = []
    monkeypatch.setattr(bench.backend, "quarantine", lambda key, _reason: quarantined.append(key), raising=False)
    stored(bench, writer, kv())
    tier = bench.tier("aes-256-gcm", codecs=ALL, rules=rules_of("aes-256-gcm"))
    (outcome,) = read_chunks(tier, KEYS[:1], bench.stale([1]))
    assert (outcome.kind, outcome.is_clear) == (CORRUPT, True)
    assert "accept_clear = true" in outcome.error
    assert not quarantined


MARKS = {
    "approximate": lambda header: header._replace(approximate=True),
    "withheld": lambda header: header._replace(withheld=False, raw_checksum=checksum_of_parts(header.part_checksums)),
    "one part less": lambda header: header._replace(part_checksums=header.part_checksums[1:]),
    "no parts": lambda header: header._replace(part_checksums=()),
}


@pytest.mark.parametrize("change", MARKS)
def test_the_marks_of_an_encrypted_frame_are_bound_to_it(bench: Bench, change: str) -> None:
    """Header checksums need no key. A cleared mark would turn an approximation into an exact chunk."""
    frame = bytearray(stored(bench, "aes-256-gcm", kv(), parts=5))
    pack_header(MARKS[change](parse_header(memoryview(frame))), memoryview(frame))
    bench.file(KEYS[0]).write_bytes(frame)
    (outcome,) = read_chunks(
        bench.tier("aes-256-gcm", codecs=ALL, rules=rules_of("aes-256-gcm")), KEYS[:1], bench.stale([1])
    )
    assert outcome.kind is CORRUPT
    assert "does not match its authentication tag" in outcome.error


def test_the_identity_matches_its_page(bench: Bench) -> None:
    """Decrypted with the library's one-shot call and the documented associated data."""
    frame = stored(bench, "aes-256-gcm", kv(), parts=5)
    notes, stored_bytes = frame[4032:4096], int.from_bytes(frame[314:322], "little")
    marks = frame[10] & 6
    facts = marks.to_bytes(2, "little") + (5).to_bytes(2, "little") + frame[48:50] + frame[306:314]
    bound = b"tierkv frame 2" + frame[16:48] + facts + KEYS[0] + notes[:10]
    cipher = notes[22:38] + frame[4096 : 4096 + stored_bytes] + notes[38:54]
    assert len(AESGCM(KEY).decrypt(notes[10:22], cipher, bound)) > 16
    assert marks == 2


@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("workers", [1, 5])
def test_only_chunks_of_the_groups_shape_are_read(bench: Bench, codec: str, workers: int) -> None:
    """A worker would refuse any other at every load, while every lookup would report a hit."""
    groups = (GroupSpec(16, (PAYLOAD_BYTES // workers,)), GroupSpec(16, (PAYLOAD_BYTES // workers - 2,)))
    geometry = Geometry.of(EngineSpec("m", "bfloat16", groups, 16, num_workers=workers))
    tier = bench.tier(codec, codecs=ALL, rules=rules_of(codec), geometry=geometry)
    short = PAYLOAD_BYTES - 2 * workers
    for group, size, parts, kind in [
        *[(0, PAYLOAD_BYTES, workers, OK), (1, short, workers, OK)],
        *[(0, short, workers, CORRUPT), (1, PAYLOAD_BYTES, workers, CORRUPT), (2, short, workers, CORRUPT)],
        *[(0, PAYLOAD_BYTES, 6 - workers, CORRUPT), (0, PAYLOAD_BYTES, 2, CORRUPT)],
    ]:
        key = keys.make_key(b"a hash", group)
        bench.fill(0, key, kv(size=size), parts=parts)
        assert write_chunks(tier, [key], [SlotRef(0, 1)])[0].kind is OK
        (outcome,) = read_chunks(tier, [key], bench.stale([1]))
        assert outcome.kind is kind, (group, size, parts, outcome)


def test_values_of_parts_that_end_between_tiles(bench: Bench) -> None:
    """Tiles may cross the borders of workers' parts. Values do not."""
    codec = open_codec("int8")
    payload = kv(3, 9990)
    bench.fill(0, KEYS[0], payload, parts=5)
    tier = bench.tier("int8", codecs={"int8": codec}, rules=rules_of("int8"))
    assert write_chunks(tier, KEYS[:1], [SlotRef(0, 1)])[0].kind is OK
    assert read_chunks(tier, KEYS[:1], bench.stale([1]))[0].kind is OK
    truth, found = (
        (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        for raw in (payload, bench.payload(1, KEYS[0]))
    )
    assert np.abs(truth - found).max() <= np.abs(truth).max() / 127
