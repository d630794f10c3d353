"""What `fit` reads: the same batches on all workers, and `mx.data.Dataset`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mirrax._src.base import context
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.distributed import DistributedDataset
from mirrax._src.input.iterators import adopt, describe_steps
from mirrax._src.integrations.keras.private import (
    DataAdapter,
    class_weight_to_sample_weights,
    data_adapters,
    wrap,
)


def install() -> None:
    wrap(data_adapters, "get_data_adapter", _get_data_adapter)


def cluster_of(strategy: StrategyLike | None) -> Any:
    """The workers of a strategy; None if there is one, or no strategy."""
    mesh = None if strategy is None else strategy.replica_mesh
    return mesh.cluster if mesh is not None and mesh.spans_workers else None


def agree_on_randomness(strategy: StrategyLike | None) -> None:
    """Has all workers draw the random numbers of the first one: Keras shuffles by them."""
    cluster = cluster_of(strategy)
    if cluster is None:
        return
    torch = sys.modules.get("torch")
    own: list[Any] = []
    if cluster.worker == 0:
        kind, keys, *rest = np.random.get_state()
        own = [[kind, np.asarray(keys).tolist(), *rest], random.getstate()]
        own.append(torch.get_rng_state().tolist() if torch else None)
    first = cluster.agree("the random numbers of `fit`", own)[0]
    if cluster.worker == 0:
        return
    kind, keys, *rest = first[0]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    version, state, gauss = first[1]
    random.setstate((version, tuple(state), gauss))
    if torch and first[2] is not None:
        torch.set_rng_state(torch.tensor(first[2], dtype=torch.uint8))


def _get_data_adapter(
    original: Callable[..., Any],
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: Any = False,
    class_weight: Any = None,
) -> Any:
    if isinstance(x, DistributedDataset):
        raise TypeError(
            "Keras' `fit`, `evaluate` and `predict` divide the batches themselves: pass the "
            f"dataset, and not what `experimental_distribute_dataset` made of it, {x!r}."
        )
    if not isinstance(x, Dataset):
        options = batch_size, steps_per_epoch, shuffle, class_weight
        return original(x, y, sample_weight, *options)
    given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"`{name}` is given beside an `mx.data.Dataset`, whose elements are batches: "
                "`x`, `(x, y)` or `(x, y, sample_weight)`. Make it a part of the dataset."
            )
    return DatasetAdapter(x, class_weight)


class DatasetAdapter(DataAdapter):
    """The batches of an `mx.data.Dataset`, one pass for each epoch."""

    def __init__(self, dataset: Dataset, class_weight: Any) -> None:
        cluster = cluster_of(context.current().strategy)
        if cluster is not None:  # the first worker's seeds, where none were given
            own = describe_steps((dataset.node,))
            adopt((dataset.node,), cluster.agree("a dataset for `fit`", own)[0])
        if class_weight is not None:
            spec = dataset.element_spec
            if not isinstance(spec, tuple) or len(spec) != 2:
                raise ValueError(
                    "`class_weight` needs a dataset with elements `(x, y)`, got elements "
                    f"{spec}. Where they have a weight already, multiply it by that of the "
                    "class in the dataset."
                )
            dataset = dataset.map(
                lambda x, y: (x, y, class_weight_to_sample_weights(y, class_weight))
            )
        self._dataset = dataset
        # Keras looks at a batch before the first epoch. That pass does not count.
        self._is_looking = True
        self._first: Any = None

    def get_jax_iterator(self) -> Iterator[Any]:
        # Keras asks for more iterators than it uses; a pass begins with its first batch.
        iterator = iter(self._dataset)
        try:
            if self._first is not None and not self._is_looking:
                iterator.set_state(self._first)
            self._first = iterator.get_state() if self._is_looking else None
            yield from iterator
        finally:
            iterator.close()

    get_numpy_iterator = get_jax_iterator

    def on_epoch_end(self) -> None:
        self._is_looking = False

    @property
    def num_batches(self) -> int | None:
        count = self._dataset.cardinality()
        return None if count < 0 else count

    @property
    def batch_size(self) -> int | None:
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None
