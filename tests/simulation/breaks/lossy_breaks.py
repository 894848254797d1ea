"""Breaks of lossy tiers: each is one careless line in tierkv, with the invariant that must notice it."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulation.breaks.registry import Patch, breaks
from simulation.checks.monitor import EXACT
from simulation.drawing.features import SLOT_BYTES
from simulation.engine.approximations import NEAR
from simulation.engine.kv_memory import WRONG_BYTES
from tierkv.codecs.eight_bit import EightBitCodec
from tierkv.codecs.fp8 import Fp8Codes
from tierkv.codecs.int8 import Int8Codes
from tierkv.frames.frame import HEADER_BYTES, parse_header
from tierkv.manager.lower.lower_tier import LowerTierLimits
from tierkv.tiers.framing import Framer, FrameRules

__all__: list[str] = []  # the registry has all breaks


@breaks("rounded", EXACT, first=18)  # most chunks that are read are in the exact tier already
def an_exact_tier_takes_approximations(patch: Patch) -> None:
    """Neither the manager, which plans no such write, nor the framer, which refuses it, knows of exact tiers."""
    patch.setattr(
        "tierkv.stack.tier_factory.LowerTierLimits", lambda **limits: LowerTierLimits(**{**limits, "exact": True})
    )
    patch.setattr(
        "tierkv.stack.tier_factory.FrameRules",
        lambda lossy, conceals, _, accepts_clear: FrameRules(lossy, conceals, True, accepts_clear),
    )


@breaks("rounded", WRONG_BYTES)
def damage_is_rounded_and_sealed(patch: Patch) -> None:
    """A lossy frame has no checksum of the chunk in the host tier, so damage there would never be found again."""
    encode = Framer.encode_frame

    def hasty(self: Framer, slot: memoryview, key: bytes) -> Any:
        raw_bytes = parse_header(slot).raw_bytes
        if self._rules.lossy and raw_bytes <= SLOT_BYTES - HEADER_BYTES:
            self._sealer.seal(slot, key, raw_bytes)
        return encode(self, slot, key)

    patch.setattr(Framer, "encode_frame", hasty)


@breaks("rounded", WRONG_BYTES)
def the_end_of_a_rounded_chunk_is_not_decoded(patch: Patch) -> None:
    """Earlier bytes of the slot stay there, and get the checksum of the chunk."""
    decode = Framer._decode_payload

    def hasty(self: Framer, slot: memoryview, header: Any) -> None:
        end = slot[HEADER_BYTES + header.raw_bytes - 2 : HEADER_BYTES + header.raw_bytes]
        before = bytes(end)
        decode(self, slot, header)
        if header.approximate:
            end[:] = before
            self._sealer.seal_as(
                slot, header.key, header.raw_bytes, *self._sealer.payload_checksums(slot, header), approximate=True
            )

    patch.setattr(Framer, "_decode_payload", hasty)


@breaks("rounded", NEAR)
def values_lose_their_sign(patch: Patch) -> None:
    for codes in (Fp8Codes, Int8Codes):
        values = codes.values

        def unsigned(self: Any, codes: Any, out: Any, values: Any = values) -> None:
            values(self, codes, out)
            np.abs(out, out=out)

        patch.setattr(codes, "values", unsigned)


@breaks("rounded", NEAR)
def chunks_are_rounded_again_each_time(patch: Patch) -> None:
    """A scale that fits the largest value exactly, and loses bits with each trip."""
    encode = EightBitCodec.encode

    def smaller(self: EightBitCodec, raw: memoryview, out: memoryview, frame: Any) -> int | None:
        dtype = np.float16 if self._dtype.name == "float16" else None
        if dtype is None or not np.isfinite(np.frombuffer(raw, dtype)).all():
            return encode(self, raw, out, frame)
        shrunk = (np.frombuffer(raw, dtype) * dtype(127 / 128)).tobytes()
        return encode(self, memoryview(shrunk), out, frame)

    patch.setattr(EightBitCodec, "encode", smaller)
