"""The program itself: fast help, lazy commands, clean errors."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import click
import pytest
from click.testing import CliRunner, Result

from tierkv import __version__
from tierkv.cli.main import COMMANDS, LazyCommand, LazyGroup
from tierkv.cli.main import cli as program

Run = Callable[..., Result]

HEAVY = {"torch", "numpy", "pydantic", "rich", "yaml", "tierkv.plugins.loading", "tierkv.config"}


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout


class TestSpeed:
    """`import tierkv` and `tierkv --help` are used in scripts, completions and every start of an engine."""

    def test_importing_tierkv_is_light(self) -> None:
        """An engine that has tierkv installed but not configured must not pay for it."""
        loaded = json.loads(python("import sys, json, tierkv; print(json.dumps(sorted(sys.modules)))"))
        assert not (HEAVY | {"click", "pluggy"}) & set(loaded)

    @pytest.mark.parametrize("words", [["--help"], ["--version"], ["-h"], ["--bad-option"]])
    def test_help_imports_no_command(self, words: list[str]) -> None:
        """One import at the top of a command's module would make every call slow."""
        code = f"""
import json, sys
sys.argv = ["tierkv", *{words!r}]
from tierkv.cli.main import main
try:
    main()
except SystemExit:
    print("LOADED" + json.dumps(sorted(sys.modules)))
"""
        loaded = json.loads(python(code).partition("LOADED")[2])
        assert "tierkv.cli.main" in loaded
        assert not HEAVY & set(loaded)
        assert not {lazy.target.partition(":")[0] for lazy in COMMANDS.values()} & set(loaded)

    def test_completion_imports_no_command(self) -> None:
        """A completing shell asks at every press of a key."""
        code = """
import json, sys
import tierkv.cli.main as program
try:
    program.main()
finally:
    print("LOADED" + json.dumps(sorted(sys.modules)))
"""
        code = code.replace("finally", "except SystemExit")
        said = python(code, _TIERKV_COMPLETE="bash_complete", COMP_WORDS="tierkv pl", COMP_CWORD="1")
        words, _, loaded = said.partition("LOADED")
        assert words.split() == ["plain,plan", "plain,plugins"]
        assert not HEAVY & set(json.loads(loaded))


