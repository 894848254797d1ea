"""The kit for authors of codecs, on every built-in codec; and that it finds codecs that break their promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tierkv.abc import Codec, CodecFrame, CodecPlugin
from tierkv.codecs.builtin import CODEC_PLUGINS
from tierkv.codecs.zstd import ZstdCodec
from tierkv.testing import CodecConformance

ZSTD = next(plugin for plugin in CODEC_PLUGINS if plugin.name == "zstd")

for _plugin in CODEC_PLUGINS:
    if not _plugin.conceals:  # it needs a key, below
        _suite = f"Test_{_plugin.name.replace('-', '_')}"
        globals()[_suite] = type(_suite, (CodecConformance,), {"plugin": _plugin, "__module__": __name__})


class TestAesGcm(CodecConformance):
    """Encrypts, with a key from a file."""

    plugin = next(plugin for plugin in CODEC_PLUGINS if plugin.conceals)

    @pytest.fixture(autouse=True)
    def _key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cryptography")
        (tmp_path / "key").write_text(bytes(range(32)).hex())
        (tmp_path / "key").chmod(0o600)
        monkeypatch.setattr(type(self), "options", self.plugin.options(key_file=str(tmp_path / "key")))


class Overflows(ZstdCodec):
    """Returns a length that it has not written."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        return len(raw)


class LeaksErrors(ZstdCodec):
    """Raises what its library raises."""

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        try:
            super().decode(stored, out, frame)
        except Exception as error:
            raise ValueError(str(error)) from error


class FillsAPart(ZstdCodec):
    """Accepts a buffer of any length."""

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        size = 8192
        whole = memoryview(bytearray(size))
        super().decode(stored, whole, frame)
        out[:size] = whole[: len(out)]


class SharesABuffer(ZstdCodec):
    """Keeps the last payload, and restores it whatever is stored."""

    last = b""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        type(self).last = bytes(raw)
        return super().encode(raw, out, frame)

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        super().decode(stored, out, frame)
        out[:] = self.last[: len(out)].ljust(len(out), b"\0")


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Overflows, lambda suite: suite.test_a_payload_comes_back("text")),
        (LeaksErrors, lambda suite: suite.test_a_damaged_form_is_an_error_of_ours(suite.open_codec(), "text")),
        (FillsAPart, lambda suite: suite.test_another_length_is_refused(suite.open_codec(), "text")),
        (SharesABuffer, lambda suite: suite.test_threads_do_not_share_state(suite.open_codec())),
    ],
)
def test_the_kit_finds_a_broken_codec(broken: Callable[[], Codec], test: Callable[[CodecConformance], None]) -> None:
    """A suite that accepts everything is no suite."""

    class Suite(CodecConformance):
        plugin: ClassVar[CodecPlugin] = replace(ZSTD, open=lambda _context, _options: broken())

    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        test(Suite())
