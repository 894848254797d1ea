"""A request grows its hashes with its tokens, and changes state only as the table says."""

from __future__ import annotations

import itertools

import pytest

from tierkv.errors import IllegalTransitionError
from tierkv.reference.block_pool import Block, chained_hash, root_hash
from tierkv.reference.configs import EngineConfig
from tierkv.reference.request import Request, RequestRecord, RequestState
from tierkv.types import engine as protocols


def request(prompt: list[int], salt: str = "") -> Request:
    """For three new tokens, in blocks of two."""
    config = EngineConfig(block_tokens=2, hash_salt=salt, num_groups=2)
    return Request(config, RequestRecord("r", 0, len(prompt), 0.0), prompt, 3, {"max_offload_tokens": 4})


def test_it_is_what_the_scheduler_reads() -> None:
    """The connector is handed engine objects as they are: they must satisfy its protocols, in type and in value."""
    seen: protocols.Request = request([1, 2, 3])
    assert (seen.request_id, seen.num_tokens, seen.num_prompt_tokens) == ("r", 3, 3)
    assert seen.kv_transfer_params == {"max_offload_tokens": 4}
    block: protocols.Block = Block(7)
    assert (block.block_id, block.block_hash, block.is_null) == (7, None, False)


def test_hashes_cover_full_blocks_only_and_grow_with_the_output() -> None:
    """A hash of a block that is still growing would name content that changes under it."""
    r = request([1, 2, 3])
    first = chained_hash(root_hash(""), [1, 2])
    assert list(r.block_hashes) == [first]
    r.append(9)
    assert list(r.block_hashes) == [first, chained_hash(first, [3, 9])]
    r.append(8)
    assert len(r.block_hashes) == 2
    assert list(r.tokens) == [1, 2, 3, 9, 8]
    assert r.record.output_tokens == [9, 8]
    assert not r.is_complete
    r.append(7)
    assert r.is_complete
    assert r.num_prompt_tokens == 3


def test_the_salt_separates() -> None:
    """Tenants that must not share KV differ by it."""
    assert not set(request([1, 2], salt="a").block_hashes) & set(request([1, 2]).block_hashes)


ROADS = {
    RequestState.WAITING: [],
    RequestState.LOADING: [RequestState.LOADING],
    RequestState.RUNNING: [RequestState.RUNNING],
    RequestState.FINISHED: [RequestState.FINISHED],
}
LEGAL = {
    ("WAITING", "LOADING"),
    ("WAITING", "RUNNING"),
    ("WAITING", "FINISHED"),
    ("LOADING", "RUNNING"),
    ("LOADING", "FINISHED"),
    ("RUNNING", "WAITING"),
    ("RUNNING", "FINISHED"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestState, repeat=2)))
def test_only_listed_changes_happen(before: RequestState, after: RequestState) -> None:
    """A request that runs while its load writes, or runs again after its end, must fail at the first such step."""
    r = request([1])
    for state in ROADS[before]:
        r.become(state)
    if (before.name, after.name) in LEGAL:
        r.become(after)
        assert r.state is after
    else:
        with pytest.raises(IllegalTransitionError, match=r"request 'r' cannot go from"):
            r.become(after)
        assert r.state is before


def test_time_to_first_token_is_unknown_before_it() -> None:
    """0.0 would be the best of all times."""
    record = RequestRecord("r", 0, 1, arrival_s=2.0)
    assert record.ttft_s is None
    record.first_token_s = 2.5
    assert record.ttft_s == 0.5
