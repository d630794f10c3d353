"""SPEC rows as a user would meet them, in both engines."""
