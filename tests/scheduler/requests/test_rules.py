"""Calls that break a rule: a named error, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from core_blocks import blocks
from core_parts import Core, make_core
from group_parts import window

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.requests import rules
from tierkv.scheduler.requests.rules import HASHES_CHECKED_MAX
from tierkv.types.engine import GroupKind, GroupSpec, ScheduledRequest, StepOutput
from tierkv.types.transfers import WorkerOutput

FULL = GroupSpec(4, (64,), GroupKind.FULL_ATTENTION)


@dataclass
class OddRequest:
    """Request whose hashes a test writes."""

    block_hashes: list[Any]
    num_tokens: int = 12
    request_id: str = "a"
    kv_transfer_params: None = None

    @property
    def num_prompt_tokens(self) -> int:
        """All of its tokens."""
        return self.num_tokens


def state_of(core: Core) -> object:
    """Everything that a refused call could have changed."""
    records = core.scheduler._records.values()
    return [
        (
            record.ctx.request_id, record.state, record.computed_tokens, record.load_job, set(record.store_jobs),
            [(list(group.block_ids), list(group.keys), group.next_stored) for group in record.groups],
        )
        for record in records
    ], core.counters.lookups, core.host.room, core.scheduler.has_pending_work  # fmt: skip


def refuses(core: Core, call: Callable[[], object], *words: str) -> None:
    """The call raises an error with these words, changes nothing, and all invariants hold."""
    before = state_of(core)
    with pytest.raises(EngineProtocolError) as error:
        call()
    if words[0].startswith("'"):
        assert f"'{error.value.request_id}'" == words[0]  # a caller that drops the request needs its id
    assert all(word in str(error.value) for word in words), str(error.value)
    assert state_of(core) == before
    core.scheduler.validate()


def entry(
    name: str = "a", computed: int = 0, scheduled: int = 8, ids: object = ((1, 2),), *, whole: bool = True
) -> StepOutput:
    """A step with one entry."""
    return StepOutput((ScheduledRequest(name, computed, scheduled, ids, whole),))  # type: ignore[arg-type]  # bad ones, too


@pytest.mark.parametrize(
    ("hashes", "words"),
    [
        pytest.param([b"one", b"", b"three"], ["block_hashes[1]", "not empty"], id="empty"),
        pytest.param([b"one", 17, b"three"], ["block_hashes[1]", "17", "bytes"], id="integer"),
        pytest.param([b"one", b"two", b"one"], ["block_hashes[2] repeats block_hashes[0]", "chain"], id="repeated"),
    ],
)
@pytest.mark.parametrize("when", ["at arrival", "at a question", "in a step", "at its end"])
def test_bad_hashes(hashes: list[object], words: list[str], when: str) -> None:
    """With one of these, a chunk would be stored under another one's key."""
    core = make_core()
    if when == "at arrival":
        refuses(core, lambda: core.scheduler.on_new_request(OddRequest(hashes)), "'a'", *words)
        return
    request = OddRequest([])
    core.scheduler.on_new_request(request)
    if when == "at its end":
        core.scheduler.build_connector_meta(entry(scheduled=12, ids=((1, 2, 3),)))
    request.block_hashes = hashes
    calls: dict[str, Callable[[], object]] = {
        "at a question": lambda: core.scheduler.get_num_new_matched_tokens(request, 0),
        "in a step": lambda: core.scheduler.build_connector_meta(entry(scheduled=12, ids=((1, 2, 3),))),
        "at its end": lambda: core.scheduler.request_finished(request, []),
    }
    refuses(core, calls[when], "'a'", *words)
    request.block_hashes = [b"one", b"two", b"three"]
    calls[when]()
    core.scheduler.validate()


class CountedHashes(list[bytes]):
    """Hashes of a prompt, and how many of them were taken out."""

    taken = 0

    def __getitem__(self, place: Any) -> Any:  # an index, or a slice
        """Take out one hash, or some."""
        found = super().__getitem__(place)
        self.taken += len(found) if isinstance(place, slice) else 1
        return found


