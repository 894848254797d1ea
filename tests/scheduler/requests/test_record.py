"""Request record, and the table of request states."""

from __future__ import annotations

import pytest
from core_parts import Core, make_core
from group_parts import window
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import EngineProtocolError, IllegalTransitionError
from tierkv.scheduler.requests.request_state import REQUEST_STATES, TRANSITIONS, RequestEvent, RequestState
from tierkv.types.keys import Key, make_key
from tierkv.types.state_machine import TRANSITIONS_KEPT


def test_s3_a_chunk_is_named_by_its_last_hash() -> None:
    """S3: 3 hashes per chunk and 10 hashes: chunks at hash indices 2, 5 and 8; the tenth hash names no chunk."""
    core = make_core(block_tokens=(3,), hash_block_tokens=1)
    request = core.request(10)
    record = core.record(request)
    assert record.groups[0].keys == [make_key(request.block_hashes[i], 0) for i in (2, 5, 8)]


@given(st.lists(st.integers(0, 9), max_size=8))
def test_s4_keys_are_append_only(growth: list[int]) -> None:
    """S4: whenever hashes become known, keys are only added, each once; a second call adds none."""
    core = make_core(block_tokens=(2, 3), factor=2, hash_block_tokens=1)
    request = core.request(0)
    record = core.record(request)
    for count in growth:
        before = [list(group.keys) for group in record.groups]
        request.extend(range(count))
        record.extend_keys(core.geometry)
        record.extend_keys(core.geometry)
        for group, keys in zip(record.groups, before, strict=True):
            assert group.keys[: len(keys)] == keys
            assert len(group.keys) == request.num_tokens // group.chunk_tokens


def test_s5_hashes_may_lag_behind_tokens() -> None:
    """S5: with async scheduling tokens are counted before their hash is known: keys appear later, nothing fails."""
    core = make_core()
    request = core.request(16)
    core.scheduler.on_new_request(request)
    request.hashes_withheld = 2
    meta = core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    assert [len(job.keys) for job in meta.stores] == [2]
    request.hashes_withheld = 0
    meta = core.schedule(request, computed=16, scheduled=0, ids=[[]], whole=False)
    assert [job.block_ids for job in meta.stores] == [(3, 4)]


@pytest.mark.parametrize("value", [0, 10])
def test_s12_max_offload_tokens(value: int) -> None:
    """S12: a number of tokens is accepted, zero included."""
    core = make_core()
    assert core.record(core.request(8, max_offload_tokens=value)).offload_tokens_max == value
    assert not core.warnings


@pytest.mark.parametrize("value", [-1, "5", True, 1.5])
def test_s12_nonsense_is_ignored_and_logged(value: object) -> None:
    """S12: parameters can be anything; True must not become 1, and ignored values are logged."""
    core = make_core()
    assert core.record(core.request(8, max_offload_tokens=value)).offload_tokens_max is None
    (warning,) = core.warnings
    assert f"max_offload_tokens = {value!r}" in warning


def test_s13_one_record_per_group() -> None:
    """S13: each group has its own keys, blocks and cursor."""
    core = make_core(block_tokens=(2, 4), factor=2)
    record = core.record(core.request(8))
    assert [group.chunk_tokens for group in record.groups] == [4, 8]
    assert record.groups[0] is not record.groups[1]


def test_s15_hits_are_counted_in_whole_chunks() -> None:
    """S15: the answer is noted per group, in chunks of its own size; at an answer of 0, the local chunks."""
    core = make_core(block_tokens=(4, 8), hash_block_tokens=4)
    request = core.arrive(21)
    core.put([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    assert core.ask(request) == 16
    assert [group.hit_chunks for group in core.record(request).groups] == [4, 2]
    assert core.ask(request, computed=12) == 0
    assert [group.hit_chunks for group in core.record(request).groups] == [3, 1]


def touched(core: Core, monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """Keys passed to ``touch`` of the manager from now on."""
    keys: list[Key] = []
    monkeypatch.setattr(core.manager, "touch", keys.extend)
    return keys


def test_s53_touch_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """S53: once, when the request ends, all computed chunks: none is touched while it runs."""
    core = make_core()
    request = core.arrive(19)
    keys = touched(core, monkeypatch)
    assert core.ask(request) == 0
    core.schedule(request, computed=0, scheduled=19, ids=[range(1, 6)])
    assert not keys
    core.scheduler.request_finished(request, [])
    assert keys == core.truth.keys(request)[:4]


@pytest.mark.parametrize(("hit", "first"), [(0, 0), (4, 0), (12, 1), (20, 3)])
def test_s53_touch_window(hit: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S53: of a window of two chunks, those that the hit needed and everything computed since.

    Chunks before served no request, and would displace useful ones.
    """
    core = make_core(groups=[window(8)])
    request = core.arrive(29)
    if hit:
        core.put(core.truth.keys(request)[max(0, hit // 4 - 2) : hit // 4])
    assert core.ask(request) == hit
    keys = touched(core, monkeypatch)
    ids = [i + 1 if 4 * i >= hit - 8 else 0 for i in range(8)]
    core.schedule(request, computed=hit, scheduled=29 - hit, ids=[ids])
    core.scheduler.request_finished(request, [])
    assert keys == core.truth.keys(request)[first:]


def test_block_ids_of_the_wrong_number_of_groups() -> None:
    """An adapter that confuses its groups gets an error with the id of the request."""
    core = make_core(block_tokens=(2, 4))
    request = core.request(4)
    core.scheduler.on_new_request(request)
    with pytest.raises(EngineProtocolError, match="'a': block ids of 1 groups, the engine has 2"):
        core.schedule(request, computed=0, scheduled=4, ids=[[1]])


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("event", RequestEvent)
def test_only_the_table_moves_a_request(state: RequestState, event: RequestEvent) -> None:
    """An event that is not in the table raises an error with request, state and event."""
    if (state, event) in TRANSITIONS:
        assert REQUEST_STATES.next(state, event, "r", str) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"'r' is {state.value}: event '{event.value}'"):
            REQUEST_STATES.next(state, event, "r", str)


def test_an_illegal_transition_shows_the_log_of_the_request() -> None:
    """A bug report has the latest transitions; of a long life the log keeps the end."""
    core = make_core()
    record = core.record(core.request(4))
    seen: list[tuple[str, RequestEvent, RequestState, RequestState]] = []
    record.watcher = lambda *change: seen.append(change)
    record.apply(RequestEvent.UNKNOWN)
    record.apply(RequestEvent.WANTED)
    with pytest.raises(IllegalTransitionError, match=r"unknown -> asking; wanted -> gathering$"):
        record.apply(RequestEvent.LOAD_ENDED)
    assert record.state is RequestState.GATHERING
    assert seen[1] == ("a", RequestEvent.WANTED, RequestState.ASKING, RequestState.GATHERING)
    assert len(seen) == 2
    for _ in range(100):
        record.apply(RequestEvent.UNKNOWN)
    assert record.transitions.describe().count(";") == TRANSITIONS_KEPT - 1


def test_every_state_can_be_reached_and_ended() -> None:
    """A state without a transition to it is dead code; one that FINISHED does not end is a leak."""
    reached = {RequestState.IDLE, *TRANSITIONS.values()}
    assert reached == set(RequestState)
    for state in set(RequestState) - {RequestState.FINISHED}:
        assert TRANSITIONS[state, RequestEvent.FINISHED] is RequestState.FINISHED
