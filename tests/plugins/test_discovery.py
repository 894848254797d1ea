"""Discovery of plugins by load_plugins: order, and treatment of broken plugins."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tierkv import __version__
from tierkv.errors import PluginError
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import EntryPoint, load_plugins
from tierkv.plugins.origins import BrokenPlugin
from tierkv.plugins.registry import PluginRegistry
from tierkv.types.cache_events import CacheEvent, CacheEventKind

FOO = """
@hookimpl
def tierkv_backends():
    return [backend("foo")]
"""

WITHOUT_DESCRIPTORS = """
import resource
from tierkv.errors import PluginError
from tierkv.plugins.loading import load_plugins
load_plugins()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
registry = load_plugins()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
try:
    registry.require_backend("disk")
except PluginError as refused:
    print(refused)
"""


def only_broken(registry: PluginRegistry, name: str) -> BrokenPlugin:
    """Broken plugin of that name; the built-ins are never affected."""
    assert {"none", "zstd"} <= registry.codecs.keys()
    (broken,) = [plugin for plugin in registry.broken if plugin.name == name]
    return broken


class TestWhatIsFound:
    """Discovery of plugins that behave."""

    def test_an_installed_distribution_is_found(self, install: Any) -> None:
        """`pip install tierkv-foo`, write `backend = "foo"`, done: nothing else may be needed."""
        module = install("foo", FOO)
        found = load_plugins().require_backend("foo")
        assert found.plugin.summary == "the foo backend"
        assert (found.origin.distribution, found.origin.version) == ("tierkv-foo", "1.2.3")
        assert (found.origin.name, found.origin.target) == ("foo", module)
        assert str(found.origin) == f"tierkv-foo 1.2.3 (foo = {module})"

    def test_an_object_of_a_module_may_be_a_plugin(self, install: Any) -> None:
        """A plugin that keeps state is an object; its entry point says `module:object`."""
        source = """
        class Plugin:
            TIERKV_SPI = 1
            @hookimpl
            def tierkv_backends(self):
                return (backend(name) for name in ("foo", "foo-fast"))
        plugin = Plugin()
        """
        install("foo", source, target="{module}:plugin")
        assert {"foo", "foo-fast"} <= load_plugins().backends.keys()

    def test_built_ins_come_through_the_same_hooks(self) -> None:
        """If the built-in codecs needed a private interface, so would those of plugins."""
        registry = load_plugins(entry_points=lambda group: [])
        assert {"none", "zstd"} <= registry.codecs.keys()
        assert "lru" in registry.policies
        assert registry.broken == ()
        (origin,) = registry.origins
        assert (origin.distribution, origin.version, origin.target) == ("tierkv", __version__, "tierkv.plugins.builtin")

    def test_nothing_is_imported_before_plugins_are_loaded(self, install: Any) -> None:
        """Importing tierkv must not run the code of plugins."""
        module = install("foo", FOO)
        assert module not in sys.modules
        load_plugins()
        assert module in sys.modules

    def test_the_order_does_not_depend_on_the_order_of_installation(self, install: Any) -> None:
        """The owner of a name must be the same on every machine: sorted by entry point, then distribution."""
        install("foo-b", FOO)
        install("foo-a", FOO)
        install("foo-a", FOO, distribution="tierkv-another")
        found = [point for point in entry_points(group="tierkv") if point.name.startswith("foo")]
        assert len(found) == 3
        winners = {
            load_plugins(entry_points=lambda group, order=order: order).backends["foo"].origin.distribution
            for order in itertools.permutations(found)
        }
        assert winners == {"tierkv-another"}

    def test_objects_handed_in_come_before_installed_ones(self, install: Any) -> None:
        """A caller that passes a plugin wants that one, whatever else is installed."""
        installed = install("foo", FOO)
        __import__(installed)
        mine = type("Mine", (), {"TIERKV_SPI": 1, "tierkv_backends": sys.modules[installed].tierkv_backends})
        mine.tierkv_backends = staticmethod(mine.tierkv_backends)  # type: ignore[attr-defined]  # made by type()
        registry = load_plugins([mine()])
        assert registry.backends["foo"].origin.name == "Mine"
        assert "already registered by Mine" in only_broken(registry, "foo").error

    def test_the_time_of_each_import_is_taken(self, install: Any) -> None:
        """A slow plugin delays every start; `tierkv plugins` must be able to show which one it is."""
        install("foo", FOO)
        ticks = itertools.count(step=0.5)
        registry = load_plugins(clock=lambda: next(ticks))
        assert all(origin.load_s == 0.5 for origin in registry.origins)

    def test_a_distribution_without_metadata_is_still_used(self, install: Any) -> None:
        """A missing METADATA file costs the name in messages, not the plugin."""
        install("foo", FOO, metadata=False)
        assert "foo" in load_plugins().backends

    def test_importing_tierkv_plugins_imports_no_framework(self) -> None:
        """Loading plugins is the price of a stack, not of importing a name."""
        code = "import sys, tierkv.plugins; print(sorted({'torch', 'numpy', 'pydantic', 'click'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestBrokenPlugins:
    """Each broken plugin is named, and does not affect others."""

    @pytest.mark.parametrize(
        ("source", "error"),
        [
            ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
            ("raise SystemExit('bye')", "SystemExit: bye"),
            ("this is no python", "SyntaxError: "),
            ("TIERKV_SPI = 2" + FOO, f"the plugin was written for TIERKV_SPI = 2, and tierkv {__version__} supports 1"),
            ("del TIERKV_SPI" + FOO, "the plugin states no TIERKV_SPI: write TIERKV_SPI = 1 in the module"),
            ("def tierkv_backends(): return []", "the plugin implements no hook: mark its functions with @hookimpl"),
            ("@hookimpl\ndef tierkv_backends(): 1 / 0", "ZeroDivisionError: division by zero"),
            ("@hookimpl\ndef tierkv_backends(): pass", "tierkv_backends returned None; return a list of BackendPlugin"),
            (
                "@hookimpl\ndef tierkv_backends(): return 5",
                "tierkv_backends returned a int; return a list",
            ),
            (
                "@hookimpl\ndef tierkv_backends(): return backend('a')",
                "tierkv_backends returned a BackendPlugin; return a list of BackendPlugin",
            ),
            ("@hookimpl\ndef tierkv_backends():\n  yield backend('a')\n  1 / 0", "ZeroDivisionError"),
            (
                "@hookimpl\ndef tierkv_backends(): return ['foo']",
                "tierkv_backends gave a str ('foo'); give BackendPlugin",
            ),
            ("@hookimpl\ndef tierkv_codecs(): return [backend('a')]", "tierkv_codecs gave a BackendPlugin"),
            ("@hookimpl\ndef tierkv_backends(): return [backend('Foo')]", "backend name 'Foo' is not allowed"),
            ("@hookimpl\ndef tierkv_backends(config): return []", "PluginValidationError: .*config"),
            (
                "@hookimpl\ndef tierkv_bakends(): return []",
                "unknown hook 'tierkv_bakends'.*; the hooks are tierkv_backends",
            ),
            (
                "@hookimpl\ndef tierkv_backends(): return [backend('a'), backend('a')]",
                "the plugin registers backend 'a' twice",
            ),
            (
                "@hookimpl\ndef tierkv_codecs(): return [CodecPlugin('zstd', '', never)]",
                "codec 'zstd' is already registered by tierkv",
            ),
            (
                "@hookimpl\ndef tierkv_policies(): return [PolicyPlugin('lru', '', never)]",
                "policy 'lru' is already registered by tierkv",
            ),
        ],
    )
    def test_each_way_of_being_broken_is_told(self, install: Any, source: str, error: str) -> None:
        """The user of a broken plugin must get its name, version and fault, in one line."""
        install("lame", source)
        broken = only_broken(load_plugins(), "lame")
        assert (broken.distribution, broken.version) == ("tierkv-lame", "1.2.3")
        assert "\n" not in broken.error
        pattern, _, rest = error.partition(".*")
        assert pattern in broken.error
        assert rest in broken.error
        assert "Error" in broken.traceback or "SystemExit" in broken.traceback

    def test_others_work_beside_it(self, install: Any) -> None:
        """One bad upgrade must not take the other tiers down."""
        install("bad", "import no_such_module_here")
        install("foo", FOO)
        registry = load_plugins()
        assert registry.require_backend("foo").plugin.name == "foo"
        with pytest.raises(PluginError, match=r"backend 'bad': its plugin tierkv-bad 1\.2\.3 .* is broken: ModuleNot"):
            registry.require_backend("bad")

    def test_nothing_of_it_is_used(self, install: Any) -> None:
        """Half a plugin would be confusing: its backend would be there, and its codec not."""
        source = FOO + "\n@hookimpl\ndef tierkv_codecs(): 1 / 0\n@hookimpl\ndef tierkv_observe(events): pass\n"
        install("foo", source)
        registry = load_plugins()
        assert "foo" not in registry.backends
        assert all(observer.origin.name != "foo" for observer in registry.observers)

    def test_of_two_with_one_name_the_first_works_and_both_are_named(self, install: Any) -> None:
        """A clash must name the owner of the name and the other plugin, so that the user can mend it."""
        install("foo", FOO)
        install("zoo", FOO)
        registry = load_plugins()
        assert registry.backends["foo"].origin.distribution == "tierkv-foo"
        broken = only_broken(registry, "zoo")
        assert broken.distribution == "tierkv-zoo"
        assert broken.error.startswith("backend 'foo' is already registered by tierkv-foo 1.2.3 (foo = installed_")

    def test_a_plugin_is_found_by_the_name_of_its_distribution_too(self, install: Any) -> None:
        """Its entry point may have another name than the backend that the user asks for."""
        install("main", "import no_such_module_here", distribution="tierkv-foo")
        with pytest.raises(PluginError, match=r"its plugin tierkv-foo 1\.2\.3 .* is broken"):
            load_plugins().require_backend("foo")

    def test_an_attribute_that_is_not_there(self, install: Any) -> None:
        """`module:object` may point at nothing."""
        install("foo", FOO, target="{module}:plugin")
        assert "AttributeError" in only_broken(load_plugins(), "foo").error

    def test_metadata_that_cannot_be_read_hides_nobody_else(self, install: Any, site: Path) -> None:
        """Python drops all entry points when one distribution's file is malformed."""
        install("foo", FOO)
        info = site / "wrecked-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrecked\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("[tierkv]\nnonsense without a sign\n", encoding="utf-8")
        try:
            list(entry_points(group="tierkv"))
        except Exception:  # noqa: BLE001  whatever this Python raises; the point is that it does
            pass
        else:
            pytest.skip("this Python reads past the malformed line by itself")
        registry = load_plugins()
        assert "foo" in registry.backends
        assert only_broken(registry, "wrecked").distribution == "wrecked"

    def test_packages_that_cannot_be_read_are_told_in_one_line(self) -> None:
        """A program without descriptors reads no package: each was listed, as "?", and the cause was not named."""
        code = f"import sys; sys.path[:0] = {sys.path!r}\n{WITHOUT_DESCRIPTORS}"
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        message = done.stdout
        assert re.search(r"broken: \d+ packages that cannot be read \(OSError: .*Too many open files", message), message
        assert "?" not in message

    def test_an_interrupt_is_not_swallowed(self) -> None:
        """Ctrl-C during a slow import belongs to the user, not to the list of broken plugins."""

        class Interrupted(EntryPoint):
            def load(self) -> Any:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            load_plugins(entry_points=lambda group: [Interrupted("foo", "x", "tierkv")])


