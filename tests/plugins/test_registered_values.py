"""Registered values are checked when a plugin registers them, so that later code can rely on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tierkv.abc import BackendPlugin, Capabilities, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError
from tierkv.plugins.validation import check_plugin_value


@dataclass
class Options:
    """No options."""


def make(*_: object) -> Any:
    """Function in place of ``open``; it is inspected, not called."""
    raise AssertionError("opened")


def backend(**changes: Any) -> BackendPlugin:
    """Valid backend with some changes."""
    values: dict[str, Any] = {
        "name": "foo",
        "summary": "",
        "options": Options,
        "capabilities": Capabilities(),
        "open": make,
    }
    return BackendPlugin(**{**values, **changes})


def can(**flags: Any) -> BackendPlugin:
    """Backend with these capabilities."""
    return backend(capabilities=Capabilities(**flags))


@pytest.mark.parametrize(
    "good",
    [
        backend(),
        backend(name="foo-fast_2", check=make),
        can(authoritative_index=True, scan=True, durable=True, alignment=4096),
        can(shared=True, bounded=False, scan=True),
        CodecPlugin("c" * 16, "", make),
        PolicyPlugin("p", "", make),
    ],
)
def test_what_is_in_order_passes(good: object) -> None:
    """A check that refuses valid plugins is worse than none."""
    check_plugin_value(good)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (backend(name=""), "backend name '' is not allowed: at most 32"),
        (backend(name="Foo"), "backend name 'Foo' is not allowed"),
        (backend(name="f" * 33), "is not allowed: at most 32"),
        (backend(name="1foo"), "a letter first"),
        (backend(name="foo\n"), "is not allowed"),
        (backend(name=None), "backend name None is not allowed"),
        (backend(open=None), "backend 'foo': open must be callable, not None"),
        (backend(check="yes"), "backend 'foo': check must be callable, not 'yes'"),
        (backend(options=dict), "options must be a dataclass, not <class 'dict'>"),
        (backend(options=Options()), "options must be a dataclass, not Options()"),
        (backend(capabilities={"shared": True}), "capabilities must be a Capabilities, not {'shared': True}"),
        (can(authoritative_index=True), "authoritative_index needs scan"),
        (can(authoritative_index=True, scan=True, shared=True), "authoritative_index excludes shared"),
        (can(preferred_batch=0), "preferred_batch must be at least 1, not 0"),
        (can(spare_share=0.5), "spare_share must be 0 to 0.25, not 0.5"),
        (can(preferred_read_bytes=0), "preferred_read_bytes must be at least 1 or None, not 0"),
        (can(preferred_write_bytes=-1), "preferred_write_bytes must be at least 1 or None, not -1"),
        (can(preferred_concurrency=-1), "preferred_concurrency must be at least 1, not -1"),
        (can(alignment=0), "alignment must be at least 1, not 0"),
        (can(alignment=1000), "alignment must be a power of two, not 1000"),
        (CodecPlugin("c" * 17, "", make), "at most 16"),
        (CodecPlugin("zst", "", None), "codec 'zst': open must be callable"),  # type: ignore[arg-type]  # a plugin's mistake
        (PolicyPlugin("L R U", "", make), "policy name 'L R U' is not allowed"),
        (PolicyPlugin("lru", "", 3), "policy 'lru': open must be callable, not 3"),  # type: ignore[arg-type]  # (the same)
    ],
)
def test_each_contradiction_is_told(bad: object, says: str) -> None:
    """Contradictory capabilities must be reported at registration, with the name of the plugin."""
    with pytest.raises(PluginError) as caught:
        check_plugin_value(bad)
    assert says in str(caught.value)
