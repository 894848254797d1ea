"""Tokens kept in a file: after a restart, the events of a stack describe what its disk still holds."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stack_bed import ANSWER, ENGINE, opened, prompts_of, stack_config

from tierkv.errors import ConfigError
from tierkv.scheduler.events import announcements
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.types.block_events import BlockEvent, BlockStored
from tierkv.types.engine import StepOutput

pytest.importorskip("torch")

PROMPTS = prompts_of(7, 3)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No subscriber has to connect here."""
    monkeypatch.setattr(announcements, "CONNECT_WAIT_S", 0.0)


def kept(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Host and disk, with tokens kept beside the disk."""
    config = stack_config(
        tmp_path, events={"self_describing": True, "tokens_path": str(tmp_path / "tokens.db")}, **changes
    )
    return {**config, "tiers": config["tiers"][:1]}


def served(stack: Stack, prompts: list[list[int]]) -> list[BlockEvent]:
    """Events of serving prompts, all chunks written."""
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - torch

    stack.events.take = list  # type: ignore[method-assign]  # the reference engine takes them raw
    engine = Engine(ENGINE, connector=stack)
    received: list[BlockEvent] = []
    for prompt in prompts:
        engine.add_request(prompt, ANSWER)
    while engine.has_work:
        engine.step()
        received += stack.events.take_block_events()
    stack.flush()
    return received + stack.events.take_block_events()


def announced(stack: Stack) -> list[BlockEvent]:
    """Events of the steps that an idle engine makes for a stack that has just opened."""
    received: list[BlockEvent] = []
    while stack.has_pending_work():
        stack.build_connector_meta(StepOutput())
        received += stack.events.take_block_events()
    return received


def on_disk(events: list[BlockEvent]) -> dict[bytes, BlockStored]:
    """Chunks that events left on the disk, by their own hash."""
    held: dict[bytes, BlockStored] = {}
    for event in events:
        if event.tier == "disk":
            if isinstance(event, BlockStored):
                held[event.block_hashes[-1]] = event
            else:
                for block_hash in getattr(event, "block_hashes", tuple(held)):
                    held.pop(block_hash, None)
    return held


def restarted(config: Mapping[str, Any]) -> list[BlockEvent]:
    """Events of a new stack over the same files, before any request."""
    with opened(config) as stack:
        return announced(stack)


def rows_in(path: Path) -> int:
    """Number of rows of a closed file."""
    database = sqlite3.connect(path)
    (count,) = database.execute("SELECT count(*) FROM chunks").fetchone()
    database.close()
    return int(count)


def test_a_restarted_stack_announces_what_its_disk_holds(tmp_path: Path) -> None:
    """The same events as before the restart: hashes, parents, tokens, sizes. Nothing had to be asked for."""
    with opened(kept(tmp_path)) as stack:
        before = on_disk(served(stack, PROMPTS))
    after = restarted(kept(tmp_path))
    assert on_disk(after) == before
    assert len(before) == len(after) == rows_in(tmp_path / "tokens.db")
    tokens = {event.token_ids for event in before.values()}
    assert {tuple(prompt[i : i + 16]) for prompt in PROMPTS for i in range(0, 112, 16)} <= tokens


def test_a_parent_is_announced_before_its_children(tmp_path: Path) -> None:
    """A router finds the place of a chunk in a prompt by the hash before it."""
    with opened(kept(tmp_path)) as stack:
        served(stack, PROMPTS)
    known: set[bytes | None] = {None}
    for event in restarted(kept(tmp_path)):
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash in known
        known.update(event.block_hashes)


def test_a_chunk_of_an_earlier_process_is_described_in_the_host_tier_too(tmp_path: Path) -> None:
    """It is promoted by a request whose tokens this process has seen, but whose store it has not."""
    with opened(kept(tmp_path)) as stack:
        served(stack, PROMPTS)
    with opened(kept(tmp_path)) as stack:
        events = served(stack, PROMPTS)
        assert not stack.metrics.counters.events_undescribed
        assert stack.metrics.counters.promotions["disk"]
    promoted = [event for event in events if isinstance(event, BlockStored) and event.tier == "host"]
    assert promoted
    assert all(event.token_ids for event in promoted)


def test_the_removal_of_an_announced_chunk_names_all_its_hashes(tmp_path: Path) -> None:
    """A consumer's set of blocks is empty after a reset, though another process stored the chunks."""
    with opened(kept(tmp_path)) as stack:
        served(stack, PROMPTS)
    with opened(kept(tmp_path)) as stack:
        events = announced(stack)
        assert on_disk(events)
        stack.reset_cache("all")
        stack.build_connector_meta(StepOutput())
        events += stack.events.take_block_events()
        assert not on_disk(events)
        stack.flush()
    assert restarted(kept(tmp_path)) == []
    assert rows_in(tmp_path / "tokens.db") == 0


def test_evicted_chunks_leave_no_rows(tmp_path: Path) -> None:
    """The file is as bounded as the disk: a small disk evicts, and only what is left is announced."""
    config = kept(tmp_path)
    config["tiers"][0]["capacity"] = 16 * 12 * 1024
    with opened(config) as stack:
        before = on_disk(served(stack, prompts_of(8, 12)))
        assert stack.metrics.counters.evictions["disk"]
    assert on_disk(restarted(config)) == before
    assert rows_in(tmp_path / "tokens.db") == len(before)


def test_a_bound_on_payloads_bounds_the_file(tmp_path: Path) -> None:
    """``payloads_max`` is the limit of the file, too; what exceeds it is a placeholder, and counted."""
    config = kept(tmp_path)
    config["events"]["payloads_max"] = 5
    with opened(config) as stack:
        for prompt in PROMPTS:  # one after the other: the disk has the first chunks before the limit is reached
            served(stack, [prompt])
        assert stack.metrics.counters.payloads_forgotten
    assert 0 < rows_in(tmp_path / "tokens.db") <= 5
    assert 0 < len(restarted(config)) <= 5


def test_a_killed_process_keeps_the_tokens_of_what_it_wrote(tmp_path: Path) -> None:
    """Kill -9 after the disk has acknowledged: chunks and their tokens are there in the next process."""
    code = (
        "import os, sys, time; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "import test_kept_tokens as bed; from stack_bed import ENGINE; from tierkv.stack.opening import open_stack\n"
        "stack = open_stack(bed.kept(Path(sys.argv[1])), ENGINE.engine_spec())\n"
        "events = bed.served(stack, bed.PROMPTS); time.sleep(0.5); print(len(bed.on_disk(events)), flush=True)\n"
        "sys.stdin.read()"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    command = [sys.executable, "-I", "-c", code, str(tmp_path), *folders]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        count = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    assert count
    assert len(on_disk(restarted(kept(tmp_path)))) == count


def test_a_lost_disk_is_not_announced(tmp_path: Path) -> None:
    """The file alone attracts no request: rows count for chunks that a tier lists."""
    with opened(kept(tmp_path)) as stack:
        served(stack, PROMPTS)
    config = kept(tmp_path)
    config["tiers"][0]["path"] = str(tmp_path / "another disk")
    assert restarted(config) == []
    assert rows_in(tmp_path / "tokens.db") == 0


def test_another_model_finds_no_tokens(tmp_path: Path) -> None:
    """Another namespace at the same path; the rows of the first one are kept."""
    with opened(kept(tmp_path)) as stack:
        before = on_disk(served(stack, PROMPTS))
    other = kept(tmp_path, namespace={"epoch": "2"})
    other["tiers"][0]["path"] = str(tmp_path / "other disk")
    assert restarted(other) == []
    assert on_disk(restarted(kept(tmp_path))) == before


def test_damaged_rows_are_placeholders_and_the_stack_serves(tmp_path: Path) -> None:
    """Half of the rows are rotten: these chunks are not announced, and no event has wrong tokens."""
    with opened(kept(tmp_path)) as stack:
        before = on_disk(served(stack, PROMPTS))
    database = sqlite3.connect(tmp_path / "tokens.db")
    rows = database.execute("SELECT number, snapshot FROM chunks").fetchall()
    for number, row in rows[::2]:
        damaged = row[:-1] + bytes([row[-1] ^ 1])
        database.execute("UPDATE chunks SET snapshot = ? WHERE number = ?", (damaged, number))
    database.commit()
    database.close()
    after = on_disk(restarted(kept(tmp_path)))
    assert 0 < len(after) < len(before)
    assert after.items() <= before.items()


def test_replicas_have_files_of_their_own(tmp_path: Path) -> None:
    """Data parallel engines open one description; two writers of one file would be refused."""
    with opened(kept(tmp_path)), open_stack(kept(tmp_path), replace(ENGINE.engine_spec(), replica=1)):
        assert {path.name for path in tmp_path.glob("*.db")} == {"tokens.db", "tokens.replica-1.db"}


def test_a_file_in_use_refuses_the_second_stack_by_name(tmp_path: Path) -> None:
    """The error names the key and the fix, and no tier stays open behind it."""
    with opened(kept(tmp_path)):
        config = kept(tmp_path)
        config["tiers"][0]["path"] = str(tmp_path / "second")
        with pytest.raises(ConfigError, match=r"events\.tokens_path = .* one for each process"), opened(config):
            pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"events": {"tokens_path": "tokens.db"}}, "needs events.self_describing = true"),
        ({"codec": {"name": "aes-256-gcm", "key_file": "key"}}, "in the clear what codec 'aes-256-gcm' of tier 'disk'"),
    ],
)
def test_settings_that_contradict_it_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Without tokens in events there is nothing to keep; and tokens are the prompt that encryption conceals."""
    config = kept(tmp_path)
    if "codec" in change:
        pytest.importorskip("cryptography")
        (tmp_path / "key").write_bytes(bytes(range(32)))
        config["tiers"][0]["codec"] = {**change["codec"], "key_file": str(tmp_path / "key")}
    else:
        config.update(change)
    with pytest.raises(ConfigError, match=message), opened(config):
        pass
