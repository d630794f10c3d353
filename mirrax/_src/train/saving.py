"""What of an object goes into a checkpoint, under which names, and how it comes back.

A checkpoint is a flat list of named items. Variables, optimizers, metrics and iterators are
changed in place when they are restored; arrays and numbers are replaced, and with them the
structure that holds them.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import on_host
from mirrax._src.base.reduce_op import VariableSynchronization
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    ReplicaValues,
    Sharded,
    is_array,
    is_leaf,
    to_device,
)
from mirrax._src.cluster.collecting import collect_on_first
from mirrax._src.cluster.runtime import Cluster, current_cluster
from mirrax._src.engines.function import Function
from mirrax._src.input.distributed import DistributedIterator
from mirrax._src.state import foreign
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.variable import Variable
from mirrax._src.train.optimizer import Optimizer
from mirrax._src.train.own_copies import OwnCopies

# Objects of these packages, and these objects, are not searched for variables.
_FOREIGN = {"mirrax", "jax", "jaxlib", "numpy", "optax", *sys.stdlib_module_names}
_FOREIGN -= {"__main__"}
_HOLDS_NOTHING = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    Function,
)
_VALUES = (bool, int, float, str)  # also NumPy's strings


@dataclass(frozen=True)
class Item:
    """One thing that is saved under a name of its own.

    Attributes:
        is_array: Whether it is an array, or a value that JSON can hold.
        take: Gives what to save.
        check: What is wrong with restoring this saved array (its shape and dtype), or value;
            None if it fits.
        put: Restores what was saved.
        sharding: Where `put` wants an array to be already, if that can be told.
    """

    is_array: bool
    take: Callable[[], Any]
    check: Callable[[Any], str | None]
    put: Callable[[Any], None]
    sharding: Any = None


class Part:
    """A structure to save, divided into items.

    Args:
        name: The name that the names of its items begin with.
        value: The structure.
        store: Takes the structure that replaces it, where that is needed.
        is_state: Which plain leaves are saved, beside what is restored in place.
        seen: The objects that have been taken apart already, under another name.

    Attributes:
        items: The items by name.
        optimizers: Optimizers, by the name that their state begins with.
        places: The names of variables, by number.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        store: Callable[[Any], None],
        is_state: Callable[[Any], bool],
        seen: list[Any],
    ) -> None:
        found, self._tree = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=_is_whole
        )
        self._leaves = [leaf for _, leaf in found]
        self._store = store
        self._is_changed = False
        self._inner: list[Part] = []
        self.items: dict[str, Item] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.places: dict[int, str] = {}
        for i, (path, leaf) in enumerate(found):
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            self._add(_join(name, key), i, leaf, is_state, seen)

    def _add(
        self,
        name: str,
        i: int,
        leaf: Any,
        is_state: Callable[[Any], bool],
        seen: list[Any],
    ) -> None:
        if isinstance(leaf, Variable):
            self._add_item(name, _variable_item(leaf))
            self.places.setdefault(leaf.number, name)
        elif isinstance(leaf, OwnCopies):
            self._add_item(name, _copies_item(leaf))
        elif module_kind := foreign.module_kind(leaf):
            if not any(leaf is each for each in seen):
                seen.append(leaf)
                store = functools.partial(module_kind.replace_parts, leaf)
                self._descend(
                    name, module_kind.saved_parts(leaf), store, is_plain, seen
                )
        elif _is_stateful(leaf):
            self._add_item(name, _state_item(leaf))
        elif isinstance(leaf, PerReplica):
            if is_state(leaf):
                self._add_item(name, self._parts_item(name, i, leaf))
        elif isinstance(leaf, Mirrored) or (
            is_array(leaf) and not isinstance(leaf, str)
        ):
            if is_state(leaf):
                self._add_item(name, self._array_item(name, i, leaf))
        elif isinstance(leaf, _VALUES):
            if is_state(leaf):
                self._add_item(name, self._value_item(i, leaf))
        elif any(leaf is each for each in seen):
            pass
        elif hasattr(leaf, "saved_parts"):
            seen.append(leaf)
            if isinstance(leaf, Optimizer):
                self.optimizers[_join(name, "state/")] = leaf
            store = getattr(leaf, "replace_parts", _ignore)
            self._descend(name, leaf.saved_parts(), store, is_plain, seen)
        elif may_hold_state(leaf):
            seen.append(leaf)
            for key, inner in list(vars(leaf).items()):
                store = _setter(leaf, key)
                self._descend(_join(name, key), inner, store, _is_jax_array, seen)
        elif is_state is is_plain and not callable(leaf):
            raise ValueError(
                f"A checkpoint cannot save {name!r}, a {type(leaf).__name__}. It saves "
                "variables, optimizers, metrics, iterators, arrays, numbers, strings, "
                "structures of them, and objects that have them as attributes."
            )

    def include(self, root: Any, seen: list[Any]) -> None:
        """Adds what `root` holds, under the names of its attributes."""
        self._add("", -1, root, is_plain, seen)

    def _descend(self, name: str, *args: Any) -> None:
        inner = Part(name, *args)
        self._inner.append(inner)
        self.optimizers.update(inner.optimizers)
        self.places = {**inner.places, **self.places}
        for key, item in inner.items.items():
            self._add_item(key, item)

    def _add_item(self, name: str, item: Item) -> None:
        if name in self.items:
            raise ValueError(
                f"Two things would be saved under the name {name!r}; rename one of them."
            )
        self.items[name] = item

    def _array_item(self, name: str, i: int, leaf: Any) -> Item:
        shape, dtype = jnp.shape(leaf), leaf.dtype
        if not _is_key(dtype) and not _can_be_named(dtype):
            raise ValueError(
                f"A checkpoint cannot save {name!r}, an array of {dtype}: it saves numbers."
            )
        return Item(
            True,
            lambda: _whole(name, leaf),
            lambda entry: (
                _check_parts(leaf, entry)
                if isinstance(leaf, Mirrored)
                else _check_array(shape, dtype, entry)
            ),
            lambda array: self._replace(i, _placed_like(leaf, array)),
        )

    def _parts_item(self, name: str, i: int, leaf: PerReplica) -> Item:
        """A value for each replica; saved as one array if all are equal, else stacked."""

        def take() -> np.ndarray:
            parts = [np.asarray(_whole(name, part)) for part in leaf.values]
            shapes = [part.shape for part in parts]
            if (cluster := current_cluster()) is not None:
                told = cluster.agree("the shapes of a value to save", shapes)
                shapes = [tuple(shape) for each in told for shape in each]
            if any(shape != shapes[0] for shape in shapes):
                raise ValueError(
                    f"{name!r} has parts of different shapes, {', '.join(map(str, shapes))}, "
                    "which a checkpoint cannot save as one value."
                )
            if cluster is not None:
                parts = _of_all_workers(cluster, parts)
            is_one = all(part.tobytes() == parts[0].tobytes() for part in parts)
            return np.array(parts[0]) if is_one else np.stack(parts)

        def put(array: np.ndarray) -> None:
            parts = _parts_of(array, leaf)
            placed = [_placed_like(old, new) for old, new in zip(leaf.values, parts)]
            self._replace(i, PerReplica(placed))

        return Item(True, take, lambda entry: _check_parts(leaf, entry), put)

    def _value_item(self, i: int, leaf: Any) -> Item:
        return Item(
            False,
            lambda: leaf,
            lambda value: (
                None
                if isinstance(value, _VALUES)
                else f"it is a {type(leaf).__name__} here, the checkpoint has {value!r:.80}"
            ),
            lambda value: self._replace(i, value),
        )

    def _replace(self, i: int, leaf: Any) -> None:
        self._leaves[i] = leaf
        self._is_changed = True

    def name_slots(self) -> None:
        """Names what optimizers keep for a variable after the variable's own place."""
        for prefix, optimizer in self.optimizers.items():
            for old, new in optimizer.slot_names(self.places).items():
                self._add_item(prefix + new, self.items.pop(prefix + old))

    def finish(self) -> None:
        """Hands out the structures whose leaves have been replaced."""
        for inner in self._inner:
            inner.finish()
        if self._is_changed:
            self._store(jax.tree.unflatten(self._tree, self._leaves))
            self._is_changed = False


