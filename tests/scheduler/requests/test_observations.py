"""Policies observe every request once when it arrives and once when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_blocks import blocks
from core_parts import Core, disk, make_core, objects
from panics import Panic

from tierkv.abc import RequestAwarePolicy
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.policies.lru import LruPolicy
from tierkv.policies.request_feed import RequestFeed
from tierkv.types.engine import StepOutput
from tierkv.types.hints import RequestHints
from tierkv.types.observation import RequestObservation, RequestPhase


class WatchingPolicy(LruPolicy):
    """LRU that remembers observations; ``broken`` is what it raises then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[RequestObservation] = []
        self.broken: type[BaseException] | None = None

    def observe_request(self, observation: RequestObservation) -> None:
        """Remember it."""
        self.seen.append(observation)
        if self.broken is not None:
            raise self.broken


def watched(core: Core) -> list[WatchingPolicy]:
    """Give every tier of a core a watching policy, the host tier first."""
    policies = [WatchingPolicy() for _ in range(1 + len(core.lower))]
    names = core.manager.tier_names
    core.manager._request_feed = RequestFeed(zip(names, policies, strict=True), core.counters)
    return policies


def test_the_protocol_is_what_lru_does_not_have() -> None:
    """A policy without ``observe_request`` costs nothing: no observation is made for it."""
    assert isinstance(WatchingPolicy(), RequestAwarePolicy)
    assert not isinstance(LruPolicy(), RequestAwarePolicy)
    assert not make_core(tiers=[disk()]).manager.wants_observations


def test_policies_of_all_tiers_observe() -> None:
    """The manager finds the policies of the host tier and of every lower tier by itself."""
    host, below = WatchingPolicy(), WatchingPolicy()
    spec = disk()
    tier = LowerTier(0, spec.name, spec.capabilities, spec.limits, below)
    manager = OffloadManager(HostTier(4, host), [tier], [16], 4, CoreCounters())
    assert manager.wants_observations
    manager.observe_request(RequestObservation("a", RequestPhase.ARRIVED, 0.0, (), (), ()))
    assert len(host.seen) == len(below.seen) == 1


def test_arrival_has_the_whole_path() -> None:
    """With the chunks in the engine's own cache, the sources of the others, and the new ones."""
    core = make_core(tiers=[disk()])
    (host, below) = watched(core)
    request = core.arrive(24, tierkv={"session": "s", "continues": "yes"})
    keys = core.truth.keys(request)
    core.put(keys[2:3])
    core.finish_all()
    core.keep_below(keys[3:4])
    assert core.ask(request, computed=8) is None
    assert not host.seen, "not before it is answered"
    core.finish_all()
    core.begin(0.5)
    for _ in range(3):
        assert core.ask(request, computed=8) == 8
    expected = RequestObservation(
        request_id="a",
        phase=RequestPhase.ARRIVED,
        now_s=0.5,
        paths=(tuple(keys),),
        gpu_chunks=(2,),
        new_chunks=(2,),
        tier_chunks={"host": 1, "disk": 1},
        hints=RequestHints(session="s", continues=1.0),
    )
    assert host.seen == [expected]
    assert below.seen == [expected]


def test_a_path_wholly_on_the_gpu_is_observed() -> None:
    """Hits in the engine's own cache never reach the tiers: without this, the most used chunks look unused."""
    core = make_core()
    (host,) = watched(core)
    request = core.arrive(16)
    assert core.ask(request, computed=16) == 0
    (seen,) = host.seen
    assert (seen.gpu_chunks, seen.new_chunks, seen.tier_chunks) == ((4,), (0,), {})


def test_several_groups_have_a_path_each() -> None:
    """Chunks of different sizes are counted by their own size."""
    core = make_core(block_tokens=(4, 8), hash_block_tokens=4)
    (host,) = watched(core)
    request = core.arrive(32)
    for group in (0, 1):
        core.put(core.truth.keys(request, group)[: 4 // (group + 1)])
    assert core.ask(request, computed=8) == 8
    (seen,) = host.seen
    assert seen.paths == tuple(tuple(core.truth.keys(request, group)) for group in (0, 1))
    assert (seen.gpu_chunks, seen.new_chunks) == ((2, 1), (4, 2))
    assert seen.tier_chunks == {"host": 3}


def test_the_end_is_observed_once_with_what_was_computed() -> None:
    """The path at the end has generated chunks, and none that was never computed."""
    core = make_core()
    (host,) = watched(core)
    request = core.arrive(16)
    assert core.ask(request) == 0
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 5))], 0)
    core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    request.extend(range(100, 106))
    core.begin(2.0)
    core.schedule(request, computed=16, scheduled=5, ids=[[5, 6]], whole=False)
    for _ in range(2):
        core.scheduler.request_finished(request, [[]])
    arrived, finished = host.seen
    assert (arrived.phase, finished.phase) == (RequestPhase.ARRIVED, RequestPhase.FINISHED)
    assert finished.paths == (tuple(core.truth.keys(request)[:5]),)
    assert (finished.now_s, finished.new_chunks) == (2.0, arrived.new_chunks)


def test_a_preempted_request_arrives_once() -> None:
    """Asked about again after preemption, it is the same request: a second count would look like reuse."""
    core = make_core()
    (host,) = watched(core)
    request = core.arrive(16)
    core.ask(request)
    core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    core.report(*core.scheduler._jobs.live_ids())
    core.ask(request)
    assert [seen.phase for seen in host.seen] == [RequestPhase.ARRIVED]


def test_a_request_that_was_never_answered_only_ends() -> None:
    """Aborted while it waited: policies observe its end, with no counts."""
    core = make_core(tiers=[objects()])
    (host, _) = watched(core)
    request = core.arrive(16)
    assert core.ask(request) is None
    core.scheduler.request_finished(request, [[]])
    (seen,) = host.seen
    assert (seen.phase, seen.gpu_chunks, seen.new_chunks) == (RequestPhase.FINISHED, (0,), (0,))


@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_policy_that_raises_is_not_called_again(broken: int, error: type[BaseException]) -> None:
    """Never fatal: the engine continues, other policies still observe, the fault is counted once."""
    core = make_core(tiers=[disk()])
    policies: Sequence[WatchingPolicy] = watched(core)
    policies[broken].broken = error
    for i in range(2):
        assert core.ask(core.arrive(16, f"r{i}")) == 0
    assert [len(policy.seen) for policy in policies] == [1 if i == broken else 2 for i in (0, 1)]
    assert core.counters.observations_failed == {("host", "disk")[broken]: 1}
