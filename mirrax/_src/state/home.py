"""Where the arrays of variables live, small ones in packs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.mesh import ReplicaMesh, shards_of


@dataclass(frozen=True)
class Pack:
    """So many arrays of one shape, stacked in one that has a copy on every device of `mesh`."""

    count: int
    mesh: ReplicaMesh

    def open(self, pack: jax.Array) -> list[jax.Array]:
        """The arrays. All of them: a launch takes longer than what it gives."""
        return self._of_each_copy(_opened, pack)

    def close(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The pack."""
        [pack] = self._of_each_copy(_closed, *arrays)
        return pack

    def _of_each_copy(self, program: Any, *arrays: jax.Array) -> list[jax.Array]:
        """What each device computes of its own copies; other workers need not take part."""

        def run() -> list[jax.Array]:
            if not self.mesh.spans_workers:
                return program(*arrays)
            copies = zip(*([s.data for s in shards_of(a)] for a in arrays))
            results = zip(*(program(*own) for own in copies))
            return [self.mesh.join(list(own), mirrored=True) for own in results]

        return _plainly(run)

    def split(self, pack: jax.Array) -> list[jax.Array]:
        """The arrays, in a program."""
        return [pack[i] for i in range(self.count)]

    def updated(self, pack: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
        """The pack with new arrays in a program, which may reuse its memory."""
        for i, array in enumerate(arrays):
            pack = lax.dynamic_update_slice_in_dim(pack, array[None], i, 0)
        return lax.with_sharding_constraint(pack, self.mesh.mirrored)


class Home:
    """Where variables' arrays live: one list, which a program passes on call after call.

    At some places of the list there is a pack. If somebody wants one of its arrays it is opened,
    and what was in it is kept until the next call.
    """

    __slots__ = ("_inside", "_opened", "_packs", "arrays", "is_whole")

    def __init__(self, arrays: list[Any], packs: Mapping[int, Pack] = {}) -> None:
        self.arrays = arrays  # in the order of the program
        self._packs = packs  # by their places
        self._opened: dict[int, list[Any]] = {}
        self.complete()

    def complete(self) -> None:
        """Notes that all variables have moved in."""
        self._inside = {i: pack.count for i, pack in self._packs.items()}
        self.is_whole = True  # whether all variables that moved in still live here

    def array_at(self, place: int, part: int | None) -> Any:
        """The array at a place, or a part of the pack there."""
        if part is None:
            return self.arrays[place]
        opened = self._opened.get(place)
        if opened is None or opened[part].is_deleted():  # it was donated by itself
            opened = self._packs[place].open(self.arrays[place])
            self._opened[place] = opened
        return opened[part]

    def replace(self, place: int, part: int | None, array: Any) -> None:
        """Puts `array` in the place of an equal one."""
        if part is None:
            self.arrays[place] = array
        else:
            self._opened[place][part] = array

    def renew(self, arrays: list[Any]) -> bool:
        """Keeps what the program's last call gave; whether any pack had been opened."""
        self.arrays = arrays
        was_opened = bool(self._opened)
        self._opened.clear()
        return was_opened

    def leave(self, place: int, part: int | None) -> None:
        """Notes that a variable has moved out; nothing is kept that nobody needs."""
        self.is_whole = False
        if part is not None:
            if opened := self._opened.get(place):
                opened[part] = None
            self._inside[place] -= 1
            if self._inside[place]:
                return
        self.arrays[place] = None

    def pack_at(self, place: int) -> Pack | None:
        """What the array at a place is, if it is a pack."""
        return self._packs.get(place)


@jax.jit
def _opened(pack: jax.Array) -> list[jax.Array]:
    return list(pack)


@jax.jit
def _closed(*arrays: jax.Array) -> list[jax.Array]:
    return [jnp.stack(arrays)]


def _plainly(compute: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    """What `compute` gives, whatever the caller has set for programs of its own."""

    def unchecked() -> list[jax.Array]:
        with contextlib.ExitStack() as settings:
            settings.enter_context(jax.transfer_guard("allow"))
            # Only where they are on: an interrupt could leave them off for ever.
            if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
                settings.enter_context(jax.debug_nans(False))
            if jax.config.jax_debug_infs:  # pyright: ignore[reportAttributeAccessIssue]
                settings.enter_context(jax.debug_infs(False))
            return compute()

    if outside_traces() and jax.sharding.get_abstract_mesh().empty:
        return unchecked()
    # Traces and meshes are those of a thread, and some cannot be left for a while.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(unchecked).result()
