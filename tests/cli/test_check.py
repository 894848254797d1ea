"""`tierkv check`: every finding of every tier, whatever the plugins do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
Stack = Callable[..., Path]


WHOLE = {"memory", "huge pages", "space together"}
"""Subjects of findings that no backend gives."""


def by_tier(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Findings of the backends' own checks."""
    return [found for found in report["findings"] if found["subject"] not in WHOLE]


def test_a_good_stack_is_exit_code_0(tierkv: Run, stack: Stack, tmp_path: Path) -> None:
    """A deployment script asks exactly this question."""
    said = tierkv("check", stack("folder"))
    assert said.exit_code == 0, said.output
    assert "8MiB, policy lru" in said.stdout
    assert "fail" not in said.stdout
    assert f"[{tmp_path}"[:20] in said.stdout, "brackets in a detail are text, not markup"
    (found,) = by_tier(json.loads(tierkv("check", stack("folder"), "--json").stdout))
    assert found["detail"] == f"[{tmp_path}], 1073741824", "capacity is passed on"


def test_a_bad_place_is_exit_code_1_and_a_fix(tierkv: Run, stack: Stack, tmp_path: Path) -> None:
    """The file is right and the machine is not: another exit code, and what to do."""
    said = tierkv("check", stack("folder", path=tmp_path / "absent"))
    assert said.exit_code == 1
    assert "fail" in said.stdout
    assert "mkdir it" in said.stdout


def test_json_holds_every_finding(tierkv: Run, stack: Stack) -> None:
    """Programs read this; its keys are an interface."""
    path = stack("folder", "blind", "burning")
    said = tierkv("check", path, "--json")
    assert said.exit_code == 1
    report = json.loads(said.stdout)
    assert (report["stack"], report["ok"]) == (str(path), False)
    assert [(found["tier"], found["subject"], found["ok"]) for found in report["findings"]] == [
        ("host", "memory", True),
        ("host", "huge pages", True),
        ("burning", "space together", True),
        ("folder", "path", True),
        ("blind", "probe", True),
        ("burning", "probe", False),
    ]
    assert set(report["findings"][0]) == {"tier", "subject", "ok", "detail", "fix", "warns"}


@pytest.mark.parametrize(
    ("backend", "detail"),
    [("burning", "OSError: the disk is on fire"), ("mumbling", "gave 'all fine', no CheckResult")],
)
def test_a_probe_that_misbehaves_is_a_finding(tierkv: Run, stack: Stack, backend: str, detail: str) -> None:
    """A plugin's crash must not hide what the other tiers have to say."""
    report = json.loads(tierkv("check", stack(backend, "folder"), "--json").stdout)
    bad, good = by_tier(report)
    assert (bad["tier"], bad["ok"], bad["detail"]) == (backend, False, detail)
    assert bad["fix"] == "report it to the authors of the plugin"
    assert good["ok"]


def test_a_probe_that_hangs_is_given_up(tierkv: Run, stack: Stack) -> None:
    """A dead network mount blocks for ever; the program must end, and tell of the tiers that did answer."""
    report = json.loads(tierkv("check", stack("folder", "hung"), "--json", "--deadline-s", "2").stdout)
    good, bad = by_tier(report)
    assert good["ok"]
    assert (bad["tier"], bad["ok"], bad["detail"]) == ("hung", False, "none within 2 s")
    assert "--deadline-s" in bad["fix"]


def test_mistakes_of_file_plugins_and_machine_are_listed_in_one_pass(tierkv: Run, stack: Stack, tmp_path: Path) -> None:
    """A list that grows with each run of the check costs a deployment an evening; each mistake is listed once."""
    path = stack("folder", "foldr", "burning", "folder", "folder", "blind")
    config = json.loads(path.read_text())
    config["host"]["capacity"] = "1GiBit"  # a wrong unit
    config["lookup"] = {"deadlin_s": 1}
    config["chunk"] = {"blocks": 1, "tokens": 16}
    config["tiers"][0] |= {"path": str(tmp_path / "absent"), "retries": "2", "limit_bytes": "x"}
    config["tiers"][2]["capacity"] = 1.5
    config["tiers"][3] |= {"name": "c", "path": config["tiers"][2]["path"]}
    config["tiers"][4] |= {"name": "c", "codec": "zstdd"}
    del config["tiers"][5]["path"]
    path.write_text(json.dumps(config))
    said = tierkv("check", path, "--json")
    assert said.exit_code == 2
    report = json.loads(said.stdout)
    wrong = [(found["tier"], found["subject"]) for found in report["findings"] if not found["ok"]]
    assert sorted(wrong) == sorted(
        [
            ("", "chunk"),
            ("", "host.capacity"),
            ("", "tiers[0].retries"),
            ("", "tiers[2].capacity"),
            ("", "lookup.deadlin_s"),
            ("", "tiers[4].name"),
            ("", "tiers[0].limit_bytes"),
            ("", "tiers[1].backend"),
            ("", "tiers[4].codec"),
            ("", "tiers[5].path"),
            ("c", "place"),
            ("folder", "path"),
            ("burning", "probe"),
        ]
    ), said.stdout
    assert not report["ok"]
    lines = said.stderr.splitlines()
    assert [line for line in lines if f"{path}: " in line] == lines
    assert len(lines) == 10
    assert f"{path}: tiers[1].backend = \"foldr\": unknown backend 'foldr'; did you mean 'folder'?" in said.stderr
    plain = tierkv("check", path)
    assert (plain.exit_code, plain.stderr) == (2, said.stderr)
    assert "mkdir it" in plain.stdout
    assert "the disk is on fire" in plain.stdout


