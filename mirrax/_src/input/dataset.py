"""`Dataset`: the public face of pipelines.

What is done to elements is in methods/; here is where they come from, and what can be asked.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.input import sources
from mirrax._src.input.arguments import integer
from mirrax._src.input.fingerprint import fingerprint
from mirrax._src.input.iterators import Iterator as DatasetIterator
from mirrax._src.input.iterators import Passes
from mirrax._src.input.methods.base import merged_options
from mirrax._src.input.methods.batches import Batches
from mirrax._src.input.methods.elements import Elements, with_choices
from mirrax._src.input.methods.keeping import Keeping, load
from mirrax._src.input.methods.order import Order
from mirrax._src.input.node import INFINITE, UNKNOWN, Node, rebuild
from mirrax._src.input.options import Options
from mirrax._src.input.structure import (
    PyTree,
    TensorSpec,
    holds_datasets,
    leaves_of,
    map_leaves,
)
from mirrax._src.input.transforms import selecting
from mirrax._src.input.transforms.choosing import Choose, Lots, usable_weights
from mirrax._src.input.transforms.nesting import draw_entropy
from mirrax._src.input.transforms.pairing import Zip
from mirrax._src.input.transforms.windows import datasets_in

INFINITE_CARDINALITY = INFINITE
UNKNOWN_CARDINALITY = UNKNOWN


@all_brief
@hides("node")
class Dataset(Elements, Batches, Order, Keeping):
    """A pipeline of elements: where they come from and what is done to them.

    >>> dataset = mx.data.Dataset.range(6).map(lambda x: x * x).batch(4)
    >>> for batch in dataset:
    ...     print(batch)
    [0 1 4 9]
    [16 25]

    Elements are NumPy arrays, or tuples, dicts and other structures of them. Methods return
    new datasets; nothing is read before a dataset is iterated over. What lies in memory is
    worked on by index, many rows at a time.
    """

    __module__ = "mirrax.data"

    def __init__(self, node: Node, options: Options | None = None) -> None:
        if not isinstance(node, Node):
            raise TypeError(
                "A Dataset is made by `Dataset.from_tensor_slices` and the like, or by "
                f"`mx.data.as_dataset`, not of {type(node).__name__}."
            )
        self.node = node
        self._options = options or Options()
        self._passes = Passes()

    # Sources -------------------------------------------------------------------------

    @staticmethod
    def from_tensor_slices(tensors: PyTree, name: str | None = None) -> Dataset:
        """The rows of one or several arrays.

        >>> list(mx.data.Dataset.from_tensor_slices(([1, 2], ["a", "b"])))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]

        The arrays are not copied: do not change them while the dataset is used.
        """
        datasets = datasets_in(tensors, wrap_list=True)
        return Dataset(datasets or sources.slices(tensors))

    @staticmethod
    def from_tensors(tensors: PyTree, name: str | None = None) -> Dataset:
        """A dataset of one element: `tensors`.

        >>> list(mx.data.Dataset.from_tensors([1, 2]))
        [array([1, 2], dtype=int32)]
        """
        datasets = datasets_in(tensors, wrap_list=False)
        return Dataset(datasets or sources.single(tensors))

    @staticmethod
    def range(
        *args: int, output_type: Any = np.int64, name: str | None = None
    ) -> Dataset:
        """The numbers of Python's `range` with these arguments.

        >>> list(mx.data.Dataset.range(1, 6, 2).as_numpy_iterator())
        [np.int64(1), np.int64(3), np.int64(5)]
        """
        if not 1 <= len(args) <= 3:
            raise ValueError(f"`range` takes 1 to 3 numbers, got {len(args)}: {args}.")
        numbers = range(*(integer(arg, "range") for arg in args))
        dtype = TensorSpec((), output_type).dtype
        return Dataset(sources.Range(numbers.start, numbers.stop, numbers.step, dtype))

    @staticmethod
    def counter(
        start: Any = 0, step: Any = 1, dtype: Any = np.int64, name: str | None = None
    ) -> Dataset:
        """Numbers from `start` on, `step` apart, without an end.

        >>> list(mx.data.Dataset.counter(5, -2).take(3))
        [np.int64(5), np.int64(3), np.int64(1)]
        """
        kind = TensorSpec((), dtype).dtype
        if kind.kind in "iu":
            start, step = integer(start, "start"), integer(step, "step")
        return Dataset(sources.Counter(start, step, kind))

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Random int64 numbers from 0 to 2**32 - 1, without an end.

        >>> numbers = mx.data.Dataset.random(seed=4).take(10)
        >>> list(numbers) == list(numbers)
        True

        Args:
            seed: With the same seed a program meets the same numbers again.
            rerandomize_each_iteration: Whether every pass has other numbers (None: no).
            name: Unused, as in TensorFlow's eager mode.
        """
        seed = None if seed is None else integer(seed, "seed")
        anew = bool(rerandomize_each_iteration)
        return Dataset(sources.Random(seed, anew, draw_entropy()))

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: PyTree = None,
        output_shapes: PyTree = None,
        args: Sequence[Any] | None = None,
        output_signature: PyTree = None,
        name: str | None = None,
    ) -> Dataset:
        """What the iterators give that `generator` returns, a new one for each pass.

        >>> def count(n):
        ...     yield from range(n)
        >>> dataset = mx.data.Dataset.from_generator(
        ...     count, args=(3,), output_signature=mx.TensorSpec((), "int32"))
        >>> list(dataset)
        [np.int32(0), np.int32(1), np.int32(2)]

        Args:
            generator: A function that returns an iterable.
            output_types: The older way to describe elements: dtypes, and
            output_shapes: their shapes.
            args: Arguments for `generator`.
            output_signature: A structure of `mx.TensorSpec`; elements are checked and
                converted. Without a description they are taken as they come.
            name: Unused, as in TensorFlow's eager mode.
        """
        if not callable(generator):
            raise TypeError(
                f"`from_generator` needs a function that returns an iterator, got {generator!r}."
            )
        if output_signature is not None and output_types is not None:
            raise TypeError(
                "Give either `output_signature` or `output_types`, not both; got "
                f"{output_signature!r} and {output_types!r}."
            )
        if output_types is None and output_shapes is not None:
            raise TypeError(
                f"`output_shapes` needs `output_types`, too; got {output_shapes!r} alone."
            )
        if output_types is not None:
            types, tree = jax.tree.flatten(output_types)
            shapes = (
                [None] * len(types)
                if output_shapes is None
                else tree.flatten_up_to(output_shapes)
            )
            output_signature = jax.tree.unflatten(
                tree, [TensorSpec(s, t) for s, t in zip(shapes, types)]
            )
        given = tuple(args or ())
        label = f"from_generator({getattr(generator, '__name__', 'generator')})"
        return Dataset(
            sources.Generator(lambda: generator(*given), output_signature, label)
        )

    @staticmethod
    def list_files(
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The names of the files that match one or several glob patterns, as bytes.

        Args:
            file_pattern: The pattern, a string or a path, or a list of patterns.
            shuffle: Whether the order is random; if so (None), anew in every pass.
            seed: The seed of that order.
            name: Unused, as in TensorFlow's eager mode.

        Raises:
            FileNotFoundError: If no file matches.
        """
        single = isinstance(file_pattern, str | bytes | os.PathLike)
        patterns = [file_pattern] if single else list(file_pattern)  # type: ignore[arg-type]
        names = sorted(f for p in patterns for f in glob.glob(os.fsdecode(p)))
        if not names:
            raise FileNotFoundError(
                f"No file matches {', '.join(map(repr, patterns))}"
                f" (looked in {os.getcwd()})."
            )
        files = Dataset(sources.slices(names, "list_files"))
        is_random = shuffle is None or shuffle
        return files.shuffle(len(names), seed=seed) if is_random else files

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        element_spec: PyTree = None,
        compression: str | None = None,
        reader_func: Callable[..., Any] | None = None,
        wait: bool = False,
    ) -> Dataset:
        """The elements that `save` has written into a directory.

        >>> path = tempfile.mkdtemp() + "/numbers"
        >>> mx.data.Dataset.range(5).save(path, shard_func=lambda x: x % 2)
        >>> list(mx.data.Dataset.load(path).as_numpy_iterator())
        [np.int64(0), np.int64(1), np.int64(2), np.int64(3), np.int64(4)]

        Reading runs no code, whoever wrote the files, and finds damage by checksums.

        Args:
            path: The directory.
            element_spec: What the elements are expected to be; known if not given.
            compression: Known if not given.
            reader_func: Makes the dataset of a dataset of the shards' datasets; their
                elements take turns if it is not given.
            wait: Whether to wait until a dataset is there.

        Raises:
            FileNotFoundError: If no dataset is saved there.
            mx.errors.DataLossError: If a file is damaged; during a pass too.
        """
        return load(Dataset, path, element_spec, compression, reader_func, wait)

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Elements of several datasets side by side, until the shortest ends.

        >>> a, b = mx.data.Dataset.range(3), mx.data.Dataset.range(5, 9)
        >>> list(mx.data.Dataset.zip(a, b))
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6)), (np.int64(2), np.int64(7))]

        Args:
            args: Datasets, or one structure of them.
            datasets: The same as a named argument.
            name: Unused, as in TensorFlow's eager mode.
        """
        given = datasets if datasets is not None else args
        if datasets is None and len(args) == 1:
            given = args[0]
        parts = leaves_of(given)
        if not parts or not all(isinstance(part, Dataset) for part in parts):
            raise TypeError(
                f"`zip` takes datasets, or a tuple or dict of datasets, got {given!r}."
            )

        def pack(elements: Sequence[Any]) -> PyTree:
            left = iter(elements)
            return map_leaves(lambda part: next(left), given)

        is_plain = type(given) is tuple and len(given) == len(parts)
        return Dataset(
            Zip(tuple(p.node for p in parts), None if is_plain else pack),
            merged_options(parts),
        )

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Elements of several datasets, by the numbers that `choice_dataset` gives.

        >>> a, b = mx.data.Dataset.range(3), mx.data.Dataset.range(10, 13)
        >>> choices = mx.data.Dataset.from_tensor_slices(np.int64([0, 1, 1, 0]))
        >>> list(mx.data.Dataset.choose_from_datasets([a, b], choices))
        [np.int64(0), np.int64(10), np.int64(11), np.int64(1)]

        Args:
            datasets: The datasets.
            choice_dataset: The number of the dataset that gives the next element, as int64.
            stop_on_empty_dataset: Whether the first choice of a dataset that has ended is the
                end; otherwise it is passed over.
        """
        parts = _alike(datasets, "choose_from_datasets")
        if not isinstance(choice_dataset, Dataset):
            raise TypeError(f"`choice_dataset` is a dataset, got {choice_dataset!r}.")
        outline = choice_dataset.node.outline()
        if outline is not None and outline != TensorSpec((), "int64"):
            raise TypeError(
                f"`choice_dataset` must give int64 numbers, and its elements are {outline}."
            )
        stops, label = bool(stop_on_empty_dataset), "choose_from_datasets"
        choose = Choose(choice_dataset.node, parts, stops, label)
        return Dataset(choose, merged_options([choice_dataset, *datasets]))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Elements of several datasets, each of one that is drawn by lot.

        >>> a, b = mx.data.Dataset.range(50), mx.data.Dataset.range(100, 150)
        >>> mixed = mx.data.Dataset.sample_from_datasets([a, b], [0.7, 0.3], seed=1)
        >>> sorted(mixed) == [*range(50), *range(100, 150)]
        True

        Args:
            datasets: The datasets.
            weights: How often each is drawn, or a dataset that tells for every draw; equally
                often if not given.
            seed: With the same seed a program draws the same again.
            stop_on_empty_dataset: Whether the end of a dataset is the end of all, which keeps
                the mixture to the end; otherwise the others go on.
            rerandomize_each_iteration: Whether every pass draws anew (None: no).
        """
        label = "sample_from_datasets"
        parts = _alike(datasets, label)
        options = merged_options(datasets)
        chances: Any = (1.0,) * len(parts)
        if isinstance(weights, Dataset):
            chances = weights.node
        elif weights is not None:
            given = usable_weights(weights, len(parts))
            used = [(p, w) for p, w in zip(parts, given) if w > 0]
            if not used:
                return datasets[0].take(0)
            parts, chances = zip(*used)
        if len(parts) == 1 and not isinstance(weights, Dataset):
            return Dataset(parts[0], options)
        seed = None if seed is None else integer(seed, "seed")
        anew = bool(rerandomize_each_iteration)
        lots = Lots(chances, len(parts), seed, anew, draw_entropy())
        return Dataset(Choose(lots, parts, bool(stop_on_empty_dataset), label), options)

    # Options -----------------------------------------------------------------------------

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """The same dataset with these options; those that were not set stay as they are."""
        if not isinstance(options, Options):
            raise TypeError(f"`with_options` takes `mx.data.Options`, got {options!r}.")
        merged = self._options.merge(options)
        return Dataset(rebuild(self.node, lambda n: with_choices(n, merged)), merged)

    def options(self) -> Options:
        """The options that were given to this dataset or one it is made of."""
        return self._options

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """`transformation_func(self)`, so that functions of datasets can be chained."""
        result = transformation_func(self)
        if not isinstance(result, Dataset):
            raise TypeError(
                f"`apply` needs a function that returns a dataset, got {result!r}."
            )
        return result

    # Asking ------------------------------------------------------------------------------

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of an element, as `mx.TensorSpec`s.

        >>> mx.data.Dataset.range(5).batch(2).element_spec
        TensorSpec(shape=(None,), dtype=int64)

        What a `map` or a generator without a signature gives is found out by looking at
        its first element.
        """
        return self.node.spec()

    def cardinality(self, name: str | None = None) -> int:
        """The number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return self.node.cardinality()

    def __len__(self) -> int:
        size = self.node.cardinality()
        if size < 0:
            kind = "infinite" if size == INFINITE else "unknown"
            raise TypeError(
                f"The length of this dataset is {kind}; `cardinality()` says so without an error."
            )
        return size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self.node, self._passes)

    def as_numpy_iterator(self) -> Iterator[PyTree]:
        """The elements; they are NumPy arrays anyway.

        Raises:
            TypeError: If elements hold datasets.
        """
        outline = self.node.outline()
        if outline is not None and holds_datasets(outline):
            raise TypeError(
                f"`as_numpy_iterator` gives arrays, and these elements hold datasets: {outline}. "
                "Iterate over the dataset itself."
            )
        return iter(self)

    def get_single_element(self, name: str | None = None) -> PyTree:
        """The one element of a dataset that has no others.

        >>> mx.data.Dataset.range(3).batch(3).get_single_element()
        array([0, 1, 2])

        Raises:
            ValueError: If there is none, or more than one.
        """
        with contextlib.closing(iter(self)) as iterator:
            found = list(itertools.islice(iterator, 2))
        if len(found) != 1:
            has = "more than one" if found else "none"
            raise ValueError(
                f"`get_single_element` needs a dataset of one element, and this one has {has}."
            )
        return found[0]

    def fingerprint(self) -> np.uint64:
        """A number that is the same for datasets of the same steps over the same data.

        >>> a, b = mx.data.Dataset.range(3), mx.data.Dataset.range(4)
        >>> a.fingerprint() == mx.data.Dataset.range(3).fingerprint()
        np.True_
        >>> a.fingerprint() == b.fingerprint()
        np.False_

        Functions count with their code, what they refer to, and arrays; of other objects
        only the class counts.
        """
        return np.uint64(fingerprint(self.node))

    def __repr__(self) -> str:
        size = {INFINITE: "infinite", UNKNOWN: "unknown"}.get(self.cardinality())
        return f"<mx.data.Dataset {self.node.describe()}, length {size or self.cardinality()}>"


Dataset._wrap = Dataset
for _part in (Elements, Batches, Order, Keeping):
    for _name, _method in vars(_part).items():
        if callable(_method):  # Python's own messages name it
            _method.__qualname__ = f"Dataset.{_name}"


def _alike(datasets: Any, what: str) -> tuple[Node, ...]:
    """The last steps of datasets whose elements are alike."""
    if not isinstance(datasets, list | tuple) or not datasets:
        raise ValueError(f"`{what}` takes a list of datasets, got {datasets!r}.")
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise TypeError(f"`{what}` takes datasets, got {dataset!r}.")
    outlines = [dataset.node.outline() for dataset in datasets]
    known = [outline for outline in outlines if outline is not None]
    for outline in known[1:]:
        selecting.check_alike(known[0], outline, "The elements of all datasets")
    return tuple(dataset.node for dataset in datasets)
