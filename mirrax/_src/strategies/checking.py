"""`assert_in_sync` and `check_numerics`: a few numbers of each copy, made where it lies.

Both run one program without communication: each device reads its own copies once and gives a few
bytes of each. Those are compared on the host, and between workers by the roster.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import Layout, ReplicaMesh, shards_of
from mirrax._src.base.reduce_op import VariableSynchronization
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Mirrored,
    PyTree,
    ReplicaValues,
    UnevenError,
    is_leaf,
    is_numeric,
    join,
)
from mirrax._src.collectives.programs import launch
from mirrax._src.state import foreign
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.variable import Variable

_SHOWN = 20
_NO_ARRAYS = (str, bytes, type, np.dtype)


@dataclass(frozen=True)
class _Found:
    """An array that all replicas have a copy or a part of, or a plain one."""

    name: str
    value: Any
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}{list(self.shape)})"


def check_concrete(what: str) -> None:
    """Raises where values are not known yet."""
    if context.current().frame is not None or not outside_traces():
        raise RuntimeError(
            f"`strategy.{what}` looks at values, which are not known while a function is "
            "traced. Return them, and call it outside `mx.function`."
        )


def check_in_sync(mesh: ReplicaMesh | None, tree: PyTree) -> None:
    """Raises an AssertionError if copies of an array in `tree` are not equal."""
    found = [each for each in _arrays_in(tree) if not _may_differ(each.value)]
    if mesh is None:
        return
    with launching():  # no other thread's step may take the memory meanwhile
        joined = [(each, _joined(mesh, each.value)) for each in found]
        uneven = [each for each, whole in joined if whole is None]
        spread = [(e, w) for e, w in joined if w and w[1] is not Layout.PLAIN]
        rows = _run(_hashes, mesh, [whole for _, whole in spread])  # replicas, arrays
    rows = _of_all_workers(mesh, rows) if spread else rows
    wrong = [f"{each}: its parts have different shapes" for each in uneven]
    for (each, _), hashes in zip(spread, rows.T):
        if (hashes != hashes[0]).any():
            wrong.append(f"{each}: {_who_differs(mesh, hashes.tolist())}")
    if wrong:
        raise AssertionError(
            "Copies that should be equal have drifted apart:\n  "
            + _lines(wrong)
            + "\nRestore a checkpoint. If no replica assigned a value of its own (a variable "
            "with aggregation NONE), suspect the device's memory."
        )


def check_finite(mesh: ReplicaMesh | None, tree: PyTree, step: Any) -> None:
    """Raises a FloatingPointError if an array in `tree` has NaN or infinite values."""
    found = [e for e in _arrays_in(tree) if jnp.issubdtype(e.dtype, jnp.inexact)]
    spread, alone, wrong = [], [], []
    rows = np.zeros((0, 0))
    with launching():  # no other thread's step may take the memory meanwhile
        for each in found:
            whole = _joined(mesh, each.value)
            is_alone = whole is None or whole[1] is Layout.PLAIN
            (alone if is_alone else spread).append((each, whole))
        if mesh is not None:
            rows = _run(_bad, mesh, [whole for _, whole in spread])
    for each, _ in alone:
        is_uneven = isinstance(each.value, ReplicaValues)
        parts = each.value.values if is_uneven else [each.value]
        for i, part in enumerate(parts):
            part = _plain(part)
            if not jnp.all(jnp.isfinite(part)):
                where = mesh.describe(mesh.local_ids[i]) if is_uneven and mesh else ""
                wrong += _describe_bad(each, np.asarray(part), where)
    for i, j in np.argwhere(rows):
        assert mesh is not None
        each, (array, _) = spread[j]
        part = np.asarray(shards_of(array)[i].data)
        wrong += _describe_bad(each, part, mesh.describe(mesh.local_ids[i]))
    if mesh is not None and mesh.spans_workers:
        told = mesh.cluster.agree("values that are not finite", wrong)
        wrong = list(dict.fromkeys(line for lines in told for line in lines))
    if wrong:
        when = "" if step is None else f" at step {np.asarray(step)}"
        raise FloatingPointError(
            f"Found NaN or infinite values{when}:\n  {_lines(wrong)}"
        )


def _arrays_in(tree: PyTree, path: str = "") -> Iterator[_Found]:
    """Variables and arrays, also those of modules, optimizers and metrics."""
    if isinstance(tree, str):
        raise TypeError(
            f"There is nothing to check in the string {tree!r}: pass the values themselves, "
            "such as a variable, a list of variables or a model."
        )
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        opened(tree), is_leaf=lambda x: is_leaf(x) or foreign.is_module(x)
    )
    for keys, leaf in leaves:
        name = path + jax.tree_util.keystr(keys)
        leaf = foreign.variable_of(leaf)  # of Keras, say
        if isinstance(leaf, Variable):
            shown = f"variable {leaf.name!r}" + (name and f" at {name}")
            yield _Found(shown, leaf, leaf.shape, leaf.dtype)
        elif module_kind := foreign.module_kind(leaf):
            yield from _arrays_in(module_kind.saved_parts(leaf), name)
        elif isinstance(leaf, ReplicaValues):
            first = leaf.values[0]
            if is_numeric(first):
                dtype = jnp.asarray(first).dtype
                yield _Found(name or "the value", leaf, jnp.shape(first), dtype)
        elif is_numeric(leaf):
            dtype = jnp.asarray(leaf).dtype
            yield _Found(name or "the value", leaf, jnp.shape(leaf), dtype)
        elif isinstance(getattr(leaf, "variables", None), list):
            yield from _arrays_in(leaf.variables, f"{name}.variables")
        elif not isinstance(leaf, _NO_ARRAYS) and not inspect.isroutine(leaf):
            raise TypeError(
                f"{name or 'The value'} is of type {type(leaf).__name__}, and which arrays it "
                "holds is not known. Pass its variables, as a list or a dict."
            )


def _may_differ(value: Any) -> bool:
    """Whether each replica has its own on purpose: sums that are combined when read."""
    on_read = VariableSynchronization.ON_READ
    return isinstance(value, Variable) and value.synchronization is on_read


def _joined(mesh: ReplicaMesh | None, value: Any) -> tuple[Any, Layout] | None:
    """One array of all copies and how it lies on the mesh; None for unequal shapes."""
    if isinstance(value, Variable):
        value.check_not_lost()
        is_spread = isinstance(value, DistributedVariable)
        array, layout = value.in_one_array()
        return array, layout if is_spread else Layout.PLAIN
    if isinstance(value, Mirrored) and value.array is not None:
        return value.array, Layout.MIRRORED
    if isinstance(value, ReplicaValues) and mesh is not None:
        try:
            return join(value, mesh)
        except UnevenError:
            return None
    if isinstance(value, jax.Array) and mesh is not None:
        is_copied = value.sharding == mesh.mirrored
        return value, Layout.MIRRORED if is_copied else Layout.PLAIN
    return value, Layout.PLAIN


def _run(program: Any, mesh: ReplicaMesh, joined: list[Any]) -> np.ndarray:
    """A row of results of each replica of this worker; 0 for empty arrays."""
    rows = np.zeros((len(mesh.local_ids), len(joined)), np.uint32)
    # XLA of JAX 0.11 crashes on an empty array.
    known = [i for i, (array, _) in enumerate(joined) if array.size]
    if known:
        [found] = launch(program, mesh, [joined[i] for i in known], mesh.split.spec)
        shards = [np.asarray(shard.data) for shard in shards_of(found)]
        rows[:, known] = np.concatenate(shards)
    return rows


def _hashes(arrays: list[jax.Array]) -> list[jax.Array]:
    """A replica's program: a hash of each array, which differs if a single bit does."""
    return [jnp.stack([_hash(_bits(array)) for array in arrays])[None]]


