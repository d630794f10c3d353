"""Variables and modules of Flax NNX: made in a scope, a variable holds an `mx.Variable`.

Everything that mirrax knows of the inside of NNX is in this file, and of its BatchNorm in
`flax_norm.py`; `tests/integrations/test_nnx_names.py` says what falls with each name.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import pytreelib, tracers, variablelib
from flax.nnx.nn import normalization

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import (
    ConcreteArray,
    Tracer,
    outside_traces,
    trace_state,
)
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.structures import Atom
from mirrax._src.base.values import is_array, is_number
from mirrax._src.integrations.flax_norm import synchronised
from mirrax._src.state import foreign
from mirrax._src.state.sharded import ShardedVariable
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Variable
from mirrax._src.train.own_copies import OwnCopies

_MADE_OUTSIDE = (
    "{what} was made outside the scope of the strategy, so it is one plain array, which {who} "
    "cannot change. Make the module inside `with strategy.scope():`, or bring it in with "
    "`model = strategy.replicate(model)`."
)
_MADE_ELSEWHERE = (
    "{what} was made in a compiled function, or in another replica (by `sow`, say), and "
    "belongs there. Return the value from the function instead."
)

# What is not documented, and replaced or relied on below.
_NAMES = (
    (nnx.Variable, "_raw_value"),
    (nnx.Variable, "_can_update"),
    (tracers, "current_jax_trace"),
    (tracers.TraceState, "jax_trace"),
    (getattr(variablelib, "VariableMeta", None), "_variable_meta_call"),
    (getattr(pytreelib, "PytreeMeta", None), "_pytree_meta_construct"),
    (pytreelib.Pytree, "_setattr"),
    (normalization, "_compute_stats"),
)


def check_names() -> None:
    """Raises for a version of Flax that is built differently."""
    missing = [name for owner, name in _NAMES if not hasattr(owner, name)]
    if missing:
        raise ImportError(
            f"mirrax does not know Flax {flax.__version__}, which has no {', '.join(missing)}. "
            "It was tested with Flax 0.12.7 to 0.12.12: `pip install 'mirrax[flax]'`."
        )


check_names()

# Where the code is ------------------------------------------------------------------------

with jax.ensure_compile_time_eval():
    _top_level = trace_state()


class _Place(type(trace_state())):
    """Where an object of NNX is made, if in a replica or a function that mirrax traces.

    NNX lets only code of the same trace change the object. mirrax's own traces count as
    none, since what they assign goes to variables; the real trace is remembered as well.
    """

    def __init__(self, seen: Any, real: Any, replica: Any) -> None:
        self.seen, self.real = seen, real
        self._replica = weakref.ref(replica) if replica is not None else None

    def is_in(self, replica: Any) -> bool:
        """Whether it is the place of this replica, or None, and of the trace of now."""
        own = None if self._replica is None else self._replica()
        return own is replica and self.real == trace_state()

    def __eq__(self, other: object) -> bool:
        return self.seen == (other.seen if isinstance(other, _Place) else other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _current_place() -> Any:
    if not context.is_entered():  # at once, for programs without strategies
        return trace_state()
    real, here = trace_state(), context.current()
    frame: Any = here.frame
    if frame is None and (here.replica is None or context.is_default()):
        return real
    is_ours = frame is not None and frame.is_innermost()
    return _Place(_top_level if is_ours else real, real, here.replica)


# Variables --------------------------------------------------------------------------------


class _RawValue(foreign.Route):
    """Where an `nnx.Variable` keeps its array."""

    def __init__(self, owner: type, name: str) -> None:
        super().__init__(owner, name)
        slot: Any = self._slot
        self._get, self._set = slot.__get__, slot.__set__

    def read(self, obj: Any, variable: Variable) -> Any:
        if not isinstance(obj, nnx.RngState):
            return variable.read_value()
        replica = spread_replica()
        value = _split_keys(replica).get(variable.number)
        if value is None:
            value = variable.read_value()
            if replica is not None and isinstance(obj, nnx.RngKey):
                value = _fold_in(value, replica.replica_id_in_sync_group)
        return value

    def write(self, obj: Any, variable: Variable, value: Any) -> None:
        if isinstance(obj, nnx.RngState):
            replica = spread_replica()
            split = _split_keys(replica)
            split.pop(variable.number, None)
            if jnp.shape(value) != variable.shape:
                split[variable.number] = value
                return
            # Replicas have keys of their own, made from one that they cannot change.
            if replica is not None and isinstance(obj, nnx.RngKey):
                return
        if isinstance(value, nnx.Variable):
            value = value.get_raw_value()
        here = context.current()
        is_together = here.replica is None or context.is_default()
        if is_together and _is_count(variable):
            _assign_to_first(variable, jnp.asarray(value, variable.dtype))
        else:
            variable.assign(value)

    def like(self, obj: Any, value: Any) -> Any:
        return obj.replace(value)

    def hold(self, obj: Any, value: Any) -> None:
        here = context.current()
        if here.frame is not None or spread_replica() is not None:
            self.check_own(obj, here)
        elif id(obj) in _kept:
            _kept[id(obj)].change()
        super().hold(obj, value)

    def check_plain(self, obj: Any) -> None:
        """Raises where `hold` would: before NNX takes a module apart, to put it together anew."""
        here = context.current()
        is_plain = not isinstance(self.held(obj), Variable)
        if is_plain and (here.frame is not None or spread_replica() is not None):
            self.check_own(obj, here)

    def check_own(self, obj: Any, here: Context) -> None:
        """Raises if replicas, or a traced function, change what was there before them."""
        try:
            self.held(obj)
        except AttributeError:  # it is being made
            return
        place = obj._trace_state.jax_trace
        if isinstance(place, _Place):
            if place.is_in(here.replica):
                return
            raise ValueError(_MADE_ELSEWHERE.format(what=_describe(obj)))
        who = "a compiled function" if here.replica is None else "replicas"
        raise ValueError(_MADE_OUTSIDE.format(what=_describe(obj), who=who))

    def _keep(self, obj: Any) -> None:
        """Notes that a program which is traced keeps the value of a plain variable."""
        is_older = not isinstance(obj._trace_state.jax_trace, _Place)
        if is_older and not isinstance(self.held(obj), Variable):
            _kept.setdefault(id(obj), Plain(type(obj).__name__))

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        value = self._get(obj)
        is_traced = context.current().frame is not None
        if type(value) is ConcreteArray and not is_traced:
            return value  # at once, for programs without strategies
        value = super().__get__(obj, owner)
        if is_traced:
            self._keep(obj)
        one = value[0] if type(value) is tuple and value else value  # what is sown
        if isinstance(one, Tracer) and outside_traces():
            raise ValueError(_MADE_ELSEWHERE.format(what=_describe(obj)))
        return value

    def __set__(self, obj: Any, value: Any) -> None:
        try:
            is_plain = type(self._get(obj)) is ConcreteArray
        except AttributeError:
            is_plain = False
        if is_plain and not _kept and not context.is_entered():
            self._set(obj, value)  # at once, for programs without strategies
        else:
            super().__set__(obj, value)


class Plain:
    """A plain variable that programs have read, and so keep the value of.

    When it is changed, outside, they are not used any more. NNX's variables take no weak
    references; the number of one that is gone may lead to a trace too many.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._version = kind, 0

    def change(self) -> None:
        version, self._version = self._version, self._version + 1
        foreign.settings.note(self, self._kind, version, self._version)