def test_the_hashes_of_a_long_prompt_are_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrival of a prompt of 100,000 chunks took 15 ms. No key is made of a hash before it is checked."""
    monkeypatch.setattr(rules, "HASHES_CHECKED_MAX", 8)
    core = make_core()
    hashes = CountedHashes(b"%4d" % number for number in range(30))
    request = OddRequest(hashes, num_tokens=121)
    core.scheduler.on_new_request(request)
    assert hashes.taken <= 8
    answers, made = [], []
    for _ in range(4):
        hashes.taken = 0
        answers.append(core.scheduler.get_num_new_matched_tokens(request, 0)[0])
        made.append(len(core.scheduler._records["a"].groups[0].keys))
        assert hashes.taken <= 3 * 8 + 1, "checked, and made into keys, also those of the arrival"
    assert answers == [None, None, 0, 0]
    assert made == [16, 24, 30, 30]


def test_a_hash_that_repeats_one_that_was_checked_before() -> None:
    """The parts in which a long prompt is checked are one prompt: the same chunk would have two places in it."""
    core = make_core()
    request = OddRequest([b"%6d" % number for number in range(2 * HASHES_CHECKED_MAX)])
    request.block_hashes[-1] = request.block_hashes[5]
    core.scheduler.on_new_request(request)
    ask = core.scheduler.get_num_new_matched_tokens
    refuses(core, lambda: ask(request, 0), "'a'", f"block_hashes[{len(request.block_hashes) - 1}]", "block_hashes[5]")
    refuses(core, lambda: core.scheduler.request_finished(request, []), "'a'", "block_hashes[5]")


def test_a_step_checks_the_rest_of_a_long_prompt() -> None:
    """An engine may schedule a request that it has asked about once, or never."""
    core = make_core()
    request = OddRequest([b"%6d" % number for number in range(2 * HASHES_CHECKED_MAX)])
    core.scheduler.on_new_request(request)
    core.scheduler.build_connector_meta(entry())
    record = core.scheduler._records["a"]
    assert record.checked_hashes == len(request.block_hashes)
    assert record.extend_keys(core.geometry)
    assert len(record.groups[0].keys) == len(request.block_hashes)


def test_a_hash_that_repeats_the_last_known_one() -> None:
    """Engines that hash a block without its prefix give such hashes for repeated text."""
    core = make_core()
    request = OddRequest([b"one", b"two"])
    core.scheduler.on_new_request(request)
    request.block_hashes.append(b"two")
    ask = core.scheduler.get_num_new_matched_tokens
    refuses(core, lambda: ask(request, 0), "'a'", "block_hashes[2] repeats block_hashes[1]")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        pytest.param(entry(ids=((1, 2), (3, 4))), ["2 groups", "has 1"], id="groups"),
        pytest.param(entry(ids=((1,),)), ["group 0", "1 blocks for 8 tokens", "2 are needed"], id="short"),
        pytest.param(entry(ids=((1, -2),)), ["group 0", "-2", "from 0"], id="negative block"),
        pytest.param(entry(ids=((1, "two"),)), ["group 0", "'two'"], id="no number"),
        pytest.param(entry(computed=-1), ["-1 tokens computed", "negative"], id="negative tokens"),
        pytest.param(entry(scheduled=-1), ["-1 scheduled", "negative"], id="negative count"),
        pytest.param(entry(computed=4, scheduled=4, ids=((2,),), whole=False), ["whole table"], id="no table"),
        pytest.param(StepOutput(2 * entry().scheduled), ["twice in one step"], id="twice"),
    ],
)
def test_block_tables_that_do_not_fit(step: StepOutput, words: list[str]) -> None:
    """A request before it in the same step must not have been changed either: the step is refused whole."""
    core = make_core()
    core.arrive(8)
    core.arrive(8, "first")
    before = ScheduledRequest("first", 0, 8, ((5, 6),), replaces_table=True)
    refuses(core, lambda: core.scheduler.build_connector_meta(StepOutput((before, *step.scheduled))), "'a'", *words)


def test_a_preempted_request_without_its_whole_table() -> None:
    """Its old table is void in the step that preempts it, although it is known before the step."""
    core = make_core()
    core.arrive(8)
    core.scheduler.build_connector_meta(entry())
    (ran,) = entry(computed=8, scheduled=1, ids=((3,),), whole=False).scheduled
    step = StepOutput((ran,), preempted=frozenset({"a"}))
    refuses(core, lambda: core.scheduler.build_connector_meta(step), "'a'", "whole table")


def test_a_live_id_that_comes_again_with_another_prompt() -> None:
    """It would be offered the chunks of the first one. Any call may be the first with it; a shorter one has no more."""
    core = make_core()
    request = core.arrive([1] * 12)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 12
    update = core.scheduler.update_state_after_alloc
    for tokens in ([2] * 12, [2] * 16, [1] * 8, [1] * 11 + [2] * 5):
        other = core.request(tokens)
        for call in (
            lambda other=other: core.scheduler.on_new_request(other),
            lambda other=other: core.ask(other),
            lambda other=other: update(other, [blocks([1, 2, 3])], 8),
        ):
            refuses(core, call, "'a'", "another prompt", "its own id")
    update(request, [blocks([1, 2, 3])], 12)


def test_a_live_id_that_comes_again_with_the_same_prompt_or_a_longer_one() -> None:
    """Engines repeat a call with another view of one request, and sessions go on where their prompt ended."""
    core = make_core()
    request = core.arrive([1] * 12)
    core.put(core.truth.keys(request))
    for tokens in ([1] * 12, [1] * 12 + [2] * 9):
        again = core.request(tokens)
        core.scheduler.on_new_request(again)
        assert core.ask(again) == 12
    short = core.arrive([3] * 3, "short")
    core.scheduler.on_new_request(core.request([4] * 3, "short"))  # without a hash, there is nothing to offer
    assert core.ask(short) == 0


def test_a_negative_number_of_computed_tokens() -> None:
    """The answer would have more tokens than the request."""
    core = make_core()
    request = core.arrive(8)
    refuses(core, lambda: core.ask(request, -1), "'a'", "-1 tokens are reported as computed")


@pytest.mark.parametrize("computed", [1.5, 4.0, None, "4"])
def test_a_number_of_computed_tokens_that_is_not_whole(computed: Any) -> None:
    """It was kept, and then the end of the request failed as well: not even a drop got rid of it."""
    core = make_core()
    request = core.arrive(8)
    refuses(core, lambda: core.ask(request, computed), "'a'", f"{computed!r} tokens are reported as computed: give a")
    core.scheduler.drop_request("a")


def test_lengths_that_are_no_whole_numbers() -> None:
    """An engine divides, and gets 8.0: the error came from the middle of a lookup."""
    core = make_core()
    for name in ("num_tokens", "num_prompt_tokens"):
        request = SimpleNamespace(request_id="b", num_tokens=8, num_prompt_tokens=8, block_hashes=[b"x"])
        request.kv_transfer_params = None
        setattr(request, name, 8.0)
        refuses(core, lambda request=request: core.scheduler.on_new_request(request), "'b'", f"{name} is 8.0")


@pytest.mark.parametrize("request_id", [None, 17, b"a", ["a"]])
def test_an_id_that_is_no_text(request_id: Any) -> None:
    """A list ended the call with Python's error about hashes of lists; a number was served, and never found again."""
    core = make_core()
    request = SimpleNamespace(**vars(OddRequest([b"x"])) | {"request_id": request_id, "num_prompt_tokens": 12})
    refuses(core, lambda: core.scheduler.on_new_request(request), f"{request_id!r}", "give a text")


