"""Media in a prompt, in vLLM's own requests: which of them the hash of a block names, and what tierkv serves."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tierkv.integrations.vllm.connector.requests import is_served

BLOCK_TOKENS = 32
BLOCKS = 5
FIRST, LENGTH = 40, 100


def asking(*media: tuple[str, int]) -> Request:
    """A request with media by name and first token, of equal length."""
    features = [
        MultiModalFeatureSpec(None, "any", name, PlaceholderRange(offset=first, length=LENGTH)) for name, first in media
    ]
    return Request(
        request_id="asked",
        prompt_token_ids=[7] * (BLOCK_TOKENS * BLOCKS),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


@pytest.fixture(scope="module", autouse=True)
def _start_of_hashes() -> None:
    """VLLM's hash of nothing, which an engine makes at its start."""
    init_none_hash(sha256)


def test_frames_with_another_sound_have_equal_hashes_and_are_not_served() -> None:
    """Another sound would get the KV of the first one. If this fails, such requests can be served."""
    one, other = (asking(("frames", FIRST), (sound, FIRST)) for sound in ("first sound", "other sound"))
    equal = [a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=True)]
    assert equal == [True] * 4 + [False]
    assert not is_served(one)


def test_media_behind_each_other_have_hashes_of_their_own_and_are_served() -> None:
    """Each block names all media in it, from the first block of another one."""
    one, other = (asking(("frames", 0), (sound, LENGTH)) for sound in ("first sound", "other sound"))
    equal = [a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=True)]
    assert equal == [True] * 3 + [False] * 2
    assert is_served(one)
    assert not is_served(asking(("frames", 0), ("sound", LENGTH - 1)))
