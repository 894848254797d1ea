"""The decisions of a step, without a model: who runs, who waits, who gives way, and whose blocks are whose."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tierkv.errors import EngineProtocolError
from tierkv.reference.block_pool import BlockPool
from tierkv.reference.block_tables import TableKeeper
from tierkv.reference.configs import EngineConfig
from tierkv.reference.request import Request, RequestRecord, RequestState
from tierkv.reference.scheduling import Scheduler
from tierkv.types.engine import LoadReport, ScheduledRequest, StepOutput

BLOCK = 2


class Scripted:
    """A connector's scheduler side that answers lookups from a list, and 0 when it is empty."""

    def __init__(self, answers: dict[str, list[int | None]], *, hold: bool = False) -> None:
        self.answers = answers
        self.hold = hold
        self.calls: list[tuple[Any, ...]] = []

    def on_new_request(self, request: Request) -> None:
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("ask", request.request_id, num_computed_tokens))
        answers = self.answers.get(request.request_id)
        answer = answers.pop(0) if answers else 0
        return answer, bool(answer)

    def update_state_after_alloc(self, request: Request, blocks: list[list[Any]], num_external_tokens: int) -> None:
        self.calls.append(("alloc", request.request_id, [len(table) for table in blocks], num_external_tokens))

    def request_finished(self, request: Request, block_ids: tuple[tuple[int, ...], ...]) -> tuple[bool, None]:
        self.calls.append(("over", request.request_id, block_ids))
        return self.hold, None


class Bench:
    """A scheduler with a pool, and a model that says 99 to everything."""

    def __init__(self, connector: Scripted | None = None, **config: int) -> None:
        self.config = EngineConfig(block_tokens=BLOCK, **{"max_batched_tokens": 100, **config})
        self.pool = BlockPool(self.config.num_blocks)
        self.keeper = TableKeeper(self.pool, windows=self.config.windows, block_tokens=BLOCK)
        self.connector = connector
        self.scheduler = Scheduler(
            self.keeper,
            connector,
            block_tokens=BLOCK,
            max_batched_tokens=self.config.max_batched_tokens,
            max_running=self.config.max_running,
        )
        self.count = 0

    def add(self, name: str, prompt_tokens: int, max_new_tokens: int = 50, *, seed: str | None = None) -> Request:
        rng = random.Random(name if seed is None else seed)
        prompt = [rng.randrange(10**6) for _ in range(prompt_tokens)]
        record = RequestRecord(name, self.count, prompt_tokens, 0.0)
        self.count += 1
        request = Request(self.config, record, prompt, max_new_tokens)
        self.scheduler.add(request)
        return request

    def step(self) -> StepOutput:
        step, requests = self.scheduler.schedule()
        at_end = [
            request.request_id
            for entry, request in zip(step.scheduled, requests, strict=True)
            if entry.num_computed_tokens + entry.num_scheduled_tokens == request.num_tokens
        ]
        self.scheduler.commit(step, dict.fromkeys(at_end, 99))
        return step

    def load_ended(self, *names: str, invalid: tuple[int, ...] = ()) -> None:
        self.scheduler.end_loads(LoadReport(frozenset(names), frozenset(invalid)))


def shares(step: StepOutput) -> dict[str, tuple[int, int]]:
    """Per scheduled request: computed before, and computed in this step."""
    return {entry.request_id: (entry.num_computed_tokens, entry.num_scheduled_tokens) for entry in step.scheduled}


def only(step: StepOutput) -> ScheduledRequest:
    """The one request of a step."""
    assert len(step.scheduled) == 1
    return step.scheduled[0]


def test_a_long_prompt_is_cut_by_the_budget() -> None:
    """Chunked prefill: no step computes more than the budget, and nothing is skipped or computed twice."""
    bench = Bench(max_batched_tokens=4)
    bench.add("a", 10)
    assert [shares(bench.step()) for _ in range(5)] == [
        {"a": (0, 4)},
        {"a": (4, 4)},
        {"a": (8, 2)},
        {"a": (10, 1)},
        {"a": (11, 1)},
    ]


def test_tables_are_told_once_and_then_in_pieces() -> None:
    """The connector copies by these ids: one missing or twice, and a chunk would be stored from a wrong block."""
    bench = Bench(max_batched_tokens=4)
    a = bench.add("a", 6)
    steps = [only(bench.step()) for _ in range(4)]
    assert [(entry.block_ids, entry.replaces_table) for entry in steps] == [
        (((1, 2),), True),
        (((3,),), False),
        (((4,),), False),
        (((),), False),
    ]
    assert a.block_ids == ((1, 2, 3, 4),)


