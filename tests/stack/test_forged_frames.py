"""Whole frames that an attacker put in the place of stored ones: misses that heal, in a whole stack."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stack_bed import opened, prompts_of, serve, stack_config

from tierkv.frames.frame import HEADER_BYTES, FrameHeader, frame_bytes, parse_header
from tierkv.frames.sealer import FrameSealer

pytestmark = [pytest.mark.needs_torch]
Expected = Callable[..., list[list[int]]]
PROMPTS = prompts_of(11, 2)
AES = {"name": "aes-256-gcm", "key_env": "TIERKV_TEST_KEY"}
HEALING_ROUNDS = 4
MAGIC = b"\x89TIERKV\n"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key in the variable that the configuration names."""
    monkeypatch.setenv("TIERKV_TEST_KEY", secrets.token_hex(32))


def config_of(place: Path, codec: Any, backend: str) -> dict[str, Any]:
    """Description of a host tier and one tier with this codec."""
    config = stack_config(place)
    (tier,) = [tier for tier in config["tiers"] if tier["backend"] == backend]
    return {**config, "tiers": [{**tier, "codec": codec}]}


def forge_frames(place: Path, sealer: FrameSealer, raw_bytes_of: Callable[[FrameHeader], int]) -> int:
    """Put a valid raw frame with other bytes in the place of each frame; returns their number.

    raw_bytes_of: length of the forged payload, at most that of the stored one.
    """
    forged = 0
    for path in (path for path in place.rglob("*") if path.is_file()):
        content = bytearray(path.read_bytes())
        start = content.find(MAGIC)
        while start >= 0:
            header = parse_header(memoryview(content)[start : start + HEADER_BYTES])
            raw_bytes = raw_bytes_of(header)
            frame = bytearray(frame_bytes(raw_bytes))
            frame[HEADER_BYTES : HEADER_BYTES + raw_bytes] = secrets.token_bytes(raw_bytes)
            sealer.seal(memoryview(frame), header.key, raw_bytes)
            end = min(start + len(frame), len(content))
            content[start:end] = frame[: end - start]
            start, forged = content.find(MAGIC, start + frame_bytes(header.raw_bytes)), forged + 1
        path.write_bytes(content)
    return forged


def served_after_forgery(
    config: dict[str, Any], place: Path, raw_bytes_of: Callable[[FrameHeader], int], expected: list[list[int]]
) -> dict[str, int]:
    """Store, forge, serve, and serve until chunks are loaded again.

    Returns:
        The tier's counters of the run that met the forged frames.
    """
    with opened(config) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
        sealer = FrameSealer(stack.namespace.fingerprint())
    assert forge_frames(place, sealer, raw_bytes_of) >= 7
    with opened(config) as stack:
        assert serve(stack, PROMPTS) == expected
        assert not stack.metrics.counters.tokens_loaded
        assert not stack.metrics.counters.loads_failed
        (stats,) = stack.tiers.stats().values()
        assert stack.close()
    loaded, rounds = 0, 0
    while loaded < 112 and rounds < HEALING_ROUNDS:  # a frame behind the first bad one is not read, and not replaced
        with opened(config) as stack:
            assert serve(stack, PROMPTS) == expected
            assert not stack.metrics.counters.loads_failed
            loaded, rounds = sum(stack.metrics.counters.tokens_loaded.values()), rounds + 1
            assert stack.close()
    assert loaded >= 112
    return stats


@pytest.mark.parametrize("backend", ["disk", "fsspec"])
def test_forged_frames_in_the_clear_are_misses_and_replaced(tmp_path: Path, expected: Expected, backend: str) -> None:
    """A user who may write to an encrypted tier's storage, but has no key, must not decide what is loaded."""
    config = config_of(tmp_path, AES, backend)
    stats = served_after_forgery(config, tmp_path, lambda header: header.raw_bytes, expected(PROMPTS))
    assert 0 < stats["clear"] == stats["corrupt"]


@pytest.mark.parametrize("backend", ["disk", "fsspec"])
def test_short_frames_are_misses_and_replaced(tmp_path: Path, expected: Expected, backend: str) -> None:
    """Such a frame would be a hit in every lookup, and no worker could ever load it."""
    config = config_of(tmp_path, "none", backend)
    stats = served_after_forgery(config, tmp_path, lambda header: header.raw_bytes - 100, expected(PROMPTS))
    assert stats["corrupt"] > 0
