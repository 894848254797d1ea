"""Per chunk: where it is and where it goes next. Sans-IO."""
