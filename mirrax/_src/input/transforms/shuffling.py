"""`shuffle`: a random order in a bounded buffer, as TensorFlow draws it.

The buffer holds the next `buffer_size` elements; each draw gives one of them at random and
puts the next element into its place. Draw number k of a pass depends on the seed, the
path and k alone, so an order can be taken up anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mirrax._src.input.blocks import Block
from mirrax._src.input.node import (
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
)
from mirrax._src.input.sources import seed_key
from mirrax._src.input.transforms.selecting import Through

_CHUNK = 4096  # draws that are made at a time


@node
class Shuffle(Through):
    """The elements in a random order.

    `entropy` takes the place of a seed that was not given.
    """

    input: Node
    buffer_size: int | None  # None: all elements
    seed: int | None
    reshuffle: bool
    entropy: int

    def key(self, path: Path) -> list[int]:
        """What the order of a pass depends on."""
        return seed_key(self.seed, self.entropy, path if self.reshuffle else ())

    def whole(self, path: Path) -> Block | None:
        block = self.input.whole(path)
        if block is None:
            return None
        return block.pick(shuffled(len(block), self.buffer_size, self.key(path)))

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ShuffleCursor(self, path, state)

    def describe(self) -> str:
        size = "all" if self.buffer_size is None else self.buffer_size
        return (
            f"shuffle({size})"
            if self.seed is None
            else f"shuffle({size}, seed={self.seed})"
        )


def shuffled(count: int, buffer_size: int | None, key: list[int]) -> np.ndarray:
    """The numbers up to `count` in the order in which a buffer of that size gives them."""
    if buffer_size is None or buffer_size >= count:
        return np.random.default_rng(key).permutation(count)
    if buffer_size == 1:
        return np.arange(count)
    numbers = draws(key)
    buffer = list(range(buffer_size))
    out: list[int] = []
    for number in range(buffer_size, count):
        i = int(next(numbers) * buffer_size)
        out.append(buffer[i])
        buffer[i], buffer[-1] = buffer[-1], number
    while buffer:
        out.append(_draw(buffer, next(numbers)))
    return np.array(out, np.int64)


def draws(key: list[int], start: int = 0) -> Iterator[float]:
    """Random numbers between 0 and 1, from draw number `start` on."""
    chunk, skip = divmod(start, _CHUNK)
    while True:
        numbers = np.random.default_rng([*key, chunk]).random(_CHUNK).tolist()
        yield from numbers[skip:]
        chunk, skip = chunk + 1, 0


def _draw(buffer: list[Any], number: float) -> Any:
    """Takes one element out; the last one fills its place."""
    i = int(number * len(buffer))
    buffer[i], buffer[-1] = buffer[-1], buffer[i]
    return buffer.pop()


class _ShuffleCursor(Cursor):
    """A pass over elements that come one by one.

    A state does not hold the elements of the buffer but their numbers, with the state of
    the input before the oldest of them, from which they are read again. That is noted
    every so many draws (`_base`); in between a state adds the draws made since.
    """

    def __init__(self, shuffle: Shuffle, path: Path, state: State) -> None:
        self._size = shuffle.buffer_size or math.inf
        self._buffer: list[tuple[int, Any]] = []
        self._base, drawn_since = state or ([None, 0, [], 0, 0], 0)
        start, first, numbers, self._read, self._drawn = self._base
        self._inner = open_cursor(shuffle.input, path, start)
        if start is None:  # where the input is now, should its order be drawn anew
            start = self._inner.state()
            self._base = [start, *self._base[1:]]
        self._draws = draws(shuffle.key(path), self._drawn)
        self._marks: list[tuple[int, State]] = [(first, start)]
        self._ended = False
        kept = dict.fromkeys(numbers)
        for number in range(first, self._read):
            element = next(self._inner)
            if number in kept:
                kept[number] = element
        self._buffer = list(kept.items())
        self.skip(drawn_since)

    def _fill(self) -> None:
        while len(self._buffer) < self._size and not self._ended:
            last = self._marks[-1][0]
            if self._read - last >= min(self._size, _CHUNK):
                self._marks.append((self._read, self._inner.state()))
            try:
                self._buffer.append((self._read, next(self._inner)))
                self._read += 1
            except StopIteration:
                self._ended = True

    def _note(self) -> None:
        """Makes a new base, and drops the marks that no element of the buffer needs."""
        numbers = [number for number, _ in self._buffer]
        oldest = min(numbers, default=self._read)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.pop(0)
        first, start = self._marks[0]
        self._base = [start, first, numbers, self._read, self._drawn]

    def __next__(self) -> Any:
        self._fill()
        if not self._buffer:
            raise StopIteration
        if self._drawn - self._base[-1] >= max(len(self._buffer), _CHUNK):
            self._note()
        self._drawn += 1
        return _draw(self._buffer, next(self._draws))[1]

    def state(self) -> State:
        return [self._base, self._drawn - self._base[-1]]

    def close(self) -> None:
        self._inner.close()
