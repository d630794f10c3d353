"""`mx.function`: compiles a function, with the variables it uses and the `run`s inside it."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.errors import RunEagerly, hide_own_frames, warn_user
from mirrax._src.base.hiding import hides
from mirrax._src.base.jax_compat import EMPTY_PARTS_CRASH, outside_traces
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    PyTree,
    UnevenError,
    is_array,
    is_leaf,
)
from mirrax._src.collectives.programs import describe_program
from mirrax._src.engines.arguments import (
    Call,
    Static,
    explain_change,
    freeze,
    sort_arguments,
    thawing,
)
from mirrax._src.engines.closures import FunctionCache
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.inputs import SignatureChanged
from mirrax._src.engines.jaxprs import has_empty
from mirrax._src.engines.loop import split_up, trace_steps
from mirrax._src.engines.program import Program, compile_part, layouts_match
from mirrax._src.engines.signatures import InputSignature
from mirrax._src.engines.trace import (
    trace_call,
    trace_replica,
    until_no_new_variables,
)
from mirrax._src.engines.traced import Trace
from mirrax._src.engines.uneven import run_uneven
from mirrax._src.state.foreign import settings
from mirrax._src.state.variable import Variable

_Ints = int | Sequence[int]
_Names = str | Sequence[str]
_WARN_AFTER = 5
_MOST_TRIES = 100
_run_eagerly = False
# Of JAX, for which a program is built.
_settings = operator.attrgetter(
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
)


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Makes everything run as plain Python, for debugging; False goes back to compiling.

    >>> mx.config.run_functions_eagerly(True)
    >>> mx.config.run_functions_eagerly(False)
    """
    global _run_eagerly
    _run_eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """Whether `run_functions_eagerly(True)` is in force."""
    return _run_eagerly


@overload
def function(
    fn: Fn,
    /,
    *,
    donate_argnums: _Ints = (),
    static_argnames: _Names = (),
    input_signature: Sequence[Any] | None = None,
) -> Function: ...
@overload
def function(
    *,
    donate_argnums: _Ints = (),
    static_argnames: _Names = (),
    input_signature: Sequence[Any] | None = None,
) -> Callable[[Fn], Function]: ...
def function(
    fn: Fn | None = None,
    /,
    *,
    donate_argnums: _Ints = (),
    static_argnames: _Names = (),
    input_signature: Sequence[Any] | None = None,
) -> Any:
    """Compiles `fn`: alone, as a replica function, or as the caller of `strategy.run`.

    >>> v = mx.Variable(0.0)
    >>> @mx.function
    ... def count(x):
    ...     return v.assign_add(x).read_value()
    >>> count(2.0), count(3.0), count.trace_count
    (Array(2., dtype=float32), Array(5., dtype=float32), 1)

    `fn` is traced when it meets new shapes, dtypes or static values, and for any number
    of replicas only once. Numbers and arrays are traced; strings, booleans and other
    objects are static. Variables that `fn` uses are detected automatically. A function that
    loops over a distributed dataset runs its loop on the host and compiles each `run`.
    Equal static values, those with the same type and hash for which `==` holds, share a trace.

    With an `input_signature` arguments are checked, and Python's numbers and lists and NumPy's
    arrays converted:

    >>> @mx.function(input_signature=[mx.TensorSpec([None], "float32")])
    ... def mean(x):
    ...     return x.mean()
    >>> mean([1, 2]), mean([3.0, 5.0]), mean.trace_count
    (Array(1.5, dtype=float32), Array(4., dtype=float32), 1)

    A length that is None may be any, but JAX compiles for each one, so `fn` is traced once for
    each, about which there is no warning.

    Args:
        fn: The function; leave it out to use `mx.function(...)` as a decorator.
        donate_argnums: Positions of arguments whose memory the results may reuse.
        static_argnames: Names of arguments that `fn` needs as Python values.
        input_signature: A list with a `mx.TensorSpec`, or a structure of them, for each
            argument that is not static, `self` left out; or a dataset's `element_spec`. Of
            a per-replica value each part has to fit.

    Raises:
        TypeError: If `input_signature` is not one for `fn`; at a call, if an argument does
            not fit it.
    """
    options = donate_argnums, static_argnames, input_signature
    if fn is None:
        return lambda fn: Function(fn, *options)
    is_made = isinstance(fn, Function) and options == ((), (), None)
    return fn if is_made else Function(fn, *options)