def holds_something(value: Any) -> bool:
    """Whether `value` can be a part of a checkpoint at all."""
    return not isinstance(value, _HOLDS_NOTHING) and value is not None


def is_plain(leaf: Any) -> bool:
    """What a checkpoint saves of the structures that it is given: arrays and values."""
    return True


def _variable_item(variable: Variable) -> Item:
    is_on_read = variable.synchronization is VariableSynchronization.ON_READ
    is_mirrored = isinstance(variable, DistributedVariable) and not is_on_read

    def take() -> Any:
        if is_on_read:  # a sum, say, of all copies
            return variable.read_value()
        variable.check_not_lost()
        return variable.to_save()

    def put(array: Any) -> None:
        if is_on_read:  # a summed variable's copies get equal shares
            variable.assign(array)
        elif is_mirrored:  # it is on all devices already, and nobody else's
            with launching():
                variable.stored = array
        else:
            variable.store_local(_placed_like(variable.stored, array))

    return Item(
        True,
        take,
        lambda entry: _check_array(variable.shape, variable.dtype, entry),
        put,
        variable.home_sharding() if is_mirrored else None,
    )


def _state_item(holder: Any) -> Item:
    """The state of an iterator, say; of one over data of each worker's own, all workers'."""
    cluster = current_cluster()
    is_own = isinstance(holder, DistributedIterator) and not holder.is_global
    if cluster is None or not is_own:

        def check_own(state: Any) -> str | None:
            of_workers = state.get(_OF_WORKERS) if isinstance(state, dict) else None
            return _check_workers(len(of_workers), 1) if of_workers else None

        return Item(False, holder.get_state, check_own, holder.set_state)

    def take() -> Any:
        own = json.dumps(holder.get_state()).encode()
        found = collect_on_first(cluster, cluster.worker, "a state to save", own)
        return {_OF_WORKERS: [state and json.loads(state) for state in found]}

    def check(state: Any) -> str | None:
        count = len(state.get(_OF_WORKERS, [None]))
        return _check_workers(count, cluster.size)

    def put(state: Any) -> None:
        holder.set_state(state[_OF_WORKERS][cluster.worker])

    return Item(False, take, check, put)


