"""`mirrax run` and `mirrax info`, with real processes."""
