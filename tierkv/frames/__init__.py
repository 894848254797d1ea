"""Frame: header, checksums and payload of a chunk, in a slot of the host arena and at rest in a lower tier.

Nouns:

* *Frame*: one header page of 4096 bytes, then the stored payload. :mod:`tierkv.frames.frame` has the layout.
* *Raw frame*: frame of codec ``none``. Every sealed slot of the host arena holds one.
* *Sealing*: writing the header over a payload that is in place. :class:`~tierkv.frames.sealer.FrameSealer` seals, and
  checks.
* *Part*: what one of several workers writes to a payload. All parts of a payload have one length.
* *Unsealed slot*: slot between grant and seal, in which workers of one stack store the checksums of their parts.

Flow: the payload arrives from the KV tensors; its checksum is computed once, where it was written; the header is
packed. From then on the raw checksum travels with the chunk through every tier and codec. A backend that lost its index
recognises frames by their first page (:mod:`tierkv.frames.recognition`).

Threads: all functions are pure and may be called on any thread. Those that hash or fill a payload release the GIL.

Invariants: a frame is accepted only with the expected namespace and key and with matching checksums; any other content
is a ``CorruptFrameError``. A header never describes a payload of which a part is missing.
"""
