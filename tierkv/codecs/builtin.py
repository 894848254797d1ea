"""List of the built-in codecs. Importing it loads neither numpy nor cryptography."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from tierkv.abc.codec import Codec, CodecContext
from tierkv.abc.plugin import CheckResult, CodecPlugin, NoOptions
from tierkv.codecs.key_sources import AesGcmOptions
from tierkv.codecs.none import NoneCodec
from tierkv.codecs.zstd import ZstdCodec, ZstdOptions
from tierkv.errors import ConfigError, PluginError

_INSTALL = "pip install 'cryptography>=44'"


def _open_none(_context: CodecContext, _options: NoOptions) -> Codec:
    return NoneCodec()


def _open_zstd(_context: CodecContext, options: ZstdOptions) -> Codec:
    return ZstdCodec(options)


def _open_bf16(_context: CodecContext, _options: NoOptions) -> Codec:
    from tierkv.codecs.bf16 import Bf16Codec  # noqa: PLC0415 - numpy

    return Bf16Codec()


def _open_fp8(context: CodecContext, _options: NoOptions) -> Codec:
    from tierkv.codecs.fp8 import open_fp8  # noqa: PLC0415 - numpy

    return open_fp8(context)


def _open_int8(context: CodecContext, _options: NoOptions) -> Codec:
    from tierkv.codecs.int8 import open_int8  # noqa: PLC0415 - numpy

    return open_int8(context)


def _open_aes(context: CodecContext, options: AesGcmOptions) -> Codec:
    try:
        from tierkv.codecs.aes_gcm import AesGcmCodec  # noqa: PLC0415 - cryptography is an extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise PluginError(
            f"codec 'aes-256-gcm' needs the package cryptography, which is not installed: {_INSTALL}"
        ) from error
    codecs = {"zstd": ZstdCodec(), "bf16": _open_bf16(context, NoOptions())}
    return AesGcmCodec(options.keys(os.environ), options.inner, codecs)


def _check_aes(options: AesGcmOptions) -> Iterator[CheckResult]:
    """Check that the keys and the cryptography package are available in this process."""
    try:
        keys = options.keys(os.environ)
    except ConfigError as error:
        is_variable = str(error).startswith("environment variable")  # a message about a file names its fix
        fix = "set it in the environment of the engine, and check there" if is_variable else "correct the file"
        yield CheckResult("encryption keys", ok=False, detail=str(error), fix=fix)
    else:
        yield CheckResult("encryption keys", ok=True, detail=f"{len(keys)} found")
    if importlib.util.find_spec("cryptography") is None:
        yield CheckResult("encryption", ok=False, detail="cryptography is not installed", fix=f"run: {_INSTALL}")


CODEC_PLUGINS: tuple[CodecPlugin, ...] = (
    CodecPlugin(name="none", summary="Store payloads as they are; fastest.", open=_open_none),
    CodecPlugin(name="zstd", summary="Zstandard; for slow or metered tiers.", open=_open_zstd, options=ZstdOptions),
    CodecPlugin(name="bf16", summary="Lossless, for bfloat16 KV: exponents through Zstandard.", open=_open_bf16),
    CodecPlugin(name="fp8", summary="Half of 16 bits: e4m3 with scales.", open=_open_fp8, lossy=True),
    CodecPlugin(name="int8", summary="Half of 16 bits: whole numbers with scales.", open=_open_int8, lossy=True),
    CodecPlugin(
        name="aes-256-gcm",
        summary="Encrypted and authenticated; optionally with zstd or bf16 inside.",
        open=_open_aes,
        options=AesGcmOptions,
        conceals=True,
        check=_check_aes,
    ),
)
"""Codecs that the built-in plugin registers."""