_OF_WORKERS = "of_workers"


def _check_workers(saved: int, here: int) -> str | None:
    if saved == here:
        return None
    return (
        f"it was saved by {saved} worker(s), each with data of its own, and here are {here}. "
        "Start as many, leave the iterator out of the checkpoint, or use "
        "`experimental_distribute_dataset`, whose position holds for any number of workers"
    )


def _copies_item(copies: OwnCopies) -> Item:
    variable = copies.variable

    def check(entry: Any) -> str | None:
        count = entry["shape"][:1] if isinstance(entry, Mapping) else []
        return _check_array((*count, *variable.shape), variable.dtype, entry)

    return Item(True, copies.take, check, copies.put)


def _check_array(shape: tuple[int, ...], dtype: Any, entry: Any) -> str | None:
    if not isinstance(entry, Mapping) or "dtype" not in entry:
        return f"it is an array here, the checkpoint has {entry!r:.80}"
    entry = entry.get("key", entry)
    saved = tuple(entry["shape"]), entry["dtype"]
    here = shape, str(dtype) if _is_key(dtype) else dtype.name
    for what, mine, theirs in zip(("shape", "dtype"), here, saved):
        if mine != theirs:
            return f"its {what} is {mine} here, {theirs} in the checkpoint"
    return None


def _whole(name: str, leaf: Any) -> Any:
    """An array that is given to a checkpoint, as one array."""
    if isinstance(leaf, Sharded):
        array = leaf.array
        return on_host(array) if array.is_fully_addressable else array
    if isinstance(leaf, Mirrored):
        leaf = leaf.array if leaf.array is not None else leaf.values[0]
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if leaf.is_deleted():
        raise RuntimeError(
            f"{name!r} was donated to a compiled function, whose results took over its "
            f"memory. Give the checkpoint the new value before saving: `checkpoint."
            f"{name.partition('/')[0]} = ...`."
        )
    return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf


def _of_all_workers(cluster: Cluster, parts: list[np.ndarray]) -> list[np.ndarray]:
    """The parts of all replicas; those of other workers only where they are written."""
    own = b"".join(part.tobytes() for part in parts)
    what = f"{parts[0].dtype.name} values to save"
    found = collect_on_first(cluster, cluster.worker, what, own)
    shape = len(parts), *parts[0].shape
    return [
        part
        for data in found
        if data is not None
        for part in np.frombuffer(data, parts[0].dtype).reshape(shape)
    ]


def _count_of_all(leaf: Any) -> tuple[int, int]:
    """How many replicas there are, and the number of this worker's first one."""
    cluster, local = current_cluster(), len(leaf.values)
    return (
        (local, 0)
        if cluster is None
        else (local * cluster.size, local * cluster.worker)
    )


def _parts_of(array: Any, leaf: Any) -> list[Any]:
    """What each replica gets of a saved array: its own part, or all of it."""
    local = len(leaf.values)
    first = _count_of_all(leaf)[1]
    is_apart = array.ndim > jnp.ndim(leaf.values[0])
    return list(array[first : first + local]) if is_apart else [array] * local


def _check_parts(leaf: Any, entry: Any) -> str | None:
    """As `_check_array`, for a value with a copy or a part for each replica."""
    shape, dtype = jnp.shape(leaf.values[0]), leaf.values[0].dtype
    saved = list(entry.get("shape", ())) if isinstance(entry, Mapping) else []
    if _is_key(dtype) or len(saved) != len(shape) + 1:
        return _check_array(shape, dtype, entry)
    count = _count_of_all(leaf)[0]
    if saved[0] != count:
        return f"it differs between the {saved[0]} replicas that saved it; here are {count}"
    return _check_array((saved[0], *shape), dtype, entry)


def _placed_like(leaf: Any, array: Any) -> Any:
    """A restored array on the devices, and of the kind, of the one that it replaces."""
    if isinstance(leaf, np.generic):
        return array[()]
    if isinstance(leaf, np.ndarray):
        return array
    if isinstance(leaf, Mirrored):
        if array.ndim > jnp.ndim(leaf.values[0]):  # it has become different on each
            parts = zip(_parts_of(array, leaf), leaf.values)
            return PerReplica([to_device(part, v.device) for part, v in parts])
        if leaf.array is None:
            return Mirrored([to_device(array, v.device) for v in leaf.values])
        return type(leaf).of(put_global(array, leaf.array.sharding), leaf.mesh)
    if leaf.committed or len(leaf.devices()) > 1:
        return put_global(array, leaf.sharding)
    return to_device(array, leaf.device)


def put_global(array: Any, sharding: Any) -> jax.Array:
    """`array` with this sharding; it is the same on all workers, which JAX would compare."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _can_be_named(dtype: Any) -> bool:
    """Whether a dtype is that of plain numbers, which its name tells."""
    try:
        return not dtype.hasobject and jnp.dtype(dtype.name) == dtype.newbyteorder("=")
    except TypeError:
        return False


def _is_whole(value: Any) -> bool:
    return is_leaf(value) or _is_stateful(value)


def _is_stateful(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return hasattr(value, "get_state") and hasattr(value, "set_state")


def _is_jax_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | ReplicaValues)


def may_hold_state(value: Any) -> bool:
    """Whether the attributes of an object are searched for what to save."""
    package = type(value).__module__.partition(".")[0]
    is_foreign = package in _FOREIGN and type(value) is not types.SimpleNamespace
    return holds_something(value) and hasattr(value, "__dict__") and not is_foreign


def _setter(owner: Any, attribute: str) -> Callable[[Any], None]:
    def set_attribute(value: Any) -> None:
        try:
            setattr(owner, attribute, value)
        except AttributeError:  # a frozen dataclass
            object.__setattr__(owner, attribute, value)

    return set_attribute


def _ignore(value: Any) -> None:
    pass


def _join(*names: str) -> str:
    return "/".join(name for name in names if name)
