"""The state of an optimizer as variables, and what a checkpoint saves of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.errors import warn_user
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.values import PyTree
from mirrax._src.state.sharded import ShardedVariable
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Variable
from mirrax._src.train.own_copies import OwnCopies
from mirrax._src.train.pairs import is_variable, show_names


class Name(str):
    """The key of a variable among the parameters, told apart from other keys of a state."""


class HasSlots:
    """A variable for each array of Optax's state, which a checkpoint saves."""

    name: str
    iterations: Any
    _steps: int
    _variables: Mapping[Name, Variable]
    _state: PyTree
    _mesh_to_shard: Callable[..., ReplicaMesh | None]
    # What a checkpoint had for a state that is not built yet, and where its variables were.
    _saved: Mapping[str, Any] = {}
    _places: Mapping[int, str] = {}

    def saved_parts(self) -> dict[str, Any]:
        """What a checkpoint saves, by name."""

        def whole(path: Any, variable: Variable) -> Any:
            # Halfway to an update every replica's own sum counts, to the last bit.
            return OwnCopies(variable) if self._is_sum(path) else variable

        state = jax.tree_util.tree_map_with_path(
            whole, self._state, is_leaf=is_variable
        )
        # Not built yet, but restored: what waits to be built is saved again.
        state = self._saved if state is None else state
        return {"iterations": self.iterations, "state": state}

    def _is_sum(self, path: Any) -> bool:
        """Whether a slot has the gradients of the calls since the last update."""
        return self._steps > 1 and key_of(path).startswith("accumulated/")

    def slot_names(self, places: Mapping[int, str]) -> dict[str, str]:
        """From the names of what is in `state` to those in a checkpoint.

        There a slot has the name of its variable's place (`places`, by the variable's number),
        so that other names, or another order, do not mix up slots after a restart.
        """
        paths, _ = jax.tree_util.tree_flatten_with_path(
            self._state, is_leaf=is_variable
        )
        names = names_in(places, self._variables)
        return {key_of(path): key_of(path, names) for path, _ in paths}

    def restore_later(
        self, saved: Mapping[str, Any], places: Mapping[int, str]
    ) -> None:
        """Takes values of the state, by their names in a checkpoint, for when it is built."""
        self._saved, self._places = saved, places

    def _make_slot(
        self, strategy: StrategyLike, names: Mapping[str, str], path: Any, value: Any
    ) -> Variable:
        key, is_sum = key_of(path), self._is_sum(path)
        mesh = self._mesh_to_shard(strategy)
        saved = self._saved.get(key_of(path, names))
        if saved is not None:
            self._check_saved(key, saved[0] if is_sum else saved, value)
        spec = VariableSpec(
            value if is_sum or saved is None else saved,
            trainable=False,
            name=f"{self.name}/{key}",
            dtype=jnp.asarray(value).dtype,
        )
        if is_sum and mesh is None:
            spec = replace(
                spec,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
        if mesh is not None and mesh.sharded_axis(value.shape) is not None:
            variable = ShardedVariable(spec, strategy)
        else:
            variable = strategy.extended.create_variable(spec)
        variable.is_slot = True
        if is_sum and saved is not None:
            # Now, also if a function is being traced.
            now = context.changed(frame=None, replica=None, updating=None)
            with now, jax.ensure_compile_time_eval():
                OwnCopies(variable).put(saved)
        return variable

    def _warn_of_rest(self, initial: PyTree, names: Mapping[str, str]) -> None:
        """Tells what a checkpoint had for a state that is built now and turns out another."""
        paths, _ = jax.tree_util.tree_flatten_with_path(initial)
        made = {key_of(path, names) for path, _ in paths}
        missing, unused = made - self._saved.keys(), self._saved.keys() - made
        if self._saved and (missing or unused):
            warn_user(
                f"The state of {self.name!r} was restored in part: there are other variables, "
                "or the transformation is another one.\nHere, but not in the "
                f"checkpoint (begun anew): {show_names(sorted(missing))}.\nIn the checkpoint, "
                f"but not here: {show_names(sorted(unused))}."
            )
        self._saved = {}

    def _check_saved(self, key: str, saved: Any, value: Any) -> None:
        there, here = ((jnp.shape(x), jnp.result_type(x).name) for x in (saved, value))
        if there != here:
            raise ValueError(
                f"{self.name!r} was restored from a checkpoint in which {key} is "
                f"{there[1]} of shape {there[0]}; for the variables here it is {here[1]} of "
                f"shape {here[0]}."
            )


def by_names(variables: Sequence[Variable]) -> dict[Name, Variable]:
    """The variables by their names, of which a repeated one gets a number."""
    named: dict[Name, Variable] = {}
    for variable in variables:
        names = itertools.chain(
            [variable.name], (f"{variable.name}_{i}" for i in itertools.count(1))
        )
        named[Name(next(n for n in names if n not in named))] = variable
    return named


def names_in(
    places: Mapping[int, str], variables: Mapping[Name, Variable]
) -> dict[str, str]:
    """What variables are called in a checkpoint: their place there, or their own name."""
    return {name: places.get(v.number, name) for name, v in variables.items()}


def key_of(path: Any, names: Mapping[str, str] | None = None) -> str:
    """A place in a state as a name; `names` says what variables are called there."""
    renamed = tuple(
        jax.tree_util.DictKey((names or {}).get(entry.key, entry.key))
        if isinstance(getattr(entry, "key", None), Name)
        else entry
        for entry in path
    )
    return jax.tree_util.keystr(renamed, simple=True, separator="/")
