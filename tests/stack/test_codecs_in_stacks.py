"""Codecs in a whole stack: hits after a changed configuration, content of the storage, and refused starts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_ranks
from stack_bed import opened, prompts_of, serve, stack_config

import tierkv
from tierkv.errors import ConfigError
from tierkv.frames.frame import HEADER_BYTES, parse_header
from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec

Expected = Callable[..., list[list[int]]]
PROMPTS = prompts_of(11, 2)
AES = {"name": "aes-256-gcm", "key_env": "TIERKV_TEST_KEY"}
MIGRATED = {**AES, "inner": "zstd"}
"""Codec of a tier that also accepts the frames in the clear that it holds."""
SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """Key in the file that the configuration names."""
    text = secrets.token_hex(32)
    monkeypatch.setenv("TIERKV_TEST_KEY", text)
    return text


def config_of(place: Path, codec: Any, backend: str = "disk", **changes: Any) -> dict[str, Any]:
    """Description of a host tier and one tier with this codec."""
    config = stack_config(place)
    (tier,) = [tier for tier in config["tiers"] if tier["backend"] == backend]
    return {**config, "tiers": [{**tier, "codec": codec, **changes}]}


def at_rest(place: Path) -> bytes:
    """Return every byte of every file."""
    return b"".join(path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file())


def payloads_at_rest(place: Path) -> list[bytes]:
    """Return the payloads of whole raw frames among these bytes."""
    found, everything = [], at_rest(place)
    start = everything.find(b"\x89TIERKV\n")
    while start >= 0:
        header = parse_header(memoryview(everything)[start : start + HEADER_BYTES])
        found.append(everything[start + HEADER_BYTES : start + HEADER_BYTES + header.stored_bytes])
        start = everything.find(b"\x89TIERKV\n", start + HEADER_BYTES)
    return found


def frames_in(place: Path) -> list[Path]:
    """Files that begin like frames."""
    files = [path for path in place.rglob("*") if path.is_file()]
    return [path for path in files if path.read_bytes()[:8] == b"\x89TIERKV\n"]


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("none", {"name": "zstd", "level": 3}),
        ({"name": "zstd", "level": 3}, {"name": "zstd", "level": 19}),
        ("zstd", "none"),
        ("zstd", MIGRATED),
        ({**AES, "inner": "zstd"}, AES),
        (AES, {**AES, "inner": "zstd"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["disk", "fsspec"])
def test_another_codec_finds_what_is_there(
    tmp_path: Path, expected: Expected, before: Any, after: Any, backend: str
) -> None:
    """A user who turns on compression keeps the cache, and one who turns on encryption can."""
    with opened(config_of(tmp_path, before, backend)) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    with opened(config_of(tmp_path, after, backend, accept_clear=after is MIGRATED)) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        (loaded,) = stack.metrics.counters.tokens_loaded.values()
        assert loaded >= 112 + 72
        stats = next(iter(stack.tiers.stats().values()))
        assert (stats["unreadable"], stats["clear"] > 0) == (0, after is MIGRATED)


@pytest.mark.needs_torch
@pytest.mark.parametrize("backend", ["disk", "fsspec"])
def test_an_encrypted_place_holds_no_payload(tmp_path: Path, expected: Expected, backend: str) -> None:
    """Checked are all bytes of all files: segments, logs, manifests. The payloads to look for come from an unencrypted
    tier.
    """
    for name, codec in (("open", "none"), ("closed", AES)):
        with opened(config_of(tmp_path / name, codec, backend)) as stack:
            assert serve(stack, PROMPTS) == expected(PROMPTS)
            assert stack.close()
    payloads = payloads_at_rest(tmp_path / "open")
    assert len(payloads) >= 7
    samples = {payload[start : start + 16] for payload in payloads for start in range(0, len(payload) - 16, 512)}
    samples = {sample for sample in samples if len(set(sample)) > 4}
    closed = at_rest(tmp_path / "closed")
    assert len(samples) > 50
    assert all(sample in at_rest(tmp_path / "open") for sample in samples)
    assert not any(sample in closed for sample in samples)


@pytest.mark.needs_torch
def test_a_wrong_key_is_a_miss_and_a_counter(
    tmp_path: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong key gives misses and a counter, never wrong bytes or an error; the right key then finds the chunks."""
    with opened(config_of(tmp_path, AES)) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    monkeypatch.setenv("TIERKV_TEST_KEY", secrets.token_hex(32))
    with opened(config_of(tmp_path, AES, write="read_only")) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert not stack.metrics.counters.tokens_loaded
        assert next(iter(stack.tiers.stats().values()))["unreadable"] > 0
        assert next(iter(stack.tiers.stats().values()))["corrupt"] == 0
    assert any("previous_key_env" in record.getMessage() for record in caplog.records)
    monkeypatch.setenv("TIERKV_OLD_KEY", key)
    with opened(config_of(tmp_path, {**AES, "previous_key_env": ["TIERKV_OLD_KEY"]})) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112 + 72
    assert key not in caplog.text


