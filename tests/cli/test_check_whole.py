"""`tierkv check` on what no single backend can see: memory, places and capacities that collide."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tierkv.cli.check_whole import check_huge_pages, check_memory, held_bytes
from tierkv.memory.available import usable_bytes

Run = Callable[..., Result]
GIB = 2**30


def findings(tierkv: Run, place: Path, *tiers: dict[str, Any], host: str | int = "8MiB") -> list[dict[str, Any]]:
    """Findings of a stack of these tiers about the stack as a whole."""
    file = place / "whole.json"
    file.write_text(json.dumps({"host": {"capacity": host}, "tiers": list(tiers)}), encoding="utf-8")
    said = tierkv("check", file, "--json")
    report = json.loads(said.stdout)
    assert said.exit_code == int(not report["ok"])
    return [found for found in report["findings"] if found["subject"] in {"memory", "place", "space together"}]


def disk(name: str, path: Path, capacity: str = "1GiB") -> dict[str, Any]:
    """A disk tier."""
    return {"backend": "disk", "name": name, "path": str(path), "capacity": capacity, "min_free_bytes": 0}


def test_a_missing_folder_of_the_stacks_own_files_is_found(tierkv: Run, tmp_path: Path) -> None:
    """The stack would not open: the engine has loaded its weights by then."""
    file = tmp_path / "files.json"
    for folder, ok in (("gone", False), (".", True)):
        record, tokens = str(tmp_path / folder / "run.jsonl"), str(tmp_path / folder / "tokens.db")
        described = {"self_describing": True, "tokens_path": tokens}
        file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "record": {"path": record}, "events": described}))
        said = tierkv("check", file, "--json")
        found = [found for found in json.loads(said.stdout)["findings"] if found["tier"] == "stack"]
        assert [(each["subject"], each["ok"]) for each in found] == [("record.path", ok), ("events.tokens_path", ok)]
        assert ok or all(each["fix"].startswith(f"mkdir {tmp_path / folder}") for each in found)
        assert said.exit_code == int(not ok)
    assert not (tmp_path / "run.jsonl").exists()


def test_a_record_that_is_a_directory_is_found(tierkv: Run, tmp_path: Path) -> None:
    """The stack would not open, and the check called its folder fine."""
    file = tmp_path / "stack.json"
    file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "record": {"path": str(tmp_path)}}))
    said = tierkv("check", file, "--json")
    (found,) = [found for found in json.loads(said.stdout)["findings"] if found["subject"] == "record.path"]
    assert (said.exit_code, found["ok"], found["detail"]) == (1, False, f"{tmp_path} is a directory")
    assert f"{tmp_path}/run.jsonl" in found["fix"]


def test_a_host_tier_larger_than_memory_is_found(tierkv: Run, tmp_path: Path) -> None:
    """It is allocated at start: the engine would be killed, perhaps after an hour of loading weights."""
    (found,) = findings(tierkv, tmp_path, host="1PiB")
    assert (found["tier"], found["ok"]) == ("host", False)
    assert found["detail"].startswith("1.00 PiB of ")
    assert "lower host.capacity to" in found["fix"]


def test_a_host_tier_in_the_wrong_unit_is_found(tierkv: Run, tmp_path: Path) -> None:
    """`capacity = 16` are 16 bytes. The check passed, and the engine refused the stack behind its weights."""
    (found,) = findings(tierkv, tmp_path, host=16)
    assert (found["ok"], found["detail"]) == (False, "16 B hold no chunk of any model")
    assert 'host.capacity = "16GiB"' in found["fix"]


@pytest.mark.parametrize(("gib", "ok", "warns"), [(8, True, False), (15, True, True), (17, False, False)])
def test_memory_has_three_levels(gib: int, ok: bool, warns: bool) -> None:
    """An engine needs memory beside the host tier: a warning, before it is a failure."""
    found = check_memory(gib * GIB, 16 * GIB)
    assert (found.ok, found.warns) == (ok, warns)
    assert bool(found.fix) == (warns or not ok)
    assert "12.8 GiB or less" in found.fix or not found.fix


@pytest.mark.parametrize(
    ("chunk", "warned"),
    [({}, ["bucket"]), ({"tokens": 256}, []), ({"blocks": 16}, []), ({"tokens": 1024}, ["host"])],
)
def test_chunks_that_cost_more_than_they_give_are_found(
    tierkv: Run, tmp_path: Path, chunk: dict[str, int], warned: list[str]
) -> None:
    """Long chunks lose hits; short ones make a bucket answer a request for each 16 tokens. A disk takes both."""
    file = tmp_path / "chunks.json"
    bucket = {"backend": "fsspec", "name": "bucket", "url": f"file://{tmp_path}/objects"}
    stack = {"host": {"capacity": "8MiB"}, "chunk": chunk, "tiers": [disk("a", tmp_path / "a"), bucket]}
    file.write_text(json.dumps(stack), encoding="utf-8")
    report = json.loads(tierkv("check", file, "--json").stdout)
    found = [found for found in report["findings"] if found["subject"] == "chunk"]
    assert [one["tier"] for one in found] == warned
    assert all(one["ok"] and one["warns"] and "set chunk.tokens to" in one["fix"] for one in found)


def test_a_tier_that_joins_chunks_takes_short_ones(tierkv: Run, tmp_path: Path) -> None:
    """The reader of another process's LMDB copies from a map: it sends no request for a chunk."""
    file = tmp_path / "reader.json"
    reader = {"backend": "lmdb-read-only", "path": str(tmp_path / "lmdb"), "write": "read_only"}
    file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "tiers": [reader]}), encoding="utf-8")
    report = json.loads(tierkv("check", file, "--json").stdout)
    assert "chunk" not in {found["subject"] for found in report["findings"]}


