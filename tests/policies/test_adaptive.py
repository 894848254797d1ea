"""The policy ``adaptive`` against a naive one, and its other promises."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from naive_adaptive import NaiveAdaptive

from tierkv.policies.adaptive.observations import OBSERVATION_CHUNKS, PENDING_MAX
from tierkv.policies.adaptive.policy import AdaptivePolicy
from tierkv.policies.ghost import marks_of
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key, make_key
from tierkv.types.observation import RequestObservation, RequestPhase

SLOTS = 24
HINTS = (
    NO_HINTS,
    NO_HINTS,
    NO_HINTS,
    RequestHints(continues=0.95),
    RequestHints(closed=True),
    RequestHints(one_shot=True),
    RequestHints(priority=60),
    RequestHints(priority=-1, retain=True),
)


def key_of(number: int) -> Key:
    """Key per number."""
    return make_key(number.to_bytes(16, "big"), 0)


def arrival(path: Sequence[Key], now_s: float, hints: RequestHints = NO_HINTS) -> RequestObservation:
    """Observation of a request for a path."""
    return RequestObservation("r", RequestPhase.ARRIVED, now_s, (tuple(path),), (0,), (len(path),), {}, hints)


class Tier:
    """Small tier: calls a policy as a manager does, in the same order.

    Args:
        policies: the first decides; the others must agree.
        slots: number of chunks that fit.
    """

    def __init__(self, policies: Sequence[AdaptivePolicy | NaiveAdaptive], slots: int) -> None:
        self.policies = policies
        self.slots: dict[Key, int] = {}
        self.free = list(range(slots))
        self.pins = bytearray(slots)
        self.writes = self.hits = 0

    def ask(self, verb: str, *args: object) -> list[int]:
        """Call one verb of all policies."""
        answers = [getattr(policy, verb)(*args) for policy in self.policies]
        answers = [sorted(answer) if verb == "refuse" else answer for answer in answers]
        assert all(answer == answers[0] for answer in answers), (verb, args, answers)
        return answers[0]  # type: ignore[no-any-return]  # of getattr

    def request(self, path: Sequence[Key], now_s: float, hints: RequestHints = NO_HINTS) -> None:
        """Request a path, and store the missing chunks that are admitted."""
        for key in path:
            if key not in self.slots:
                break
            self.hits += 1
        self.ask("observe_request", arrival(path, now_s, hints))
        missing = [key for key in path if key not in self.slots]
        present = [self.slots[key] for key in path if key in self.slots and not self.pins[self.slots[key]]]
        refused = self.ask("refuse", missing, len(self.free))
        missing = [key for i, key in enumerate(missing) if i not in refused]
        self.hold(present)
        room = len(self.slots) - sum(self.pins)
        missing = missing[: len(self.free) + room]
        if len(missing) > len(self.free):
            self.leave(self.ask("evict", len(missing) - len(self.free), self.pins))
        handles = [self.free.pop() for _ in missing]
        self.slots.update(zip(missing, handles, strict=True))
        self.writes += len(handles)
        self.ask("add", handles[::-1], missing[::-1])
        self.release(present[::-1])
        self.ask("touch", [self.slots[key] for key in reversed(path) if key in self.slots])

    def hold(self, handles: Sequence[int]) -> None:
        """Pin these chunks for a read."""
        for handle in handles:
            self.pins[handle] = 1

    def release(self, handles: Sequence[int]) -> None:
        """Unpin these chunks after a read."""
        held = [handle for handle in handles if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.ask("release", held)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Unpin these chunks after a write."""
        held = [handle for handle in handles if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.ask("release_after_write", held)

    def leave(self, victims: Sequence[int]) -> None:
        """Evict these chunks."""
        assert not any(self.pins[handle] for handle in victims)
        gone = set(victims)
        self.slots = {key: handle for key, handle in self.slots.items() if handle not in gone}
        self.free.extend(victims)

    def remove(self, handles: Sequence[int]) -> None:
        """Remove corrupt chunks."""
        mine = [handle for handle in handles if handle in self.slots.values()]
        for handle in mine:
            self.pins[handle] = 0
        self.ask("remove", mine)
        self.leave(mine)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "ask", "hold", "hold", "release", "release_after_write", "remove"]),
        st.lists(st.integers(0, 2), min_size=1, max_size=9),
        st.sampled_from([1, 3, 40, 700, 300_000]),
        st.sampled_from(HINTS),
    ),
    min_size=10,
    max_size=40,
)


