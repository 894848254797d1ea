"""The kit for authors of policies, on every built-in policy; and that it finds policies that break their promises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from tierkv.abc import PolicyPlugin
from tierkv.policies.builtin import POLICY_PLUGINS
from tierkv.policies.lru import LruPolicy
from tierkv.testing import PolicyConformance
from tierkv.testing.conformance.policy import ROOM, TierOfPolicy
from tierkv.types.keys import Key

for _plugin in POLICY_PLUGINS:
    _suite = f"Test{_plugin.open.__name__}"
    globals()[_suite] = type(_suite, (PolicyConformance,), {"plugin": _plugin, "__module__": __name__})


def test_every_policy_is_on_the_page(root: Path) -> None:
    """A user chooses from the table of the page."""
    page = (root / "docs/how-to/choose-a-policy.md").read_text(encoding="utf-8")
    missing = [plugin.name for plugin in POLICY_PLUGINS if f"\n| `{plugin.name}`" not in page]
    assert not missing, f"docs/how-to/choose-a-policy.md lacks a line of {missing}"


class InOrderOfTime(LruPolicy):
    """Ignores the order of prompts: the later chunk is the more recent one."""

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:
        self.add(handles, keys)


class Greedy(LruPolicy):
    """Ignores where a choice must end."""

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        return self.evict(count, pins)


@pytest.mark.parametrize("broken", [InOrderOfTime, Greedy])
def test_the_kit_finds_a_policy_that_loses_heads(broken: type[LruPolicy]) -> None:
    """A suite that accepts everything is no suite."""

    class Suite(PolicyConformance):
        plugin: ClassVar[PolicyPlugin] = PolicyPlugin(name="broken", summary="Broken.", open=broken)

    with pytest.raises(AssertionError):
        Suite().test_a_prompt_that_cannot_fit_keeps_its_head(TierOfPolicy(broken(ROOM)))


class FindsNone(LruPolicy):
    """Has no victim, ever."""

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        return []


def test_a_policy_that_finds_none_is_told_what_to_return() -> None:
    """``assert 0 == 13`` says nothing to an author."""

    class Suite(PolicyConformance):
        plugin: ClassVar[PolicyPlugin] = PolicyPlugin(name="broken", summary="Broken.", open=FindsNone)

    with pytest.raises(AssertionError, match="evict found fewer victims than are unpinned: return exactly `count`"):
        Suite().test_a_full_tier_always_finds_a_victim(TierOfPolicy(FindsNone(ROOM)))
