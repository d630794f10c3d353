"""`Variable`: what all kinds share, and the ordinary kind."""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.hiding import brief, hides
from mirrax._src.base.jax_compat import Tracer, is_staging, uncommitted
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import Layout
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import VariableSynchronization
from mirrax._src.base.values import Atom, PerReplica, join
from mirrax._src.state.dtypes import check_fits
from mirrax._src.state.frozen_rate import check_not_frozen
from mirrax._src.state.home import Home
from mirrax._src.state.parts import InParts, PartUpdate
from mirrax._src.state.refusing import NotInPlace, as_array
from mirrax._src.state.spec import VariableSpec

_numbers = itertools.count()
_all: dict[int, weakref.ref[Variable]] = {}

# The numbers of variables whose array is also in the user's hands. A compiled step that would reuse
# (donate) such an array copies it first, so that what was read stays readable.
handed_out: set[int] = set()

_UPDATED = (
    "Variable {!r} has no value at the moment: the step that has called this code updates it in "
    "place. Read it in the step, and pass the value to the callback as an argument."
)

# How an assignment combines what a variable holds with the value; None replaces it.
Update = Callable[[Any, Any], Any] | None

# The numbers of variables whose array is gone, and how that came.
lost: dict[int, str] = {}
FAILED = "a step that updated it in place has failed."
DONATED = (
    "it shared its array with an argument that was donated (`donate_argnums`). Give one of "
    "them a copy, `jnp.copy(x)`."
)


def live_variables() -> list[Variable]:
    """Every variable that exists, oldest first."""
    return [v for v in (ref() for ref in list(_all.values())) if v is not None]


class _VariableType(type):
    """Lets the current strategy choose the kind that `mx.Variable(...)` makes.

    Every kind is also a pytree of its array, so that JAX's compiled functions, which flatten
    their arguments, take it: `jnp.matmul(x, v)`. What comes out is a plain array.
    """

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        node: Any = cls
        jax.tree_util.register_pytree_node(
            node,
            lambda v: ((v.__jax_array__(),), None),
            lambda _, children: children[0],
        )

    @brief
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Variable:
            return super().__call__(*args, **kwargs)
        if not args and "initial_value" not in kwargs:
            kwargs["initial_value"] = None  # which says what it should be
        try:
            cls.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"mx.Variable() {error}: it is called as Variable{cls.__signature__}."
            ) from None
        spec = VariableSpec(*args, **kwargs)
        return context.current().strategy.extended.create_variable(spec)