def test_a_host_tier_with_an_unknown_policy_is_not_called_ok(tierkv: Run, stack: Stack) -> None:
    """The table said that the configuration is fine, and the line below that its policy does not exist."""
    path = stack("folder")
    config = json.loads(path.read_text())
    config["host"]["policy"] = "lur"
    path.write_text(json.dumps(config))
    said = tierkv("check", path)
    assert said.exit_code == 2
    assert "unknown policy 'lur'; did you mean 'lru'?" in said.stderr
    assert "policy lur" not in said.stdout


def test_a_tier_whose_name_is_taken_is_named_by_its_place(tierkv: Run, stack: Stack) -> None:
    """The message speaks of `tiers[1]`, so the rows of that tier must be found beside it."""
    path = stack("folder", "folder")
    config = json.loads(path.read_text())
    config["tiers"][1]["name"] = config["tiers"][0]["name"] = "cache"
    path.write_text(json.dumps(config))
    said = tierkv("check", path, "--json")
    assert {found["tier"] for found in json.loads(said.stdout)["findings"]} >= {"cache", "tiers-1"}
    assert "tiers[1].name" in said.stderr


@pytest.mark.parametrize(
    ("wrong", "lines"),
    [
        ({}, ["host: missing, and required"]),
        ({"host": 3, "tiers": 4}, ["host = 3: must be a table", "tiers = 4: must be a list"]),
        ({"host": {}, "tiers": ["disk"]}, ["host.capacity: missing", 'tiers[0] = "disk": must be a table']),
        ({"host": {"capacity": "1GiB"}, "tiers": [{}]}, ["tiers[0].backend: missing"]),
        ({"host": {"capacity": "1GiB"}, "tiers": [{"backend": 7, "name": "Host"}]}, ["tiers[0].name", "tiers[0].back"]),
        (
            {"host": {"capacity": "1GiB"}, "tiers": [{"backend": "disk", "path": "/x", "tenant_quota": "1GiB"}]},
            ["tiers[0].tenant_quota", "tiers[0].capacity: missing"],
        ),
    ],
)
def test_what_comes_of_a_mistake_is_no_mistake(
    tierkv: Run, tmp_path: Path, wrong: dict[str, Any], lines: list[str]
) -> None:
    """A wrong value is taken out before further checks; that it is absent then is no second mistake."""
    file = tmp_path / "stack.json"
    file.write_text(json.dumps(wrong), encoding="utf-8")
    said = tierkv("check", file)
    assert said.exit_code == 2
    found = [line.partition("stack.json: ")[2] for line in said.stderr.splitlines()]
    assert len(found) == len(lines), found
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


@pytest.mark.parametrize(("key", "ok"), [("ab" * 31 + "cd", True), ("", False), (None, False)])
def test_a_key_that_is_missing_is_found(
    tierkv: Run, stack: Stack, monkeypatch: pytest.MonkeyPatch, key: str | None, *, ok: bool
) -> None:
    """A stack with aes-256-gcm does not start without it, so the check reports it. The key is not shown."""
    monkeypatch.delenv("TIERKV_TEST_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("TIERKV_TEST_KEY", key)
    path = stack("folder")
    config = json.loads(path.read_text())
    config["tiers"][0]["codec"] = {"name": "aes-256-gcm", "key_env": "TIERKV_TEST_KEY"}
    path.write_text(json.dumps(config))
    said = tierkv("check", path, "--json")
    report = json.loads(said.stdout)
    (found,) = [found for found in report["findings"] if found["subject"] == "encryption keys"]
    assert (found["ok"], said.exit_code) == (ok, int(not ok))
    assert ok or "environment variable TIERKV_TEST_KEY" in found["detail"]
    assert not key or key not in said.stdout


def test_a_file_of_a_key_that_others_may_read(tierkv: Run, stack: Stack, tmp_path: Path) -> None:
    """The fix spoke of the engine's environment, which has nothing to do with a file."""
    (tmp_path / "key").write_text("ab" * 31 + "cd", encoding="utf-8")
    (tmp_path / "key").chmod(0o644)
    path = stack("folder")
    config = json.loads(path.read_text())
    config["tiers"][0]["codec"] = {"name": "aes-256-gcm", "key_file": str(tmp_path / "key")}
    path.write_text(json.dumps(config))
    report = json.loads(tierkv("check", path, "--json").stdout)
    (found,) = [found for found in report["findings"] if found["subject"] == "encryption keys"]
    assert "run: chmod 600" in found["detail"]
    assert found["fix"] == "correct the file"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "3601"])
def test_a_deadline_has_bounds(tierkv: Run, stack: Stack, value: str) -> None:
    """A deadline that never comes is none."""
    said = tierkv("check", stack("folder"), "--deadline-s", value)
    assert said.exit_code == 2
    assert "--deadline-s" in said.stderr
    assert value != "soon" or "'soon' is no number; write it without a unit" in said.stderr
