"""All that a plugin author reads.

With ``tierkv.types``, ``tierkv.errors`` and ``tierkv.hookspecs`` it is all that a plugin imports.
"""

from tierkv.abc.backend import (
    AsyncBackend,
    Backend,
    BackendContext,
    Entry,
    ProbeResult,
    ReadRequest,
    ReadResult,
    Scannable,
    WriteRequest,
    WriteResult,
)
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import Codec
from tierkv.abc.plugin import SPI_VERSION, BackendPlugin, CodecPlugin, Finding, PolicyPlugin
from tierkv.abc.policy import AdmissionPolicy, EvictionPolicy
from tierkv.abc.sighting import SightingPolicy

__all__ = [
    "SPI_VERSION",
    "AdmissionPolicy",
    "AsyncBackend",
    "Backend",
    "BackendContext",
    "BackendPlugin",
    "Capabilities",
    "Codec",
    "CodecPlugin",
    "Entry",
    "EvictionPolicy",
    "Finding",
    "PolicyPlugin",
    "ProbeResult",
    "ReadRequest",
    "ReadResult",
    "Scannable",
    "SightingPolicy",
    "WriteRequest",
    "WriteResult",
]
