"""All that a plugin author reads.

With ``tierkv.types``, ``tierkv.errors`` and ``tierkv.hookspecs`` it is all that a plugin imports.
"""

from tierkv.abc.backend import (
    AsyncBackend,
    Backend,
    BackendContext,
    Entry,
    FrameRecogniser,
    ProbeResult,
    ReadRequest,
    ReadResult,
    SupportsQuarantine,
    SupportsRoomLimit,
    SupportsScan,
    WriteRequest,
    WriteResult,
    recognise_nothing,
)
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import CODEC_NOTES_BYTES, Codec, CodecContext, CodecFrame
from tierkv.abc.observation import RequestAwarePolicy
from tierkv.abc.plugin import SPI_VERSION, BackendPlugin, CheckResult, CodecPlugin, NoOptions, PolicyPlugin
from tierkv.abc.policy import AdmissionPolicy, EvictionPolicy, WriteAwarePolicy

__all__ = [
    "CODEC_NOTES_BYTES",
    "SPI_VERSION",
    "AdmissionPolicy",
    "AsyncBackend",
    "Backend",
    "BackendContext",
    "BackendPlugin",
    "Capabilities",
    "CheckResult",
    "Codec",
    "CodecContext",
    "CodecFrame",
    "CodecPlugin",
    "Entry",
    "EvictionPolicy",
    "FrameRecogniser",
    "NoOptions",
    "PolicyPlugin",
    "ProbeResult",
    "ReadRequest",
    "ReadResult",
    "RequestAwarePolicy",
    "SupportsQuarantine",
    "SupportsRoomLimit",
    "SupportsScan",
    "WriteAwarePolicy",
    "WriteRequest",
    "WriteResult",
    "recognise_nothing",
]