_kept: dict[int, Plain] = {}


def _is_count(variable: Variable) -> bool:
    is_summed = variable.aggregation is VariableAggregation.SUM
    return is_summed and jnp.issubdtype(variable.dtype, jnp.integer)


def _assign_to_first(variable: Variable, value: jax.Array) -> None:
    """Gives the first replica a count, and none to the others: shares may not add up again."""

    def assign(value: jax.Array) -> None:
        replica: Any = context.current().replica
        is_first = replica.replica_id_in_sync_group == 0
        variable.assign(jnp.where(is_first, value, 0))

    if context.current().frame is None:
        OwnCopies(variable).put(np.asarray(value)[None])
    else:
        variable.strategy.run(assign, (value,))


def _fold_in(key: jax.Array, replica_id: jax.Array) -> jax.Array:
    fold = jax.random.fold_in
    for _ in range(key.ndim):  # the keys of stacked layers
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, replica_id)


def spread_replica() -> Any:
    """The replica that the code runs for, if there are others."""
    here = context.current()
    is_alone = here.replica is None or here.strategy.num_replicas_in_sync == 1
    return None if is_alone else here.replica


class _SplitKeys(threading.local):
    def __init__(self) -> None:
        self.by_number: dict[int, Any] = {}


_split_outside = _SplitKeys()


