"""`mirrax.testing`, with real processes."""
