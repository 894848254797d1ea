"""Chunks held in the host tier for requests, from the moment they are wanted until they are loaded or released.

Nouns: a *reservation* is the wanted chunks of one request, in prefix order, with a slot for each that was *granted*. A
*stream* is a load that begins before all of its chunks are readable; it reserves one *segment* at a time. A *pin* holds
one readable chunk ahead of a reservation.

Flow: ``reserve`` grants what is readable, and reads what is in lower tiers, as far as room and caps allow. Calling it
again in a later step continues. When everything is readable, ``hand_over`` passes the holds to a load job.

Invariants (decision 4): granted chunks stay held until they are handed over or released. Only the oldest unfinished
reservation takes slots while slots are short. All reserved chunks together stay under a cap, so that stores have
room, and streams have a share of their own. So the oldest reservation on either side always progresses.
"""
