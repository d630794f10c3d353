"""Where the arrays of variables live, small ones in packs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.jax_compat import debug_nans, outside_traces
from mirrax._src.base.logical import after_launch, launching
from mirrax._src.base.mesh import ReplicaMesh, shards_of


@dataclass(frozen=True)
class Pack:
    """So many arrays of one shape, stacked in one that has a copy on every device of `mesh`."""

    count: int
    mesh: ReplicaMesh

    def open(self, pack: jax.Array) -> list[jax.Array]:
        """The arrays."""
        return _on_own_devices(_apart, self.mesh, [pack])

    def close(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The pack."""
        [pack] = _on_own_devices(_stacked, self.mesh, arrays)
        return pack

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

    At some places of the list there is a pack, which is opened when somebody wants an array
    of it, and stays open until the next call.
    """

    __slots__ = ("_inside", "_open", "_packs", "arrays", "is_whole")

    def __init__(self, arrays: list[Any], packs: Mapping[int, Pack] = {}) -> None:
        self.arrays = arrays  # in the order of the program
        self._packs = packs  # by their places
        self._open: dict[int, list[Any]] = {}
        self.complete()

    def complete(self) -> None:
        """Notes that all variables have moved in."""
        self._inside = {i: pack.count for i, pack in self._packs.items()}
        self.is_whole = True  # whether all variables that moved in still live here

    def array_at(self, place: int, part: int | None) -> Any:
        """The array at a place, or a part of the pack there."""
        if part is None:
            return self.arrays[place]
        with launching:  # a step on another thread must not donate the pack
            found = self._opened(place)[part]
            if found.is_deleted():  # it was donated by itself
                del self._open[place]
                found = self._opened(place)[part]
            return found

    def _opened(self, place: int) -> list[Any]:
        pack = self.arrays[place]
        if pack.is_deleted():  # XLA crashes on it
            raise RuntimeError(
                "A variable has lost its value: a step that updated it in place has failed. Assign "
                "it again, or restore a checkpoint."
            )
        if place not in self._open:
            self._open[place] = self._packs[place].open(pack)
        return self._open[place]

    def replace(self, place: int, part: int | None, array: Any) -> None:
        """Puts `array` in the place of an equal one."""
        if part is None:
            self.arrays[place] = array
        else:
            self._opened(place)[part] = array

    def renew(self, arrays: list[Any]) -> bool:
        """Keeps what the program's last call gave; whether a pack was open before."""
        self.arrays = arrays
        was_open = bool(self._open)
        self._open.clear()
        return was_open

    def leave(self, place: int, part: int | None) -> None:
        """Notes that a variable has moved out; nothing is kept that nobody needs."""
        self.is_whole = False
        if part is not None:
            self._inside[place] -= 1
            if self._inside[place]:
                return
            self._open.pop(place, None)
        self.arrays[place] = None

    def pack_at(self, place: int) -> Pack | None:
        """What the array at a place is, if it is a pack."""
        return self._packs.get(place)


@jax.jit
def _apart(pack: jax.Array) -> list[jax.Array]:
    return [pack[i] for i in range(len(pack))]


@jax.jit
def _stacked(*arrays: jax.Array) -> list[jax.Array]:
    return [jnp.stack(arrays)]


def _on_own_devices(
    compute: Callable[..., list[jax.Array]],
    mesh: ReplicaMesh,
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """What `compute` makes of mirrored arrays; other workers need not take part."""
    with launching, _plainly():
        if not mesh.spans_workers:
            results = compute(*arrays)
        else:
            copies = zip(*([s.data for s in shards_of(a)] for a in arrays))
            each = [compute(*own) for own in copies]
            results = [mesh.join(parts, mirrored=True) for parts in zip(*each)]
    after_launch(results)
    return results


def _plainly() -> contextlib.AbstractContextManager[Any]:
    """Has JAX compute now and say nothing of NaN, which are not this program's doing."""
    # Mostly nothing: an interrupt could leave such settings behind.
    settings = contextlib.ExitStack()
    if not outside_traces():
        settings.enter_context(jax.ensure_compile_time_eval())
    if debug_nans.value:
        settings.enter_context(jax.debug_nans(False))
    return settings
