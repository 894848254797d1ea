"""Dense containers that know no tier."""