@settings(deadline=None, max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink takes long
@given(steps=STEPS)
def test_it_decides_like_the_naive_one(steps: list[tuple[str, list[int], int, RequestHints]]) -> None:
    """Columns, rings, logs and tables only save time: victims and refusals equal those of the naive policy.

    That one searches plain objects; any history is compared.
    """
    naive, policy = NaiveAdaptive(), AdaptivePolicy(SLOTS)
    tier, now_s = Tier([policy, naive], SLOTS), 0.0
    for verb, branches, pause_s, hints in steps:
        now_s += pause_s
        path = [key_of(hash(tuple(branches[: end + 1])) % 2**64) for end in range(len(branches))]
        here = [tier.slots[key] for key in reversed(path) if key in tier.slots]
        if verb == "ask":
            tier.request(path, now_s, hints)
        else:
            getattr(tier, verb)(here)
        assert len(policy) == len(naive) == len(tier.slots)
        assert policy._values.factors == pytest.approx(naive.values.factors)
        assert policy._values.chances == pytest.approx(naive.values.chances)


def conversations(seed: int, requests: int) -> list[tuple[float, list[Key]]]:
    """Sessions that continue after about a minute, among one-shot prompts: recency cannot tell them apart."""
    randomness, number, now_s = random.Random(seed), 0, 0.0
    asked: list[tuple[float, list[Key]]] = []
    while len(asked) < requests:
        now_s += randomness.expovariate(0.5)
        path: list[Key] = []
        for turn in range(randomness.choice([1, 1, 1, 8])):
            fresh = randomness.randint(4, 12) if turn == 0 else 2
            path = path + [key_of(number + i) for i in range(fresh)]
            number += fresh
            asked.append((now_s + turn * randomness.uniform(30, 60), path))
    return sorted(asked, key=lambda item: item[0])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns_who_comes_back(seed: int) -> None:
    """Learning must pay: with continuing sessions and one-shots, clearly more requested chunks are kept than with
    recency.

    And with fewer writes.
    """
    told, untold = Tier([AdaptivePolicy(200)], 200), Tier([AdaptivePolicy(200)], 200)
    untold.policies[0].observe_request = lambda _: None  # type: ignore[method-assign]  # so it is least recently used
    for now_s, path in conversations(seed, 1500):
        told.request(path, now_s)
        untold.request(path, now_s)
    assert told.hits > 1.3 * untold.hits
    assert told.writes < 0.7 * untold.writes


def test_few_runs_are_remembered_and_no_chunk_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of runs is a ring: when a place is reused, chunks of its previous run must stay in the order.

    Otherwise their memory is never freed.
    """
    monkeypatch.setattr("tierkv.policies.adaptive.runs.RUNS_MIN", 8)
    monkeypatch.setattr("tierkv.policies.adaptive.runs.RUNS_MAX", 8)
    randomness, policy = random.Random(11), AdaptivePolicy(64)
    tier = Tier([policy], 64)
    for now_s in range(400):
        root = randomness.randrange(12)
        path = [key_of(1000 * root + i) for i in range(randomness.randint(1, 12))]
        tier.request(path, float(now_s), randomness.choice(HINTS))
        held = randomness.sample(sorted(tier.slots.values()), 3) if len(tier.slots) > 3 else []
        (tier.hold if randomness.random() < 0.2 else tier.release)(held)
    tier.release(sorted(tier.slots.values()))
    here = sorted(tier.slots.values())
    assert sorted(policy.evict(len(here), tier.pins)) == here
    assert len(policy) == 0


def first_to_leave(*hints: RequestHints) -> list[int]:
    """Order of eviction of requests of four chunks each, at the same time, with these hints."""
    policy = AdaptivePolicy(100)
    for number, hint in enumerate(hints):
        path = [key_of(10 * number + i) for i in range(4)]
        policy.observe_request(arrival(path, 100.0, hint))
        policy.add(range(4 * number, 4 * number + 4), path[::-1])
    victims = policy.evict(4 * len(hints), bytes(100))
    return list(dict.fromkeys(victim // 4 for victim in victims if victim % 4))  # tails are a matter of their own


def test_hints_decide_before_anything_is_learned() -> None:
    """A hint is worth more than any learning, if it counts from the first request on."""
    yes, no = RequestHints(continues=1.0), RequestHints(continues=0.0)
    perhaps, closed = RequestHints(continues=0.5), RequestHints(continues=1.0, closed=True)
    assert first_to_leave(yes, perhaps, no) == [2, 1, 0]
    assert first_to_leave(yes, closed) == [1, 0]
    assert first_to_leave(NO_HINTS, RequestHints(one_shot=True)) == [1, 0]
    assert first_to_leave(RequestHints(priority=1), NO_HINTS, RequestHints(priority=-60)) == [2, 1, 0]
    assert first_to_leave(RequestHints(retain=True), NO_HINTS) == [1, 0]


def test_what_all_use_does_not_depend_on_one_session() -> None:
    """The last request of a session does not affect the system prompt that all sessions share."""
    policy, shared = AdaptivePolicy(100), [key_of(1)]
    policy.add([0], shared)
    for number in range(20):
        policy.observe_request(arrival([*shared, key_of(100 + number)], float(number), RequestHints(closed=True)))
    policy.observe_request(arrival([key_of(500), key_of(501)], 20.0))
    policy.add([2, 1], [key_of(501), key_of(500)])
    policy.touch([0])
    assert policy.evict(3, bytes(100))[-1] == 0


def test_observations_that_make_no_sense() -> None:
    """Parameters can be anything: empty paths, a chunk that is its own parent, a clock that runs backwards, long paths.

    None of them may raise, or lose a chunk.
    """
    policy = AdaptivePolicy(100)
    one, other = key_of(1), key_of(2)
    for now_s in (50.0, 10.0, -3.0, float("nan"), 60.0):
        for path in ([], [one], [one, one, one], [one, other, one], [key_of(n) for n in range(10_000)]):
            for event in RequestPhase:
                policy.observe_request(RequestObservation("r", event, now_s, (tuple(path),), (0,), (len(path),)))
    policy.add([3, 2, 1], [one, other, one])
    policy.observe_request(arrival([one, one, other], 61.0))
    policy.touch([1, 2])
    assert sorted(policy.evict(3, bytes(100))) == [1, 2, 3]
    assert len(policy) == 0


def test_a_long_path_is_looked_at_over_several_calls() -> None:
    """A prompt of two thousand chunks must not stop the engine for milliseconds.

    The call with the observation handles a part, each later call a smaller one, in the order of the observations.
    """
    policy = AdaptivePolicy(4000)
    long, short = [key_of(n) for n in range(2000)], [key_of(n) for n in range(5000, 5008)]
    policy.observe_request(arrival(long, 1.0))
    assert len(policy._memory) <= OBSERVATION_CHUNKS
    policy.observe_request(arrival(short, 2.0))
    known = [len(policy._memory)]
    assert known[0] <= 2 * OBSERVATION_CHUNKS
    while known[-1] < len(long) + len(short):
        policy.touch([])
        known.append(len(policy._memory))
        assert known[-1] - known[-2] < OBSERVATION_CHUNKS
        assert len(known) < 20
    marks, newcomers = marks_of([*long, *short]), policy._memory._newcomers
    assert list(newcomers) == marks
    assert [parent for _, _, parent in newcomers.values()] == [0, *marks[:1999], 0, *marks[2000:-1]]
    assert len({run for _, run, _ in newcomers.values()}) == 4, "of each path the body and the last chunk"


def test_paths_that_wait_are_bounded() -> None:
    """Observations without any other call must not make a growing list."""
    policy = AdaptivePolicy(100)
    for number in range(3 * PENDING_MAX):
        policy.observe_request(arrival([key_of(1000 * number + n) for n in range(600)], float(number)))
    assert len(policy._tracker._pending) <= PENDING_MAX


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The division of a prompt must not change decisions: pieces of two chunks equal one piece."""
    monkeypatch.setattr("tierkv.policies.adaptive.observations.WHOLE_CHUNKS_MAX", 2)
    monkeypatch.setattr("tierkv.policies.adaptive.observations.PIECE_CHUNKS", 2)
    naive, policy = NaiveAdaptive(), AdaptivePolicy(SLOTS)
    tier = Tier([policy, naive], SLOTS)
    for now_s, path in conversations(5, 60):
        tier.request(path, now_s)
        assert policy._values.factors == pytest.approx(naive.values.factors)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million prompts that are not repeated must not grow a process that runs for months."""
    monkeypatch.setattr("tierkv.policies.adaptive.memory.GHOSTS_MIN", 100)
    monkeypatch.setattr("tierkv.policies.adaptive.memory.NEWCOMERS_MAX", 50)
    policy = AdaptivePolicy(10)
    log, memory = policy._log, policy._memory
    sizes = set()
    for number in range(3000):
        policy.observe_request(arrival([key_of(7 * number + i) for i in range(7)], float(number)))
        sizes.add((len(log.alive), len(log.times), policy._rings.length))
        assert len(memory) <= 150
    assert len(sizes) == 1
    remembered = sum(log.alive)
    assert remembered == len(memory), "a run counts those of its chunks that are remembered, and no others"


def test_no_refusal_while_there_is_room() -> None:
    """A cache that refuses chunks with room left is worse than none."""
    policy = AdaptivePolicy(100)
    path = [key_of(n) for n in range(8)]
    policy.observe_request(arrival(path, 1.0, RequestHints(one_shot=True)))
    assert not policy.refuse(path, 8)
    assert not policy.refuse([], 0)


def test_the_youngest_leaves_if_it_comes_back_later() -> None:
    """Users think for a minute: a prompt of a minute ago is about to be repeated, a new one is not.

    A policy that compares only the oldest chunks of each kind would evict the first one.
    """
    policy = AdaptivePolicy(100)
    old, young, newcomer = ([key_of(100 * number + i) for i in range(6)] for number in range(3))
    policy.observe_request(arrival(old, 0.0))
    policy.add(range(6), old[::-1])
    policy.observe_request(arrival(young, 55.0))
    policy.add(range(6, 12), young[::-1])
    policy.observe_request(arrival(newcomer, 56.0))
    assert policy.evict(3, bytes(100)) == [6, 7, 8]
    policy.observe_request(arrival(young, 57.0))
    policy.touch(range(9, 12))
    assert policy.evict(3, bytes(100)) == [0, 1, 2], "seen twice by now"