def test_running_requests_come_before_waiting_ones() -> None:
    """A long prompt that arrives must not stop those who are in the middle of their answer."""
    bench = Bench(max_batched_tokens=4)
    bench.add("a", 2)
    bench.step()
    bench.add("b", 10)
    assert shares(bench.step()) == {"a": (2, 1), "b": (0, 3)}


def test_no_more_run_than_allowed() -> None:
    """max_running bounds the held blocks; a later request is admitted when an earlier one ends."""
    bench = Bench(max_running=2)
    for name in "abc":
        bench.add(name, 2, max_new_tokens=2)
    assert set(shares(bench.step())) == {"a", "b"}
    assert set(shares(bench.step())) == {"a", "b"}
    third = bench.step()
    assert set(shares(third)) == {"c"}
    assert third.finished == {"a", "b"}
    assert bench.step().finished == frozenset()


def test_the_oldest_takes_blocks_from_the_youngest() -> None:
    """Preemption: the youngest loses all blocks, waits first in the queue, and returns with a whole table."""
    bench = Bench(num_blocks=7, max_running=3)
    a, b, c = bench.add("a", 4, 9), bench.add("b", 4, 9), bench.add("c", 4, 9)
    assert set(shares(bench.step())) == {"a", "b", "c"}
    bench.add("d", 4, 1)
    second = bench.step()
    assert shares(second) == {"a": (4, 1), "b": (4, 1)}
    assert second.preempted == {"c"}
    assert (c.state, c.num_computed_tokens, c.block_ids) == (RequestState.WAITING, 0, ((),))
    assert c.record.preemptions == 1
    steps = []
    while c.state is RequestState.WAITING:
        steps.append(bench.step())
    assert "d" not in {name for step in steps[:-1] for name in shares(step)}, "c was here before"
    entry = next(entry for entry in steps[-1].scheduled if entry.request_id in "cd")
    assert entry.request_id == "c"
    assert entry.replaces_table
    assert entry.num_computed_tokens + entry.num_scheduled_tokens == c.num_tokens - 1
    assert entry.block_ids == c.block_ids
    assert RequestState.FINISHED in {a.state, b.state}


def test_several_preempted_keep_their_order() -> None:
    """The older request is scheduled first, also when both were preempted in one step."""
    bench = Bench(num_blocks=5)
    for name in "abcd":
        bench.add(name, 2, 2)
    assert list(shares(bench.step())) == ["a", "b", "c", "d"]
    assert bench.step().preempted == {"c", "d"}
    assert list(shares(bench.step())) == ["c", "d"]


def test_a_request_stalls_rather_than_take_from_an_older_one() -> None:
    """While a request stalls, no other is admitted that would take the freed blocks."""
    bench = Bench(num_blocks=6, max_batched_tokens=7)
    a, b = bench.add("a", 3, 3), bench.add("b", 10, 1)
    assert shares(bench.step()) == {"a": (0, 3), "b": (0, 4)}
    c = bench.add("c", 1, 1)
    stalled = bench.step()
    assert shares(stalled) == {"a": (3, 1)}, "b needs three blocks for its next chunk; the one that is free fits c"
    assert not stalled.preempted
    assert bench.pool.num_free == 1
    assert shares(bench.step()) == {"a": (4, 1)}
    assert a.state is RequestState.FINISHED
    assert shares(bench.step()) == {"b": (4, 6)}
    assert b.record.preemptions == 0
    assert shares(bench.step()) == {"c": (0, 1)}
    assert c.is_complete


def test_a_deferred_request_is_skipped_and_keeps_its_place() -> None:
    """(None, False) means "not known yet": others go ahead in this step, and it is asked again in the next."""
    connector = Scripted({"a": [None, None], "b": [None]})
    bench = Bench(connector)
    a, b = bench.add("a", 4), bench.add("b", 4)
    bench.add("c", 4)
    assert set(shares(bench.step())) == {"c"}
    assert set(shares(bench.step())) == {"b", "c"}
    assert list(shares(bench.step())) == ["b", "c", "a"]
    assert (a.record.deferrals, b.record.deferrals) == (2, 1)
    assert [call[:2] for call in connector.calls if call[0] == "ask"] == [
        *(("ask", name) for name in "abc"),
        *(("ask", name) for name in "ab"),
        ("ask", "a"),
    ]


def test_deferred_requests_come_before_those_behind_them() -> None:
    """Being asked again must not cost the place in the queue: else a busy engine never serves a slow lookup."""
    connector = Scripted({"a": [None], "b": [None]})
    bench = Bench(connector, max_running=1)
    for name in "abcd":
        bench.add(name, 2, 1)
    assert [list(shares(bench.step())) for _ in range(4)] == [["c"], ["a"], ["b"], ["d"]]