def _bad(arrays: list[jax.Array]) -> list[jax.Array]:
    """A replica's program: how many values of each array are not finite."""
    counts = [jnp.sum(~jnp.isfinite(array), dtype=jnp.uint32) for array in arrays]
    return [jnp.stack(counts)[None]]


def _bits(array: jax.Array) -> jax.Array:
    """The array as unsigned integers of 32 bits or fewer, in a row."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    size = min(array.dtype.itemsize, 4)
    words = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}"))
    return words.reshape(-1)


def _hash(words: jax.Array) -> jax.Array:
    """A sum of all words, each times an odd number of its own: one pass, in any order."""
    place = lax.iota(jnp.uint32, words.size)
    factor = place * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.sum(words.astype(jnp.uint32) * factor, dtype=jnp.uint32)


def _of_all_workers(mesh: ReplicaMesh, rows: np.ndarray) -> np.ndarray:
    """All replicas' rows; workers whose copies are all equal exchange one number only."""
    if not mesh.spans_workers:
        return rows
    whole = functools.reduce(lambda a, b: (a * 31 + int(b)) % 2**61, rows[0], 0)
    is_equal = bool((rows == rows[0]).all())
    told = mesh.cluster.agree("the state of copies", [is_equal, whole])
    if all(each == [True, told[0][1]] for each in told):
        return rows
    found = mesh.cluster.agree("copies that differ", rows.tolist())
    return np.array([row for each in found for row in each], np.uint32)


def _who_differs(mesh: ReplicaMesh, hashes: list[int]) -> str:
    """The replicas whose copies are not as most are."""
    usual, count = collections.Counter(hashes).most_common(1)[0]
    odd = [mesh.describe(i) for i, each in enumerate(hashes) if each != usual]
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    verb = "differs" if len(odd) == 1 else "differ"
    others = mesh.describe(hashes.index(usual)) if count == 1 else f"the other {count}"
    return f"{', '.join(odd[:_SHOWN])}{more} {verb} from {others}"


def _describe_bad(each: _Found, part: np.ndarray, where: str) -> list[str]:
    counts = (("NaN", np.isnan(part).sum()), ("infinite", np.isinf(part).sum()))
    kinds = [f"{count} {kind}" for kind, count in counts if count]
    if not kinds:
        return []
    return [f"{each}: {' and '.join(kinds)}" + (where and f" on {where}")]


def _plain(part: Any) -> Any:
    return part.read_value() if isinstance(part, Variable) else jnp.asarray(part)


def _lines(wrong: list[str]) -> str:
    more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "\n  ".join(wrong[:_SHOWN]) + more