@pytest.mark.needs_torch
@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_a_lossy_tier_serves_and_an_exact_one_does_not_give_its_chunks(
    tmp_path: Path, expected: Expected, codec: str
) -> None:
    """With `lossy = true` chunks are loaded; without it the same storage gives misses, and exact answers."""
    with opened(config_of(tmp_path, codec, lossy=True)) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    with opened(config_of(tmp_path, codec, lossy=True)) as stack:
        serve(stack, PROMPTS)
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112 + 72
    with opened(config_of(tmp_path, "none")) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert not stack.metrics.counters.tokens_loaded
        assert next(iter(stack.tiers.stats().values()))["unreadable"] > 0


@pytest.mark.needs_torch
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_what_comes_from_a_lossy_tier_is_not_offered_to_an_exact_one(tmp_path: Path, codec: str) -> None:
    """The manager does not write lossy chunks to an exact tier, whatever codec the lossy tier uses now. Newly computed
    chunks are written.
    """
    with opened(config_of(tmp_path, "int8", lossy=True)) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    (lossy,) = config_of(tmp_path, codec, lossy=True)["tiers"]
    (exact,) = config_of(tmp_path, "none", "fsspec")["tiers"]
    with opened({**stack_config(tmp_path), "tiers": [lossy, exact]}) as stack:
        serve(stack, [*PROMPTS, *prompts_of(99, 1, shared=0)])
        assert stack.flush()
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112
        assert stack.metrics.counters.cascades["objects"] >= 7
        assert stack.metrics.counters.writes_failed["objects"] == 0
    headers = [parse_header(memoryview(path.read_bytes())) for path in frames_in(tmp_path / "objects")]
    assert len(headers) >= 7
    assert not any(header.approximate for header in headers)


@pytest.mark.parametrize(
    ("codec", "spec", "says"),
    [
        ("fp8", EngineSpec("m", "int4", (GroupSpec(16, (4096,)),), 16), "KV values of type 'int4'"),
        (
            "int8",
            EngineSpec("m", "float16", (GroupSpec(16, (4096,)), GroupSpec(16, (64,), GroupKind.SSM)), 16),
            "KV cache group 1: states of SSM",
        ),
        ({**AES, "key_env": "TIERKV_NO_SUCH_KEY"}, SPEC, "environment variable TIERKV_NO_SUCH_KEY is not set"),
        ({"name": "aes-256-gcm", "key_file": "/no/such/key"}, SPEC, "key file '/no/such/key' cannot be read"),
        ({**AES, "previous_key_env": ["TIERKV_NO_SUCH_KEY"]}, SPEC, "TIERKV_NO_SUCH_KEY is not set"),
    ],
)
def test_what_a_codec_lacks_stops_the_start(tmp_path: Path, codec: Any, spec: EngineSpec, says: str) -> None:
    """At run time every chunk would be a miss without a visible cause. The storage is not locked afterwards."""
    with pytest.raises(ConfigError, match=says) as caught:
        tierkv.open_stack(config_of(tmp_path, codec, lossy=True), spec)
    assert caught.value.tier == "disk"
    tierkv.open_stack(config_of(tmp_path, "none"), SPEC).close()


def test_unused_codecs_log_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are opened to read old frames. A codec without a key, or for other values, logs nothing."""
    spec = EngineSpec("m", "int4", (GroupSpec(16, (4096,)),), 16)
    tierkv.open_stack(config_of(tmp_path, "zstd"), spec).close()
    assert not [record for record in caplog.records if record.name.startswith("tierkv")]


@pytest.mark.parametrize("inner", ["none", "zstd"])
def test_parts_of_two_workers_are_encrypted_and_come_back(tmp_path: Path, inner: str) -> None:
    """Digests of parts are not stored in plain text; each worker needs its own digest on the way back."""
    disk = {
        "backend": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free_bytes": 0,
        "codec": {**AES, "inner": inner},
    }  # fmt: skip
    config, source, target = worker_ranks.config_of(tiers=[disk]), [1, 2, 3, 4], [9, 8, 7, 6]
    with tierkv.open_stack(config, worker_ranks.spec_of(2)) as stack:
        first = worker_ranks.Driver(stack, [worker_ranks.LocalRank(worker) for worker in stack.workers])
        expected = [[rank.block(i) for i in source] for rank in first.ranks]
        first.store(first.request(range(64)), source)
        assert stack.flush()
    everything = at_rest(tmp_path)
    assert not any(block[:32] in everything for blocks in expected for block in blocks)
    with tierkv.open_stack(config, worker_ranks.spec_of(2)) as stack:
        second = worker_ranks.Driver(stack, [worker_ranks.LocalRank(worker, seed=2) for worker in stack.workers])
        assert second.load(second.request(range(64)), target) == (64, frozenset())
        assert [[rank.block(i) for i in target] for rank in second.ranks] == expected


@pytest.mark.needs_torch
def test_an_encrypted_tier_is_attached_later(tmp_path: Path, expected: Expected) -> None:
    """Its codec has options, and is opened although no tier had it at the start."""
    with opened(config_of(tmp_path, AES)) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    (disk,) = config_of(tmp_path, AES)["tiers"]
    with opened({**config_of(tmp_path, AES), "tiers": []}) as stack:
        with pytest.raises(ConfigError, match="TIERKV_NO_SUCH_KEY is not set"):
            stack.tiers.attach({**disk, "codec": {**AES, "key_env": "TIERKV_NO_SUCH_KEY"}})
        stack.tiers.attach(disk)
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112
