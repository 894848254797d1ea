"""No code in the documentation is untested.

What happens to a fenced block of README.md, CONTRIBUTING.md and docs/:

python   all blocks of a page run in order, as one program, in a fresh folder and a fresh process
toml     parsed; one that describes a stack is also validated like a user's file
console  each `$ command` is parsed by the shell, and by tierkv's own command line if it is one of ours; behind a line
         `<!-- runs -->` the commands of a block are also run, after the page's python, in the page's folder
json, yaml   parsed
text     left alone, and directives of the site too; any other language is refused

A toml, json or yaml block whose first line is a comment with a file name (`# stack.toml`) is also written to the
page's folder under that name, so that the program finds it. A block that cannot be tested is preceded by a line
`<!-- no-test: the reason -->`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml
from markdown_it import MarkdownIt
from session_names import nox_sessions

from tierkv.cli.main import cli
from tierkv.config import load_config, resolve
from tierkv.plugins.loading import load_plugins

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNTESTED = ("text",)
WAIVER = re.compile(r"<!--\s*no-test:\s*(\S.*?)\s*-->\s*$")
RUNS = re.compile(r"<!--\s*runs\s*-->\s*$")
FILE_NAME = re.compile(r"(?:#|//)\s*([\w-]+\.(?:toml|json|ya?ml))\s*\n")
RUN_TIMEOUT_S = 240


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; ``line`` is that of its first line of code, counted from 1."""

    page: Path
    line: int
    language: str
    code: str
    waived: bool
    runs: bool

    @property
    def place(self) -> str:
        """Page and line, for names of tests and messages."""
        name = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "fence" and token.map:
            remark = before.content if before is not None and before.type == "html_block" else ""
            waived, runs = bool(WAIVER.search(remark)), bool(RUNS.search(remark))
            language = token.info.split(" ")[0]
            found.append(Block(page, token.map[0] + 2, language, token.content, waived, runs))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks_in(*languages: str) -> list[object]:
    """Parameters: the blocks in these languages without a waiver."""
    chosen = [block for block in BLOCKS if block.language in languages and not block.waived]
    return [pytest.param(block, id=block.place) for block in chosen]


def program_of(blocks: list[Block]) -> str:
    """The page's python as one program in which every line keeps its number, so that a traceback points at the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def run_page(blocks: list[Block], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's python, then the commands that it shows as run, in a folder that holds the page's named files."""
    for block in blocks:
        if name := FILE_NAME.match(block.code):
            (folder / name[1]).write_text(block.code, encoding="utf-8")
    program = folder / f"{blocks[0].page.stem}.py"
    program.write_text(program_of([block for block in blocks if block.language == "python"]), encoding="utf-8")
    python = shlex.join([sys.executable, "-I", "-W", "error::DeprecationWarning:__main__", program.name])
    commands = [command for block in blocks if block.runs for command in commands_of(block)]
    script = "\n".join(["set -e", python, *commands])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def commands_of(block: Block) -> list[str]:
    """The commands of a console block: lines that begin with `$ `, with their continuations; the rest is output."""
    joined = block.code.replace("\\\n", "")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def programs_with_python() -> list[object]:
    """Parameters: the pages that hold python, each with all its blocks."""
    by_page = {page: [block for block in BLOCKS if block.page == page and not block.waived] for page in PAGES}
    return [
        pytest.param(blocks, id=str(page.relative_to(ROOT)))
        for page, blocks in by_page.items()
        if any(block.language == "python" for block in blocks)
    ]


@pytest.mark.parametrize("blocks", programs_with_python())
def test_python_of_a_page_runs(blocks: list[Block], tmp_path: Path) -> None:
    """A reader who pastes a page's code from top to bottom must not meet an error."""
    for needed in ("torch", "transformers"):
        if any(needed in block.code for block in blocks if block.language == "python"):
            pytest.importorskip(needed)
    done = run_page(blocks, tmp_path)
    assert done.returncode == 0, f"{blocks[0].page}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("block", blocks_in("toml"))
def test_toml_parses_and_stacks_are_valid(block: Block, tmp_path: Path) -> None:
    """A stack that a reader copies must be accepted by the loader that will read it."""
    content = tomllib.loads(block.code)
    if {"tiers", "host"} & content.keys():
        for tier in content.get("tiers", ()):
            if (ROOT / f"plugins/tierkv-{tier['backend']}").is_dir():
                pytest.importorskip(f"tierkv_{tier['backend']}")
        path = tmp_path / "stack.toml"
        path.write_text(block.code, encoding="utf-8")
        resolve(load_config(path), load_plugins(), str(block.place))


@pytest.mark.parametrize("block", blocks_in("json", "yaml"))
def test_data_parses(block: Block) -> None:
    """A reader copies data as it is on the page."""
    if block.language == "json":
        json.loads(block.code)
    else:
        yaml.safe_load(block.code)