def _split_keys(replica: Any) -> dict[int, Any]:
    """What `nnx.split_rngs` puts in the place of a variable for a while: another shape."""
    if replica is None:
        return _split_outside.by_number
    return vars(replica).setdefault("nnx_split_keys", {})


def _describe(variable: Any) -> str:
    """A variable of NNX for messages: `nnx.Param 'Linear.kernel', of shape (2, 3)`."""
    names = [
        f"{type(owner).__name__}.{name}"
        for owner in _owners(variable)
        for name, value in vars(owner).items()
        if value is variable
    ]
    held = raw_value.held(variable)
    shape = f", of shape {held.shape}," if hasattr(held, "shape") else ""
    name = (
        f" {min(names)!r}" if names else ""
    )  # NNX may just be taking its module apart
    return f"nnx.{type(variable).__name__}{name}{shape}"


def _owners(variable: Any) -> list[Any]:
    """The modules that have a variable as an attribute; only messages ask."""
    found = gc.get_referrers(variable)
    found += [x for each in found if type(each) is dict for x in gc.get_referrers(each)]
    return [x for x in found if isinstance(x, nnx.Pytree)]


raw_value = _RawValue(nnx.Variable, "_raw_value")


def current_scope() -> StrategyLike | None:
    """The strategy in whose scope the code is, outside replicas and traced functions."""
    here = context.current()
    is_plain = here.replica is None and here.updating is None and here.frame is None
    return here.strategy if is_plain and not context.is_default() else None


def _adopt(variable: Any, strategy: StrategyLike, name: str) -> None:
    """Has a variable of NNX hold one of the strategy's, unless its value is no array."""
    if variable.hijax or variable.ref:
        option = "hijax" if variable.hijax else "ref"
        raise NotImplementedError(
            f"nnx.{variable.var_type.__name__} {name!r} is made with `{option}=True` in the "
            "scope of a strategy, which keeps the value itself. Leave the option out "
            f"(`nnx.var_defaults({option}=False)`)."
        )
    value = raw_value.held(variable)
    if isinstance(value, Variable):
        value.name = name
        return
    if isinstance(value, Tracer) or not (is_array(value) or is_number(value)):
        return
    value = value if is_array(value) else np.asarray(value)
    synchronization = VariableSynchronization.AUTO
    aggregation = VariableAggregation.NONE
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    if isinstance(variable, nnx.BatchStat) and is_float:
        synchronization = VariableSynchronization.ON_READ
        aggregation = VariableAggregation.MEAN
    elif isinstance(variable, nnx.metrics.MetricState):
        synchronization = VariableSynchronization.ON_READ
        aggregation = VariableAggregation.SUM
    is_trained = isinstance(variable, nnx.Param)
    spec = VariableSpec(
        value, is_trained, name, None, synchronization, aggregation=aggregation
    )
    if isinstance(variable, nnx.OptState) and _is_in_parts(value, strategy):
        spec = replace(spec, dtype=value.dtype)  # so that it is taken as it is
        made: Variable = ShardedVariable(spec, strategy)
    else:
        made = strategy.extended.create_variable(spec)
    foreign.Route.hold(raw_value, variable, made)


def _is_in_parts(value: Any, strategy: StrategyLike) -> bool:
    """Whether an array lies on the strategy's devices as an optimizer with `shard_state` makes it."""
    mesh = strategy.replica_mesh
    return (
        isinstance(value, jax.Array)
        and not value.is_fully_replicated
        and value.sharding.is_equivalent_to(mesh.sharded(value.shape), value.ndim)
    )


