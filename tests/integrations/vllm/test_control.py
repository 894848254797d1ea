"""The negative control: let wrong bytes through, and tokens change. Otherwise equal tokens would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_process import EngineProcess, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

CACHED = 192


@pytest.fixture(scope="module")
def unchecked(seam: Seam, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Llama over host memory that is not looked at again."""
    stack = {"host": {"capacity": "16MiB", "verify": False}, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup(seam, stack, blocks_per_chunk=2)) as engine:
        yield engine


def test_other_bytes_in_the_host_tier_are_other_tokens(unchecked: EngineProcess) -> None:
    """The second pass really uses the tier's bytes: other bytes there, other tokens."""
    asked = prompts("control", 3)
    first = unchecked.call("vllm_scenarios:serve", prompts=asked)
    second = unchecked.call("vllm_scenarios:serve_again", prompts=asked)
    unchecked.call("vllm_scenarios:overwrite_host")
    third = unchecked.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(second) == tokens_of(first)
    for good, bad in zip(tokens_of(first), tokens_of(third), strict=True):
        assert good != bad


@pytest.fixture(scope="module")
def checked(start_engine: StartEngine) -> Iterator[EngineProcess]:
    """The same damage, found during the copy to the device: only the connector can report it then."""
    stack = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup("connector", stack, blocks_per_chunk=2)) as engine:
        yield engine


def test_the_connector_refuses_other_bytes_and_has_them_computed_again(checked: EngineProcess) -> None:
    """Memory rots, too: a load that fails on its way to the device is reported to vLLM, which computes the tokens."""
    asked = prompts("control", 3)
    first = checked.call("vllm_scenarios:serve", prompts=asked)
    checked.call("vllm_scenarios:overwrite_host")
    second = checked.call("vllm_scenarios:serve_again", prompts=asked)
    counters = checked.call("vllm_scenarios:counters")
    assert counters["loads_failed"] > 0
    assert tokens_of(second) == tokens_of(first)
    third = checked.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(third) == [CACHED] * 3
    assert tokens_of(third) == tokens_of(first)
