"""Codecs that ship with tierkv: the stored form of a chunk's payload at rest.

A *payload* is the KV cache of one chunk, as bytes. A *codec* (:class:`tierkv.abc.Codec`) encodes it when a tier writes
and decodes it when a tier reads. The result is the body of a *frame* (:mod:`tierkv.frames`), which also carries the
codec's name and its notes.

- ``none`` stores payloads unchanged; ``zstd`` compresses any bytes; ``bf16`` compresses bfloat16 values without loss.
- ``fp8`` and ``int8`` store scaled 8-bit values. They are *lossy*: only tiers that allow it write and read them.
- ``aes-256-gcm`` encrypts and authenticates. It *conceals*: neither payload nor checksum is ever stored in the clear.

Flow: :mod:`~tierkv.codecs.builtin` lists the codecs for the plugin registry. A tier opens the codecs that it may need,
and the framer of the tier calls them on I/O threads.

Invariants:

- A codec does no I/O, keeps no state between calls, and runs on several threads at once.
- ``decode`` fills the whole output or raises. It never returns wrong bytes silently where they can be detected.
- Stored bytes are untrusted: lengths and codes are checked before memory is allocated.
- Lossless codecs restore every byte. What a lossy codec decoded encodes to the same bytes again.
- A stored form never changes under the name of one codec; golden files in the tests hold it.
- Listing the codecs imports neither numpy nor cryptography. Opening one may.
"""
