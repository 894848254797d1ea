"""Stores of named byte strings: one protocol, three implementations, and the choice among them.

``store`` defines :class:`Store`: verbs for one name at a time, and a listing. ``local_store`` serves directories with
atomic, flushed writes. ``obstore_store`` serves S3, Google Cloud Storage, Azure and HTTP through obstore, with one
request per verb. ``fsspec_store`` serves any other URL through fsspec's blocking interface. ``selection`` picks the
fastest implementation that is installed and understands the options.

Stores know no keys and no frames. They raise the errors of the library below; ``failures`` of the package translates
them.

Invariants. Readers see an object whole, its old or its new version. An absent name is a :class:`FileNotFoundError`. All
verbs may be called on any threads.
"""
