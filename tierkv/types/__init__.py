"""Values that every floor shares: frozen, slotted, standard library only."""
