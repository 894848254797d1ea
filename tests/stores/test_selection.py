"""Choices of namespaces and chunks, as a command line writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filled_stores import SALT, chunk_key, model_namespace

from tierkv.abc import StoredFrame, StoredNamespace
from tierkv.errors import ConfigError
from tierkv.recording.entries import short_key
from tierkv.stores.selection import (
    ChunkFilter,
    NamespaceFilter,
    parse_age,
    parse_tenant,
    read_namespace_file,
    tenant_text,
)
from tierkv.types.keys import NO_TENANT, tenant_of_salt
from tierkv.types.namespace import Namespace


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("1.5h", 5400), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_ages_are_numbers_with_a_unit(text: str, seconds: float) -> None:
    """`7` alone could be days or seconds: a removal must not guess."""
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 days", "1e9d"])
def test_other_ages_are_refused_with_an_example(text: str) -> None:
    """A misread age removes the wrong chunks."""
    with pytest.raises(ValueError, match="7d"):
        parse_age(text)


def test_a_tenant_is_a_salt_or_the_digest_that_is_shown() -> None:
    """The salt is a secret of the user, so listings show its digest, and that must be enough to remove the chunks."""
    shown = tenant_text(chunk_key(1))
    assert parse_tenant(shown) == parse_tenant(SALT) == tenant_of_salt(SALT)
    assert parse_tenant(tenant_text(chunk_key(0))) == NO_TENANT
    assert tenant_text(chunk_key(0)) == "-"
    with pytest.raises(ValueError, match="- for requests without one"):
        parse_tenant("")  # a variable of the shell that is not set: a removal must not guess
    with pytest.raises(ValueError, match="du --by tenant"):
        parse_tenant("id:12")


def test_namespaces_match_by_model_pattern_or_fingerprint() -> None:
    """People know the model's name; two namespaces of one model differ in the fingerprint only."""
    stored = StoredNamespace(model_namespace("llama-3-8b"), last_used_s=1000.0)
    fingerprint = stored.namespace.fingerprint().hex()
    for name in ("llama-3-8b", "llama*", fingerprint[:8], fingerprint):
        assert NamespaceFilter((name,)).matches(stored), name
    for name in ("llama", "qwen*", fingerprint[:3], fingerprint[1:9]):
        assert not NamespaceFilter((name,)).matches(stored), name


def test_a_namespace_of_unknown_or_present_use_is_never_unused() -> None:
    """`rm --unused-for` may not take what an engine serves from."""
    namespace = model_namespace()
    unused = NamespaceFilter((), 2000.0)
    assert unused.matches(StoredNamespace(namespace, last_used_s=1000.0))
    assert not unused.matches(StoredNamespace(namespace, last_used_s=3000.0))
    assert not unused.matches(StoredNamespace(namespace))
    assert not unused.matches(StoredNamespace(namespace, last_used_s=1000.0, in_use_by="process 7"))


def test_chunks_match_by_tenant_age_and_key() -> None:
    """All choices must hold; an unknown age is neither old nor young."""
    mine, old = StoredFrame(chunk_key(1), 10, 500.0), ChunkFilter(stored_before_s=1000.0)
    assert ChunkFilter(tenant=tenant_of_salt(SALT)).matches(mine)
    assert not ChunkFilter(tenant=tenant_of_salt(SALT)).matches(StoredFrame(chunk_key(2), 10))
    assert old.matches(mine)
    assert not old.matches(mine._replace(stored_at_s=1500.0))
    assert old.matches(mine._replace(stored_at_s=None)) is None
    assert ChunkFilter(keys=frozenset({short_key(chunk_key(1))})).matches(mine)
    assert ChunkFilter(keys=frozenset({chunk_key(1).hex()})).matches(mine)
    assert not ChunkFilter(keys=frozenset({chunk_key(3).hex()})).matches(mine)


def test_a_namespace_file_may_be_any_manifest(tmp_path: Path) -> None:
    """A backend that cannot list its namespaces is given them by any file with their description."""
    namespace = model_namespace()
    described = namespace.describe()
    file = tmp_path / "file.json"
    for content in (described, {"namespace": described}, {"namespaces": [{"namespace": described}]}):
        file.write_text(json.dumps(content))
        assert read_namespace_file(file) == [namespace]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"namespace": 7}', '{"namespace": {"model": "m"}}', "[" * 10_000])
def test_other_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    """A wrong file is a usage error, not a traceback."""
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json"):
        read_namespace_file(file)
    with pytest.raises(ConfigError, match=r"Is a directory\. Give a namespace\.json of a tier"):
        read_namespace_file(tmp_path)


def test_a_description_gives_back_its_namespace() -> None:
    """The tools open a store by the description beside it: a field that changed on the way would open another one."""
    for namespace in (model_namespace(), model_namespace(replica=2, world_size=2, rank=1, epoch="7")):
        assert Namespace.from_description(json.loads(json.dumps(namespace.describe()))) == namespace
    for wrong in ({"rank": "1"}, {"new_field": 1}, {"groups": [[16, [1.5], "full_attention", None]]}):
        with pytest.raises(ValueError, match="description"):
            Namespace.from_description({**model_namespace().describe(), **wrong})
