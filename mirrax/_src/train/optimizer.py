"""`mx.train.Optimizer`: an Optax transformation that sums gradients over replicas."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import PyTree, is_leaf
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.engines.function import function
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Variable
from mirrax._src.strategies.default import get_strategy
from mirrax._src.train.explaining import StatePlan, plan_state, shape_of
from mirrax._src.train.learning_rate import HasLearningRate
from mirrax._src.train.pairs import (
    as_dense,
    is_distributed,
    is_variable,
    own_variables,
    show_names,
    split_pairs,
)
from mirrax._src.train.parts import StateInParts
from mirrax._src.train.slots import HasSlots, Name, by_names, names_in
from mirrax._src.train.transforming import Transforming

# How Keras says that gradients are summed already.
_AGGREGATES = ("skip_gradients_aggregation", "experimental_aggregate_gradients")


@all_brief
@hides(
    *("advance", "begin", "begin_in_scope", "compiled_update", "describe"),
    *("in_reduce_dtype", "lr", "options", "restore_later", "saved_parts", "slot_names"),
)
class Optimizer(Transforming, HasSlots, HasLearningRate):
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
        shard_state: Whether each replica keeps, and updates, only a part of the state, so
            that a device needs the memory of 1/n of it. Results are the same.
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
        shard_state: bool = False,
        name: str = "optimizer",
        **hyperparameters: Any,
    ) -> None:
        super().__init__(
            transformation,
            gradient_accumulation_steps=gradient_accumulation_steps,
            reduce_dtype=reduce_dtype,
            options=options,
            shard_state=shard_state,
            name=name,
            **hyperparameters,
        )
        self._variables: dict[Name, Variable] = {}
        self._state: PyTree = None
        self._strategy = get_strategy()
        self._iterations: Variable | None = None
        self._compiled = function(self._update_variables)

    def __repr__(self) -> str:
        count = len(self._variables)
        built = f"of {count} variable(s)" if count else "not built yet"
        return f"<mx.train.Optimizer {self.name!r}, {built}>"

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
        """Optax's state, with a variable for each array, once it is built.

        A hyperparameter of an optimizer that was made by name, or of
        `optax.inject_hyperparams`, can be assigned here:
        `optimizer.state.hyperparams["b1"].assign(0.8)`.

        Raises:
            AttributeError: Before `build`, or the first `apply_gradients`, which calls it.
        """
        if not self._variables:
            raise AttributeError(
                f"{self.name!r} has no state before its first `apply_gradients`. "
                "`optimizer.build(variables)` makes it at once."
            )
        return self._state

    @property
    def variables(self) -> list[Variable]:
        """The number of iterations and all variables of the state."""
        slots = jax.tree.leaves(self._state, is_leaf=is_variable)
        return [self.iterations, *slots]

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the state for `variables`; else the first `apply_gradients` does."""
        variables = own_variables(variables)
        if self._variables:
            self._check_known(variables)
            return
        strategy = variables[0].strategy or get_strategy()
        named = by_names(variables)
        with jax.ensure_compile_time_eval():
            initial = self._initial(strategy, named)
        names = names_in(self._places, named)
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

    def explain(self, params: PyTree = None) -> StatePlan:
        """What lies where: the bytes of the state on each device, with `shard_state` and without.

        >>> import jax, optax
        >>> strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> optimizer = mx.train.Optimizer(optax.adam(1e-3), shard_state=True)
        >>> with strategy.scope():
        ...     plan = optimizer.explain({"w": jax.ShapeDtypeStruct((1024, 1024), "float32")})
        >>> print(plan)
        slot     shape                on a device  where
        0/mu/w   float32[1024, 1024]  2.0 MiB      axis 0 over 2 devices
        0/nu/w   float32[1024, 1024]  2.0 MiB      axis 0 over 2 devices
        0/count  int32[]              4 B          a copy on each device
        4.0 MiB on each of 2 device(s); 8.0 MiB without `shard_state`

        Args:
            params: Variables, or a pytree of arrays or their shapes (`jax.ShapeDtypeStruct`):
                nothing is allocated. Not needed once the optimizer is built.
        """
        strategy = get_strategy()
        if params is None:
            if self._state is None:
                raise ValueError(
                    f"{self.name!r} is not built yet: pass the variables, or parameters, that "
                    "it is to train."
                )
            params = dict(self._variables)
            strategy = next(iter(params.values())).strategy or strategy
        shapes = jax.tree.map(shape_of, params, is_leaf=is_leaf)
        known = strategy.num_replicas_in_sync, self.shard_state
        try:
            state = jax.eval_shape(self.begin, shapes)
        except (TypeError, jax.errors.JAXTypeError) as error:
            raise ValueError(
                f"The state of {self.name!r} can be neither planned from shapes nor sharded: "
                f"`{self.describe()}` cannot be traced by JAX, which says: {error}"
            ) from error
        return plan_state(state, self._mesh_to_shard(strategy), *known)

    def _initial(self, strategy: StrategyLike, variables: Mapping[Name, Any]) -> PyTree:
        mesh = self._mesh_to_shard(strategy)
        if mesh is None:
            return self.begin(
                {k: v.concrete(is_local=True) for k, v in variables.items()}
            )
        values = {k: v.concrete() for k, v in variables.items()}
        return StateInParts(self, mesh).begin(values)

    def _make_iterations(self, strategy: StrategyLike, value: Any) -> Variable:
        name = f"{self.name}/iterations"
        spec = VariableSpec(value, trainable=False, name=name, dtype=jnp.int32)
        variable = strategy.extended.create_variable(spec)
        variable.is_slot = True
        return variable

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
                    f"`apply_gradients` has no argument {name!r}, and the transformation "
                    "takes no extra arguments."
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
            owner = [k.key for k in path if isinstance(getattr(k, "key", None), Name)]
            if gradients.keys() >= set(owner):
                variable.store_agreed(variable.convert(value))
        done = new_state.micro_step == 0 if self._steps > 1 else 1
        self.iterations.store_agreed(self.iterations.read_value() + done)
