"""Frames and the codecs that come with tierkv."""

from __future__ import annotations

from tierkv.abc.plugin import CodecPlugin
from tierkv.codecs.none import NoneCodec
from tierkv.codecs.zstd import ZstdCodec

CODEC_PLUGINS: tuple[CodecPlugin, ...] = (
    CodecPlugin(name="none", summary="Store payloads as they are; fastest.", open=NoneCodec),
    CodecPlugin(name="zstd", summary="Zstandard level 1; for slow or metered tiers.", open=ZstdCodec),
)
"""What :func:`tierkv.hookspecs.tierkv_codecs` returns for tierkv itself."""
