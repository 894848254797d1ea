"""Kit, part 1: the declaration of a backend, its entry point, and keys and answers as they must be.

These tests run first. What they find makes most other tests fail, with messages that explain less.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tierkv.abc import BackendPlugin, SupportsScan
from tierkv.plugins.loading import load_plugins
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session, is_async
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key

VERBS = ("contains", "read_into", "write", "delete", "close")
"""Methods of every backend."""


class DeclarationTests(KitBase):
    """The plugin, as users install it and as the framework plans by it."""

    def test_declaration_is_consistent(self, place: Path) -> None:
        """The dispatcher plans by the capability record alone, so it must be consistent, also with the object."""
        assert isinstance(self.plugin, BackendPlugin)
        assert self.plugin.name == self.plugin.name.lower() and self.plugin.name.isascii() and self.plugin.summary
        assert dataclasses.is_dataclass(self.plugin.options)
        options = self.make_options(place)
        assert isinstance(options, self.plugin.options)
        _require_fixed_path(options)
        self.require_sound_declaration()
        with self.open(place) as session:
            missing = [name for name in VERBS if not hasattr(session.backend, name)]
            assert not missing, f"the backend has no method {', '.join(missing)}: it needs all of {', '.join(VERBS)}"
            assert isinstance(session.backend, SupportsScan) or not self.capabilities.scan, (
                "the capabilities declare scan, and the backend has no method of that name"
            )
            verbs = [getattr(session.backend, name) for name in VERBS]
            kinds = {inspect.iscoroutinefunction(verb) for verb in verbs}
            assert kinds == {is_async(session.backend)}, "some verbs are coroutines and some are not"

    def test_users_can_install_it(self) -> None:
        """An entry point that is missing, or a module without TIERKV_SPI, shows only when a user names the backend."""
        if self.not_installed:
            self.not_applicable(f"is not installed: {self.not_installed}")
        registry = load_plugins()
        if self.plugin.name not in registry.backends:
            broken = "".join(f"\nNot usable: {found.origin}: {found.error}" for found in registry.broken)
            raise AssertionError(
                f"no installed plugin has the backend {self.plugin.name!r}. In pyproject.toml, "
                f'[project.entry-points.tierkv] needs a line like name = "package", whose module has TIERKV_SPI and '
                f"the hook tierkv_backends; then install it again. If no distribution will have it, give the reason "
                f"in not_installed.{broken}"
            )
        registered = registry.backends[self.plugin.name]
        assert registered.plugin.options is self.plugin.options, (
            f"{registered.origin} has a backend {self.plugin.name!r} with other options than the tested plugin: is an "
            "older copy installed?"
        )

    def test_contains_answers_true_or_false(self, session: Session) -> None:
        """Servers count: 0 and 1 pass for answers in Python, and the framework refuses them."""
        session.put({make_key(1): make_frame(make_key(1), 1, self.small)})
        for answer in session.backend_call("contains", [make_key(1), make_key(2)]):
            assert isinstance(answer, bool), (
                f"contains answered {answer!r} ({type(answer).__name__}): return True or False, as in "
                "[bool(count) for count in counts]"
            )

    def test_scan_yields_keys_as_they_were_given(self, session: Session) -> None:
        """Stores have prefixes; the framework knows the key alone, and would never find a chunk under another one."""
        self.need("scan")
        keys = [make_key(number) for number in range(3)]
        session.put({key: make_frame(key, 1, self.small) for key in keys})
        found = session.scan()
        assert set(found) == set(keys), f"scan: {_difference(found, keys)}"


def _require_fixed_path(options: Any) -> None:  # noqa: ANN401 - a dataclass of the plugin
    """Require that a relative ``path`` is refused, or becomes the directory that it names now.

    A process may change its directory later, and a tier that is opened again would begin a second, empty store.
    """
    if isinstance(getattr(options, "path", None), str):
        try:
            relative = dataclasses.replace(options, path="tierkv-relative")
        except ValueError:
            return
        assert Path(relative.path).is_absolute(), (
            "a relative `path` stays relative, and would name another directory after a chdir of the engine: in "
            '__post_init__ of the options, object.__setattr__(self, "path", absolute_path(self.path)); it is in '
            "tierkv.abc.places"
        )


def _difference(found: Collection[object], keys: Sequence[Key]) -> str:
    """Explain how listed keys differ from stored ones."""
    for listed in found:
        if not isinstance(listed, bytes):
            return f"{listed!r} is {type(listed).__name__}: yield the key as bytes"
        for key in keys:
            before, is_there, _ = listed.partition(key)
            if is_there and listed != key:
                what = f"begins with {before!r}" if before else f"ends with {listed.removeprefix(key)!r}"
                return f"a listed key {what}: yield the key as it was given to write, without the store's own prefix"
    if set(found) < set(keys):
        lost = ", ".join(key.hex() for key in keys if key not in found)
        return f"write said that it stored {lost}, which is not listed: return an error for a key that is not stored"
    return "other keys are listed than were stored: yield each whole key as it was given to write, and nothing else"
