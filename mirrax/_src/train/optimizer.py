"""`mx.train.Optimizer`: an Optax transformation that sums gradients over replicas."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.errors import warn_user
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.values import PyTree
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.engines.function import function
from mirrax._src.state.variable import Variable, VariableSpec
from mirrax._src.strategies.default import get_strategy
from mirrax._src.train.learning_rate import HasLearningRate, by_name
from mirrax._src.train.own_copies import OwnCopies
from mirrax._src.train.pairs import (
    as_dense,
    is_distributed,
    is_variable,
    own_variables,
    show_names,
    split_pairs,
)

# How Keras says that gradients are summed already.
_AGGREGATES = ("skip_gradients_aggregation", "experimental_aggregate_gradients")


class Accumulating(NamedTuple):
    """The state of an optimizer that updates once in several calls."""

    micro_step: Any
    accumulated: PyTree
    inner: PyTree


class _Name(str):
    """The key of a variable among the parameters, told apart from other keys of a state."""


class Optimizer(HasLearningRate):
    """Trains variables, or a pytree of parameters, with an Optax transformation.

    >>> import optax
    >>> strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     w = mx.Variable(5.0)
    >>> optimizer = mx.train.Optimizer(optax.sgd(0.1))
    >>> @mx.function
    ... def step():
    ...     gradient = mx.grad(lambda: 0.5 * w * w, w)()
    ...     optimizer.apply_gradients([(gradient, w)])
    >>> strategy.run(step)
    >>> w.numpy()  # 5 - 0.1 * (5 + 5): gradients are summed over the replicas
    array(4., dtype=float32)

    Gradients are summed first, so that clipping by the global norm
    (`optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))`) sees those of the whole
    batch. In functional style it is a transformation like any other: `init` makes the state,
    `update`, called in a replica, sums the gradients and returns the updates. To Optax the
    variables are a dict by their names, for masks and labels.

    Args:
        transformation: What Optax makes: `optax.adam(1e-3)`, a `chain`, with schedules. Or the
            name of an optimizer of Optax, "adam", with its arguments as `hyperparameters`,
            which can be changed in `state` and by `learning_rate`.
        gradient_accumulation_steps: The number of calls whose mean gradient makes one update.
            Gradients travel between replicas only then.
        reduce_dtype: The dtype in which gradients are summed over replicas; by default that of
            the variables, in functional style that of the gradients.
        options: How the gradients travel.
        name: Shown in messages.
        **hyperparameters: With a name: `learning_rate=1e-3`, and what else Optax takes.
    """

    __module__ = "mirrax.train"

    def __init__(
        self,
        transformation: Any,
        *,
        gradient_accumulation_steps: int = 1,
        reduce_dtype: Any = None,
        options: CommunicationOptions | None = None,
        name: str = "optimizer",
        **hyperparameters: Any,
    ) -> None:
        if isinstance(transformation, str):
            transformation = by_name(transformation, hyperparameters)
        elif hyperparameters:
            raise TypeError(
                f"`mx.train.Optimizer` takes {', '.join(map(repr, hyperparameters))} only with "
                "the name of an optimizer: `mx.train.Optimizer('adam', learning_rate=1e-3)`."
            )
        methods = (getattr(transformation, each, None) for each in ("init", "update"))
        if not all(map(callable, methods)) or isinstance(transformation, Optimizer):
            raise TypeError(
                "`mx.train.Optimizer` needs an Optax transformation, such as "
                f"`optax.adam(1e-3)`, got {transformation!r}."
            )
        steps = gradient_accumulation_steps
        if not hasattr(steps, "__index__") or isinstance(steps, bool) or steps < 1:
            raise ValueError(
                f"`gradient_accumulation_steps` must be a number from 1 on, got {steps!r}."
            )
        if reduce_dtype is not None and not _is_floating(reduce_dtype):
            raise ValueError(
                f"`reduce_dtype` must be a floating-point type, got {reduce_dtype!r}."
            )
        import optax

        self.name = name
        self._takes_extra = isinstance(
            transformation, optax.GradientTransformationExtraArgs
        )
        self._transformation = optax.with_extra_args_support(transformation)
        self._steps = int(steps)
        self._reduce_dtype = reduce_dtype and jnp.dtype(reduce_dtype)
        self._options = options
        self._variables: dict[_Name, Variable] = {}
        self._state: PyTree = None
        self._places: Mapping[int, str] = {}
        self._saved: Mapping[str, Any] = {}
        self._strategy = get_strategy()
        self._iterations: Variable | None = None
        self._compiled = function(self._update_variables)

    # Functional style ------------------------------------------------------------------

    def init(self, params: PyTree) -> PyTree:
        """The state that `update` needs, for a pytree of parameters."""
        inner = self._transformation.init(params)
        if self._steps == 1:
            return inner
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Accumulating(jnp.zeros((), jnp.int32), zeros, inner)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        aggregate: bool = True,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        """What to add to the parameters (`optax.apply_updates`), and the new state.

        Args:
            updates: This replica's gradients.
            state: What `init` or the last `update` returned.
            params: The parameters, for transformations that look at them (weight decay).
            aggregate: Whether to sum the gradients over the replicas.
            **extra_args: What the transformation takes beyond that. Floating-point arrays,
                such as a loss, are averaged over the replicas.
        """

        def finish(gradients: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
            extra = _agreed(extra_args)
            if aggregate:
                gradients = self._sum(gradients)
            return self._transformation.update(gradients, inner, params, **extra)

        if self._steps == 1:
            return finish(updates, state)
        total = jax.tree.map(jnp.add, state.accumulated, updates)

        def update() -> tuple[PyTree, PyTree]:
            mean = jax.tree.map(lambda x: x / self._steps, total)
            new, inner = finish(mean, state.inner)
            return new, Accumulating(
                jnp.zeros_like(state.micro_step),
                jax.tree.map(jnp.zeros_like, total),
                inner,
            )

        def wait() -> tuple[PyTree, PyTree]:
            shapes, _ = jax.eval_shape(
                lambda: self._transformation.update(
                    total, state.inner, params, **extra_args
                )
            )
            new = jax.tree.map(jnp.zeros_like, shapes)
            return new, Accumulating(state.micro_step + 1, total, state.inner)

        is_last = state.micro_step == self._steps - 1
        if not isinstance(is_last, Tracer):
            return update() if is_last else wait()
        if context.is_uneven(context.current()):
            # Such a step is cut where replicas communicate, which it cannot be in a branch.
            return jax.tree.map(lambda x, y: jnp.where(is_last, x, y), update(), wait())
        return lax.cond(is_last, update, wait)

    def _sum(self, gradients: PyTree) -> PyTree:
        """The gradients of all replicas, summed in `reduce_dtype`."""
        replica = context.current().replica
        if replica is None:
            raise RuntimeError(
                "`Optimizer.update` sums gradients over replicas, so it must be called in a "
                "replica: inside `strategy.run`. Pass `aggregate=False` for gradients that "
                "are summed already."
            )
        is_ours = (
            isinstance(gradients, dict) and gradients.keys() == self._variables.keys()
        )
        if is_ours:
            # In the order in which they are made, not that of their names, which JAX takes.
            ordered = [gradients[key] for key in self._variables]
            return dict(zip(self._variables, self._sum_in(replica, ordered)))
        return self._sum_in(replica, gradients)

    def _sum_in(self, replica: Any, gradients: PyTree) -> PyTree:
        def cast(x: jax.Array) -> jax.Array:
            is_real = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(self._reduce_dtype) if is_real else x

        if self._reduce_dtype is None:
            return replica.all_reduce("SUM", gradients, self._options)
        total = replica.all_reduce("SUM", jax.tree.map(cast, gradients), self._options)
        return jax.tree.map(lambda x, own: x.astype(own.dtype), total, gradients)

    def __repr__(self) -> str:
        count = len(self._variables)
        built = f"of {count} variable(s)" if count else "not built yet"
        return f"<mx.train.Optimizer {self.name!r}, {built}>"

    # Variables -------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of calls that make one update."""
        return self._steps

    @property
    def iterations(self) -> Variable:
        """How often the variables have been updated."""
        counter = self._iterations
        if counter is None:  # not before it is needed: it starts JAX's devices
            counter = self._iterations = self._make_iterations(self._strategy, 0)
        return counter

    @property
    def state(self) -> PyTree:
        """Optax's state, with a variable for each array; None before it is built.

        A hyperparameter of an optimizer that was made by name, or of
        `optax.inject_hyperparams`, can be assigned here:
        `optimizer.state.hyperparams["b1"].assign(0.8)`.
        """
        return self._state

    @property
    def variables(self) -> list[Variable]:
        """The number of iterations and all variables of the state."""
        slots = jax.tree.leaves(self._state, is_leaf=is_variable)
        return [self.iterations, *slots]

    def saved_parts(self) -> dict[str, Any]:
        """What a checkpoint saves, by name."""

        def whole(variable: Variable) -> Any:
            # Halfway to an update every replica's own sum counts, to the last bit.
            is_own = variable.synchronization is VariableSynchronization.ON_READ
            return OwnCopies(variable) if is_own else variable

        state = jax.tree.map(whole, self._state, is_leaf=is_variable)
        # Not built yet, but restored: what waits to be built is saved again.
        state = self._saved if state is None else state
        return {"iterations": self.iterations, "state": state}

    def slot_names(self, places: Mapping[int, str]) -> dict[str, str]:
        """From the names of what is in `state` to those in a checkpoint.

        There a slot has the name of its variable's place (`places`, by the variable's number),
        so that other names, or another order, do not mix up slots after a restart.
        """
        paths, _ = jax.tree_util.tree_flatten_with_path(
            self._state, is_leaf=is_variable
        )
        names = _names_in(places, self._variables)
        return {_key(path): _key(path, names) for path, _ in paths}

    def restore_later(
        self, saved: Mapping[str, Any], places: Mapping[int, str]
    ) -> None:
        """Takes values of the state, by their names in a checkpoint, for when it is built."""
        self._saved, self._places = saved, places

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the state for `variables`; else the first `apply_gradients` does."""
        variables = own_variables(variables)
        if self._variables:
            self._check_known(variables)
            return
        strategy = variables[0].strategy or get_strategy()
        named = _named(variables)
        with jax.ensure_compile_time_eval():
            initial = self.init(
                {k: v.concrete(is_local=True) for k, v in named.items()}
            )
        names = _names_in(self._places, named)
        self._state = jax.tree_util.tree_map_with_path(
            functools.partial(self._make_slot, strategy, names), initial
        )
        self._warn_of_rest(initial, names)
        self._set_rate_to_come()
        if self.iterations.strategy is not variables[0].strategy:
            # The same object, which a user may hold, with a copy for each replica.
            now = self.iterations.concrete(is_local=True)
            fresh = self._make_iterations(strategy, now)
            self.iterations.become(fresh)
        self._variables = named

    def _make_iterations(self, strategy: StrategyLike, value: Any) -> Variable:
        name = f"{self.name}/iterations"
        spec = VariableSpec(value, trainable=False, name=name, dtype=jnp.int32)
        return strategy.extended.create_variable(spec)

    def _make_slot(
        self, strategy: StrategyLike, names: Mapping[str, str], path: Any, value: Any
    ) -> Variable:
        key = _key(path)
        is_own = self._steps > 1 and key.startswith("accumulated/")
        saved = self._saved.get(_key(path, names))
        if saved is not None:
            self._check_saved(key, saved[0] if is_own else saved, value)
        spec = VariableSpec(
            value if is_own or saved is None else saved,
            trainable=False,
            name=f"{self.name}/{key}",
            dtype=jnp.asarray(value).dtype,
        )
        if is_own:
            spec = replace(
                spec,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
        variable = strategy.extended.create_variable(spec)
        if is_own and saved is not None:
            # Now, also if a function is being traced.
            now = context.changed(frame=None, replica=None, updating=None)
            with now, jax.ensure_compile_time_eval():
                OwnCopies(variable).put(saved)
        return variable

    def _warn_of_rest(self, initial: PyTree, names: Mapping[str, str]) -> None:
        """Tells what a checkpoint had for a state that is built now and turns out another."""
        paths, _ = jax.tree_util.tree_flatten_with_path(initial)
        made = {_key(path, names) for path, _ in paths}
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

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        aggregate: bool = True,
        **extra_args: Any,
    ) -> Variable:
        """Sums the gradients over the replicas and updates every copy of the variables.

        In cross-replica context distributed gradients are summed; plain arrays are taken as
        they are.

        Args:
            grads_and_vars: Pairs of a gradient (an array or `mx.IndexedSlices`) and its
                variable, also one of Keras or NNX that was made in a scope. The first call
                names all variables; of those that a later one leaves out nothing changes.
            aggregate: Whether to sum; False for gradients that are summed already.
            **extra_args: What the transformation takes beyond gradients and parameters.
                Floating-point arrays, such as a loss, are averaged over the replicas.

        Returns:
            `iterations`.
        """
        self._check_extra(extra_args)
        gradients, variables = split_pairs(grads_and_vars)
        here = context.current()
        owner = variables[0].strategy or here.strategy
        if here.replica is None or (
            owner is not here.strategy and context.is_default()
        ):
            self._apply_together(owner, gradients, variables, aggregate, extra_args)
        elif context.in_program(here) or here.strategy.num_replicas_in_sync == 1:
            self._compiled(self._prepare(gradients, variables), aggregate, extra_args)
        else:
            return self._apply_eagerly(
                here, gradients, variables, aggregate, extra_args
            )
        return self.iterations

    def _check_extra(self, extra_args: Mapping[str, Any]) -> None:
        """Raises for arguments that the transformation would drop without a word."""
        for name in extra_args:
            if name in _AGGREGATES or difflib.get_close_matches(name, ["aggregate"]):
                raise TypeError(
                    f"`apply_gradients` has no argument {name!r}; pass `aggregate=False` for "
                    "gradients that are summed already."
                )
            if name == "name" or not self._takes_extra:
                raise TypeError(
                    f"`apply_gradients` has no argument {name!r}, and nor has the "
                    "transformation."
                )

    def _apply_eagerly(
        self,
        here: context.Context,
        gradients: list[Any],
        variables: list[Variable],
        aggregate: bool,
        extra_args: dict[str, Any],
    ) -> Variable:
        """In an eager replica: all meet, and one compiled step does the rest."""
        # By name, since replicas may come with another order.
        known = {f"{v.name} ({v.number})": v for v in variables}
        own = {k: as_dense(g, v) for (k, v), g in zip(known.items(), gradients)}

        replica: Any = here.replica

        def merge(strategy: StrategyLike, *given: Any) -> Variable:
            together, extra = replica.rejoined(given)
            ordered = [together[key] for key in known]
            self._apply_together(strategy, ordered, variables, aggregate, extra)
            return self.iterations

        return replica.merge("apply_gradients", merge, (own, extra_args))

    def _apply_together(
        self,
        strategy: StrategyLike,
        gradients: list[Any],
        variables: list[Variable],
        aggregate: bool,
        extra_args: dict[str, Any],
    ) -> None:
        """In cross-replica context: every replica updates its copies."""
        given = self._prepare(gradients, variables)
        plain = [k for k, g in given.items() if not is_distributed(g)]
        if aggregate and 0 < len(plain) < len(given):
            raise ValueError(
                f"Some gradients are distributed and those of {show_names(plain)} are plain "
                "arrays: whether to sum them is ambiguous. Sum all of them first and pass "
                "`aggregate=False`."
            )
        strategy.run(self._compiled, (given, aggregate and not plain, extra_args))

    def _prepare(
        self, gradients: list[Any], variables: list[Variable]
    ) -> dict[str, Any]:
        """The gradients by the names of the variables."""
        self.build(variables)
        given = {v.number: g for g, v in zip(gradients, variables)}
        return {
            k: given[v.number] for k, v in self._variables.items() if v.number in given
        }

    def _check_known(self, variables: Sequence[Variable]) -> None:
        known = {v.number for v in self._variables.values()}
        strange = [v.name for v in variables if v.number not in known]
        if strange:
            raise ValueError(
                f"{self.name!r} does not know {show_names(strange)}: its state was made for "
                f"{show_names(list(self._variables))}. Name all variables at once, with "
                "`build`, or use another optimizer for the others."
            )

    def _update_variables(
        self, gradients: dict[str, Any], aggregate: bool, extra_args: dict[str, Any]
    ) -> None:
        """In a replica: its part of the update, from its own gradients."""
        import optax

        read = functools.partial(
            jax.tree.map, lambda v: v.read_value(), is_leaf=is_variable
        )
        params, state = read(self._variables), read(self._state)
        dense = {
            k: as_dense(gradients[k], v)
            if k in gradients
            else jnp.zeros_like(params[k])
            for k, v in self._variables.items()
        }
        updates, new_state = self.update(
            dense, state, params, aggregate=aggregate, **extra_args
        )
        new = optax.apply_updates(params, updates), new_state
        written, _ = jax.tree_util.tree_flatten_with_path(
            (self._variables, self._state), is_leaf=is_variable
        )
        for (path, variable), value in zip(written, jax.tree.leaves(new)):
            owner = [k.key for k in path if isinstance(getattr(k, "key", None), _Name)]
            if gradients.keys() >= set(owner):
                variable.store_agreed(variable.convert(value))
        done = new_state.micro_step == 0 if self._steps > 1 else 1
        self.iterations.store_agreed(self.iterations.read_value() + done)


def _agreed(extra_args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of which all replicas have the same, so that copies never drift apart."""
    leaves, tree = jax.tree.flatten(extra_args)
    own = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    replica = context.current().replica
    if own and replica is not None:
        mean = replica.all_reduce("MEAN", [leaves[i] for i in own])
        for i, value in zip(own, mean):
            leaves[i] = value
    return jax.tree.unflatten(tree, leaves)


def _named(variables: Sequence[Variable]) -> dict[_Name, Variable]:
    """The variables by their names, of which a repeated one gets a number."""
    named: dict[_Name, Variable] = {}
    for variable in variables:
        names = itertools.chain(
            [variable.name], (f"{variable.name}_{i}" for i in itertools.count(1))
        )
        named[_Name(next(n for n in names if n not in named))] = variable
    return named


def _names_in(
    places: Mapping[int, str], variables: Mapping[_Name, Variable]
) -> dict[str, str]:
    """What variables are called in a checkpoint: their place there, or their own name."""
    return {name: places.get(v.number, name) for name, v in variables.items()}


def _key(path: Any, names: Mapping[str, str] | None = None) -> str:
    """A place in a state as a name; `names` says what variables are called there."""
    renamed = tuple(
        jax.tree_util.DictKey((names or {}).get(entry.key, entry.key))
        if isinstance(getattr(entry, "key", None), _Name)
        else entry
        for entry in path
    )
    return jax.tree_util.keystr(renamed, simple=True, separator="/")


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