@pytest.mark.parametrize("block", blocks_in("console"))
def test_commands_are_real(block: Block) -> None:
    """A command that a reader types must exist, with the options that are shown."""
    commands = commands_of(block)
    assert commands, f"{block.place}: a console block shows commands as `$ command`"
    for command in commands:
        check_command(command)


def check_command(command: str) -> None:
    """Refuse what the shell, our command line or the noxfile does not know.

    Raises:
        AssertionError: says what is wrong with the command.
    """
    parsed = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert parsed.returncode == 0, f"{command!r}: {parsed.stderr}"
    for part in re.split(r"&&|\|\||[|;]", command):
        words = [word for word in shlex.split(part, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)] or [""]
        if "nox" in words and "-s" in words:
            sessions = itertools.takewhile(lambda word: not word.startswith("-"), words[words.index("-s") + 1 :])
            names = {re.sub(r"\(.*\)$|-3\.\d+$", "", session) for session in sessions}
            assert names <= nox_sessions(), f"{command!r}: no session {sorted(names - nox_sessions())}"
        if Path(words[0]).name == "tierkv":
            check_tierkv_command(words[1:])


def check_tierkv_command(words: list[str]) -> None:
    """Let the program's own parser read the words, without running anything.

    Raises:
        AssertionError: it does not know a command or an option.
    """
    name, command, context = "tierkv", cli, click.Context(cli, resilient_parsing=True, **cli.context_settings)
    while isinstance(command, click.Group):
        _, words, _ = command.make_parser(context).parse_args(args=list(words))
        if not words:
            return
        try:
            name, found = f"{name} {words[0]}", command.get_command(context, words[0])
        except click.ClickException as error:
            pytest.skip(f"{words[0]}: {error.message}")  # it exists; an extra that it needs is not installed here
        assert found, f"there is no command {name!r}"
        context = click.Context(found, parent=context, resilient_parsing=True, **found.context_settings)
        command, words = found, words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known.update(cli.context_settings["help_option_names"])
    strange = {word.partition("=")[0] for word in words if word.startswith("-")} - known
    assert not strange, f"{name} knows {sorted(known)}, not {strange}"


def is_directive(block: Block) -> bool:
    """Whether it is an instruction to the site, like a table of contents. One that shows code is none of these."""
    return block.language.startswith("{") and "code" not in block.language


def test_every_block_is_of_a_known_kind() -> None:
    """A block in a language that nothing here checks would be a hole in the promise of this module."""
    known = {"python", "toml", "console", "json", "yaml", *UNTESTED}
    strange = [block for block in BLOCKS if block.language not in known and not is_directive(block)]
    assert not strange, f"write one of {sorted(known)}: {[(block.place, block.language) for block in strange]}"


class TestTheChecks:
    """The checks themselves can fail."""

    @staticmethod
    def write(folder: Path, text: str) -> list[Block]:
        page = folder / "page.md"
        page.write_text(text, encoding="utf-8")
        return blocks_of(page)

    def test_a_broken_program_is_told_by_its_line_on_the_page(self, tmp_path: Path) -> None:
        """Otherwise a failure would send its reader to a line of some generated file."""
        blocks = self.write(tmp_path, "# Title\n\n```python\nx = 1\n```\n\nThen:\n\n```python\nassert x == 2\n```\n")
        done = run_page(blocks, tmp_path)
        assert done.returncode == 1
        assert "line 10" in done.stderr

    def test_named_files_lie_beside_the_program(self, tmp_path: Path) -> None:
        """A page shows a file, then the code that reads it."""
        code = "from pathlib import Path\nassert 'x = 1' in Path('stack.toml').read_text()\n"
        blocks = self.write(tmp_path, f"```toml\n# stack.toml\nx = 1\n```\n\n```python\n{code}```\n")
        done = run_page(blocks, tmp_path)
        assert done.returncode == 0, done.stderr

    def test_a_waiver_needs_a_reason(self, tmp_path: Path) -> None:
        """An excuse without words would soon stand everywhere."""
        fence = "```python\n1 / 0\n```\n"
        blocks = self.write(tmp_path, f"<!-- no-test: needs a GPU -->\n{fence}\n<!-- no-test: -->\n{fence}")
        assert [block.waived for block in blocks] == [True, False]

    def test_commands_that_are_said_to_run_do(self, tmp_path: Path) -> None:
        """A marked command is part of the page's program: it finds the files, and its failure is the page's."""
        code = "```python\nopen('a.txt', 'w').write('1')\n```\n\n"
        good = self.write(tmp_path, code + "<!-- runs -->\n```console\n$ test -f a.txt\nsome output\n```\n")
        assert run_page(good, tmp_path).returncode == 0
        bad = self.write(tmp_path, code + "<!-- runs -->\n```console\n$ test -f b.txt\n```\n")
        assert run_page(bad, tmp_path).returncode

    @pytest.mark.parametrize("command", ["nox -s nonsense", "echo 'open", "tierkv nonsense", "tierkv check --nonsense"])
    def test_a_wrong_command_is_refused(self, command: str) -> None:
        """A misspelled command is the commonest error of a page."""
        with pytest.raises(AssertionError):
            check_command(command)