def _adopt_all(module: Any, strategy: StrategyLike) -> None:
    """Adopts what is in a module, and names it by its place in there."""
    for path, value in nnx.iter_graph(module):
        if isinstance(value, nnx.Variable):
            name = ".".join(map(str, (type(module).__name__, *path)))
            _adopt(value, strategy, name)


def _make_variable(cls: Any, *args: Any, **kwargs: Any) -> Any:
    variable = _make_variable_plain(cls, *args, **kwargs)
    strategy = current_scope()
    if strategy is not None:
        _adopt(variable, strategy, cls.__name__)
    return variable


def _can_update(variable: Any) -> bool:
    if context.is_entered():
        raw_value.check_plain(variable)
    return _can_update_plain(variable)


class _Making(threading.local):
    """The modules whose `__init__` runs."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


_making = _Making()


def _construct(cls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    _making.numbers.append(id(self))
    try:
        _construct_plain(cls, self, *args, **kwargs)
    finally:
        _making.numbers.pop()
    strategy = current_scope()
    if strategy is not None:
        _adopt_all(self, strategy)


# Modules ----------------------------------------------------------------------------------


def _set_attribute(self: Any, name: str, value: Any) -> None:
    before = vars(self).get(name, self)
    _set_attribute_plain(self, name, value)
    if before is self or before is value or id(self) in _making.numbers:
        return
    # What a step itself sets counts when it is traced, as any Python does.
    here = context.current()
    is_step = here.replica is not None and not context.is_default()
    if here.frame is None and not is_step:
        foreign.settings.note(self, name, before, vars(self)[name])


def _check_module(module: Any) -> None:
    """Raises for a module whose arrays a program would keep as they are now."""
    for _, value in nnx.iter_graph(module):
        if not isinstance(value, nnx.Variable):
            continue
        held = raw_value.held(value)
        if isinstance(held, jax.Array | np.ndarray) and not isinstance(held, Tracer):
            raise ValueError(
                f"A compiled function takes a {type(module).__name__} as an argument. "
                + _MADE_OUTSIDE.format(what=_describe(value), who="a compiled function")
            )


def _replicate(strategy: Any, module: Any) -> Any:
    with strategy.scope():
        graph, state = nnx.split(module)
        copied = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        _adopt_all(copied, strategy)
    return copied


def _saved_parts(module: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for path, value in nnx.iter_graph(module):
        if isinstance(value, nnx.Variable):
            held = raw_value.held(value)
            is_metric = isinstance(held, Variable) and isinstance(
                value, nnx.metrics.MetricState
            )
            parts["/".join(map(str, path))] = OwnCopies(held) if is_metric else held
    return parts


def _replace_parts(module: Any, parts: dict[str, Any]) -> None:
    for path, value in nnx.iter_graph(module):
        name = "/".join(map(str, path))
        if isinstance(value, nnx.Variable) and not isinstance(
            parts.get(name, Variable), Variable | OwnCopies | type
        ):
            value.set_value(parts[name])


# What of NNX is replaced ------------------------------------------------------------------

_make_variable_plain = variablelib.VariableMeta._variable_meta_call
_can_update_plain: Any = nnx.Variable._can_update.fget  # pyright: ignore[reportAttributeAccessIssue]
_construct_plain = pytreelib.PytreeMeta._pytree_meta_construct
_set_attribute_plain = pytreelib.Pytree._setattr


def replace_name(owner: Any, name: str, new: Any) -> None:
    """Puts `new` in the place of something of NNX's."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(new))


replace_name(tracers, "current_jax_trace", _current_place)
nnx.Variable._can_update = property(_can_update)  # pyright: ignore[reportAttributeAccessIssue]
replace_name(variablelib.VariableMeta, "_variable_meta_call", _make_variable)
replace_name(pytreelib.PytreeMeta, "_pytree_meta_construct", _construct)
replace_name(pytreelib.Pytree, "_setattr", _set_attribute)
replace_name(
    normalization, "_compute_stats", synchronised(normalization._compute_stats)
)

# A module is one leaf of arguments and results, told apart by identity.
nnx.Pytree.__bases__ = (*nnx.Pytree.__bases__, Atom)
foreign.module_kinds.append(
    foreign.ModuleKind(
        nnx.Pytree, _check_module, _replicate, _saved_parts, _replace_parts
    )
)
