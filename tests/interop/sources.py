"""The same examples as a dataset of every library.

A `Source` makes the library's dataset of batches, dicts of "x" and "y", out of two columns;
`own` iterates over it as the library's users do, without mirrax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from interop import libraries
from interop.comparing import to_numpy

Columns = dict[str, np.ndarray]


def columns(count: int) -> Columns:
    """Examples whose numbers tell where they belong."""
    x = np.arange(3 * count, dtype=np.float32).reshape(count, 3) / 2
    return {"x": x, "y": np.arange(count, dtype=np.int64)}


def batches(of: Columns, size: int) -> list[Columns]:
    """The columns in batches, by hand."""
    starts = range(0, len(of["y"]), size)
    return [{name: c[i : i + size] for name, c in of.items()} for i in starts]


def rows(of: Columns) -> list[dict[str, Any]]:
    """The columns example by example."""
    count = len(of["y"])
    return [{name: column[i] for name, column in of.items()} for i in range(count)]


@dataclass(frozen=True)
class Source:
    """One kind of dataset.

    Attributes:
        name: What the test is called.
        make: Makes it of columns and a batch size.
        own: What the library itself gives.
        is_sized: Whether the number of batches is known before a pass.
        has_dtypes: Whether the library gives batches the dtypes of the columns; a stream
            of Hugging Face makes doubles of lists of floats.
    """

    name: str
    make: Callable[[Columns, int], Any]
    own: Callable[[Any], Any] = iter
    is_sized: bool = True
    has_dtypes: bool = True

    def elements(self, dataset: Any) -> list[Any]:
        """The elements of one pass by the library itself."""
        return [to_numpy(element) for element in self.own(dataset)]


def _tf_data(of: Columns, size: int) -> Any:
    return libraries.tensorflow().data.Dataset.from_tensor_slices(of).batch(size)


def _grain_map(of: Columns, size: int) -> Any:
    return libraries.grain().MapDataset.source(rows(of)).batch(size)


def _grain_iter(of: Columns, size: int) -> Any:
    return libraries.grain().MapDataset.source(rows(of)).to_iter_dataset().batch(size)


def _grain_loader(of: Columns, size: int) -> Any:
    grain = libraries.grain()
    sampler = grain.IndexSampler(
        len(of["y"]), shard_options=grain.NoSharding(), shuffle=False, num_epochs=1
    )
    return grain.DataLoader(
        data_source=rows(of), sampler=sampler, operations=[grain.Batch(size)]
    )


def _torch(of: Columns, size: int) -> Any:
    loader = libraries.torch().utils.data.DataLoader
    return loader(rows(of), batch_size=size)


def _torch_workers(of: Columns, size: int) -> Any:
    loader = libraries.torch().utils.data.DataLoader
    return loader(rows(of), batch_size=size, num_workers=2)


def _torch_iterable(of: Columns, size: int) -> Any:
    data = libraries.torch().utils.data

    class Stream(data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows(of))

    return data.DataLoader(Stream(), batch_size=size)


def _hugging_face(of: Columns, size: int) -> Any:
    return libraries.hugging_face().Dataset.from_dict(of).batch(size)


def _hugging_face_iterable(of: Columns, size: int) -> Any:
    whole = libraries.hugging_face().Dataset.from_dict(of)
    return whole.to_iterable_dataset(num_shards=3).batch(size)


def _hugging_face_own(dataset: Any) -> Any:
    return iter(dataset.with_format("numpy"))


def _keras(of: Columns, size: int) -> Any:
    made = batches(of, size)

    class Batches(libraries.keras().utils.PyDataset):
        def __len__(self) -> int:
            return len(made)

        def __getitem__(self, index: int) -> Columns:
            return made[index]

    return Batches()


def _keras_own(dataset: Any) -> Any:
    return (dataset[i] for i in range(len(dataset)))


def _generator_function(of: Columns, size: int) -> Any:
    def generate() -> Any:
        yield from batches(of, size)

    return generate


SOURCES = [
    Source("tf.data", _tf_data, lambda dataset: dataset.as_numpy_iterator()),
    Source("grain.MapDataset", _grain_map),
    Source("grain.IterDataset", _grain_iter, is_sized=False),
    Source("grain.DataLoader", _grain_loader, is_sized=False),
    Source("torch.DataLoader", _torch),
    Source("torch.DataLoader(num_workers=2)", _torch_workers),
    Source("torch.DataLoader(IterableDataset)", _torch_iterable, is_sized=False),
    Source("datasets.Dataset", _hugging_face, _hugging_face_own),
    Source(
        "datasets.IterableDataset",
        _hugging_face_iterable,
        _hugging_face_own,
        is_sized=False,
        has_dtypes=False,
    ),
    Source("keras.PyDataset", _keras, _keras_own),
    Source("list", batches),
    Source("function", _generator_function, lambda fn: fn(), is_sized=False),
]
ONE_PASS = Source("iterator", lambda of, size: iter(batches(of, size)), is_sized=False)


def every_source(*more: Source) -> Any:
    """The test with each source in turn, and some that not all tests can use."""
    return pytest.mark.parametrize(
        "source", [*SOURCES, *more], ids=lambda source: source.name
    )
