"""vllm-router over two real servers: events of every tier steer requests to the server that has the chunks.

Without a reason to choose, an idle router takes one of them again and again. So the other one is made to hold prompts,
and a request that goes there went there because of events.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_fleet import PROMPTS_IN_GPU, PROMPTS_IN_HOST, PROMPTS_ON_DISK, Fleet, Router, routed
from vllm_server import free_port
from vllm_setups import prompts

pytestmark = pytest.mark.router

BLOCKS = 6
"""Blocks of a prompt in whole chunks."""


@pytest.fixture(scope="module")
def fleet(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers; ended whatever happens."""
    fleet = Fleet(models, tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet
    finally:
        fleet.kill()


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Iterator[Router]:
    """The router in front of them, in service before any request."""
    with routed(fleet, fleet.endpoints, fleet.place / "router.log") as router:
        yield router


@pytest.fixture(scope="module")
def usual(router: Router) -> int:
    """The server that the router takes without a reason."""
    (number,) = {router.ask(prompt) for prompt in prompts("router unknown", 4)}
    return number


@pytest.fixture(scope="module")
def holder(usual: int) -> int:
    """The server that is made to hold prompts."""
    return 1 - usual


def test_a_prompt_goes_to_the_server_that_has_it_in_host_memory(fleet: Fleet, router: Router, holder: int) -> None:
    """The device has forgotten the prompts, and host memory has not."""
    held = prompts("router host", 4)
    fleet.serve(holder, held)
    fleet.serve(holder, prompts("router host filler", PROMPTS_IN_GPU + 1))
    fleet.wait_for(holder, held, lambda media: "GPU" not in media and media.get("CPU") == BLOCKS)
    assert [router.ask(prompt) for prompt in held] == [holder] * 4


def test_a_prompt_goes_to_the_server_that_has_it_on_disk(fleet: Fleet, router: Router, holder: int) -> None:
    """Newer prompts have pushed these out of host memory."""
    held = prompts("router disk", 3)
    fleet.serve(holder, held)
    fleet.serve(holder, prompts("router disk filler", PROMPTS_IN_HOST + 5))
    fleet.wait_for(holder, held, lambda media: media == {"STORAGE": BLOCKS})
    assert [router.ask(prompt) for prompt in held] == [holder] * 3


def test_an_eviction_moves_traffic(fleet: Fleet, router: Router, usual: int, holder: int) -> None:
    """The disk evicts the second prompt: it goes elsewhere, is stored there, and stays there."""
    kept, evicted = prompts("router eviction", 2)
    fleet.serve(holder, [kept, evicted])
    fleet.wait_for(holder, [kept, evicted], lambda media: media.get("STORAGE") == BLOCKS)
    assert router.ask(kept) == holder
    fleet.serve(holder, prompts("router eviction filler", PROMPTS_ON_DISK + 10))
    fleet.wait_for(holder, [evicted], lambda media: not media)
    assert router.ask(evicted) == usual
    fleet.wait_for(usual, [evicted], lambda media: media.get("CPU") == BLOCKS)
    assert router.ask(evicted) == usual


def test_a_reset_clears(fleet: Fleet, router: Router, usual: int, holder: int) -> None:
    """A reset that reaches all tiers: the server has nothing, and attracts nothing."""
    (held,) = prompts("router reset", 1)
    fleet.serve(holder, [held])
    fleet.wait_for(holder, [held], lambda media: media.get("STORAGE") == media.get("CPU") == BLOCKS)
    fleet.servers[holder].get("/reset_prefix_cache?reset_external=true", "POST")
    fleet.wait_for(holder, [held], lambda media: not media)
    assert router.ask(held) == usual


def test_without_events_requests_spread(fleet: Fleet) -> None:
    """The negative control: a router that receives no event follows load alone, whatever the servers hold."""
    held = [prompts(f"router silence {number}", 7) for number in range(2)]
    for number in range(2):
        fleet.serve(number, held[number])
        fleet.wait_for(number, held[number], lambda media: media.get("STORAGE") == BLOCKS)
    silent = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    with routed(fleet, silent, fleet.place / "silent-router.log") as router:
        holders = (0, 0, 1, 1, 0, 1)
        assert [router.ask(held[number].pop()) for number in holders] != list(holders)
        taken = router.ask_at_once(held[0] + held[1])
    assert sum(taken) == 8
    assert min(taken) >= 2


def test_after_a_restart_the_disk_still_attracts(fleet: Fleet, router: Router, holder: int) -> None:
    """Before any request, the new process announces what its disk holds, with the tokens that were kept."""
    held = prompts("router restart", 3)
    fleet.serve(holder, held)
    fleet.wait_for(holder, held, lambda media: media.get("STORAGE") == BLOCKS)
    fleet.restart(holder)
    fleet.wait_for(holder, held, lambda media: media == {"STORAGE": BLOCKS}, idle=True)
    router.wait_until_all_are_healthy()
    assert [router.ask(prompt) for prompt in held] == [holder] * 3


def test_a_restart_without_kept_tokens_attracts_nothing(fleet: Fleet, router: Router, usual: int, holder: int) -> None:
    """The other negative control: the chunks are on the disk, and no consumer can know it."""
    (held,) = prompts("router forgotten", 1)
    fleet.serve(holder, [held])
    fleet.wait_for(holder, [held], lambda media: media.get("STORAGE") == BLOCKS)
    fleet.restart(holder, between=fleet.tokens_of(holder).unlink)
    router.wait_until_all_are_healthy()  # otherwise it would take the other server for no better reason
    fleet.serve(holder, prompts("router forgotten filler", 1))  # its chunks are the first event of the new process
    fleet.wait_for(holder, [held], lambda media: not media)
    assert router.ask(held) == usual
