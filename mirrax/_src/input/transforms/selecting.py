"""Which elements, how often: take, skip, shard, repeat, concatenate."""

from __future__ import annotations

from typing import Any

from mirrax._src.input.blocks import Block, join, value_of
from mirrax._src.input.node import (
    INFINITE,
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    merge_specs,
    node,
    open_cursor,
)
from mirrax._src.input.structure import (
    PyTree,
    StructureError,
    leaves_of,
    map_leaves,
    spec_of,
)

START: Any = (0, None)  # the first of several passes, from its start


class Through(Node):
    """A step that passes elements of one input on as they are."""

    input: Node

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> PyTree:
        return self.input.spec()

    def outline(self) -> PyTree | None:
        return self.input.outline()

    def batch_size(self) -> int | None:
        return self.input.batch_size()


@node
class Take(Through):
    """The first `count` elements; all if it is negative."""

    input: Node
    count: int

    def whole(self, path: Path) -> Block | None:
        block = self.input.whole(path)
        return block if block is None or self.count < 0 else block[: self.count]

    def open(self, path: Path, state: State = None) -> Cursor:
        left, inner = state or (self.count, None)
        return _TakeCursor(open_cursor(self.input, path, inner), left)

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return size
        if size == INFINITE:
            return self.count
        return size if size < 0 and self.count else min(max(size, 0), self.count)

    def describe(self) -> str:
        return f"take({self.count})"


class _TakeCursor(Cursor):
    def __init__(self, inner: Cursor, left: int) -> None:
        self._inner, self._left = inner, left

    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        element = next(self._inner)
        self._left -= 1
        return element

    def next_block(self, count: int) -> Block | None:
        if self._left >= 0:
            count = min(count, self._left)
        block = self._inner.next_block(count) if count else None
        self._left -= len(block) if block else 0
        return block

    def state(self) -> State:
        return [self._left, self._inner.state()]

    def close(self) -> None:
        self._inner.close()


@node
class Skip(Through):
    """All but the first `count` elements; none if it is negative."""

    input: Node
    count: int

    def whole(self, path: Path) -> Block | None:
        block = self.input.whole(path)
        if block is None:
            return None
        return block[self.count :] if self.count >= 0 else block[:0]

    def open(self, path: Path, state: State = None) -> Cursor:
        if self.count < 0:
            inner = state[1] if state else None
            return _TakeCursor(open_cursor(self.input, path, inner), 0)
        cursor = open_cursor(self.input, path, state)
        if state is None:
            cursor.skip(self.count)
        return cursor

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return 0
        return size if size < 0 else max(size - self.count, 0)

    def describe(self) -> str:
        return f"skip({self.count})"


@node
class Shard(Through):
    """Every `num_shards`-th element, from number `index` on."""

    input: Node
    num_shards: int
    index: int

    def whole(self, path: Path) -> Block | None:
        block = self.input.whole(path)
        return None if block is None else block[self.index :: self.num_shards]

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ShardCursor(self, open_cursor(self.input, path, state))

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size < 0 else len(range(self.index, size, self.num_shards))

    def describe(self) -> str:
        return f"shard({self.num_shards}, {self.index})"


class _ShardCursor(Cursor):
    """Reads whole rounds, so that its state is its input's."""

    def __init__(self, shard: Shard, inner: Cursor) -> None:
        self._before, self._after = shard.index, shard.num_shards - shard.index - 1
        self._inner = inner

    def __next__(self) -> Any:
        self._inner.skip(self._before)
        element = next(self._inner)
        self._inner.skip(self._after)
        return element

    def next_block(self, count: int) -> Block | None:
        step = self._before + self._after + 1
        block = self._inner.next_block(count * step)
        block = block and block[self._before :: step]
        return block or None

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


@node
class ShardHint(Through):
    """The place where the policy HINT divides a dataset among workers."""

    input: Node

    def open(self, path: Path, state: State = None) -> Cursor:
        raise RuntimeError(
            f"`shard(SHARD_HINT, ...)` of {self.input.describe()} marks where a dataset is divided "
            "among workers. Distribute the dataset with `auto_shard_policy` HINT; without distribution give numbers."
        )

    def describe(self) -> str:
        return "shard(SHARD_HINT)"


@node
class Repeat(Through):
    """The input `count` times; without end if it is negative."""

    input: Node
    count: int

    def open(self, path: Path, state: State = None) -> Cursor:
        return _RepeatCursor(self, path, *(state or START))

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count == 0 or size == 0:
            return 0
        if self.count < 0:
            return INFINITE
        return size if size < 0 else size * self.count

    def describe(self) -> str:
        return f"repeat({self.count if self.count >= 0 else ''})"


