"""Interfaces that a plugin author implements: backends, codecs and eviction policies.

A plugin imports this package, ``tierkv.types``, ``tierkv.errors`` and ``tierkv.hookspecs``, and nothing else of tierkv.

- :mod:`~tierkv.abc.backend`: a *backend* stores byte strings (*frames*) by key. Five verbs are required. Further
  abilities are separate protocols, named ``Supports...``.
- :mod:`~tierkv.abc.at_rest`: abilities for storage without a stack: listing, reading beside a writer, removal.
- :mod:`~tierkv.abc.capabilities`: the record in which a backend declares what it can do.
- :mod:`~tierkv.abc.codec`: a *codec* turns a chunk's payload into its stored form and back.
- :mod:`~tierkv.abc.policy`: an *eviction policy* orders the chunks of one tier. Abilities are separate protocols.
- :mod:`~tierkv.abc.places`: directories and files that no other user can read or change, for backends with files. It
  uses the file system, so it is not imported here.
- :mod:`~tierkv.abc.logs`: a logger for plugins, whose lines have the event and the tier as fields. Not imported here.
- :mod:`~tierkv.abc.observation`: the ability of a policy to receive whole requests.
- :mod:`~tierkv.abc.plugin`: the values that a plugin's hooks return, each with a name and an ``open`` function.

Flow: hooks (:mod:`tierkv.hookspecs`) register a plugin's values. A stack that names one of them checks its options and
calls ``open``. The framework then frames, checks, batches, retries, measures and evicts. The plugin stores bytes,
encodes bytes, or orders handles.

Invariants:

- Abilities are found by declared capability or by method name, never by the name of a plugin.
- A fault of a plugin becomes a miss or a counted failure. It never reaches the engine's thread as an exception.
- ``SPI_VERSION`` covers everything in this package and the hooks. A plugin of another version is not loaded.
"""

from tierkv.abc.at_rest import AtRest, DamagedEntry, StoredFrame, StoredNamespace, SupportsListing
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
from tierkv.abc.policy import AdmissionPolicy, EvictionPolicy, PrefixAwarePolicy, WriteAwarePolicy

__all__ = [
    "CODEC_NOTES_BYTES",
    "SPI_VERSION",
    "AdmissionPolicy",
    "AsyncBackend",
    "AtRest",
    "Backend",
    "BackendContext",
    "BackendPlugin",
    "Capabilities",
    "CheckResult",
    "Codec",
    "CodecContext",
    "CodecFrame",
    "CodecPlugin",
    "DamagedEntry",
    "Entry",
    "EvictionPolicy",
    "FrameRecogniser",
    "NoOptions",
    "PolicyPlugin",
    "PrefixAwarePolicy",
    "ProbeResult",
    "ReadRequest",
    "ReadResult",
    "RequestAwarePolicy",
    "StoredFrame",
    "StoredNamespace",
    "SupportsListing",
    "SupportsQuarantine",
    "SupportsRoomLimit",
    "SupportsScan",
    "WriteAwarePolicy",
    "WriteRequest",
    "WriteResult",
    "recognise_nothing",
]
