"""A model that sees pictures: the tokens in the place of two pictures are equal, their KV is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineProcess, StartEngine
from vllm_setups import ARGUMENTS, EngineSetup, Seam, cached_of, prompts, tokens_of

pytestmark = pytest.mark.long

PICTURE = 999
PICTURE_TOKENS = 64 + 3
"""In the place of a picture: its own, and three words around them."""

ARGUMENTS_MORE = {"num_gpu_blocks_override": 200, "limit_mm_per_prompt": {"image": 2}}
Asked = dict[str, Any]

BEFORE, BETWEEN = prompts("beside pictures", 2, 40)
(BEHIND,) = prompts("behind pictures", 1, 150)


def asking(*parts: list[int] | int, **more: Any) -> Asked:
    """A prompt of texts and numbers of pictures; the words for pictures are in no text."""
    prompt: list[int] = []
    for part in parts:
        prompt += [PICTURE] if isinstance(part, int) else [token % 990 for token in part]
    return {"prompt": prompt, "pictures": [part for part in parts if isinstance(part, int)], **more}


ASKED = [
    asking(BEFORE, 1, BEHIND),
    asking(BEFORE, 2, BEHIND),
    asking(BEFORE, 1, BETWEEN, 2, BETWEEN),
    asking(BEFORE, 1, BETWEEN, 3, BETWEEN),
    asking(BEFORE, 2, 1, BEHIND),
    asking(BEFORE, 1),
    asking(BEFORE, 1, BEHIND, salt="another tenant"),
    asking(BEFORE, 1, BEHIND, names=["a"]),
    asking(BEFORE, 2, BEHIND, names=["b"]),
]
FOUND_AT_FIRST = [0, 32, 96, 128, 96, 96, 0, 32, 32]
"""Tokens that a prompt shares with those before it, in whole blocks. Some end in the midst of a picture."""


@pytest.fixture(scope="module")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Answers of vLLM without tierkv, which keeps no prefixes here either."""
    arguments = {**ARGUMENTS, **ARGUMENTS_MORE, "model": str(models / "idefics"), "enable_prefix_caching": False}
    with EngineProcess(arguments, tmp_path_factory.mktemp("plain") / "log") as engine:
        tokens = tokens_of(engine.call("vllm_request_scenarios:serve_pictures", asked=ASKED))
    assert tokens[0] != tokens[1], "an answer must depend on the picture"
    assert tokens[2] != tokens[3]
    return tokens


def test_a_chunk_behind_a_picture_is_found_with_this_picture_only(
    seam: Seam, start_engine: StartEngine, expected: list[list[int]], tmp_path: Path
) -> None:
    """At first, again with an empty device, from disk, and after a restart without the cache of processed pictures."""
    tiers = [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]
    lookup = {"recompute": "off", "deadline_s": 60.0}
    stack = {"host": {"capacity": "32MiB"}, "tiers": tiers, "lookup": lookup}
    whole = [(len(one["prompt"]) + len(one["pictures"]) * (PICTURE_TOKENS - 1) - 1) // 32 * 32 for one in ASKED]

    def served(engine: EngineProcess, *, empty: bool = True) -> list[Any]:
        answers = []
        for one in ASKED:
            if empty:
                engine.call("vllm_scenarios:forget")
            answers += engine.call("vllm_request_scenarios:serve_pictures", asked=[one])
        return answers

    with start_engine(EngineSetup(seam, stack, model="idefics", arguments=ARGUMENTS_MORE)) as engine:
        first, again = served(engine, empty=False), served(engine)
        engine.call("vllm_scenarios:forget_host")
        below = served(engine)
    more = {**ARGUMENTS_MORE, "mm_processor_cache_gb": 0}
    with start_engine(EngineSetup(seam, stack, model="idefics", arguments=more)) as engine:
        after = served(engine)
        counters = engine.call("vllm_scenarios:counters")
    assert cached_of(first) == FOUND_AT_FIRST
    assert cached_of(again) == cached_of(below) == cached_of(after) == whole
    assert tokens_of(first) == tokens_of(again) == tokens_of(below) == tokens_of(after) == expected
    assert (counters["requests_dropped"], counters["errors_contained"]) == (0, 0)


def test_a_router_knows_pictures_and_salts_in_every_tier(start_engine: StartEngine, tmp_path: Path) -> None:
    """As it does of the device's blocks: the tokens alone are equal for all pictures. With the connector only, because
    vLLM builds the events of the spec, and leaves this out."""
    stack = {
        "host": {"capacity": "32MiB"},
        "tiers": [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}],
        "events": {"self_describing": True},
    }
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:*"}
    arguments = {**ARGUMENTS_MORE, "kv_events_config": published}
    setup = EngineSetup("connector", stack, model="idefics", blocks_per_chunk=2, arguments=arguments)
    with start_engine(setup) as engine:
        engine.call("vllm_watching:listen")
        engine.call("vllm_request_scenarios:serve_pictures", asked=ASKED)
        assert engine.call("vllm_scenarios:flush")
        engine.call("vllm_watching:step")
        heard = engine.call("vllm_watching:extra_keys")
    device = heard["GPU"]
    named = {block: keys for block, keys in device.items() if keys}
    assert {len(keys) for keys in named.values()} == {1, 2}, "a salt beside a picture, or two pictures"
    for medium in ("CPU", "STORAGE"):
        assert heard[medium] == {block: device[block] for block in heard[medium]}
        assert len(heard[medium].keys() & named.keys()) > len(ASKED)