class _Last(dict[Any, Program]):
    """The last program at each place."""

    def __missing__(self, place: Any) -> Program:
        raise SignatureChanged


@hides("call_for_each", "cuts", "fn", "inner", "note_trace", "run_on")
class Function:
    """A function that compiles itself; made by `mx.function`.

    Attributes:
        trace_count: How often the function has been traced.
        input_signature: The specs of its arguments, as a tuple; None if there are none.
    """

    __module__ = "mirrax"

    def __init__(
        self,
        fn: Fn,
        donate_argnums: _Ints = (),
        static_argnames: _Names = (),
        input_signature: Sequence[Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"`mx.function` needs a function, got {fn!r}.")
        functools.update_wrapper(self, fn)
        vars(self).pop(
            "_signature", None
        )  # of an `mx.function` that `fn` is a method of
        self.fn = fn
        self.trace_count = 0
        donate, static = donate_argnums, static_argnames
        self._donate = (donate,) if isinstance(donate, int) else tuple(donate)
        self._static = (static,) if isinstance(static, str) else tuple(static)
        self._check_names()
        self._plain = thawing(fn) if self._static else fn
        self.input_signature: tuple[Any, ...] | None = None
        self._accepted: InputSignature | None = None
        if input_signature is not None:
            known = self._signature, self._static, repr(self)
            self._accepted = InputSignature(input_signature, *known)
            self.input_signature = self._accepted.specs
        self._prepares = bool(self._static) or self._accepted is not None
        self._programs: dict[Any, list[Program]] = {}
        # By the settings of modules; then by strategy, and by where it is called.
        self._recent: dict[Any, _Last] = defaultdict(_Last)
        self._parts: dict[Any, Callable[[Call], PyTree] | None] = {}
        # How many traces, and the key of the last; of a method for each object.
        self._traces: dict[Any, tuple[int, Any]] = {}
        self.inner: FunctionCache[Function] = FunctionCache(Function)
        self._split: dict[Variable, None] = {}  # what loops want in parts
        # For uneven batches: programs, and why there is none.
        self.cuts: dict[Any, tuple[list[Any], list[str]]] = {}

    def _check_names(self) -> None:
        """Raises for an argument that is named but that the function does not have."""
        try:
            parameters = self._signature.parameters.values()
        except (TypeError, ValueError):
            return  # a function without a signature
        kinds = [p.kind for p in parameters]
        known = [p.name for p in parameters]
        for name in self._static:
            if name not in known and Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(
                    f"`static_argnames` names {name!r}, but {self!r} has no such argument; it "
                    f"has {', '.join(known)}."
                )
        by_position = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        count = sum(map(kinds.count, by_position))
        for i in self._donate:
            if not 0 <= i < count and Parameter.VAR_POSITIONAL not in kinds:
                raise ValueError(
                    f"`donate_argnums` names argument {i}, but {self!r} has {count} "
                    "positional argument(s), counted from 0."
                )

    def __repr__(self) -> str:
        return f"<mx.function {getattr(self.fn, '__qualname__', self.fn)}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    # Calling -------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        try:
            here = context.current()
            if here.frame is not None or _run_eagerly or not outside_traces():
                if self._accepted is not None:
                    args, kwargs = self._accepted.fit(args, kwargs, jnp.asarray)
                return self.fn(*args, **kwargs)
            if self._prepares:
                args, kwargs = self._prepare(args, kwargs)
            strategy = here.strategy
            if here.replica is not None and strategy.num_replicas_in_sync > 1:
                if self._accepted is not None:
                    args, kwargs = self._accepted.fit(args, kwargs)
                return self._call_in_replica(args, kwargs)
            place = (strategy, "call", here.replica is None, here.updating)
            try:
                return self._recent[settings.token][place].call_again(args, kwargs)
            except SignatureChanged:
                if self._accepted is not None:
                    args, kwargs = self._accepted.fit(args, kwargs)
            leaves = jax.tree.leaves(opened((args, kwargs)), is_leaf=is_leaf)
            if not any(map(_is_data, leaves)):
                try:
                    mesh = strategy.replica_mesh
                    call = sort_arguments(args, kwargs, mesh, in_cross_replica=True)
                    known = self.fn, call.signature, call.arrays, call.mesh
                    return self._execute(place, call, lambda: trace_call(*known))
                except (RunEagerly, UnevenError):
                    pass
            with context.changed(compile_runs=self):  # on the host
                return self._plain(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    def run_on(self, strategy: StrategyLike, args: Args, kwargs: Kwargs) -> PyTree:
        """`strategy.run(self, args, kwargs)`, compiled."""
        if self._prepares:
            args, kwargs = self._prepare(args, kwargs)
        if _run_eagerly:
            return run_eagerly(strategy, self._plain, args, kwargs)
        try:
            return self._recent[settings.token][strategy].call_again(args, kwargs)
        except SignatureChanged:
            if self._accepted is not None:
                args, kwargs = self._accepted.fit(args, kwargs)
        try:
            call = sort_arguments(args, kwargs, strategy.replica_mesh)
            avals = call.avals_of_part(strategy.replica_mesh)
            known, keep = (strategy, self.fn, call.signature, avals), not self._donate
            return self._execute(
                strategy, call, lambda: trace_replica(*known, may_forward=keep)
            )
        except UnevenError:
            return run_uneven(self, strategy, self._plain, args, kwargs)
        except RunEagerly:
            return run_eagerly(strategy, self._plain, args, kwargs)

    def call_for_each(
        self, common: tuple[Any, ...], elements: Sequence[PyTree], keep_all: bool
    ) -> PyTree:
        """What `fn(common, element)` gives for `elements` in turn, all in one program.

        With `keep_all` these are the results of all calls, stacked; else the last ones.

        Raises:
            UnlikeSteps, SlowInLoops, UnevenError, RunEagerly: If no one program can, or
                should, do it.
        """
        strategy = context.current().strategy
        args, place = (common, *elements), (strategy, keep_all)
        split_up(self._split)
        try:
            return self._recent[settings.token][place].call_again(args, {})
        except SignatureChanged:
            pass
        call = sort_arguments(args, {}, strategy.replica_mesh, in_cross_replica=True)
        known = self.fn, call.signature, call.arrays, call.mesh

        def trace() -> Trace:
            loop = trace_steps(*known, keep_all)
            split = [v for v, layout in loop.writes.items() if layout.is_split]
            self._split.update(dict.fromkeys(split))
            return loop

        return self._execute(place, call, trace)

    def _call_in_replica(self, args: Args, kwargs: Kwargs) -> PyTree:
        """A call in an eager replica: compiled for it alone, where that is possible."""
        here = context.current()
        call = sort_arguments(args, kwargs, None)
        key = call.key((here.strategy, context.local_index(here), settings.token))
        if key not in self._parts:
            known = self.fn, call.signature, call.arrays, None, Mode.PART
            try:
                traced = until_no_new_variables(lambda: trace_call(*known), self.fn)
                self.note_trace(call.key(None))
                self._parts[key] = compile_part(traced)
            except RunEagerly:  # it meets other replicas
                self._parts[key] = None
        part = self._parts[key]
        return self._plain(*args, **kwargs) if part is None else part(call)

    # Programs --------------------------------------------------------------------------

    def _execute(self, place: Any, call: Call, trace: Callable[[], Trace]) -> PyTree:
        """Finds or makes the program for `call`, and runs it."""
        token = settings.token
        key = call.key((place, call.mesh, _settings(jax.config), token))
        candidates = self._programs.setdefault(key, [])
        for _ in range(_MOST_TRIES):
            program = next((p for p in candidates if layouts_match(p.trace)), None)
            if program is None:
                traced, label = until_no_new_variables(trace, self.fn), ""
                spans = traced.mesh is not None and traced.mesh.size > 1
                if spans and EMPTY_PARTS_CRASH and has_empty(traced.closed.jaxpr):
                    raise UnevenError("replicas without rows, one by one")
                if traced.mesh is not None and traced.mesh.spans_workers:
                    label = describe_program(self, key[2])
                    traced.mesh.cluster.compare(label)
                program = Program(traced, call, self._donate, label)
                self.note_trace(key)
                candidates.append(program)
            elif program.is_outworn:
                with contextlib.suppress(ValueError):  # if another thread has done so
                    candidates.remove(program)
                program = program.renewed(call)
                candidates.append(program)
            try:
                result = program.compile_and_call(call)
            except SignatureChanged:
                continue  # another thread has laid out a variable otherwise since
            self._recent[token][place] = program
            return result
        raise RuntimeError(
            f"{self!r} was not run: other threads keep changing whether the copies of its "
            "variables are the same on all replicas. Let one thread assign them."
        )

    # Static arguments, and the signature -----------------------------------------------

    def _prepare(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments, static ones frozen, converted where `input_signature` says so."""
        if self._static:
            args, kwargs = self._freeze(args, kwargs)
        accepted = self._accepted
        if accepted is not None and (
            _run_eagerly or not accepted.is_settled(args, kwargs)
        ):
            make = jnp.asarray if _run_eagerly else np.asarray
            args, kwargs = accepted.fit(args, kwargs, make)
        return args, kwargs

    def _freeze(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with those named in `static_argnames` made static."""
        named = {k: freeze(k, kwargs[k]) for k in self._static if k in kwargs}
        bound = self._signature.bind(*args, **kwargs | named)
        for name in self._static:
            if name in bound.arguments:
                bound.arguments[name] = freeze(name, bound.arguments[name])
        return bound.args, bound.kwargs

    @functools.cached_property
    def _signature(self) -> Signature:
        return signature(self.fn)

    # Why it was traced again -----------------------------------------------------------

    def note_trace(self, key: Any) -> None:
        """Counts a trace; when there are many, warns with what has changed."""
        self.trace_count += 1
        # A method is traced once for each object, which is as it should be.
        first = next(iter(key[1].kinds), None)
        members = vars(type(first.value)).values() if isinstance(first, Static) else ()
        owner = first if any(member is self for member in members) else None
        count, previous = self._traces.get(owner, (0, None))
        if self._accepted is not None and previous and previous[:2] == key[:2]:
            return  # only a length is new, as `input_signature` allows
        count += 1
        self._traces[owner] = count, key
        if count % _WARN_AFTER:
            return
        name = getattr(self.fn, "__name__", str(self.fn))
        warn_user(
            f"{name!r} has been traced {count} times. The last time because "
            f"{explain_change(previous, key)}. Each trace compiles again, which is slow: "
            "pass changing numbers as arrays or plain numbers, keep shapes the same (pad, "
            "or drop the last batch), and avoid new objects as arguments."
        )


def _is_data(leaf: Any) -> bool:
    """Whether an argument is a dataset or an iterator, which a program cannot loop over."""
    return hasattr(leaf, "__iter__") and not (
        is_leaf(leaf)
        or is_array(leaf)
        or isinstance(leaf, str | bytes | type | range | frozenset)
    )
