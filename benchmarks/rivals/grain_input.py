"""Epochs of Grain pipelines over NumPy arrays, put on the devices with JAX.

Run by `input.py`, with an interpreter that has Grain and JAX:
`grain_input.py ROWS REPLICAS PLATFORM`. See `epochs.py`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import math
import sys

import grain
import numpy as np
from absl import flags
from delivery import deliver, find_slices
from epochs import BATCH, Epoch, answer, make_rows, normalise

NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
TWO_THREADS = grain.ReadOptions(num_threads=2)
DEFAULT = grain.ReadOptions()  # 16 threads
# Processes live for all epochs, and should not read far ahead between two of them.
SHORT_QUEUE = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


class Rows:
    """Rows of arrays, as Grain reads them: one at a time."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[i], self.y[i]


def main() -> None:
    count, replicas, platform = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    flags.FLAGS.mark_as_parsed()  # Grain's processes read Abseil's flags
    sharding = find_slices(replicas, platform)
    x, y = make_rows(count)
    rows = grain.MapDataset.source(Rows(x, y))
    numbers = grain.MapDataset.range(count)
    seeds = itertools.count()

    def plain(read: grain.ReadOptions) -> Epoch:
        def epoch() -> int:
            batches = rows.shuffle(seed=next(seeds)).batch(BATCH)
            return deliver(batches.to_iter_dataset(read), sharding)

        return epoch

    def by_index() -> int:
        indices = numbers.shuffle(seed=next(seeds)).batch(BATCH)
        batches = indices.map(lambda i: (x[i], y[i]))
        return deliver(batches.to_iter_dataset(NO_THREADS), sharding)

    def mapped(read: grain.ReadOptions) -> Epoch:
        def epoch() -> int:
            batches = rows.shuffle(seed=next(seeds)).map(_normalise).batch(BATCH)
            return deliver(batches.to_iter_dataset(read), sharding)

        return epoch

    def in_processes() -> Epoch:
        batches = rows.shuffle(seed=0).map(_normalise).batch(BATCH).repeat()
        ahead = batches.to_iter_dataset(SHORT_QUEUE).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=2)
        )
        endless = itertools.chain.from_iterable([ahead])  # opened by the first epoch
        size = math.ceil(count / BATCH)
        return lambda: deliver(itertools.islice(endless, size), sharding)

    answer(
        {
            "Grain": plain(NO_THREADS),
            "Grain, 16 threads": plain(DEFAULT),
            "Grain, batches of indices": by_index,
            "Grain map": mapped(NO_THREADS),
            "Grain map, 2 threads": mapped(TWO_THREADS),
            "Grain map, 16 threads": mapped(DEFAULT),
            "Grain map, 2 processes": in_processes(),
        }
    )


def _normalise(row: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return normalise(*row)


if __name__ == "__main__":
    main()
