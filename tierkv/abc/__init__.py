"""All that a plugin author reads.

With ``tierkv.types``, ``tierkv.errors`` and ``tierkv.hookspecs`` it is all that a plugin imports.
"""

from tierkv.abc.backend import (
    AsyncBackend,
    Backend,
    BackendContext,
    Distrustful,
    Entry,
    FrameAt,
    ProbeResult,
    ReadRequest,
    ReadResult,
    RoomTeller,
    Scannable,
    WriteRequest,
    WriteResult,
    recognise_nothing,
)
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import CODEC_NOTES_BYTES, Codec, CodecContext, CodecFrame
from tierkv.abc.plugin import SPI_VERSION, BackendPlugin, CodecPlugin, Finding, NoOptions, PolicyPlugin
from tierkv.abc.policy import AdmissionPolicy, EvictionPolicy, WriteAwarePolicy
from tierkv.abc.sighting import SightingPolicy

__all__ = [
    "CODEC_NOTES_BYTES",
    "SPI_VERSION",
    "AdmissionPolicy",
    "AsyncBackend",
    "Backend",
    "BackendContext",
    "BackendPlugin",
    "Capabilities",
    "Codec",
    "CodecContext",
    "CodecFrame",
    "CodecPlugin",
    "Distrustful",
    "Entry",
    "EvictionPolicy",
    "Finding",
    "FrameAt",
    "NoOptions",
    "PolicyPlugin",
    "ProbeResult",
    "ReadRequest",
    "ReadResult",
    "RoomTeller",
    "Scannable",
    "SightingPolicy",
    "WriteAwarePolicy",
    "WriteRequest",
    "WriteResult",
    "recognise_nothing",
]