class TestHelp:
    """Help of the program."""

    def test_help_lists_the_commands_with_examples(self, tierkv: Run) -> None:
        """Help is the first thing a newcomer reads."""
        said = tierkv("--help")
        assert said.exit_code == 0
        for name, lazy in COMMANDS.items():
            assert f"  {name} " in said.output
            assert lazy.summary in said.output
        assert "tierkv check stack.toml" in said.output

    @pytest.mark.parametrize("name", ["", *(name for name in COMMANDS if name != "demo")])
    def test_every_command_has_examples(self, tierkv: Run, name: str) -> None:
        """Users copy examples, so each is on its own line."""
        said = tierkv(name, "--help") if name else tierkv("--help")
        assert said.exit_code == 0
        examples = said.output.partition("\n  Examples:\n")[2].partition("\n\n")[0].splitlines()
        assert examples, f"the docstring of `tierkv {name}` lacks examples: \\b, `Examples:`, and a line for each"
        assert examples[0].startswith(f"    tierkv {name}"), f"the first example of `tierkv {name}`: {examples[0]}"
        continued = [line.startswith("      ") for line in examples]
        alone = [line for line, goes_on in zip(examples, continued, strict=True) if not goes_on]
        assert all(line.startswith(("    tierkv ", "    pip ", "    python ")) for line in alone)

    def test_version(self, tierkv: Run) -> None:
        """A report of a bug begins with it."""
        assert tierkv("--version").output == f"tierkv {__version__}\n"

    def test_the_installed_program_runs(self) -> None:
        """The entry point of the distribution must name a function that exists."""
        program_path = Path(sys.executable).with_name("tierkv")
        done = subprocess.run([str(program_path), "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"tierkv {__version__}\n"

    def test_the_module_runs(self) -> None:
        """A user with several environments names the one that is meant."""
        command = [sys.executable, "-m", "tierkv", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == f"tierkv {__version__}\n"


class TestErrors:
    """Bad input gets one message and an exit code, never a traceback."""

    def test_an_unknown_command_is_answered_with_the_nearest(self, tierkv: Run) -> None:
        """A typo must not send the user to the manual."""
        said = tierkv("chekc", "stack.toml")
        assert said.exit_code == 2
        assert "No such command 'chekc'. Did you mean 'check'?" in said.stderr

    def test_a_wrong_file_is_one_clean_message(self, tierkv: Run, tmp_path: Path) -> None:
        """Exit code 2 tells a script that the input is wrong, not the machine."""
        said = tierkv("check", tmp_path / "absent.toml")
        assert said.exit_code == 2
        assert said.stdout == ""
        assert said.stderr.startswith(f"Error: {tmp_path}/absent.toml: no such file")
        assert "Traceback" not in said.stderr

    def test_streams_that_are_closed(self, root: Path) -> None:
        """As under a cron job with `>&-`: the program ended with a traceback, and a file could get the number 1."""
        program_path = Path(sys.executable).with_name("tierkv")
        page = root / "docs" / "reference" / "cli.md"  # no record
        for words, code in ((["plugins"], 0), (["trace", str(page)], 2)):
            line = shlex.join([str(program_path), *words])
            done = subprocess.run(["/bin/sh", "-c", f"{line} <&- >&- 2>&-"], check=False)
            assert done.returncode == code, words

    @pytest.mark.parametrize(
        "words", [["plugins"], ["plugins", "--json"], ["check", "absent.toml", "--json"], ["--help"]]
    )
    def test_a_full_disk_behind_standard_output(self, words: list[str]) -> None:
        """A report cut by a full disk must not look whole: help ended with a traceback, the others named no stream."""
        program_path = Path(sys.executable).with_name("tierkv")
        with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123  a device
            done = subprocess.run([program_path, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        named = "absent.toml: no such file" if "check" in words else "standard output: No space left on device"
        assert (done.returncode, done.stderr.startswith(f"Error: {named}")) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(
        ("words", "code"), [(["plugins"], 0), (["ls", "absent"], 2), (["chekc"], 2), (["--debug", "ls", "absent"], 2)]
    )
    def test_a_full_disk_behind_standard_error(self, words: list[str], code: int) -> None:
        """A script reads the exit code: a message that could not be written changed it to 1."""
        program_path = Path(sys.executable).with_name("tierkv")
        with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123  a device
            done = subprocess.run([program_path, *words], stdout=subprocess.DEVNULL, stderr=full, check=False)
        assert done.returncode == code

    @pytest.mark.parametrize(
        "words",
        [
            ["explain", "absent", "--slowest"],
            ["explain", "absent", "--lines"],
            ["demo", "--conversations"],
            ["demo", "--tensor-parallel"],
            ["plan", "absent", "--engines"],
        ],
    )
    @pytest.mark.parametrize(
        ("value", "says"), [("few", "'few' is no whole number; write it in digits"), ("0", "0 is not in the range")]
    )
    def test_an_option_that_is_a_number(self, tierkv: Run, words: list[str], value: str, says: str) -> None:
        """`'few' is not a valid integer range` names neither what is wrong nor what is right."""
        said = tierkv(*words, value)
        assert (said.exit_code, f"Invalid value for '{words[-1]}': {says}" in said.stderr) == (2, True), said.stderr

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["check", "absent.toml"], "absent.toml: no such file"),
            (["ls"], "Missing argument 'PLACE'."),
            (["ls", "absent", "--chunks"], "absent: there is no such file"),
            (["top", "absent", "--jsn"], "No such option '--jsn'"),
            (["chekc"], "No such command 'chekc'. Did you mean 'check'?"),
        ],
    )
    def test_json_has_the_error(self, tierkv: Run, words: list[str], says: str) -> None:
        """A script that reads the object got nothing, and many a reader of JSON takes nothing for success."""
        said = tierkv(*words, "--json")
        assert said.exit_code == 2
        found = json.loads(said.stdout)
        assert (found["ok"], says in found["error"]) == (False, True), found
        assert said.stdout.count("\n") == 1, "where a command prints an object per line, this is one"
        assert says in said.stderr

    def test_json_has_one_object(self, tierkv: Run, tmp_path: Path) -> None:
        """The findings of a wrong file are the object: a second one behind it is no JSON."""
        (tmp_path / "stack.json").write_text('{"host": 3}')
        said = tierkv("check", tmp_path / "stack.json", "--json")
        assert (said.exit_code, json.loads(said.stdout)["ok"]) == (2, False)

    def test_debug_shows_the_traceback(self, tierkv: Run, tmp_path: Path) -> None:
        """For a report, the way to the error matters."""
        said = tierkv("--debug", "check", tmp_path / "absent.toml")
        assert said.exit_code == 2
        assert "Traceback (most recent call last)" in said.stderr
        assert said.stderr.splitlines()[-1].startswith("Error: ")

    def test_a_command_whose_extra_is_missing(self) -> None:
        """A demo without torch must say so, and leave the other commands alone."""

        class Group(LazyGroup):
            lazy: Mapping[str, LazyCommand] = MappingProxyType({"sing": LazyCommand("tierkv.no_such_module:sing", "")})

        said = CliRunner().invoke(Group("tierkv"), ["sing"])
        assert said.exit_code == 1
        assert said.stderr.startswith("Error: this command cannot be loaded: No module named 'tierkv.no_such_module'")

    def test_an_interrupted_import(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in the first half second reaches the body of a class. Python 3.11 raises a RuntimeError for it there,
        which was shown as a traceback."""
        source = "try:\n    raise KeyboardInterrupt\nexcept BaseException as err:\n    raise RuntimeError from err\n"
        (tmp_path / "tierkv_slow_import.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))

        class Group(LazyGroup):
            lazy: Mapping[str, LazyCommand] = MappingProxyType({"sing": LazyCommand("tierkv_slow_import:sing", "")})

        said = CliRunner().invoke(Group("tierkv"), ["sing"])
        assert said.exit_code == 130
        assert said.stderr == "Interrupted. What was done until here stays done.\n"

    def test_a_slot_that_holds_no_command(self) -> None:
        """A typo in our own table is a bug, and must look like one."""
        with pytest.raises(TypeError, match="is not a command"):
            LazyCommand("tierkv.errors:TierKVError", "").load()


@pytest.mark.usefixtures("site")
class TestCommandsOfPlugins:
    """`tierkv_commands`: found when called, listed by `tierkv plugins`."""

    def test_a_plugin_adds_a_command(self, tierkv: Run) -> None:
        """The hook is worth nothing unless the command runs, with its arguments."""
        said = tierkv("greet", "world")
        assert said.exit_code == 0, said.output
        assert said.stdout == "hello world\n"

    def test_it_runs_in_the_installed_program(self) -> None:
        """As a user calls it: another process, the real entry point."""
        program_path = Path(sys.executable).with_name("tierkv")
        done = subprocess.run([str(program_path), "greet", "you"], capture_output=True, text=True, check=True)
        assert done.stdout == "hello you\n"

    def test_help_does_not_look_for_it(self, tierkv: Run) -> None:
        """Listing it would import every plugin; the help says where it is listed instead."""
        said = tierkv("--help")
        assert "greet" not in said.output
        assert "`tierkv plugins` lists them" in said.output
        assert "installed_places" not in sys.modules

    def test_a_plugin_whose_commands_fail_is_a_warning(self, tierkv: Run, break_plugin: Callable[[str], None]) -> None:
        """The contract of the hook: the plugin is named, the other commands work."""
        break_plugin("\n@hookimpl\ndef tierkv_commands():\n    1 / 0\n")
        said = tierkv("greet", "world")
        assert said.exit_code == 2
        assert (
            "Warning: commands of plugin tierkv-places 4.5 (places = installed_places) cannot be used: Zero"
            in said.stderr
        )
        assert tierkv("plugins").exit_code == 0

    def test_a_plugin_cannot_take_over_a_command_of_ours(
        self, tierkv: Run, break_plugin: Callable[[str], None]
    ) -> None:
        """`tierkv check` must mean the same on every machine."""
        break_plugin("@hookimpl\ndef tierkv_commands():\n    return [click.Command('check', help='mine')]\n")
        assert "mine" not in tierkv("check", "--help").output
        assert "Validate STACK" in tierkv("check", "--help").output


def test_the_program_is_a_group_of_click() -> None:
    """Documentation tools and tests take the program apart with click's own means."""
    context = click.Context(program)
    assert program.list_commands(context) == sorted(COMMANDS)
