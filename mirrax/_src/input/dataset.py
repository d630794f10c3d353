"""`Dataset`: the public face of pipelines."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mirrax._src.input import sources
from mirrax._src.input.arguments import (
    check_arguments,
    checked_calls,
    integer,
    positive,
)
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.iterators import Iterator as DatasetIterator
from mirrax._src.input.iterators import Passes
from mirrax._src.input.node import INFINITE, UNKNOWN, Node, rebuild
from mirrax._src.input.options import AUTOTUNE, SHARD_HINT, Options
from mirrax._src.input.structure import (
    PyTree,
    TensorSpec,
    leaves_of,
    map_leaves,
    spec_of,
    to_element,
)
from mirrax._src.input.transforms import batching, selecting
from mirrax._src.input.transforms.buffering import Cache, Prefetch
from mirrax._src.input.transforms.elementwise import Filter, Map
from mirrax._src.input.transforms.nesting import Interleave, draw_entropy
from mirrax._src.input.transforms.parallel import num_calls
from mirrax._src.input.transforms.shuffling import Shuffle

INFINITE_CARDINALITY = INFINITE
UNKNOWN_CARDINALITY = UNKNOWN


class Dataset:
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
                "A Dataset is made by `Dataset.from_tensor_slices` and its kin, or by "
                f"`mx.data.as_dataset`, not of {type(node).__name__}."
            )
        self.node = node
        self._options = options or Options()
        self._passes = Passes()

    def _then(self, node: Node) -> Dataset:
        return Dataset(node, self._options)

    # Sources -------------------------------------------------------------------------

    @staticmethod
    def from_tensor_slices(tensors: PyTree, name: str | None = None) -> Dataset:
        """The rows of one or several arrays.

        >>> list(mx.data.Dataset.from_tensor_slices(([1, 2], ["a", "b"])))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]

        The arrays are not copied: do not change them while the dataset is used.
        """
        return Dataset(sources.slices(tensors))

    @staticmethod
    def from_tensors(tensors: PyTree, name: str | None = None) -> Dataset:
        """A dataset of one element: `tensors`."""
        return Dataset(sources.single(tensors))

    @staticmethod
    def range(
        *args: int, output_type: Any = np.int64, name: str | None = None
    ) -> Dataset:
        """The numbers of Python's `range` with these arguments.

        >>> list(mx.data.Dataset.range(1, 6, 2).as_numpy_iterator())
        [np.int64(1), np.int64(3), np.int64(5)]
        """
        numbers = range(*(integer(arg, "range") for arg in args))
        dtype = TensorSpec((), output_type).dtype
        return Dataset(sources.Range(numbers.start, numbers.stop, numbers.step, dtype))

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
                "Give either `output_signature` or `output_types`, not both."
            )
        if output_types is None and output_shapes is not None:
            raise TypeError("`output_shapes` needs `output_types` beside it.")
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
        options = parts[0].options()
        return Dataset(
            selecting.Zip(tuple(p.node for p in parts), None if is_plain else pack),
            options,
        )

    # Elements ------------------------------------------------------------------------

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        name: str | None = None,
        *,
        workers: str = "threads",
    ) -> Dataset:
        """`map_func` of each element.

        >>> pairs = mx.data.Dataset.from_tensor_slices(([1, 2], [10, 20]))
        >>> list(pairs.map(lambda x, y: x + y))
        [np.int32(11), np.int32(22)]

        The parts of a tuple are separate arguments. A function of NumPy's element-wise
        operations that uses nothing else is called with many rows at once.

        Args:
            map_func: The function. It gets NumPy arrays and may return arrays, JAX's too.
            num_parallel_calls: How many calls at a time; `AUTOTUNE` for as many as the
                machine has cores. None: one after the other.
            deterministic: Whether parallel results keep the order of the elements.
            synchronous: True is the same as `num_parallel_calls=None`.
            name: Unused, as in TensorFlow's eager mode.
            workers: "threads", or "processes" for functions that keep Python busy; as many
                as the machine has cores if `num_parallel_calls` does not say.
        """
        if not callable(map_func):
            raise TypeError(f"`map` needs a function, got {map_func!r}.")
        if workers not in ("threads", "processes"):
            raise ValueError(
                f'`workers` must be "threads" or "processes", got {workers!r}.'
            )
        if synchronous and num_parallel_calls is not None:
            raise ValueError(
                "`synchronous=True` and `num_parallel_calls` exclude each other."
            )
        calls = checked_calls(num_parallel_calls)
        if calls is None and workers == "processes":
            calls = AUTOTUNE
        check_arguments(map_func, self.node, "map")
        step = Map(self.node, ElementFn(map_func, "map"), calls, deterministic, workers)
        return self._then(_with_options(step, self._options) or step)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements for which `predicate` returns true.

        >>> list(mx.data.Dataset.range(6).filter(lambda x: x % 3 == 0))
        [np.int64(0), np.int64(3)]
        """
        if not callable(predicate):
            raise TypeError(f"`filter` needs a function, got {predicate!r}.")
        check_arguments(predicate, self.node, "filter")
        return self._then(Filter(self.node, ElementFn(predicate, "filter")))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs of a number, from `start` on, and an element."""
        return self._then(selecting.Enumerate(self.node, integer(start, "start")))

    def flat_map(
        self, map_func: Callable[..., Any], name: str | None = None
    ) -> Dataset:
        """The elements of the datasets that `map_func` makes of each element, in order.

        >>> list(mx.data.Dataset.range(3).flat_map(mx.data.Dataset.range))
        [np.int64(0), np.int64(0), np.int64(1)]
        """
        return self._interleaved(map_func, "flat_map", 1, 1, 0)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """As `flat_map`, with elements of several datasets in turn.

        Args:
            map_func: Makes a dataset of an element, for example of a file's name.
            cycle_length: How many datasets take turns; as many as the machine has cores
                if it is not given.
            block_length: The elements that a dataset gives in its turn.
            num_parallel_calls: With any number each dataset is read ahead in a thread.
            deterministic: Accepted; the order is always that of the turns.
            name: Unused, as in TensorFlow's eager mode.
        """
        calls = checked_calls(num_parallel_calls)
        cycle = AUTOTUNE if cycle_length is None else cycle_length
        if cycle == AUTOTUNE:
            cycle = num_calls(calls or AUTOTUNE)
        block = 1 if block_length is None else block_length
        if cycle < 1 or block < 1:
            raise ValueError(
                "`cycle_length` and `block_length` must be positive, got "
                f"{cycle_length} and {block_length}."
            )
        if calls is not None and calls > cycle:
            raise ValueError(
                f"`num_parallel_calls` ({calls}) cannot exceed `cycle_length` ({cycle})."
            )
        ahead = 0 if calls is None else max(2, block)
        return self._interleaved(map_func, "interleave", cycle, block, ahead)

    def _interleaved(
        self,
        map_func: Callable[..., Any],
        label: str,
        cycle: int,
        block: int,
        ahead: int,
    ) -> Dataset:
        if not callable(map_func):
            raise TypeError(f"`{label}` needs a function, got {map_func!r}.")
        check_arguments(map_func, self.node, label)
        fn = ElementFn(map_func, label)
        return self._then(
            Interleave(
                self.node, fn, _node_of, cycle, block, ahead, draw_entropy(), label
            )
        )

    # Batches -------------------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """`batch_size` elements in one, along a new first axis.

        >>> list(mx.data.Dataset.range(5).batch(2))
        [array([0, 1]), array([2, 3]), array([4])]

        Args:
            batch_size: The elements in a batch.
            drop_remainder: Whether a last batch that is not full is left out.
            num_parallel_calls: Accepted; batches are made of many rows at once anyway.
            deterministic: Accepted; the order is always that of the elements.
            name: Unused, as in TensorFlow's eager mode.
        """
        size = positive(batch_size, "batch_size")
        is_parallel = checked_calls(num_parallel_calls) is not None
        return self._then(
            batching.Batch(self.node, size, bool(drop_remainder), is_parallel)
        )

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: PyTree = None,
        padding_values: PyTree = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """As `batch`, of elements whose lengths differ: shorter ones are filled up.

        >>> list(mx.data.Dataset.range(1, 4).map(lambda n: np.full(n, n)).padded_batch(3))
        [array([[1, 0, 0],
               [2, 2, 0],
               [3, 3, 3]])]

        Args:
            batch_size: The elements in a batch.
            padded_shapes: The shapes to fill up to; None for a length, or for all, stands
                for the longest in the batch.
            padding_values: What to fill up with; zero or the empty string if not given.
            drop_remainder: Whether a last batch that is not full is left out.
            name: Unused, as in TensorFlow's eager mode.
        """
        size = positive(batch_size, "batch_size")
        return self._then(
            batching.PaddedBatch(
                self.node, size, padded_shapes, padding_values, bool(drop_remainder)
            )
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """The rows of each element: takes batches apart."""
        return self._then(batching.Unbatch(self.node))

    # Order and number ------------------------------------------------------------------

    def shuffle(
        self,
        buffer_size: int | None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements in a random order.

        A buffer holds the next `buffer_size` elements, one of which is drawn at a time; for
        a perfect shuffle it must hold all of them (None: all, whatever their number).

        Args:
            buffer_size: The size of the buffer.
            seed: With the same seed a program meets the same orders again.
            reshuffle_each_iteration: Whether every pass has another order (None: yes).
            name: Unused, as in TensorFlow's eager mode.
        """
        if buffer_size is not None and buffer_size != UNKNOWN:
            buffer_size = positive(buffer_size, "buffer_size")
        else:
            buffer_size = None
        if seed is not None:
            seed = integer(seed, "seed")
        return self._then(
            Shuffle(
                self.node,
                buffer_size,
                seed,
                reshuffle_each_iteration is not False,
                draw_entropy(),
            )
        )

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """The elements `count` times; for ever if it is None or -1."""
        return self._then(
            selecting.Repeat(
                self.node, -1 if count is None else integer(count, "count")
            )
        )

    def take(self, count: int, name: str | None = None) -> Dataset:
        """The first `count` elements; all if it is -1."""
        return self._then(selecting.Take(self.node, integer(count, "count")))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """All but the first `count` elements; none if it is -1."""
        return self._then(selecting.Skip(self.node, integer(count, "count")))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Every `num_shards`-th element, from number `index` on.

        >>> list(mx.data.Dataset.range(7).shard(3, 1))
        [np.int64(1), np.int64(4)]
        """
        num_shards = integer(num_shards, "num_shards")
        index = integer(index, "index")
        if num_shards == SHARD_HINT:
            return self._then(selecting.ShardHint(self.node))
        if num_shards < 1:
            raise ValueError(f"`num_shards` must be positive, got {num_shards}.")
        if not 0 <= index < num_shards:
            raise ValueError(
                f"`index` must be from 0 to {num_shards - 1} for {num_shards} shards, got "
                f"{index}."
            )
        return self._then(selecting.Shard(self.node, num_shards, index))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """The elements of this dataset, then those of `dataset`.

        Raises:
            TypeError: If their elements differ in structure or dtype.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"`concatenate` takes a dataset, got {dataset!r}.")
        mine, other = self.node.outline(), dataset.node.outline()
        if mine is not None and other is not None:
            selecting.check_alike(mine, other)
        return self._then(selecting.Concatenate((self.node, dataset.node)))

    # Buffers ---------------------------------------------------------------------------

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """The elements of the first whole pass, kept in memory or in a file.

        Args:
            filename: The file; it is read by later programs too. Empty: in memory.
            name: Unused, as in TensorFlow's eager mode.
        """
        return self._then(Cache(self.node, os.fspath(filename)))

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """The same elements, up to `buffer_size` of them made ahead in a thread.

        Args:
            buffer_size: How many; `AUTOTUNE` is 2, 0 is none.
            name: Unused, as in TensorFlow's eager mode.
        """
        buffer_size = integer(buffer_size, "buffer_size")
        if buffer_size < 0 and buffer_size != AUTOTUNE:
            raise ValueError(f"`buffer_size` cannot be negative, got {buffer_size}.")
        size = 2 if buffer_size == AUTOTUNE else buffer_size
        return self._then(Prefetch(self.node, size))

    # Options -----------------------------------------------------------------------------

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """The same dataset with these options."""
        if not isinstance(options, Options):
            raise TypeError(f"`with_options` takes `mx.data.Options`, got {options!r}.")
        return Dataset(rebuild(self.node, lambda n: _with_options(n, options)), options)

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
                f"The length of this dataset is {kind}; `cardinality()` tells so too."
            )
        return size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self.node, self._passes)

    def as_numpy_iterator(self) -> Iterator[PyTree]:
        """The elements; they are NumPy arrays anyway."""
        return iter(self)

    def reduce(
        self,
        initial_state: PyTree,
        reduce_func: Callable[..., Any],
        name: str | None = None,
    ) -> PyTree:
        """`reduce_func(state, element)` over all elements, from `initial_state` on.

        >>> mx.data.Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x)
        np.int64(10)
        """
        state = to_element(initial_state)
        spec = spec_of(state)
        for element in self:
            state = to_element(reduce_func(state, element))
            selecting.check_alike(spec, spec_of(state), "The state of `reduce`")
        return state

    def __repr__(self) -> str:
        size = {INFINITE: "infinite", UNKNOWN: "unknown"}.get(self.cardinality())
        return f"<mx.data.Dataset {self.node.describe()}, length {size or self.cardinality()}>"


def _with_options(step: Node, options: Options) -> Node | None:
    """A step that leaves a choice to the options, with the choice made."""
    if not isinstance(step, Map):
        return None
    calls, in_order = step.num_parallel_calls, step.deterministic
    if calls == AUTOTUNE:
        calls = options.threading.private_threadpool_size or calls
    if in_order is None:
        in_order = options.deterministic
    if (calls, in_order) == (step.num_parallel_calls, step.deterministic):
        return None
    step = dataclasses.replace(step, num_parallel_calls=calls, deterministic=in_order)
    return dataclasses.replace(
        step, input=rebuild(step.input, lambda n: _with_options(n, options))
    )


def _node_of(result: Any, what: str) -> Node:
    if not isinstance(result, Dataset):
        raise TypeError(
            f"The function of `{what}` must return a dataset, got {type(result).__name__}."
        )
    return result.node
