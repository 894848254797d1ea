"""A tier that hangs or raises while the engine serves: the engine goes on, and its tokens stay right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

CACHED = 192
VERBS = ("contains", "read_into", "write")
LIMITS = {
    "probe_deadline_s": 1.0,
    "read_deadline_s": 1.0,
    "write_deadline_s": 1.0,
    "breaker_cooldown_s": 0.2,
    "retries": 0,
    # Every lookup asks anew.
    "presence_ttl_s": 0,
    "absence_ttl_s": 0,
}

Give = Callable[..., None]
"""Orders for the tier, by verb; none: it works."""


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory, seam: Seam) -> Path:
    """The file that the tier obeys."""
    file = tmp_path_factory.mktemp("orders") / "orders.json"
    file.write_text("{}", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an engine in which the tier's plugin is installed, as far as Python can tell."""
    place = tmp_path_factory.mktemp("site")
    metadata = place / "tierkv_unsteady-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tierkv-unsteady\nVersion: 1\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[tierkv]\nunsteady = tierkv_unsteady\n", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(place), str(Path(__file__).with_name("plugins"))])}


@pytest.fixture(scope="module")
def engine(
    seam: Seam,
    orders: Path,
    plugin: dict[str, str],
    start_engine: StartEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """Llama over host memory and the unsteady tier."""
    place = {"path": str(tmp_path_factory.mktemp("unsteady")), "orders": str(orders)}
    stack = {
        "host": {"capacity": "16MiB"},
        "tiers": [{"backend": "unsteady", **place, **LIMITS}],
        "lookup": {"recompute": "off", "deadline_s": 3.0},
    }
    with start_engine(EngineSetup(seam, stack, blocks_per_chunk=2), plugin) as engine:
        yield engine
        orders.write_text("{}", encoding="utf-8")  # nothing may hang at the end


@pytest.fixture
def give(orders: Path, engine: EngineProcess) -> Iterator[Give]:
    """Give orders; at the end the tier works again."""

    def write(**by_verb: str) -> None:
        news = orders.with_suffix(".new")
        news.write_text(json.dumps(by_verb), encoding="utf-8")
        news.replace(orders)

    yield write
    write()
    engine.call("vllm_scenarios:recover")


def test_a_tier_that_must_be_asked_defers_the_request_and_then_serves_it(engine: EngineProcess) -> None:
    """The request waits for the answer of a slow tier, and finds all its chunks."""
    asked = prompts("deferred", 3)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    before = engine.call("vllm_scenarios:counters")
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    after = engine.call("vllm_scenarios:counters")
    assert after["deferrals"] > before["deferrals"]
    assert after["deadlines_expired"] == before["deadlines_expired"]
    assert cached_of(second) == [CACHED] * 3
    assert tokens_of(second) == tokens_of(first)


@pytest.mark.parametrize("fault", ["hang", "raise"])
def test_prompts_are_served_while_the_tier_fails(
    engine: EngineProcess, give: Give, fault: str, plain_tokens: PlainTokens
) -> None:
    """A mount hangs, a library raises: every request gets the right answer, computed if necessary."""
    known, new = prompts(f"known {fault}", 2), prompts(f"new {fault}", 2)
    engine.call("vllm_scenarios:serve", prompts=known)
    engine.call("vllm_scenarios:forget_host")
    give(**dict.fromkeys(VERBS, fault))
    answers = engine.call("vllm_scenarios:serve", prompts=known + new)
    assert all(answer["finished"] for answer in answers)
    assert tokens_of(answers) == plain_tokens("llama", known + new, 16)
    assert cached_of(answers) == [0] * 4
    give()
    engine.call("vllm_scenarios:recover")
    for _ in range(8):  # what a failed write may have spoiled is stored anew; on a busy machine an answer may be late
        engine.call("vllm_scenarios:forget_host")
        again = engine.call("vllm_scenarios:serve", prompts=known)
        assert tokens_of(again) == tokens_of(answers)[:2]
        if cached_of(again) == [CACHED] * 2:
            break
    assert cached_of(again) == [CACHED] * 2


@pytest.mark.parametrize("fault", ["hang", "raise"])
def test_a_load_that_fails_after_the_hit_was_promised_is_computed(
    engine: EngineProcess, give: Give, fault: str
) -> None:
    """The tier says yes and then does not deliver: the blocks were allocated already, and get their tokens computed."""
    asked = prompts(f"promised {fault}", 2)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    give(read_into=fault)
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    assert all(answer["finished"] for answer in second)
    assert tokens_of(second) == tokens_of(first)


def test_a_request_that_is_aborted_while_its_load_hangs_leaves_nothing_behind(
    engine: EngineProcess, give: Give, plain_tokens: PlainTokens
) -> None:
    """Clients disconnect: blocks and slots of the load are freed, and late data affects no other request."""
    asked, others = prompts("hung up", 2), prompts("others", 2)
    engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    give(read_into="hang")
    answers = engine.call("vllm_scenarios:serve_and_abort", prompts=asked + others, aborted=[0, 1], at_step=3)
    give()
    assert [answer["finished"] for answer in answers[2:]] == [True, True]
    assert tokens_of(answers)[2:] == plain_tokens("llama", others, 16)
    engine.call("vllm_scenarios:recover")
    again = engine.call("vllm_scenarios:serve_again", prompts=asked + others)
    assert tokens_of(again) == plain_tokens("llama", asked + others, 16)
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")
