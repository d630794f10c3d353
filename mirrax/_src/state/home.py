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

    def take(self, pack: jax.Array, part: int) -> jax.Array:
        """One of the arrays.

        Each device takes its own: on CPUs a program on all would have to wait for a step that
        runs on them, which may itself wait for a host callback that reads a variable.
        """
        return _plainly(
            lambda: self.mesh.join(
                [_part(shard.data, part) for shard in shards_of(pack)], mirrored=True
            )
        )

    def close(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The pack."""

        def stack() -> jax.Array:
            if not self.mesh.spans_workers:
                return _stacked(*arrays)
            copies = zip(*([s.data for s in shards_of(a)] for a in arrays))
            return self.mesh.join([_stacked(*own) for own in copies], mirrored=True)

        return _plainly(stack)

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

    At some places of the list there is a pack. What somebody wants of it is taken out and kept
    until the next call.
    """

    __slots__ = ("_inside", "_packs", "_taken", "arrays", "is_whole")

    def __init__(self, arrays: list[Any], packs: Mapping[int, Pack] = {}) -> None:
        self.arrays = arrays  # in the order of the program
        self._packs = packs  # by their places
        self._taken: dict[tuple[int, int], Any] = {}
        self.complete()

    def complete(self) -> None:
        """Notes that all variables have moved in."""
        self._inside = {i: pack.count for i, pack in self._packs.items()}
        self.is_whole = True  # whether all variables that moved in still live here

    def array_at(self, place: int, part: int | None) -> Any:
        """The array at a place, or a part of the pack there."""
        if part is None:
            return self.arrays[place]
        found = self._taken.get((place, part))
        if found is None or found.is_deleted():  # it was donated by itself
            pack = self.arrays[place]
            if pack.is_deleted():  # XLA crashes on it
                raise RuntimeError(
                    "A variable has lost its value: a step that updated it in place has failed. "
                    "Assign it again, or restore a checkpoint."
                )
            found = self._taken[place, part] = self._packs[place].take(pack, part)
        return found

    def replace(self, place: int, part: int | None, array: Any) -> None:
        """Puts `array` in the place of an equal one."""
        if part is None:
            self.arrays[place] = array
        else:
            self._taken[place, part] = array

    def renew(self, arrays: list[Any]) -> bool:
        """Keeps what the program's last call gave; whether anything had been taken out."""
        self.arrays = arrays
        was_taken = bool(self._taken)
        self._taken.clear()
        return was_taken

    def leave(self, place: int, part: int | None) -> None:
        """Notes that a variable has moved out; nothing is kept that nobody needs."""
        self.is_whole = False
        if part is not None:
            self._taken.pop((place, part), None)
            self._inside[place] -= 1
            if self._inside[place]:
                return
        self.arrays[place] = None

    def pack_at(self, place: int) -> Pack | None:
        """What the array at a place is, if it is a pack."""
        return self._packs.get(place)


@jax.jit
def _part(pack: jax.Array, part: int) -> jax.Array:
    return pack[part]


@jax.jit
def _stacked(*arrays: jax.Array) -> jax.Array:
    return jnp.stack(arrays)


def _plainly(compute: Callable[[], jax.Array]) -> jax.Array:
    """What `compute` gives, whatever the caller has set for programs of its own."""

    def unchecked() -> jax.Array:
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