@pytest.mark.parametrize("hashes", [None, 1.5, 3])
def test_hashes_that_are_no_sequence(hashes: Any) -> None:
    """At arrival, and of a request whose id is used again."""
    core = make_core()
    refuses(core, lambda: core.scheduler.on_new_request(OddRequest(hashes)), "'a'", "give a sequence of bytes")
    core.arrive(12)
    refuses(core, lambda: core.ask(OddRequest(hashes)), "'a'", "no len()")


def test_a_request_without_parameters() -> None:
    """Python's own error about an attribute named neither the request nor what to give."""
    core = make_core()
    request = SimpleNamespace(request_id="b", num_tokens=4, num_prompt_tokens=4, block_hashes=[b"x"])
    for call in (core.scheduler.on_new_request, core.ask):
        refuses(core, lambda call=call: call(request), "'b'", "no kv_transfer_params", "or None")
    request.kv_transfer_params = None
    core.scheduler.on_new_request(request)


@pytest.mark.parametrize("tokens", [None, "8", 8.0, [8]])
def test_a_number_of_external_tokens_that_is_not_whole(tokens: Any) -> None:
    """None is what an engine passes on that takes a deferred answer for an answer."""
    core = make_core()
    request = core.arrive(9)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    update = core.scheduler.update_state_after_alloc
    refuses(core, lambda: update(request, [blocks([1, 2])], tokens), "'a'", f"{tokens!r} external tokens")
    for tables in (7, [7], [[7, 8]], [[None, None]]):
        refuses(core, lambda tables=tables: update(request, tables, 8), "'a'", "block tables")
    update(request, [blocks([1, 2])], 8)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(StepOutput(entry().scheduled[0]), id="no tuple"),  # type: ignore[arg-type]  # what a stranger writes
        pytest.param(StepOutput((("a", 0, 8),)), id="plain tuples"),  # type: ignore[arg-type]
        pytest.param(entry(scheduled="8"), id="text"),  # type: ignore[arg-type]
        pytest.param(entry(ids=5), id="no tables"),
        pytest.param(entry(ids=(5,)), id="no table"),
        pytest.param(StepOutput((), (7,)), id="number preempted"),  # type: ignore[arg-type]
        pytest.param(StepOutput((), 7), id="no set of preempted"),  # type: ignore[arg-type]
        pytest.param(StepOutput((), "abc"), id="text of preempted"),  # type: ignore[arg-type]
        pytest.param(StepOutput((), iter(["a"])), id="preempted that can be read once"),  # type: ignore[arg-type]
    ],
)
def test_a_step_of_a_wrong_form(step: StepOutput) -> None:
    """Refused whole, and the engine's next step works."""
    core = make_core()
    core.arrive(8)
    refuses(core, lambda: core.scheduler.build_connector_meta(step), "build_connector_meta: give a StepOutput")
    (job,) = core.scheduler.build_connector_meta(entry()).stores
    core.report(job.job_id)


