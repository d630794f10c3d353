"""The house behind the doors: import from `mirrax`, not from here."""
