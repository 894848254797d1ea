"""A mapping becomes a stack, or an error that lists all of its faults."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from tierkv.config import parse_config
from tierkv.errors import ConfigError

HOST = {"capacity": "1GiB"}
DISK = {"backend": "disk", "path": "/tmp/x", "capacity": "8GiB"}


def complaint(mapping: dict[str, Any]) -> list[str]:
    """Lines of the error for this mapping."""
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping, source="s.toml")
    return str(caught.value).splitlines()


def only_complaint(mapping: dict[str, Any]) -> str:
    """The one line of the error for this mapping."""
    (line,) = complaint(mapping)
    return line


def tier(**keys: object) -> dict[str, Any]:
    """Stack with one tier that has these keys beside the usual ones."""
    return {"host": HOST, "tiers": [{**DISK, **keys}]}


def test_the_smallest_stack_has_the_documented_defaults() -> None:
    """Omitted keys must have the values on the reference page."""
    stack = parse_config({"host": HOST})
    assert stack.host.capacity == 2**30
    assert stack.chunk.blocks == 1
    assert stack.chunk.tokens is None
    assert stack.namespace.model is None
    assert stack.namespace.epoch == "0"
    assert stack.tiers == ()
    assert stack.lookup.deadline_s == 5.0
    assert not stack.store.prompt_only


def test_a_tier_sets_its_options_apart_and_is_named_after_its_backend() -> None:
    """Options belong to the plugin; the framework must not know them, and must not lose them."""
    (disk,) = parse_config(tier(direct=True)).tiers
    assert disk.name == "disk"
    assert disk.capacity == 8 * 2**30
    assert disk.queue_bytes_max == 256 * 2**20
    assert disk.options == {"path": "/tmp/x", "direct": True}


def test_a_stack_is_a_value() -> None:
    """No code may change an option of a running stack."""
    stack = parse_config({"host": HOST})
    with pytest.raises(ValidationError, match="frozen"):
        stack.host.capacity = 1  # type: ignore[misc]  # the point of the test


def test_tokens_instead_of_blocks() -> None:
    """With `tokens` given, the default for `blocks` must not contradict it."""
    chunk = parse_config({"host": HOST, "chunk": {"tokens": 256}}).chunk
    assert (chunk.blocks, chunk.tokens) == (None, 256)


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({}, r"s\.toml: host: missing, and required; write a table; in TOML `\[host\]`"),
        ({"host": {}}, r"host\.capacity: missing, and required; write .*\"8GiB\""),
        (
            {"host": HOST, "tier": []},
            r"tier = \[\]: unknown key; did you mean 'tiers'\?; allowed here: chunk, .*host, .*version",
        ),
        ({"host": {**HOST, "polcy": "lru"}}, r"host\.polcy = \"lru\": unknown key; did you mean 'policy'\?; allowed"),
        ({"host": {**HOST, "zzz": 1}}, r"host\.zzz = 1: unknown key; allowed here: capacity, "),
        ({"host": {**HOST, "tiers": []}}, r"host\.tiers = \[\]: unknown key; it belongs at the top of the file"),
        ({"host": HOST, "tokens": 256}, r"tokens = 256: unknown key; it belongs in the table \[chunk\]; allowed here"),
        ({"host": HOST, "backend": "disk"}, r"backend = .*: unknown key; it belongs in a table \[\[tiers\]\]; allowed"),
        ({"host": HOST, "version": 2}, r"version = 2: must be 1"),
        ({"host": []}, r"host = \[\]: must be a table; in TOML `\[host\]`"),
        (
            {"host": HOST, "tiers": {"disk": DISK}},
            r"tiers = .*: must be a list of tables; in TOML write each as `\[\[tiers\]\]`",
        ),
        ({"host": HOST, "tiers": [5]}, r"tiers\[0\] = 5: must be a table; in TOML `\[\[tiers\]\]`"),
        (
            {"host": HOST, "tiers": [{"capacity": 1}]},
            r"tiers\[0\]\.backend: missing, and required; write text in quotes",
        ),
        ({"host": {"capacity": "0GiB"}}, r"host\.capacity = \"0GiB\": must be at least 1 byte; write .*units: B, KB"),
        ({"host": {"capacity": -1}}, r"host\.capacity = -1: must be at least 1 byte"),
        ({"host": {"capacity": "8Gib"}}, r"host\.capacity = \"8Gib\": unknown unit 'Gib'; did you mean GiB\?"),
        ({"host": {**HOST, "verify": "yes"}}, r"host\.verify = \"yes\": must be true or false"),
        ({"host": {**HOST, "copy_threads": True}}, r"host\.copy_threads = true: must be a whole number from 1 to 256"),
        ({"host": {**HOST, "copy_threads": "2"}}, r"host\.copy_threads = \"2\": must be a whole number from 1 to 256"),
        ({"host": {**HOST, "reserved_share": 0}}, r"host\.reserved_share = 0: must be a number, above 0 and at most 1"),
        (
            {"host": {**HOST, "reserved_share": 1.5}},
            r"host\.reserved_share = 1\.5: must be a number, above 0 and at most 1",
        ),
        ({"host": {**HOST, "policy": ""}}, r"host\.policy = \"\": must be text in quotes, not empty"),
        (
            {"host": HOST, "chunk": {"blocks": 1, "tokens": 16}},
            r"chunk = .*: `blocks` and `tokens` exclude each other; keep one",
        ),
        ({"host": HOST, "chunk": {"blocks": 0}}, r"chunk\.blocks = 0: must be a whole number, at least 1"),
        ({"host": HOST, "namespace": {"epoch": 3}}, r"namespace\.epoch = 3: must be text in quotes"),
        (
            {"host": HOST, "lookup": {"deadline_s": "5s"}},
            r"lookup\.deadline_s = \"5s\": must be a number of seconds, above 0",
        ),
        ({"host": HOST, "lookup": {"deadline_s": 0}}, r"lookup\.deadline_s = 0: must be a number of seconds, above 0"),
        (
            {"host": HOST, "lookup": {"deadline_s": math.inf}},
            r"lookup\.deadline_s = Infinity: must be a number of seconds",
        ),
        ({"host": HOST, "lookup": {"deadline_s": math.nan}}, r"lookup\.deadline_s = NaN: must be a number of seconds"),
        ({"host": HOST, "store": {"chunks_per_step_max": 0}}, r"store\.chunks_per_step_max = 0: must be .*at least 1"),
        (
            tier(write="thru"),
            r"tiers\[0\]\.write = \"thru\": must be \"through\" or .* or \"read_only\"; did you mean 'through'\?",
        ),
        (tier(name="Disk 1"), r"tiers\[0\]\.name = \"Disk 1\": must be at most 32 lower-case letters, digits, - and _"),
        (tier(name="host"), r"tiers\[0\]\.name = \"host\": 'host' is the name of the host tier; choose another"),
        (tier(retries=-1), r"tiers\[0\]\.retries = -1: must be a whole number from 0 to 100"),
        (tier(io_threads=0), r"tiers\[0\]\.io_threads = 0: must be a whole number from 1 to 256"),
        (tier(probe_deadline_s=-2), r"tiers\[0\]\.probe_deadline_s = -2: must be a number of seconds, above 0"),
        (
            {"host": HOST, "tiers": [DISK, {**DISK, "path": "/b"}]},
            r"tiers\[1\]\.name = \"disk\": tiers\[0\] has this name too; give each",
        ),
        (
            {"host": HOST, "record": {"bytes_max": "1KiB"}},
            r"record\.bytes_max = \"1KiB\": must be a size of at least 64KiB: a whole number of bytes",
        ),
        (
            {"host": HOST, "record": {"spans": "otlp"}},
            r"record\.spans = \"otlp\": give \"program\", or the URL of a collector",
        ),
        ({"host": HOST, 7: 8}, r"s\.toml: keys must be text, and 7 is not"),
    ],
)
def test_each_kind_of_bad_value_is_told(mapping: dict[str, Any], says: str) -> None:
    """An error must name file, key path, value, what is allowed, and the nearest valid name."""
    line = only_complaint(mapping)
    assert line.startswith("s.toml: ")
    assert re.search(says, line), line


def test_every_problem_is_told_at_once() -> None:
    """A user must not mend a file one error at a time."""
    lines = complaint(
        {
            "hots": {},
            "host": {"capacity": "1 banana", "verify": 1},
            "tiers": [DISK, {"backend": "fsspec", "retries": 1000}],
        }
    )
    paths = sorted(line.split(" ")[1] for line in lines)
    assert paths == ["host.capacity", "host.verify", "hots", "tiers[1].retries"]


def test_secrets_are_not_repeated() -> None:
    """Errors go to logs; a key of a bucket must not follow them there."""
    line = only_complaint({"host": {**HOST, "secret_access_key": "hunter2"}})
    assert "hunter2" not in line
    assert "host.secret_access_key = (hidden): unknown key" in line


def test_a_long_value_is_cut() -> None:
    """A pasted file in the wrong place must not fill the screen."""
    line = only_complaint({"host": {**HOST, "verify": "x" * 10_000}})
    assert len(line) < 300


def test_a_misshapen_backend_name_is_left_for_the_plugins_to_judge() -> None:
    """`Disk` must be answered with the backends there are, not with the rules for tier names."""
    (found,) = parse_config({"host": HOST, "tiers": [{"backend": "Disk!"}]}).tiers
    assert (found.backend, found.name) == ("Disk!", "disk-")