def test_calls_out_of_order() -> None:
    """An engine that allocates what it was not offered, or computes while a load fills its blocks."""
    core = make_core()
    request = core.arrive(9)
    update = core.scheduler.update_state_after_alloc
    refuses(core, lambda: update(request, [blocks([1, 2])], 8), "'a'", "0 were offered")
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    refuses(core, lambda: update(request, [], 8), "'a'", "0 groups")
    refuses(core, lambda: update(request, [blocks([1])], 8), "'a'", "2 are needed")
    update(request, [blocks([1, 2])], 8)
    refuses(core, lambda: update(request, [blocks([1, 2])], 8), "'a'", "before its load had ended")
    step = entry(computed=8, scheduled=1, ids=((1, 2, 3),))
    refuses(core, lambda: core.scheduler.build_connector_meta(step), "'a'", "before its load had ended")


def test_a_part_of_an_offer_with_windows() -> None:
    """The window of another end was not gathered."""
    core = make_core(groups=[FULL, window(8, 4)])
    request = core.arrive(17)
    core.put([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    assert core.ask(request) == 16
    update = core.scheduler.update_state_after_alloc
    tables = [blocks([1, 2, 3, 4]), blocks([5, 6, 7, 8])]
    refuses(core, lambda: update(request, tables, 8), "'a'", "8 of 16", "all of them or none")


def test_a_job_that_is_reported_too_often() -> None:
    """Reports ahead of it in the same output must not have been taken in."""
    core = make_core()
    core.arrive(8)
    core.arrive([9] * 8, "b")
    steps = (*entry().scheduled, *entry("b", ids=((5, 6),)).scheduled)
    first, second = core.scheduler.build_connector_meta(StepOutput(steps)).stores
    output = WorkerOutput({first.job_id: 1, second.job_id: 2})
    refuses(core, lambda: core.scheduler.update_connector_output(output), f"job {second.job_id}", "more workers")
    core.report(first.job_id, second.job_id)
    assert not core.scheduler.has_transfers


def test_nothing_of_the_load_of_a_dropped_request_counts() -> None:
    """The engine waits for this load, and goes on with the request: it computes all of it."""
    core = make_core()
    request = core.arrive(9)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    (job,) = core.scheduler.build_connector_meta(StepOutput()).loads
    core.scheduler.drop_request("a")
    report = core.report(job.job_id)
    assert (report.finished, report.invalid_block_ids) == ({"a"}, {1, 2})
    core.scheduler.validate()


def test_a_dropped_request_may_run_on() -> None:
    """Its writes to the GPU must wait for transfers, and nothing of it is stored."""
    core = make_core()
    request = core.arrive(8)
    other = core.arrive([9] * 8, "b")
    (job,) = core.schedule(other, computed=0, scheduled=8, ids=[[5, 6]]).stores
    core.scheduler.request_finished(other, [])
    core.scheduler.drop_request("a")
    core.scheduler.validate()
    meta = core.schedule(request, computed=0, scheduled=8, ids=[[5, 7]])
    assert meta.jobs_to_flush == {job.job_id}
    assert not meta.stores
    assert core.scheduler.request_finished(request, []) == (False, None)
    core.scheduler.drop_request("a")
