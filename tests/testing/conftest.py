"""The fixture that is tested, as a user would take it."""

from mirrax.testing import worker_pool as worker_pool
