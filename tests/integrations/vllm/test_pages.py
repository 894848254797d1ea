"""Commands of the how-to pages about vLLM, run with a small model, small sizes and directories of the test."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fsspec_support import S3Server
from vllm_process import ENVIRONMENT, LoggedProcess
from vllm_setups import ARGUMENTS

pytestmark = pytest.mark.long

PAGES = Path(__file__).resolve().parents[3] / "docs/how-to"
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 120.0
SMALL = ("dtype", "block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "max_model_len")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SERVER = "vllm.entrypoints.openai.api_server"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return [code for found, code in FENCE.findall(text) if found == language]


def server_commands(page: str) -> list[str]:
    """The commands that start a server, as one line each."""
    commands = [block.replace("\\\n", " ") for block in blocks(page, "console") if SERVER in block]
    assert commands, f"{page} starts no server"
    return [command[command.index("$ python") + 2 :].replace("\n", " ") for command in commands]


def small_stack(page: str, folder: Path, **replaced: str) -> None:
    """The page's stack, with mebibytes in place of gibibytes, in the test's folder."""
    (stack,) = [block for block in blocks(page, "toml") if block.startswith("# stack.toml")]
    stack = stack.replace("GiB", "MiB").replace("/var/cache/tierkv", str(folder / "cache"))
    for old, new in replaced.items():
        assert old in stack
        stack = stack.replace(old, new)
    (folder / "stack.toml").write_text(stack, encoding="utf-8")


def typed(command: str, folder: Path) -> str:
    """Run a command as a reader would, in the folder; it must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PATH": path},
        capture_output=True,
        text=True,
        timeout=END_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def command_of(page: str, start: str) -> str:
    """The page's only command that begins so."""
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    (command,) = [line for line in lines if line.startswith(start)]
    return command


@contextmanager
def served(command: str, model: Path, folder: Path) -> Iterator[str]:
    """Run a page's command in the folder; the URL of the server. Ends it as an operator does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    small = [word for name in SMALL for word in (f"--{name.replace('_', '-')}", str(ARGUMENTS[name]))]
    more = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *small]
    line = f"cd {folder} && exec {command.replace('python', sys.executable, 1)} {' '.join(more)}"
    environment = {"MODEL": str(model), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = LoggedProcess(["bash", "-c", line], folder / "log", environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, url)
        yield url
        process.process.send_signal(signal.SIGTERM)
        process.process.wait(END_TIMEOUT_S)
    except BaseException as error:
        raise process.failure(f"{error}") from error
    finally:
        process.kill()


def wait_until_healthy(process: LoggedProcess, url: str) -> None:
    """Return when the server answers.

    Raises:
        TimeoutError: it does not.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.is_alive() and time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=10).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError("the server did not come up")


def found_tokens(page: str, url: str, folder: Path) -> list[int]:
    """Run the page's program against the server; the numbers of tokens that it prints as found."""
    (program,) = [block for block in blocks(page, "python") if "openai" in block]
    script = folder / "page.py"
    script.write_text(program.replace("http://127.0.0.1:8000", url), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=END_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(found) for found in re.findall(r"^(\d+|None) of", done.stdout.replace("None of", "0 of"), re.MULTILINE)]


@pytest.mark.parametrize("number", [0, 1], ids=["connector", "spec"])
def test_the_commands_of_the_page_serve_and_survive_a_restart(number: int, models: Path, tmp_path: Path) -> None:
    """Run the page's command, ask its question, and find the prompt after a restart."""
    page = "serve-with-vllm.md"
    small_stack(page, tmp_path)
    command = server_commands(page)[number]
    with served(command, models / "llama", tmp_path) as url:
        first = found_tokens(page, url, tmp_path)
        assert first[0] == 0
        curl = command_of(page, "curl").replace("http://127.0.0.1:8000", url)
        assert "tierkv_chunks_stored_total" in typed(curl, tmp_path)
    with served(command, models / "llama", tmp_path) as url:
        again = found_tokens(page, url, tmp_path)
    assert again[0] >= 256


def test_the_shared_stack_of_the_page_is_usable(tmp_path: Path, s3: S3Server) -> None:
    """The first thing to do with the page's stack is to check it: every key is right, and the bucket takes chunks."""
    page = "share-a-bucket.md"
    stack = {"s3://kv-cache/gemma": f's3://{s3.new_bucket()}/gemma"\nendpoint_url = "{s3.endpoint}'}
    small_stack(page, tmp_path, **stack)
    assert "bucket" in typed(command_of(page, "tierkv check"), tmp_path)
