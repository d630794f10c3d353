"""A function of each element: `map` and `filter`.

A function that depends on nothing but its element is called with many rows at a time
where NumPy can do that (vectorise.py), and only for rows that are asked for. Any other is
called once for every element, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mirrax._src.input.blocks import (
    Block,
    CannotVectorise,
    Mapped,
    block_of,
    join,
    value_of,
)
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    first_elements,
    merge_specs,
    node,
    open_cursor,
    zeros_like,
)
from mirrax._src.input.purity import is_pure
from mirrax._src.input.sources import static_rows
from mirrax._src.input.structure import (
    PyTree,
    TensorSpec,
    leaves_of,
    map_leaves,
    spec_of,
)
from mirrax._src.input.transforms.parallel import (
    ParallelCursor,
    ThreadPool,
    call_on_rows,
    num_calls,
)
from mirrax._src.input.transforms.processes import process_pool
from mirrax._src.input.transforms.selecting import Through

_MOST_AT_ONCE = 16  # elements that a thread gets


@node
class Map(Node):
    """`fn` of each element."""

    input: Node
    fn: ElementFn
    num_parallel_calls: int | None
    deterministic: bool | None
    workers: str

    def whole(self, path: Path) -> Block | None:
        block = self.input.whole(path)
        if block is None or not self.fn.can_vectorise(block):
            return None
        return Block(Mapped(block.table, self.fn, self.fn.of_rows()), block.index)

    def open(self, path: Path, state: State = None) -> Cursor:
        if self.num_parallel_calls is not None:
            count = num_calls(self.num_parallel_calls)
            is_apart = self.workers == "processes"
            pool = (
                process_pool(self.fn, count)
                if is_apart
                else ThreadPool([call_on_rows(self.fn)] * count, _MOST_AT_ONCE)
            )
            return ParallelCursor(
                lambda inner: open_cursor(self.input, path, inner),
                pool,
                is_apart or self.deterministic is not False,
                state,
            )
        return _MapCursor(open_cursor(self.input, path, state), self.fn)

    is_described = False

    def outline(self) -> PyTree | None:
        known = self.input.outline()
        if known is None or not is_pure(self.fn.fn):
            return None
        try:
            return spec_of(self.fn(zeros_like(known)))
        except Exception:  # zeros may not be what the function can work with
            return None

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> PyTree:
        return spec_of_results(self.input, self.fn)

    def batch_size(self) -> int | None:
        try:
            return static_rows(self.spec()) if is_static(self.input.spec()) else None
        except Exception:  # the pass itself will raise it, at its place
            return None

    def describe(self) -> str:
        return f"map({self.fn!r})"


def spec_of_results(source: Node, fn: Callable[[PyTree], PyTree]) -> PyTree:
    """The specs of what `fn` gives, found by calling it with the first elements."""
    known = source.spec()
    elements = first_elements(source)
    if not is_static(known):  # as another length would change the result
        elements.append(map_leaves(_other_length, elements[0], known))
    specs = [spec_of(fn(elements[0]))]
    for element in elements[1:]:
        try:
            specs.append(spec_of(fn(element)))
        except Exception:  # it may be an element that we made up
            specs.append(map_leaves(_unknown, specs[0]))
    return merge_specs(specs)


def is_static(spec: PyTree) -> bool:
    """Whether all lengths are known."""
    return all(s.shape is not None and None not in s.shape for s in leaves_of(spec))


def _other_length(leaf: Any, spec: TensorSpec) -> Any:
    """The array with a row more along the axes whose length varies."""
    shape = spec.shape if spec.shape is not None else (None,) * np.ndim(leaf)
    more = [(0, int(n is None)) for n in shape]
    is_empty = 0 in np.shape(leaf)
    return (
        np.pad(leaf, more, mode="constant" if is_empty else "edge")
        if any(b for _, b in more)
        else leaf
    )


def _unknown(spec: TensorSpec) -> TensorSpec:
    return TensorSpec([None] * len(spec.shape or ()), spec.dtype)


class _MapCursor(Cursor):
    def __init__(self, inner: Cursor, fn: ElementFn) -> None:
        self._inner, self._fn = inner, fn

    def __next__(self) -> Any:
        return self._fn(value_of(next(self._inner)))

    def next_block(self, count: int) -> Block | None:
        block = self._inner.next_block(count)
        if block is None:
            return None
        if self._fn.can_vectorise(block):
            return Block(Mapped(block.table, self._fn, self._fn.of_rows()), block.index)
        return block_of([self._fn(element) for element in block.elements()])

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


@node
class Filter(Through):
    """The elements for which `fn` is true."""

    input: Node
    fn: ElementFn

    def open(self, path: Path, state: State = None) -> Cursor:
        return _FilterCursor(open_cursor(self.input, path, state), self.fn)

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return UNKNOWN if size else 0

    def describe(self) -> str:
        return f"filter({self.fn!r})"


class _FilterCursor(Cursor):
    def __init__(self, inner: Cursor, fn: ElementFn) -> None:
        self._inner, self._fn = inner, fn

    def __next__(self) -> Any:
        while True:
            element = next(self._inner)
            if is_true(self._fn, value_of(element)):
                return element

    def next_block(self, count: int) -> Block | None:
        found: list[Block] = []
        while count and (block := self._inner.next_block(count)) is not None:
            found.append(self._wanted(block))
            count -= len(found[-1])
        found = [block for block in found if len(block)]
        return join(found) if found else None

    def _wanted(self, block: Block) -> Block:
        if self._fn.can_vectorise(block):
            # Not if rows differ, or for one there is an error: row by row it is raised.
            with contextlib.suppress(CannotVectorise, ValueError):
                verdict = self._fn.of_rows()(block.value())
                return block.pick(np.flatnonzero(_checked(verdict, self._fn, 1)))
        keep = [is_true(self._fn, element) for element in block.elements()]
        return block.pick(np.flatnonzero(keep))

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


def is_true(fn: ElementFn, element: PyTree) -> bool:
    """What a predicate says of an element.

    Raises:
        ValueError: If it does not say one boolean.
    """
    return bool(_checked(np.asarray(fn(element)), fn))


def _checked(verdict: Any, fn: ElementFn, rank: int = 0) -> np.ndarray:
    if getattr(verdict, "ndim", -1) != rank or verdict.dtype != bool:
        shape = getattr(verdict, "shape", ())[rank:]
        raise ValueError(
            f"The function of `{fn.what}` ({fn!r}) must return one boolean, got "
            f"{getattr(verdict, 'dtype', type(verdict).__name__)}{list(shape)}."
        )
    return verdict
