"""Tests with several workers, each a process of its own: `mirrax.testing`."""

from mirrax._src.testing.failures import WorkerError as WorkerError
from mirrax._src.testing.fixtures import worker_pool as worker_pool
from mirrax._src.testing.pool import WorkerPool as WorkerPool
from mirrax._src.testing.pool import run_workers as run_workers
