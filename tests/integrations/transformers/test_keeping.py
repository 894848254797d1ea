"""A cache in the hands of a user: what it holds, how to get rid of it, and how much room it takes unasked."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from hf_models import GREEDY, greedy, make_prompt
from prometheus_client.parser import text_string_to_metric_families

from tierkv.errors import BackendUnavailableError, EngineProtocolError
from tierkv.integrations.transformers import TieredPrefixCache
from tierkv.integrations.transformers.defaults import folder_stack, model_name

Open = Callable[..., TieredPrefixCache]
DOCUMENT, OTHER = make_prompt(150), make_prompt(130, seed=5)


# -- progress ----------------------------------------------------------------------------------------------------------


def test_prefill_reports_its_progress(model: Callable[..., Any], open_cache: Open) -> None:
    """A document of an hour must not look like a hang: each piece is reported, and the last report is all of it."""
    cache = open_cache(model("llama"))
    seen: list[tuple[int, int]] = []
    cache.prefill([DOCUMENT, OTHER], progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (280, 280)
    assert seen == sorted(seen)
    assert len(seen) >= 6, "one per piece of 64 tokens"
    again: list[int] = []
    cache.prefill(DOCUMENT, progress=lambda done, _of: again.append(done))
    assert again[0] == 144, "loaded tokens are done at once"
    assert again[-1] == 150


def test_a_bar_is_drawn_where_it_is_wanted(
    model: Callable[..., Any], open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log file gets no bar unless it is asked for; a terminal shows one."""
    cache = open_cache(model("llama"))
    for progress, drawn in ((None, False), (False, False), (True, True)):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        cache.prefill(make_prompt(70, seed=hash(progress) % 100), progress=progress)
        assert ("prefill" in sys.stderr.getvalue()) == drawn  # type: ignore[attr-defined]


# -- sums --------------------------------------------------------------------------------------------------------------


def test_stats_are_the_sums_of_the_reports(model: Callable[..., Any], open_cache: Open) -> None:
    """A user sees what the cache saved, and what it holds, without a metrics server."""
    cache = open_cache(model("llama"))
    reports = []
    for prompt in (DOCUMENT, DOCUMENT, OTHER, DOCUMENT[:100]):
        cache.generate([prompt], **GREEDY)
        reports += cache.last_prompts
    assert cache.flush()
    stats = cache.stats()
    assert stats.prompts == 4
    assert stats.prompt_tokens == sum(report.prompt_tokens for report in reports) == 530
    assert stats.loaded_tokens == sum(report.loaded_tokens for report in reports) > 0
    assert stats.computed_tokens == sum(report.computed_tokens for report in reports)
    assert stats.hit_rate == stats.loaded_tokens / 530
    assert set(stats.by_tier) <= {"host", "disk"}
    assert stats.tiers["disk"].chunks == stats.tiers["host"].chunks
    assert stats.tiers["disk"].usable
    assert stats.tiers["disk"].capacity_bytes == 64 << 20


# -- removal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_forgotten_prompt_is_gone(kind: str, model: Callable[..., Any], open_cache: Open) -> None:
    """A user's document must be removable: from memory, from the disk, also after a restart; others stay."""
    cache = open_cache(model(kind))
    for prompt in (DOCUMENT, OTHER):
        cache.prefill(prompt)
    assert cache.forget(DOCUMENT)
    assert cache.load([[*DOCUMENT, 7]]).tokens == 0
    assert cache.load([[*OTHER, 7]]).tokens == 128
    cache.close()
    later = open_cache(model(kind))
    assert later.load([[*DOCUMENT, 7]]).tokens == 0
    assert later.load([[*OTHER, 7]]).tokens == 128
    out = later.generate([DOCUMENT], **GREEDY)
    assert torch.equal(out, greedy(model(kind), torch.tensor([DOCUMENT])))
    assert later.load([[*DOCUMENT, 7]]).tokens == 144, "it is stored again"


def test_a_prompt_of_a_tenant_is_forgotten_with_its_salt(model: Callable[..., Any], open_cache: Open) -> None:
    """Without the salt it is another prompt, and stays."""
    cache = open_cache(model("llama"))
    cache.prefill(DOCUMENT, cache_salt="a")
    assert cache.forget(DOCUMENT)
    assert cache.load([[*DOCUMENT, 7]], cache_salt="a").tokens == 144
    assert cache.forget(DOCUMENT, cache_salt="a")
    assert cache.load([[*DOCUMENT, 7]], cache_salt="a").tokens == 0