def test_the_connector_is_told_of_every_allocation() -> None:
    """Also without a load: it ends the lookup. Local hits are passed with the question."""
    connector = Scripted({})
    bench = Bench(connector)
    bench.add("a", 5, 1)
    bench.step()
    bench.add("b", 5, 1, seed="a")
    bench.step()
    assert [call for call in connector.calls if call[0] in {"ask", "alloc"}] == [
        ("ask", "a", 0),
        ("alloc", "a", [3], 0),
        ("ask", "b", 4),
        ("alloc", "b", [3], 0),
    ]


def test_an_offer_that_cannot_be_placed_is_not_taken() -> None:
    """No blocks: the connector must not start a load, and is asked again when there are some."""
    connector = Scripted({"b": [4, 4, 4]})
    bench = Bench(connector, num_blocks=5)
    bench.add("a", 5, 2)
    bench.step()
    b = bench.add("b", 5, 1)
    bench.step()
    assert b.state is RequestState.WAITING
    assert [call[0] for call in connector.calls if call[1] == "b"] == ["new", "ask"]
    bench.step()
    assert b.state is RequestState.LOADING
    assert connector.calls[-1] == ("alloc", "b", [2], 4)


def test_a_loading_request_holds_blocks_and_does_not_run() -> None:
    """It counts as running: its blocks are taken, and a load must not be overtaken by its own computation."""
    connector = Scripted({"a": [4]})
    bench = Bench(connector, max_running=1)
    a, b = bench.add("a", 7), bench.add("b", 3)
    for _ in range(3):
        assert not bench.step().scheduled
    assert (a.state, b.state) == (RequestState.LOADING, RequestState.WAITING)
    assert a.block_ids == ((1, 2),)
    assert all(block.block_hash is None for block in a.tables[0]), "not findable before the load ended"
    bench.load_ended("a")
    assert [block.block_hash for block in a.tables[0]] == a.block_hashes[:2]
    entry = only(bench.step())
    assert (entry.num_computed_tokens, entry.num_scheduled_tokens) == (4, 3)
    assert entry.block_ids == ((1, 2, 3, 4),)
    assert entry.replaces_table
    assert (a.record.tokens_loaded, a.record.tokens_computed) == (4, 3)


def test_the_last_token_of_a_prompt_loaded_in_whole_is_computed() -> None:
    """Without it there are no logits; its block is full of valid data all the same."""
    connector = Scripted({"a": [4]})
    bench = Bench(connector)
    a = bench.add("a", 4)
    bench.step()
    bench.load_ended("a")
    assert all(block.block_hash for block in a.tables[0])
    assert shares(bench.step()) == {"a": (3, 1)}
    assert a.record.tokens_loaded == 3