@pytest.mark.parametrize(
    ("chunk", "ok", "names"),
    [({"blocks": 4}, False, "chunk.blocks = 4"), ({"tokens": 256}, True, "chunk.tokens = 256"), ({}, None, "")],
)
def test_a_plan_that_wants_single_blocks_is_compared_with_the_chunks(
    tierkv: Run, tmp_path: Path, chunk: dict[str, int], ok: bool | None, names: str
) -> None:
    """An engine refuses such a stack at its start, after `tierkv check` had passed it."""
    file = tmp_path / "lazy.json"
    file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "chunk": chunk, "store": {"plan": "lazy"}}), "utf-8")
    said = tierkv("check", file, "--json")
    found = [found for found in json.loads(said.stdout)["findings"] if found["subject"] == "store.plan"]
    assert [one["ok"] for one in found] == ([] if ok is None else [ok])
    assert said.exit_code == (1 if ok is False else 0)
    assert all(names in one["detail"] and "set chunk.blocks = 1" in one["fix"] for one in found)


def test_quotas_above_the_capacity_are_found(tierkv: Run, tmp_path: Path) -> None:
    """No tenant reaches them, so the tenants share the tier as without quotas. No salt is named: it may be a secret."""
    file = tmp_path / "quotas.json"
    quotas = {"tenant_quota": "1GiB", "tenant_quotas": {"team-a": "2GiB", "": "3TiB", "b": "1MiB"}}
    tiers = [disk("a", tmp_path / "a") | quotas, disk("b", tmp_path / "b") | {"tenant_quota": "1GiB"}]
    file.write_text(json.dumps({"host": {"capacity": "8MiB", "tenant_quota": "1GiB"}, "tiers": tiers}), "utf-8")
    report = json.loads(tierkv("check", file, "--json").stdout)
    found = [found for found in report["findings"] if found["subject"] == "quotas"]
    assert [(one["tier"], one["ok"], one["warns"]) for one in found] == [("host", True, True), ("a", True, True)]
    assert found[0]["detail"].startswith("tenant_quota = 1.00 GiB; capacity = 8.00 MiB: ")
    assert found[1]["detail"].startswith("2 of tenant_quotas, up to 3.00 TiB; capacity = 1.00 GiB: ")
    assert "team-a" not in str(found)


@pytest.mark.parametrize("is_there", [True, False])
def test_spans_without_opentelemetry_are_found(
    tierkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """The stack would not open: the engine has loaded its weights by then. The check may run with another Python."""
    if is_there:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    else:
        monkeypatch.setitem(sys.modules, "tierkv.recording.exporting", None)
    file = tmp_path / "spans.json"
    file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "record": {"spans": "program"}}), "utf-8")
    report = json.loads(tierkv("check", file, "--json").stdout)
    (found,) = [found for found in report["findings"] if found["subject"] == "record.spans"]
    assert (found["tier"], found["ok"], found["warns"]) == ("stack", True, not is_there)
    assert is_there or "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in found["fix"]


def test_a_variable_in_a_path_is_found(tierkv: Run, tmp_path: Path) -> None:
    """A user who writes it as in a shell would get a folder of that name, in the directory of the process."""
    (warned,) = (
        found
        for found in findings(tierkv, tmp_path, disk("a", tmp_path / "$CACHE" / "kv"), disk("b", tmp_path / "b"))
        if found["subject"] == "place"
    )
    assert (warned["tier"], warned["ok"], warned["warns"]) == ("a", True, True)
    assert "$CACHE is part of the name" in warned["detail"]


def test_memory_is_known() -> None:
    """A wrong unit would let every stack pass, or none."""
    assert GIB // 8 < usable_bytes() < 2**50


