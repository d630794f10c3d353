"""Where elements come from: arrays in memory, numbers, generators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mirrax._src.base.structures import opened
from mirrax._src.input.blocks import Arrays, Block, Numbers
from mirrax._src.input.node import (
    INFINITE,
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    merge_specs,
    node,
)
from mirrax._src.input.structure import (
    STRING,
    PyTree,
    StructureError,
    TensorSpec,
    dtype_of,
    leaves_of,
    map_leaves,
    own,
    show,
    spec_of,
    to_array,
    to_element,
    without_axis,
)


@node
class Slices(Node):
    """The rows of arrays; also one element alone, as the only row."""

    arrays: PyTree
    length: int
    label: str

    def whole(self, path: Path) -> Block:
        return Block(Arrays(self.arrays), range(self.length))

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        return without_axis(spec_of(self.arrays))

    def batch_size(self) -> int | None:
        return static_rows(self.spec())

    def describe(self) -> str:
        return self.label


def static_rows(spec: PyTree) -> int | None:
    """The length of the first axis if it is known and the same for all leaves."""
    lengths = {s.shape[0] if s.shape else None for s in leaves_of(spec)}
    return lengths.pop() if len(lengths) == 1 else None


def static_rows_of(step: Node) -> int | None:
    """The rows of every element, if its spec says so."""
    try:
        return static_rows(step.spec())
    except Exception:  # the pass itself will raise it, at its place
        return None


def slices(tensors: PyTree, label: str = "from_tensor_slices") -> Slices:
    """The rows of all arrays in `tensors`, which must be equally many."""
    arrays = map_leaves(lambda leaf: protected(np.asarray(to_array(leaf))), tensors)
    leaves = leaves_of(arrays)
    if not leaves:
        raise ValueError(
            f"`from_tensor_slices` needs at least one array, got {tensors!r}."
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(opened(arrays))
    for path, array in flat:
        if not array.ndim:
            raise ValueError(
                "`from_tensor_slices` splits arrays along their first axis, and "
                f"{jax.tree_util.keystr(path) or 'the argument'} has none: it is a single "
                f"{array.dtype.name}. Use `from_tensors` for one whole element."
            )
    lengths = {jax.tree_util.keystr(path): len(array) for path, array in flat}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ValueError(
            f"The arrays of `from_tensor_slices` must be equally long, got {shown}."
        )
    return Slices(arrays, len(leaves[0]), label)


def protected(array: np.ndarray) -> np.ndarray:
    """The array in C order, seen read-only: what users get must not change the data."""
    view = np.ascontiguousarray(array).view() if array.ndim else array.view()
    view.flags.writeable = False
    return view


def single(tensors: PyTree) -> Slices:
    """The one element `tensors`."""
    element = map_leaves(to_array, tensors)
    return Slices(map_leaves(_as_only_row, element), 1, "from_tensors")


def _as_only_row(leaf: Any) -> np.ndarray:
    if isinstance(leaf, bytes):
        row = np.empty(1, object)
        row[0] = leaf
        return row
    return protected(np.asarray(leaf)[None])


@node
class Range(Node):
    """Numbers from `start` on, `step` apart."""

    start: int
    stop: int
    step: int
    dtype: np.dtype

    def whole(self, path: Path) -> Block:
        return Block(
            Numbers(self.start, self.step, self.dtype), range(self.cardinality())
        )

    def cardinality(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def spec(self) -> PyTree:
        return TensorSpec((), self.dtype)

    def describe(self) -> str:
        return f"range({self.start}, {self.stop}, {self.step})"


@node
class Counter(Node):
    """Numbers from `start` on, `step` apart, without an end."""

    start: Any
    step: Any
    dtype: np.dtype

    def open(self, path: Path, state: State = None) -> Cursor:
        return _CounterCursor(self, state or 0)

    def cardinality(self) -> int:
        return INFINITE

    def spec(self) -> PyTree:
        return TensorSpec((), self.dtype)

    def describe(self) -> str:
        return f"counter({self.start}, {self.step})"


class _CounterCursor(Cursor):
    def __init__(self, counter: Counter, position: int) -> None:
        self._table = Numbers(counter.start, counter.step, counter.dtype)
        self._position = position

    def __next__(self) -> Any:
        self._position += 1
        return self._table.row(self._position - 1)

    def next_block(self, count: int) -> Block:
        start, self._position = self._position, self._position + count
        return Block(self._table, range(start, self._position))

    def skip(self, count: int) -> None:
        self._position += count

    def state(self) -> int:
        return self._position


_RANDOM_AT_ONCE = 1024


@node
class Random(Node):
    """Random numbers below 2**32, without an end."""

    seed: int | None
    rerandomize: bool
    entropy: int

    def open(self, path: Path, state: State = None) -> Cursor:
        key = seed_key(self.seed, self.entropy, path if self.rerandomize else ())
        return _RandomCursor(key, state or 0)

    def cardinality(self) -> int:
        return INFINITE

    def spec(self) -> PyTree:
        return TensorSpec((), "int64")

    def describe(self) -> str:
        return "random()" if self.seed is None else f"random(seed={self.seed})"


class _RandomCursor(Cursor):
    """Number k depends on the key and k alone, so that a state is k."""

    def __init__(self, key: list[int], position: int) -> None:
        self._key, self._position = key, position
        self._chunk, self._numbers = -1, np.empty(0, np.int64)

    def __next__(self) -> np.int64:
        chunk, place = divmod(self._position, _RANDOM_AT_ONCE)
        if chunk != self._chunk:
            numbers = np.random.default_rng([*self._key, chunk])
            self._numbers = numbers.integers(2**32, size=_RANDOM_AT_ONCE)
            self._chunk = chunk
        self._position += 1
        return self._numbers[place]

    def skip(self, count: int) -> None:
        self._position += count

    def state(self) -> int:
        return self._position


def seed_key(seed: int | None, entropy: int, path: Path) -> list[int]:
    """What random numbers depend on: the seed, or what was drawn in its place, and a path."""
    drawn = [entropy, 0] if seed is None else [seed & (2**64 - 1), 1]
    return [*drawn, *path]


@node
class Generator(Node):
    """What the iterator gives that `make` returns.

    Its state is the number of elements, which are passed over when a state is restored.
    """

    make: Callable[[], Any]
    signature: PyTree | None
    label: str = "from_generator"
    length: int = UNKNOWN

    @property
    def is_described(self) -> bool:
        return self.signature is not None

    def open(self, path: Path, state: State = None) -> Cursor:
        return _GeneratorCursor(self, state or 0)

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        return spec_of_first(self) if self.signature is None else self.signature

    def batch_size(self) -> int | None:
        return None if self.signature is None else static_rows(self.signature)

    def describe(self) -> str:
        return self.label


class _GeneratorCursor(Cursor):
    def __init__(self, source: Generator, count: int) -> None:
        self._source = source
        self._iterator: Iterator[Any] = iter(source.make())
        self._count = 0
        self.skip(count)

    def __next__(self) -> Any:
        element = next(self._iterator)
        if self._source.signature is not None:
            element = _fit(element, self._source.signature, self._count)
        else:
            element = to_element(element)
        self._count += 1
        # The generator may use its arrays again for the next element.
        return map_leaves(own, element)

    def state(self) -> int:
        return self._count

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            try:
                close()
            except ValueError:  # it runs at this moment, in a thread that ends after it
                pass


def _fit(element: PyTree, signature: PyTree, number: int) -> PyTree:
    """The element as the signature has it."""
    try:
        return map_leaves(
            lambda spec, part: _fit_leaf(part, spec, number), signature, element
        )
    except StructureError:
        raise TypeError(
            f"Element {number} of the generator does not have the structure of "
            f"`output_signature`: expected {signature}, got {element!r}."
        ) from None


def _fit_leaf(part: Any, spec: TensorSpec, number: int) -> Any:
    array = to_array(part)
    is_text = dtype_of(array) == STRING
    if is_text == (spec.dtype == STRING):
        if not is_text and dtype_of(array) != spec.dtype:
            array = np.asarray(part).astype(spec.dtype)[()]
        if spec.is_compatible_with(array):
            return array
    raise TypeError(
        f"Element {number} of the generator holds {show(array)} where `output_signature` says "
        f"{spec}."
    )


def spec_of_first(source: Node) -> PyTree:
    """The specs that describe the first two elements of a source."""
    cursor = source.open((0,))
    try:
        found = [spec_of(element) for element in itertools.islice(cursor, 2)]
    finally:
        cursor.close()
    if not found:
        raise ValueError(
            f"The elements of {source.describe()} can only be described by looking at the "
            "first one, and there is none. Give it an `output_signature`."
        )
    return merge_specs(found)
