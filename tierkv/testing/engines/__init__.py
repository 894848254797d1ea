"""Small engines of the kit: the hand engine, and the small stack that puts a backend under test below it."""