def test_two_tiers_in_one_place_are_found(tierkv: Run, tmp_path: Path) -> None:
    """Also by a link, with another spelling, one inside of the other, and for backends of two kinds."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    tiers = (
        disk("a", tmp_path / "a"),
        disk("b", tmp_path / "link"),
        {"backend": "fsspec", "name": "c", "url": f"file://{tmp_path}/x/../a/inner"},
        disk("d", tmp_path / "d"),
    )
    found = [found for found in findings(tierkv, tmp_path, *tiers) if found["subject"] == "place"]
    assert [(one["tier"], one["ok"]) for one in found] == [("b", False), ("c", False), ("c", False)]
    assert f"is the place of tier 'a', {tmp_path / 'a'}" in found[0]["detail"]
    assert "overlaps with" in found[1]["detail"]


def test_capacities_are_added_up_by_file_system(tierkv: Run, tmp_path: Path) -> None:
    """Each tier fits alone, and both together do not: the second one would fill up below its capacity."""
    free = shutil.disk_usage(tmp_path).free
    most = str(int(free * 0.7))
    tiers = [disk("a", tmp_path / "a", f"{most}B"), disk("b", tmp_path / "b", f"{most}B")]
    (found,) = [found for found in findings(tierkv, tmp_path, *tiers) if found["subject"] == "space together"]
    assert not found["ok"]
    assert found["detail"].startswith("a, b on one file system: ")
    assert "GiB" in found["fix"] or "MiB" in found["fix"]
    assert [found["subject"] for found in findings(tierkv, tmp_path, tiers[0])] == ["memory"]


def test_what_tiers_hold_counts_as_room(tmp_path: Path) -> None:
    """A tier that is full already needs no further space."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "file").write_bytes(bytes(100_000))
    assert held_bytes(tmp_path) >= 100_000
    assert held_bytes(tmp_path / "absent") == 0


TOML = '[host]\ncapacity = "8MiB"\n'
YAML = "host:\n  capacity: 8MiB\n"


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("stack.toml", YAML, "its content is YAML: rename it to stack.yaml"),
        ("stack.yaml", TOML, "its content is TOML: rename it to stack.toml"),
        ("stack.json", TOML, "its content is TOML: rename it to stack.toml"),
        ("stack.yml", 'host.capacity = "8MiB"\n', "its content is TOML: rename it to stack.toml"),
    ],
)
def test_a_file_in_another_format_is_recognised(tierkv: Run, tmp_path: Path, name: str, text: str, hint: str) -> None:
    """A page of YAML saved as .toml gave an error about a missing equals sign."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    said = tierkv("check", tmp_path / name)
    assert said.exit_code == 2
    assert hint in said.stderr
    (tmp_path / name).write_text("{ neither [ of = them", encoding="utf-8")
    assert "its content is" not in tierkv("check", tmp_path / name).stderr


def test_a_warning_is_no_failure(tierkv: Run, tmp_path: Path, break_plugin: Callable[[str], None]) -> None:
    """The third level: shown as ``warn`` with what to do, and exit code 0."""
    break_plugin(
        """
@hookimpl(specname="tierkv_backends")
def more_backends():
    def grows(options, capacity):
        yield CheckResult("lifecycle", True, "it grows", "set a rule", warns=True)
    return [BackendPlugin("growing", "grows", Options, Capabilities(durable=True), opened, grows)]
"""
    )
    file = tmp_path / "growing.json"
    tier = {"backend": "growing", "path": str(tmp_path), "capacity": "1GiB"}
    file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "tiers": [tier]}), encoding="utf-8")
    said = tierkv("check", file)
    assert said.exit_code == 0, said.output
    assert "warn" in said.stdout
    assert "set a rule" in said.stdout


@pytest.mark.parametrize(
    ("private", "shared", "warns", "fix"),
    [
        ("always [madvise] never", "always [advise] never", False, ""),
        ("always madvise [never]", "always [advise] never", True, "echo madvise > "),
        ("[always] madvise never", "always advise [never] deny", False, "echo advise > "),
        (None, None, False, ""),
    ],
)
def test_the_kernels_settings_for_huge_pages_are_named(
    private: str | None, shared: str | None, warns: bool, fix: str, tmp_path: Path
) -> None:
    """Copies and direct reads are 10 to 30 % slower in small pages, and shared memory has them by default."""
    for name, text in (("enabled", private), ("shmem_enabled", shared)):
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
    found = check_huge_pages(tmp_path)
    assert (found.ok, found.warns) == (True, warns)
    assert bool(found.fix) == bool(fix)
    assert fix in found.fix
    assert ("unknown" in found.detail) == (private is None)