def test_clear_removes_everything_of_the_model(model: Callable[..., Any], open_cache: Open) -> None:
    """Two models share a folder: clearing one of them empties its own chunks only."""
    cache, other = open_cache(model("llama")), open_cache(model("gemma3"))
    for one in (cache, other):
        one.prefill([DOCUMENT, OTHER])
    assert cache.clear()
    assert cache.load([[*DOCUMENT, 7]]).tokens == 0
    assert cache.stats().tiers["disk"].chunks == 0
    assert other.load([[*DOCUMENT, 7]]).tokens == 144
    cache.prefill(OTHER)
    assert cache.load([[*OTHER, 7]]).tokens == 128


def test_a_shared_tier_is_not_cleared(model: Callable[..., Any], open_cache: Open, tmp_path: Path) -> None:
    """Others use its chunks, too: the refusal says what to do instead."""
    stack = {"host": {"capacity": "8MiB"}, "tiers": [{"backend": "fsspec", "url": f"file://{tmp_path}/objects"}]}
    cache = open_cache(model("llama"), stack)
    cache.prefill(DOCUMENT)
    with pytest.raises(EngineProtocolError, match=r"shared with others.*namespace\.epoch"):
        cache.clear()
    assert cache.load([[*DOCUMENT, 7]]).tokens == 144


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_a_tiny_example_takes_little_room(model: Callable[..., Any], open_cache: Open, tmp_path: Path) -> None:
    """A first try on a laptop must not take half a gigabyte of its disk, and a gigabyte of its memory."""
    cache = open_cache(model("llama"), tmp_path / "kv")
    cache.prefill(DOCUMENT)
    files = [path.stat() for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert sum(file.st_size for file in files) < 80 << 20
    assert cache.stats().tiers["host"].capacity_bytes <= 64 << 20  # type: ignore[operator]


@pytest.mark.parametrize(
    ("chunk_bytes", "host_mib"), [(1024, 64), (2 << 20, 128), (8 << 20, 512), (40 << 20, 512)]
)  # tiny; 1B; 7B with grouped heads; 7B without
def test_host_memory_follows_the_model(chunk_bytes: int, host_mib: int) -> None:
    """A chunk of a large model needs megabytes; a gigabyte is for users who ask for it."""
    stack = folder_stack(Path("kv"), chunk_bytes)
    assert stack["host"]["capacity"] == host_mib << 20
    (disk,) = stack["tiers"]
    assert disk["segment_bytes"] >= 2 * chunk_bytes


def test_a_folder_in_use_is_a_clear_error(model: Callable[..., Any], open_cache: Open, tmp_path: Path) -> None:
    """Two caches of one model on one folder: the second one must not run without its disk, in silence."""
    cache = open_cache(model("llama"), tmp_path / "kv")
    cache.prefill(DOCUMENT)
    with pytest.raises(BackendUnavailableError, match="in use by this process: close the other stack"):
        open_cache(model("llama"), tmp_path / "kv")
    other = open_cache(model("gemma3"), tmp_path / "kv")
    other.prefill(DOCUMENT)
    cache.close()
    assert open_cache(model("llama"), tmp_path / "kv").load([[*DOCUMENT, 7]]).tokens == 144


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("google/gemma-3-270m", "google/gemma-3-270m"),
        ("gpt2", "gpt2"),
        ("/home/me/.cache/hub/models--google--gemma-3-270m/snapshots/9b0cfec892", "google/gemma-3-270m"),
        ("/data/models/gemma-3-270m/", "gemma-3-270m"),
        ("./gemma-3-270m", "gemma-3-270m"),
        ("", "SimpleNamespace-270M"),
    ],
)
def test_the_model_has_the_name_that_people_use(path: str, name: str) -> None:
    """The name is in listings, logs and metrics: a path of one machine, or a class, does not identify it."""
    weights = torch.empty(270_000_000, device="meta")
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=path), parameters=lambda: [weights])
    assert model_name(model) == name


def test_a_given_name_is_kept(model: Callable[..., Any], open_cache: Open) -> None:
    """The user's word counts."""
    assert open_cache(model("llama"), name="mine").stats().model == "mine"


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_its_metrics_are_served(model: Callable[..., Any], open_cache: Open) -> None:
    """One call; and the sums over HTTP are those that the reports gave to the user."""
    cache = open_cache(model("llama"))
    cache.prefill(DOCUMENT)
    with cache.serve_metrics() as server:
        cache.generate([[*DOCUMENT, 7, 8]], **GREEDY)
        with urlopen(server.url) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    samples = {(one.name, one.labels.get("tier", "")): one.value for family in families for one in family.samples}
    (report,) = cache.last_prompts
    loaded = {tier: value for (name, tier), value in samples.items() if name == "tierkv_tokens_loaded_total" and value}
    assert loaded == dict(report.by_tier) != {}
    assert samples["tierkv_tier_chunks", "disk"] == cache.stats().tiers["disk"].chunks
