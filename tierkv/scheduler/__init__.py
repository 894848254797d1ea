"""Per request: what to load, what to store, when to say "ask me again". Sans-IO."""