@hides(
    *("become", "check_not_lost", "check_readable", "concrete", "convert"),
    *("has_values", "home_sharding", "in_full", "in_one_array", "is_gone"),
    *("is_slot", "layout_now", "lives_at", "may_be_packed", "move_to", "number"),
    *("replace_array", "store_agreed", "store_local", "stored", "strategy", "to_save"),
    *("with_dtype", "written_layout"),
)
class Variable(NotInPlace, InParts, Atom, metaclass=_VariableType):
    """An array that can be assigned. In a strategy's scope, a copy on each device.

    >>> v = mx.Variable(1.0, name="v")
    >>> v.assign_add(2.0)
    <mx.Variable 'v' shape=() dtype=float32, numpy=3.0>

    Args:
        initial_value: An array, a number, or a function without arguments that makes one.
        trainable: Whether an optimizer should train it; the default is True, and False
            for `synchronization=ON_READ`.
        name: Shown in messages; need not be unique.
        dtype: The type to convert `initial_value` to.
        synchronization: When copies are brought together: `AUTO`, `ON_WRITE`, `ON_READ`.
        aggregation: How values that replicas assign are combined.
        shape: What the shape of `initial_value` has to be.
    """

    __module__ = "mirrax"
    # The home, the place in it, and the part of the pack there, if it is one; nothing is in the
    # home of a variable that is not made yet.
    lives_at: tuple[Home, int, int | None] = Home([None]), 0, None
    # How the array lies on the strategy's mesh, and its parts once looked at.
    _layout = Layout.PLAIN
    _view: PerReplica | None = None
    may_be_packed = True  # until it has been taken out of packs too often
    is_slot = False  # whether an optimizer keeps it for another variable
    strategy: Any  # a `StrategyLike`, or None where no strategy made the variable
    __signature__ = inspect.signature(VariableSpec)

    def _setup(
        self, spec: VariableSpec, strategy: StrategyLike | None, value: jax.Array
    ) -> None:
        self.name = spec.name or "Variable"
        is_on_read = spec.synchronization is VariableSynchronization.ON_READ
        self.trainable = not is_on_read if spec.trainable is None else spec.trainable
        self.synchronization = spec.synchronization
        self.aggregation = spec.aggregation
        self.strategy = strategy
        self.shape: tuple[int, ...] = value.shape
        self.dtype = value.dtype
        self._settle(value)

    def _settle(self, value: Any) -> None:
        """Begins to exist, with `value`."""
        self.number = next(_numbers)
        self.stored = value
        _all[self.number] = weakref.ref(self, lambda _, n=self.number: _forget(n))
        handed_out.add(self.number)
        frame = context.current().frame
        if frame is not None:
            frame.add_created(self)

    def __del__(self) -> None:
        # A variable that lives on must not keep the others' arrays.
        home, place, part = self.lives_at
        self.lives_at = Variable.lives_at  # other threads can still see this one
        home.leave(place, part)

    # What is stored ------------------------------------------------------------------

    @property
    def stored(self) -> Any:
        """The array; a `PerReplica` if each replica has a value of its own."""
        found = self._array()
        if not self._layout.is_split or found is None:
            return found
        view = self._view
        if view is None or view.array is not found:
            mesh = self.strategy.replica_mesh
            view = self._view = PerReplica.of(found, mesh, self._layout)
        return view

    @stored.setter
    def stored(self, value: Any) -> None:
        self.move_to(Home([value]), 0, type(self)._layout)

    def move_to(
        self, home: Home, place: int, layout: Layout, part: int | None = None
    ) -> None:
        """Has the variable live where a program puts its array, so laid out."""
        old, old_place, old_part = self.lives_at
        if old is not home:
            old.is_whole = False  # before all: an interrupt may come in between
        self.lives_at, self._view = (home, place, part), None
        self._layout = layout if layout.is_split else type(self)._layout
        if old is not home:
            old.leave(old_place, old_part)

    def _array(self) -> Any:
        home, place, part = self.lives_at
        if part is None:
            return home.arrays[place]
        # A step on another thread must not donate the pack, or move on.
        with launching():
            self.check_not_lost()
            if self.is_gone():  # XLA crashes on such a pack
                raise RuntimeError(_UPDATED.format(self.name))
            home, place, part = self.lives_at
            return home.array_at(place, part)

    def in_full(self) -> Any:
        """What is stored; not in parts."""
        return self.stored

    def to_save(self) -> Any:
        """The value for a checkpoint; every worker has to call it."""
        stored = self.stored
        is_apart = isinstance(stored, PerReplica)
        return stored.values[0] if is_apart else stored.addressable_data(0)

    def written_layout(self, layout: Layout) -> Layout:
        """How what a replicas' program writes is kept, which comes out of it so laid out."""
        return layout

    def replace_array(self, array: jax.Array, layout: Layout) -> None:
        """Puts `array` in the place of an equal one, which `in_one_array` gave."""
        home, place, part = self.lives_at
        home.replace(place, part, array)
        self._layout, self._view = layout, None

    def in_one_array(self) -> tuple[jax.Array, Layout]:
        """What is stored as a program takes it, and how that lies on the mesh."""
        found = self._array()
        if not isinstance(found, PerReplica):
            return found, self._layout
        mesh = self.strategy.replica_mesh
        array, layout = join(found, mesh)
        return array, layout if mesh.size > 1 else type(self)._layout

    def layout_now(self) -> Layout:
        """How what `in_one_array` gives lies on the mesh; opens no pack."""
        return self._layout if self.lives_at[2] is not None else self.in_one_array()[1]

    # Reading -------------------------------------------------------------------------

    def read_value(self) -> jax.Array:
        """The value now; later assignments do not change it."""
        frame = context.current().frame
        if frame is not None:
            return frame.read(self)
        self.check_readable()
        return self.concrete(is_local=True)

    def value(self) -> jax.Array:
        """The value now; later assignments do not change it."""
        return self.read_value()

    def check_not_lost(self) -> None:
        """Raises if a failed step has taken the value; assigning gives a new one."""
        why = lost.get(self.number)
        if why is None:
            return
        if self.is_gone():
            raise RuntimeError(
                f"Variable {self.name!r} has lost its value: {why} Assign it again, or restore "
                "a checkpoint."
            )
        lost.pop(self.number, None)

    def is_gone(self) -> bool:
        """Whether the array was donated."""
        home, place, _ = self.lives_at
        found = home.arrays[place]
        if found is None:  # the variable is going, on another thread
            return False
        if not isinstance(found, PerReplica):
            return found.is_deleted()
        arrays = found.values if found.array is None else (found.array,)
        return any(array.is_deleted() for array in arrays)

    def check_readable(self) -> None:
        """Raises inside a trace of JAX's own, which would keep the value that it has now."""
        self.check_not_lost()
        if is_staging():
            raise RuntimeError(
                f"Variable {self.name!r} is read inside a function that JAX traces on its own "
                "(`jax.jit`, the body of a `lax.scan`, ...), which would keep the value "
                "it has now. Use `mx.function` in place of `jax.jit`, or around the code that "
                "calls `lax.scan`; or read the variable outside and pass the value in."
            )

    def concrete(self, is_local: bool = False) -> Any:
        """What is stored, for somebody who may keep it; `is_local` means one replica's."""
        with launching():  # a step on another thread must not donate it
            handed_out.add(self.number)
            return self.stored

    def _keep(self, value: Any) -> None:
        """Stores what somebody has assigned, who may hold it as well."""
        with launching():
            self.stored = value
            handed_out.add(self.number)

    def __jax_array__(self) -> jax.Array:
        return self.read_value()

    def __rmul__(self, other: Any) -> Any:
        if type(other) is int:  # cheap to ask, and what Optax multiplies a rate by
            check_not_frozen(self.name)
        return super().__rmul__(other)

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array of its own."""
        return np.array(self.read_value())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # Writing -------------------------------------------------------------------------

    @brief
    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Replaces the value.

        Args:
            value: An array, or a number, of the variable's shape.
            use_locking: Assignments are always atomic.
            name: Named an operation of a graph; nothing is called so here.
            read_value: Whether to return the variable; else None.
        """
        self._assign(value, None)
        return self if read_value else None

    @brief
    def assign_add(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds `delta`; arguments as those of `assign`."""
        self._assign(delta, operator.add)
        return self if read_value else None

    @brief
    def assign_sub(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts `delta`; arguments as those of `assign`."""
        self._assign(delta, operator.sub)
        return self if read_value else None

    def _assign(self, value: Any, update: Update) -> None:
        here = context.current()
        if here.replica is not None and here.strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"Variable {self.name!r} was made outside the scope of the strategy, so it "
                "has one copy, which replicas cannot assign. Make it inside "
                "`with strategy.scope():`, or assign it outside `run`."
            )
        value = self.convert(value, update)
        with launching():  # nobody else may assign in between
            self.store_local(updated(update, self.read_value, value))

    def store_local(self, value: jax.Array) -> None:
        """Keeps what the current code, or a traced part of it, has assigned."""
        frame = context.current().frame
        if frame is not None:
            frame.write(self, value)
        else:
            self._check_leak(value)
            self._keep(value)

    def store_agreed(self, value: jax.Array, is_agreed: bool = True) -> None:
        """As `store_local`, for what all replicas have computed together; alike, if agreed."""
        self.store_local(value)

    def convert(self, value: Any, update: Update = None) -> Any:
        """`value` as an array of this variable's shape and dtype, or as `update` takes it."""
        if isinstance(update, PartUpdate):
            return update.convert(self, value)
        array = self.with_dtype(value)
        if array.shape != self.shape:
            raise ValueError(
                f"Variable {self.name!r} has shape {self.shape}; a value of shape "
                f"{array.shape} cannot be assigned to it."
            )
        return array

    def with_dtype(self, value: Any) -> jax.Array:
        """`value` as an array of this variable's dtype."""
        if isinstance(value, PerReplica):
            raise ValueError(
                f"Variable {self.name!r} is assigned a PerReplica value, which has parts for all "
                "replicas, where one is needed. Pass it to `run` as an argument: each replica gets its "
                "own part."
            )
        array = as_array(value, self.name)
        check_fits(value, array.dtype, self.dtype, self.name)
        return lax.convert_element_type(array, self.dtype)

    def _check_leak(self, value: Any) -> None:
        if isinstance(value, Tracer):
            raise RuntimeError(
                f"Variable {self.name!r} is assigned a traced value, which would leak out "
                "of the function that JAX is tracing (`jax.jit`, `jax.grad`, `lax.scan`, "
                "...). Use `mx.function` in place of `jax.jit` and `mx.value_and_grad` in "
                "place of `jax.grad`, or return the value and assign it outside."
            )

    def become(self, other: Variable) -> None:
        """Turns into a variable of another kind or strategy, and stays the same object."""
        self.__class__ = type(other)  # pyright: ignore[reportAttributeAccessIssue]
        home, place, part = self.lives_at
        home.leave(place, part)
        vars(self).update({k: v for k, v in vars(other).items() if k != "number"})
        del other.lives_at  # which is ours now: it may not leave it
        handed_out.add(self.number)

    # Showing -------------------------------------------------------------------------

    def __repr__(self) -> str:
        value = self.read_value()
        kind = f"shape={self.shape} dtype={self.dtype}"
        if isinstance(value, Tracer):
            shown = "traced"
        elif jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            shown = f"keys={jax.random.key_data(value)}"
        else:
            array = np.asarray(value)
            shown = f"numpy={array if array.ndim == 0 else repr(array)}"
        return f"<mx.Variable '{self.name}' {kind}, {shown}>"

    # Copying -------------------------------------------------------------------------

    def __copy__(self) -> Variable:
        return self  # what it holds would be shared anyway

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """A variable of the same kind and name, with a value (of each replica) of its own."""
        if context.current().frame is not None:
            raise NotImplementedError(
                f"Variable {self.name!r} is copied in a function that is traced. Copy it "
                "outside."
            )
        self.check_readable()
        new = memo[id(self)] = object.__new__(type(self))
        own = "lives_at", "values"
        vars(new).update({k: v for k, v in dict(vars(self)).items() if k not in own})
        new._settle(jax.tree.map(jnp.copy, self.concrete()))
        return new

    def __reduce__(self) -> Any:
        """Variables are not pickled: another process has other devices."""
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: save `v.numpy()`, or use "
            "`mx.train.Checkpoint`."
        )


class OrdinaryVariable(Variable):
    """A variable with one copy, made outside any distributing strategy."""

    __module__ = "mirrax"

    def __init__(
        self, spec: VariableSpec, strategy: StrategyLike | None = None
    ) -> None:
        self._setup(spec, strategy, spec.initial_array())

    def concrete(self, is_local: bool = False) -> Any:
        with launching():
            super().concrete()
            return self.in_full()

    def in_full(self) -> Any:
        array = self.stored
        if self.strategy is None and array.committed and len(array.devices()) == 1:
            return uncommitted(array)  # it belongs to no device in particular
        return array


OrdinaryVariable.__name__ = OrdinaryVariable.__qualname__ = "Variable"


def _forget(number: int) -> None:
    _all.pop(number, None)
    handed_out.discard(number)
    lost.pop(number, None)


def note_donated() -> None:
    """Looks which variables have shared an array that was just donated."""
    for number in list(handed_out):
        variable = _all[number]() if number in _all else None
        if variable is not None and variable.is_gone():
            lost[number] = DONATED


def updated(update: Update, read: Callable[[], Any], value: Any) -> Any:
    """What an assignment of `value` stores; only a real update reads the variable."""
    return value if update is None else update(read(), value)
