"""Stores at rest: what the tiers of a stack keep, read, checked, moved and removed without an engine.

Nouns:

* *Place*: storage of one tier: a backend with its options. A stack file has one per lower tier; a path or a URL is one;
  so is an *export folder* (:mod:`~tierkv.stores.folder`). :func:`~tierkv.stores.places.find_places` finds them.
* *Store*: the chunks of one namespace at a place. :class:`~tierkv.stores.store.Store` is an open one: a backend without
  a stack. It is opened for reading, beside the process that writes it where the backend can do that, or for writing,
  with the lock that an engine takes.
* *Namespace*: known to a user by the name of its model. Its description is read from the manifests that backends keep
  beside their data (:class:`tierkv.abc.AtRest`), from another tier of the same stack, or from a file.
* *Finding*: one thing that is wrong at rest, as a value: the place, the chunk, the reason, what was done.

Flow: find the places, list their namespaces (:mod:`~tierkv.stores.namespaces`), open each store, and list its frames as
a stream. :mod:`~tierkv.stores.summaries` adds them up, :mod:`~tierkv.stores.verification` reads and checks them,
:mod:`~tierkv.stores.removal` deletes some, :mod:`~tierkv.stores.copying` moves them to another place.

Invariants:

* Only the verbs of the plugin interface are needed, and ``scan`` or :class:`tierkv.abc.SupportsListing`.
* A frame is copied only after all its checks, and byte for byte: no codec is opened, so no key is needed.
* Listings are streams. Nothing here keeps one entry per chunk.
* A namespace that an engine has open for writing alone is never opened for writing here: its backend refuses.
* Damage becomes a finding, never an exception. A chunk that another process removes meanwhile is no finding.
"""