@pytest.mark.parametrize(
    ("invalid_at", "computed"), [([(0, 2)], 4), ([(1, 2)], 4), ([(0, 3), (1, 1)], 2), ([(0, 1), (1, 1)], 2), ([], 8)]
)
def test_a_failed_load_is_computed_from_the_first_invalid_block(
    invalid_at: list[tuple[int, int]], computed: int
) -> None:
    """In any group: every layer needs every token. What is valid before it is kept, what comes after it is not."""
    connector = Scripted({"a": [8]})
    bench = Bench(connector, num_groups=2)
    a = bench.add("a", 9)
    bench.step()
    bench.load_ended("a", invalid=tuple(a.block_ids[group][index] for group, index in invalid_at))
    for table in a.tables:
        assert [block.block_hash is not None for block in table] == [True] * (computed // BLOCK)
    assert shares(bench.step()) == {"a": (computed, 9 - computed)}
    assert a.record.tokens_loaded == computed
    assert all(block.block_hash for table in a.tables for block in table[:4])


def test_a_load_behind_a_local_prefix() -> None:
    """The usual second turn: the head is still in the pool, the middle comes from the tiers, the tail is new."""
    connector = Scripted({"b": [2]})
    bench = Bench(connector)
    a = bench.add("a", 5, 1)
    bench.step()
    b = bench.add("b", 9, seed="a")
    bench.step()
    assert connector.calls[-2:] == [("ask", "b", 4), ("alloc", "b", [3], 2)]
    assert a.state is RequestState.FINISHED
    bench.load_ended("b", invalid=(b.tables[0][2].block_id,))
    assert shares(bench.step()) == {"b": (4, 5)}
    assert (b.record.tokens_cached, b.record.tokens_loaded) == (4, 0)


def test_an_older_request_waits_for_blocks_that_a_load_is_writing() -> None:
    """Blocks of a load cannot be taken. When it ended they can, before their owner has ever run."""
    connector = Scripted({"b": [4]})
    bench = Bench(connector, num_blocks=5)
    a = bench.add("a", 3, 4)
    bench.step()
    b = bench.add("b", 4, 2)
    while b.state is RequestState.WAITING:
        bench.step()
    assert not bench.step().scheduled, "a needs a third block, and b holds the rest"
    assert a.state is RequestState.RUNNING
    bench.load_ended("b")
    step = bench.step()
    assert step.preempted == {"b"}
    assert set(shares(step)) == {"a"}
    assert connector.calls[-1][0] == "alloc", "a preempted request is not admitted again in the same step"
    while a.state is RequestState.RUNNING:
        bench.step()
    while b.state is not RequestState.FINISHED:
        bench.step()
    assert bench.pool.num_held == 0


def test_abort_while_waiting() -> None:
    """It holds no blocks. The connector still gets its end, and the next step reports it once."""
    connector = Scripted({"a": [None]})
    bench = Bench(connector)
    a = bench.add("a", 4)
    bench.step()
    bench.scheduler.abort(a)
    assert connector.calls[-1] == ("over", "a", ((),))
    assert bench.step().finished == {"a"}
    assert not bench.step().finished
    assert not bench.scheduler.has_loose_ends


def test_abort_while_running() -> None:
    """Its blocks are free at once, and what it computed can still be found."""
    connector = Scripted({})
    bench = Bench(connector)
    a = bench.add("a", 5)
    bench.step()
    ids = a.block_ids
    bench.scheduler.abort(a)
    assert connector.calls[-1] == ("over", "a", ids)
    assert bench.pool.num_held == 0
    assert bench.step().finished == {"a"}
    b = bench.add("b", 5, seed="a")
    bench.step()
    assert b.record.tokens_cached == 4


def test_abort_while_loading() -> None:
    """The load goes on: its blocks must not be reused before its end, and are not findable after it."""
    connector = Scripted({"a": [4]})
    bench = Bench(connector, num_blocks=5)
    a = bench.add("a", 5)
    bench.step()
    ids = set(a.block_ids[0])
    bench.scheduler.abort(a)
    assert connector.calls[-1] == ("over", "a", a.block_ids)
    assert a.state is RequestState.FINISHED
    b = bench.add("b", 4, 1, seed="a")
    assert bench.step().finished == {"a"}
    assert b.is_complete
    assert b.record.tokens_cached == 0
    assert bench.scheduler.has_loose_ends
    assert bench.pool.num_free == 2
    assert not ids & {block.block_id for block in bench.pool.free_queue}
    bench.load_ended("a")
    assert bench.pool.num_held == 0
    assert bench.step().finished == {"b"}
    assert not bench.scheduler.has_loose_ends


def test_abort_of_a_finished_request_changes_nothing() -> None:
    """A client may hang up in the very moment in which its answer is complete."""
    connector = Scripted({})
    bench = Bench(connector)
    a = bench.add("a", 2, 1)
    bench.step()
    told = list(connector.calls)
    bench.scheduler.abort(a)
    assert connector.calls == told


def test_reports_of_strangers_are_ignored() -> None:
    """A connector may report more than it was asked for; that is no reason to stop serving."""
    bench = Bench(Scripted({}))
    bench.add("a", 2)
    bench.step()
    bench.load_ended("a", "nobody", invalid=(1,))
    assert shares(bench.step()) == {"a": (2, 1)}


@pytest.mark.parametrize("offer", [5, -1])
def test_an_impossible_offer_is_refused(offer: int) -> None:
    """KV beyond the request's tokens would belong to tokens that are not generated yet."""
    bench = Bench(Scripted({"a": [offer]}))
    bench.add("a", 4)
    with pytest.raises(EngineProtocolError, match=f"the connector offered {offer} more"):
        bench.step()


def test_an_invalid_block_that_was_not_loaded_is_refused() -> None:
    """A local block may be shared with others, who are computing on it: it cannot just be computed again."""
    bench = Bench(Scripted({"b": [2]}))
    bench.add("a", 3, 1)
    bench.step()
    b = bench.add("b", 9, seed="a")
    bench.step()
    with pytest.raises(
        EngineProtocolError, match=r"blocks \[1\] of request 'b' as invalid that it did not load: 2 tokens"
    ):
        bench.load_ended("b", invalid=(b.tables[0][0].block_id,))


def test_a_connector_that_wants_to_keep_blocks_is_refused() -> None:
    """This engine frees them at once; going on would let the next owner overwrite what is being read."""
    bench = Bench(Scripted({}, hold=True))
    bench.add("a", 2, 1)
    with pytest.raises(EngineProtocolError, match="wants to keep the blocks of finished request 'a'"):
        bench.step()
