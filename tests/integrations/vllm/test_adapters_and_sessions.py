"""Requests that say more than tokens: adapters, and sessions with streamed input. Through both seams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, cached_of, prompts, tokens_of

HERE = "vllm_request_scenarios"
CACHED = 192
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_gpu_blocks_override": 100}


def setup_over(disk: Path, seam: Seam, **arguments: Any) -> EngineSetup:
    """Llama over host memory and a disk."""
    tiers = [{"backend": "disk", "path": str(disk), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    return EngineSetup(seam, stack, arguments=arguments)


def test_adapters_have_chunks_of_their_own_and_a_replaced_one_finds_none(
    seam: Seam, models: Path, tmp_path: Path, start_engine: StartEngine
) -> None:
    """VLLM names an adapter by its path. Other weights under this path, after a restart, are other KV."""
    (prompt,) = prompts("adapters", 1)
    ours, other = tmp_path / "adapter", models / "german"
    shutil.copytree(models / "french", ours)
    setup = setup_over(tmp_path / "disk", seam, **LORA)
    asked = ["", str(ours), str(other)]
    with start_engine(setup) as engine:
        first = engine.call(f"{HERE}:serve_with", prompt=prompt, adapters=asked)
        second = engine.call(f"{HERE}:serve_with_again", prompt=prompt, adapters=asked)
    assert (cached_of(first), cached_of(second)) == ([0] * 3, [CACHED] * 3)
    assert tokens_of(second) == tokens_of(first)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3
    shutil.rmtree(ours)
    shutil.copytree(other, ours)
    with start_engine(setup) as engine:
        third = engine.call(f"{HERE}:serve_with", prompt=prompt, adapters=asked)
    assert cached_of(third) == [CACHED, 0, CACHED]
    plain, _, german = tokens_of(first)
    assert tokens_of(third) == [plain, german, german]


@pytest.mark.long
def test_an_adapter_at_home_or_from_the_hub_finds_none_after_it_was_replaced(
    seam: Seam, models: Path, tmp_path: Path, start_engine: StartEngine
) -> None:
    """Its path begins with "~", or is a name on the hub, whose main branch has moved. The first request with an adapter
    from the hub is served without tierkv, because vLLM may fetch it then."""
    (prompt,) = prompts("adapters elsewhere", 1)
    setup = setup_over(tmp_path / "disk", seam, **LORA)
    environment = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    hub = tmp_path / "hub" / "hub" / "models--org--adapter"
    (hub / "refs").mkdir(parents=True)

    def put(name: str, commit: str) -> None:
        for place in (tmp_path / "adapter", hub / "snapshots" / commit):
            shutil.copytree(models / name, place, dirs_exist_ok=True)
        (hub / "refs" / "main").write_text(commit, encoding="utf-8")

    put("french", "a" * 40)
    asked = ["~/adapter", "org/adapter"]
    with start_engine(setup, environment) as engine:
        first = engine.call(f"{HERE}:serve_with", prompt=prompt, adapters=asked)
        again = [engine.call(f"{HERE}:serve_with_again", prompt=prompt, adapters=asked) for _ in range(2)]
    assert [cached_of(answers) for answers in (first, *again)] == [[0, 0], [CACHED, 0], [CACHED, CACHED]]
    put("german", "b" * 40)
    with start_engine(setup, environment) as engine:
        after = [engine.call(f"{HERE}:serve_with_again", prompt=prompt, adapters=asked) for _ in range(3)]
    assert [cached_of(answers) for answers in after] == [[0, 0], [CACHED, 0], [CACHED, CACHED]]
    french, german = tokens_of(first)[0], tokens_of(after[0])[0]
    assert french != german
    assert [tokens_of(answers) for answers in (first, *again)] == [[french] * 2] * 3
    assert [tokens_of(answers) for answers in after] == [[german] * 2] * 3


def test_what_vllm_found_of_a_replaced_adapter_is_not_stored(
    seam: Seam, models: Path, tmp_path: Path, start_engine: StartEngine
) -> None:
    """VLLM's own cache knows an adapter by name and path, so it still has the KV of the previous one."""
    (prompt,) = prompts("replaced adapter", 1)
    folder = tmp_path / "adapter"
    shutil.copytree(models / "french", folder)
    setup = setup_over(tmp_path / "disk", seam, **LORA)
    asked = [str(folder)]
    with start_engine(setup) as engine:
        french = engine.call(f"{HERE}:serve_with", prompt=prompt, adapters=asked)
        shutil.rmtree(folder)
        shutil.copytree(models / "german", folder)
        mixed = engine.call(f"{HERE}:serve_with", prompt=prompt, adapters=asked, load_inplace=True)
        german = engine.call(f"{HERE}:serve_with_again", prompt=prompt, adapters=asked, load_inplace=True)
        again = engine.call(f"{HERE}:serve_with_again", prompt=prompt, adapters=asked, load_inplace=True)
    with start_engine(setup) as engine:
        after = engine.call(f"{HERE}:serve_with", prompt=prompt, adapters=[*asked, str(models / "german")])
    assert cached_of(mixed) == [CACHED], "vLLM's own hit: of the previous adapter"
    assert (cached_of(german), cached_of(again), cached_of(after)) == ([0], [CACHED], [CACHED, 0])
    assert tokens_of(german) == tokens_of(again)
    assert tokens_of(after) == tokens_of(german) * 2
    assert tokens_of(german) != tokens_of(french)


@pytest.fixture(scope="module")
def engine(seam: Seam, start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Llama with room for all requests."""
    with start_engine(setup_over(tmp_path_factory.mktemp("disk"), seam, num_gpu_blocks_override=100)) as engine:
        yield engine


def test_a_session_with_streamed_input_stores_nothing_wrong(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Its tokens are taken back as input arrives, and vLLM names its blocks anew each time. Others must not find it."""
    parts = prompts("parts", 3, BLOCK_TOKENS + 8)
    answer = engine.call(f"{HERE}:stream", parts=parts, tokens=4)
    session: list[int] = []
    for number, part in enumerate(parts):
        session += [*part, *answer[4 * number : 4 * number + 3]]  # vLLM drops the last token, which has no KV yet
    longer = [*session, *prompts("longer", 1, 40)[0]]
    for _ in range(2):
        answers = engine.call("vllm_scenarios:serve_again", prompts=[longer])
        assert tokens_of(answers) == plain_tokens("llama", [longer], 16)
    assert cached_of(answers) == [len(longer) // BLOCK_TOKENS * BLOCK_TOKENS]
