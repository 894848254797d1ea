"""Chunks of hits on their way from where they are to the GPU.

Nouns: a *passage* is the wanted chunks of one request, in prefix order. Each chunk is known, then coming (it has a slot
and is being read), held (readable, and kept in its slot), sent (being copied to the GPU), and arrived. A passage has
one of two *sinks*. HOLD: the request waits for an answer or for GPU blocks, and its chunks are held. COPY: GPU blocks
are allocated, and chunks are sent a *segment* at a time. A *pin* holds one readable chunk ahead of a passage.

Flow: ``reserve`` grants slots to what is readable, and reads what is in lower tiers, as far as room and the account
allow; steps continue by themselves, and asking again only reads the state. ``hand_over`` passes held chunks to a job;
``copied`` ends it.

Invariants: granted chunks stay held until they are handed over or released. On either side only the oldest passage
that is not complete takes slots while slots are short, so it always progresses. One account
(:mod:`.slot_account`) bounds all chunks that are coming, held or being copied; either side has a guaranteed minimum in
it, so that neither waits for the other. A passage is late when a tier at work for it has moved nothing for a deadline;
neither silence of the engine nor a queue that moves makes it late.
"""
