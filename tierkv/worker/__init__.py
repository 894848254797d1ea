"""GPU <-> host copies, one worker per rank."""
