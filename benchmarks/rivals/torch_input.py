"""Epochs of PyTorch's DataLoader, put on the devices with JAX.

Run by `input.py`, with an interpreter that has PyTorch and JAX:
`torch_input.py ROWS REPLICAS PLATFORM`. See `epochs.py`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from delivery import deliver, find_slices
from epochs import BATCH, Epoch, answer, make_rows, normalise
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
)


class Normalised(Dataset):
    """Rows with the work for each done when they are read."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return normalise(self.x[i], self.y[i])


def main() -> None:
    count, replicas, platform = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    x, y = make_rows(count)
    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    indices = BatchSampler(RandomSampler(rows), BATCH, drop_last=False)
    loaders = {
        "PyTorch": load(rows),
        "PyTorch, 2 processes": load(rows, 2),
        "PyTorch, batches of indices": DataLoader(rows, None, sampler=indices),
        "PyTorch map": load(Normalised(x, y)),
        "PyTorch map, 2 processes": load(Normalised(x, y), 2),
    }
    for loader in loaders.values():
        iter(loader)  # starts its processes, which must not inherit JAX's threads
    sharding = find_slices(replicas, platform)

    def epoch_of(loader: DataLoader) -> Epoch:
        return lambda: deliver(map(_as_numpy, loader), sharding)

    answer({name: epoch_of(loader) for name, loader in loaders.items()})


def load(rows: Any, processes: int = 0) -> DataLoader:
    """A loader whose processes, if any, live for all epochs."""
    return DataLoader(
        rows,
        BATCH,
        shuffle=True,
        num_workers=processes,
        persistent_workers=bool(processes),
    )


def _as_numpy(batch: Any) -> tuple[np.ndarray, ...]:
    return tuple(part.numpy() for part in batch)


if __name__ == "__main__":
    main()
