"""Resets asked through vLLM after its weights were changed in place: no chunk of the old weights is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_process import PlainTokens, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, objects_in, prompts, tokens_of

CACHED = 192
HERE = "vllm_watching"


def setup_of(seam: Seam, place: Path, scope: str | None) -> EngineSetup:
    """An engine over host memory, a disk of its own and a folder that others may share."""
    stack: dict[str, Any] = {
        "host": {"capacity": "16MiB"},
        "tiers": [
            {"backend": "disk", "path": str(place / "disk"), "capacity": "64MiB"},
            {"name": "shared", "backend": "fsspec", "url": f"file://{place}/shared"},
        ],
        "lookup": {"recompute": "off"},
    }
    options = {} if scope is None else {"tierkv_reset_scope": scope}
    return EngineSetup(seam, stack, blocks_per_chunk=2, options=options)


def test_a_reset_reaches_every_tier_unless_the_host_tier_is_named(
    seam: Seam, start_engine: StartEngine, tmp_path: Path
) -> None:
    """VLLM tells a connector of new weights by a reset alone. What "host" leaves below gives wrong tokens then."""
    asked = prompts("new weights", 3)
    after: dict[str | None, Any] = {}
    for scope in (None, "host"):
        place = tmp_path / str(scope)
        with start_engine(setup_of(seam, place, scope)) as engine:
            first = engine.call("vllm_scenarios:serve", prompts=asked)
            assert engine.call("vllm_scenarios:flush")
            shared = objects_in(place / "shared")
            assert shared > 0
            engine.call(f"{HERE}:change_weights")
            engine.call(f"{HERE}:reset")
            after[scope] = engine.call("vllm_scenarios:serve", prompts=asked)
            assert "tier 'shared' (shared or read-only)" in engine.log.read_text(encoding="utf-8") or scope == "host"
            if scope is None:
                assert tokens_of(after[scope]) != tokens_of(first)
                assert cached_of(after[scope]) == [0] * 3
                again = engine.call("vllm_scenarios:serve_again", prompts=asked)  # both remaining tiers are in use
                assert cached_of(again) == [CACHED] * 3
                assert tokens_of(again) == tokens_of(after[scope])
                assert engine.call("vllm_scenarios:flush")
                assert objects_in(place / "shared") == shared, "the new weights' chunks have the old ones' names"
    assert cached_of(after["host"]) == [CACHED] * 3
    assert tokens_of(after["host"]) != tokens_of(after[None])


def test_weights_replaced_while_the_engine_sleeps_find_nothing_of_the_old_ones(
    seam: Seam, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Trainers put the engine to sleep, load other weights, and wake it up. No call names these weights to tierkv."""
    asked = prompts("asleep", 3)
    with start_engine(setup_of(seam, tmp_path, None)) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        assert engine.call("vllm_scenarios:flush")
        engine.call(f"{HERE}:replace_weights_asleep")
        after = engine.call("vllm_scenarios:serve", prompts=asked)
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert tokens_of(after) != tokens_of(first)
    assert cached_of(after) == [0] * 3
    assert cached_of(again) == [CACHED] * 3
    assert tokens_of(again) == tokens_of(after)


def test_requests_that_a_reset_preempts_go_on_from_the_tiers(
    seam: Seam, start_engine: StartEngine, tmp_path: Path, plain_tokens: PlainTokens
) -> None:
    """VLLM preempts all running requests and looks them up again in one step. Its offloading connector asserts that
    none of them loads in this step, and such a load ended the engine."""
    asked = prompts("preempted by a reset", 3)
    with start_engine(setup_of(seam, tmp_path, "host")) as engine:
        told = engine.call("vllm_scenarios:serve_and_preempt", prompts=asked, times=3)
        counters = engine.call("vllm_scenarios:counters")
    assert told["preempted"] == 3
    assert sum(counters["tokens_loaded"].values()) > CACHED
    assert tokens_of(told["answers"]) == plain_tokens("llama", asked, 16)


def test_requests_that_go_on_after_a_reset_leave_nothing_of_the_old_weights(
    seam: Seam, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Half of their KV was computed before it. Later requests must not find that, and compute all of it."""
    asked = prompts("go on", 2)
    with start_engine(setup_of(seam, tmp_path, None)) as engine:
        assert engine.call(f"{HERE}:serve_new_weights", prompts=asked, after=6, tokens=60)
        later = engine.call("vllm_scenarios:serve_again", prompts=asked)
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(later) == [0, 0]
    assert cached_of(again) == [CACHED] * 2
    assert tokens_of(again) == tokens_of(later)


def test_a_restart_finds_nothing_from_before_a_reset(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """The tier that is ours was emptied, not only forgotten."""
    asked = prompts("restart after a reset", 3)
    with start_engine(setup_of(seam, tmp_path, None)) as engine:
        engine.call("vllm_scenarios:serve", prompts=asked)
        assert engine.call("vllm_scenarios:flush")
        engine.call(f"{HERE}:reset")
        assert engine.call("vllm_scenarios:flush")  # which ends the reset
    setup = setup_of(seam, tmp_path, None)
    alone = {**setup.stack, "tiers": setup.stack["tiers"][:1]}
    with start_engine(EngineSetup(seam, alone, blocks_per_chunk=2)) as engine:
        assert cached_of(engine.call("vllm_scenarios:serve", prompts=asked)) == [0] * 3


def test_a_restart_with_the_weights_of_the_folder_finds_nothing_of_later_ones(
    seam: Seam, start_engine: StartEngine, tmp_path: Path
) -> None:
    """An engine that trained on may crash. The namespace names the weights of the folder, which the next one has."""
    asked = prompts("weights of a crashed trainer", 3)
    setup = setup_of(seam, tmp_path, None)
    alone = EngineSetup(seam, {**setup.stack, "tiers": setup.stack["tiers"][:1]}, blocks_per_chunk=2, options={})
    with start_engine(alone) as engine:
        engine.call(f"{HERE}:change_weights")
        engine.call(f"{HERE}:reset")
        later = engine.call("vllm_scenarios:serve", prompts=asked)
        assert engine.call("vllm_scenarios:flush")
        assert cached_of(engine.call("vllm_scenarios:serve_again", prompts=asked)) == [CACHED] * 3, "found by itself"
    with start_engine(alone) as engine:
        after = engine.call("vllm_scenarios:serve", prompts=asked)
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(after) == [0] * 3
    assert tokens_of(after) == tokens_of(again) != tokens_of(later)
    assert cached_of(again) == [CACHED] * 3