class TestObservers:
    """Plugins that observe cache events."""

    EVENTS = (CacheEvent(CacheEventKind.STORED, "host", ()),)

    class Watching:
        """Observer that remembers its events."""

        TIERKV_SPI = 1

        def __init__(self) -> None:
            self.seen: list[object] = []

        @hookimpl
        def tierkv_observe(self, events: object) -> None:
            self.seen.append(events)

    class Raising:
        """Observer that raises."""

        TIERKV_SPI = 1

        @hookimpl
        def tierkv_observe(self, events: object) -> None:
            raise RuntimeError("too much")

    def test_nobody_watches_by_default(self) -> None:
        """Without observers, nothing need be handed to a thread."""
        registry = load_plugins(entry_points=lambda group: [])
        assert not registry.has_observers
        registry.observe(self.EVENTS)

    def test_one_that_raises_keeps_events_from_nobody(self) -> None:
        """The fault is reported after all observers were called: it affects its owner alone."""
        first, last = self.Watching(), self.Watching()
        registry = load_plugins([first, self.Raising(), last], entry_points=lambda group: [])
        assert len(registry.observers) == 3
        with pytest.raises(ExceptionGroup) as caught:
            registry.observe(self.EVENTS)
        assert first.seen == last.seen == [self.EVENTS]
        (fault,) = caught.value.exceptions
        assert "too much" in str(fault)
        assert "Raising" in fault.__notes__[0]

    def test_an_observer_need_not_take_the_events(self) -> None:
        """Pluggy lets an implementation leave arguments out; one that only counts needs none."""

        class Counting:
            TIERKV_SPI = 1
            count = 0

            @hookimpl
            def tierkv_observe(self) -> None:
                self.count += 1

        plugin = Counting()
        load_plugins([plugin], entry_points=lambda group: []).observe(self.EVENTS)
        assert plugin.count == 1


class TestCommands:
    """Commands that plugins add to the program."""

    def test_commands_are_asked_for_only_when_wanted(self, install: Any) -> None:
        """A serving process has no use for commands, and need not import what makes them."""
        source = FOO + "\n@hookimpl\ndef tierkv_commands(): 1 / 0\n"
        install("foo", source)
        registry = load_plugins()
        assert "foo" in registry.backends
        found, broken = registry.commands(object)
        assert found == []
        (plugin,) = [plugin for plugin in broken if plugin.name == "foo"]
        assert plugin.error == "ZeroDivisionError: division by zero"

    def test_what_is_no_command_is_refused(self, install: Any) -> None:
        """A function would crash the program where it expects a command."""
        install("foo", "@hookimpl\ndef tierkv_commands(): return ['hello']")
        found, broken = load_plugins().commands(dict)
        assert found == []
        assert "tierkv_commands gave a str ('hello'); give dict" in [plugin.error for plugin in broken]