class _RepeatCursor(Cursor):
    def __init__(self, repeat: Repeat, path: Path, epoch: int, inner: State) -> None:
        self._repeat, self._path, self._epoch = repeat, path, epoch
        self._inner: Cursor | None = None
        self._is_empty = True  # whether this epoch has given nothing yet
        if epoch != repeat.count:
            self._inner = open_cursor(repeat.input, (*path, epoch), inner)
            self._is_empty = inner is None

    def _next_epoch(self) -> bool:
        """Starts the next epoch; False if there is none, or it would be empty for ever."""
        if self._inner is None:
            return False
        self._inner.close()
        endless = self._is_empty and self._repeat.count < 0
        self._epoch += 1
        if endless or self._epoch == self._repeat.count:
            self._epoch, self._inner = self._repeat.count, None
            return False
        self._inner = open_cursor(self._repeat.input, (*self._path, self._epoch))
        self._is_empty = True
        return True

    def __next__(self) -> Any:
        while self._inner is not None:
            try:
                element = next(self._inner)
                self._is_empty = False
                return element
            except StopIteration:
                self._next_epoch()
        raise StopIteration

    def next_block(self, count: int) -> Block | None:
        blocks: list[Block] = []
        while count and self._inner is not None:
            block = self._inner.next_block(count)
            if block is None:
                self._next_epoch()
                continue
            self._is_empty = False
            blocks.append(block)
            count -= len(block)
        return join(blocks) if blocks else None

    def state(self) -> State:
        return [self._epoch, self._inner and self._inner.state()]

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


@node
class Concatenate(Node):
    """The elements of one dataset, then those of another."""

    parts: tuple[Node, ...]

    def whole(self, path: Path) -> Block | None:
        blocks = [part.whole((*path, i)) for i, part in enumerate(self.parts)]
        if any(b is None or b.table is not blocks[0].table for b in blocks):  # type: ignore[union-attr]
            return None
        return join(blocks)  # type: ignore[arg-type]

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ConcatenateCursor(self.parts, path, *(state or START))

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        for special in (INFINITE, UNKNOWN):
            if special in sizes:
                return special
        return sum(sizes)

    def spec(self) -> PyTree:
        return merge_specs([part.spec() for part in self.parts])

    def batch_size(self) -> int | None:
        return agreed(self.parts)


def agreed(parts: tuple[Node, ...]) -> int | None:
    """The batch size of all `parts` if they have one."""
    sizes = {part.batch_size() for part in parts}
    return sizes.pop() if len(sizes) == 1 else None


def check_alike(
    spec: PyTree, other: PyTree, what: str = "The elements of both datasets"
) -> None:
    """Raises if what two specs describe differs in structure or dtype."""
    try:
        is_alike = all(
            leaves_of(
                map_leaves(
                    lambda a, b: a.dtype == getattr(b, "dtype", None), spec, other
                )
            )
        )
    except StructureError:
        is_alike = False
    if not is_alike:
        raise TypeError(
            f"{what} must be alike in structure and dtype, but one is\n  {spec}\nand the other\n"
            f"  {other}"
        )


class _ConcatenateCursor(Cursor):
    def __init__(
        self, parts: tuple[Node, ...], path: Path, number: int, inner: State
    ) -> None:
        self._parts, self._path, self._number = parts, path, number
        self._inner = open_cursor(parts[number], (*path, number), inner)
        self._last: Any = None
        # Of the part before, until this one is known to be alike.
        self._spec: PyTree = None

    def _next_part(self) -> bool:
        if self._number + 1 == len(self._parts):
            return False
        self._inner.close()
        if self._last is not None:
            self._spec = spec_of(value_of(self._last))
        self._number += 1
        self._inner = open_cursor(
            self._parts[self._number], (*self._path, self._number)
        )
        return True

    def __next__(self) -> Any:
        while True:
            try:
                element = next(self._inner)
                if self._number and self._spec is not None:
                    check_alike(self._spec, spec_of(value_of(element)))
                    self._spec = None
                self._last = element
                return element
            except StopIteration:
                if not self._next_part():
                    raise

    def next_block(self, count: int) -> Block | None:
        blocks: list[Block] = []
        while count:
            block = self._inner.next_block(count)
            if block is not None:
                blocks.append(block)
                count -= len(block)
            elif not self._next_part():
                break
        return join(blocks) if blocks else None

    def state(self) -> State:
        return [self._number, self._inner.state()]

    def close(self) -> None:
        self._inner.close()
