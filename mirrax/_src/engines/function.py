"""`mx.function`: compiles a function, with the variables it uses and the `run`s inside it."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from mirrax._src.base import context
from mirrax._src.base.errors import RunEagerly, warn_user
from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    PyTree,
    UnevenError,
    abstract,
    is_array,
    is_leaf,
)
from mirrax._src.collectives.programs import describe_program
from mirrax._src.engines.arguments import (
    Call,
    Frozen,
    Signature,
    Static,
    freeze,
    mesh_of_arguments,
    sort_arguments,
)
from mirrax._src.engines.closures import FunctionCache
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.inputs import SignatureChanged
from mirrax._src.engines.loop import split_up, trace_steps
from mirrax._src.engines.program import Part, Program
from mirrax._src.engines.retracing import explain_change
from mirrax._src.engines.trace import (
    trace_call,
    trace_replica,
    until_no_new_variables,
)
from mirrax._src.engines.traced import Trace
from mirrax._src.engines.uneven import run_uneven
from mirrax._src.state.variable import Variable

_Ints = int | Sequence[int]
_Names = str | Sequence[str]
_WARN_AFTER = 5
_MOST_TRIES = 100
_run_eagerly = False


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
    fn: Fn, /, *, donate_argnums: _Ints = (), static_argnames: _Names = ()
) -> Function: ...
@overload
def function(
    *, donate_argnums: _Ints = (), static_argnames: _Names = ()
) -> Callable[[Fn], Function]: ...
def function(
    fn: Fn | None = None,
    /,
    *,
    donate_argnums: _Ints = (),
    static_argnames: _Names = (),
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

    Args:
        fn: The function; leave it out to use `mx.function(...)` as a decorator.
        donate_argnums: Positions of arguments whose memory the results may reuse.
        static_argnames: Names of arguments that `fn` needs as Python values.
    """
    if fn is None:
        return lambda fn: Function(fn, donate_argnums, static_argnames)
    is_made = isinstance(fn, Function)
    return fn if is_made else Function(fn, donate_argnums, static_argnames)


class Function:
    """A function that compiles itself; made by `mx.function`.

    Attributes:
        trace_count: How often the function has been traced.
    """

    __module__ = "mirrax"

    def __init__(
        self, fn: Fn, donate_argnums: _Ints = (), static_argnames: _Names = ()
    ) -> None:
        if not callable(fn):
            raise TypeError(f"`mx.function` needs a function, got {fn!r}.")
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.trace_count = 0
        donate, static = donate_argnums, static_argnames
        self._donate = (donate,) if isinstance(donate, int) else tuple(donate)
        self._static = (static,) if isinstance(static, str) else tuple(static)
        self._check_names()
        self._programs: dict[Any, list[Program]] = {}
        self._last: dict[Any, Program] = {}  # by strategy, and by where it is called
        self._parts: dict[Any, Part | None] = {}
        self._last_key: dict[Any, Any] = {}
        self._traces: Counter[Any] = Counter()
        self.inner: FunctionCache[Function] = FunctionCache(Function)
        self._split: dict[Variable, None] = {}  # what loops want in parts
        self.cuts: dict[Any, list[Any]] = {}  # for uneven batches

    def _check_names(self) -> None:
        """Raises for an argument that is named but that the function does not have."""
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except (TypeError, ValueError):
            return  # a function without a signature
        kinds = {p.kind for p in parameters}
        known = [p.name for p in parameters]
        for name in self._static:
            if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(
                    f"`static_argnames` names {name!r}, but {self!r} has no such argument; it "
                    f"has {', '.join(known)}."
                )
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        count = sum(p.kind in by_position for p in parameters)
        for i in self._donate:
            if not 0 <= i < count and inspect.Parameter.VAR_POSITIONAL not in kinds:
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
        here = context.current()
        if here.frame is not None or _run_eagerly or not outside_traces():
            return self.fn(*args, **kwargs)
        if self._static:
            args, kwargs = self._freeze(args, kwargs)
        strategy = here.strategy
        if here.replica is not None and strategy.num_replicas_in_sync > 1:
            return self._call_in_replica(here, args, kwargs)
        place = (strategy, "call", here.replica is None, here.updating)
        last = self._last.get(place)
        if last is not None:
            try:
                return last.call_again(args, kwargs)
            except SignatureChanged:
                pass
        if any(map(_is_data, jax.tree.leaves((args, kwargs), is_leaf=is_leaf))):
            return self._call_on_host(args, kwargs)
        mesh = mesh_of_arguments(args, kwargs) or strategy.replica_mesh
        try:
            call = sort_arguments(args, kwargs, mesh, tell_mirrored=True)
            fn, signature, arrays = self._thawing_fn(), call.signature, call.arrays
            return self._execute(
                place,
                mesh,
                call,
                lambda: trace_call(fn, signature, arrays, mesh),
            )
        except (RunEagerly, UnevenError):
            return self._call_on_host(args, kwargs)

    def run_on(self, strategy: StrategyLike, args: Args, kwargs: Kwargs) -> PyTree:
        """`strategy.run(self, args, kwargs)`, compiled."""
        if self._static:
            args, kwargs = self._freeze(args, kwargs)
        last = self._last.get(strategy)
        if last is not None and not _run_eagerly:
            try:
                return last.call_again(args, kwargs)
            except SignatureChanged:
                pass
        fn = self._thawing_fn()
        if _run_eagerly:
            return run_eagerly(strategy, fn, args, kwargs)
        mesh = strategy.replica_mesh
        try:
            call = sort_arguments(args, kwargs, mesh)
            signature = call.signature
            avals = signature.avals_of_part(call.arrays, mesh)
            keep = not self._donate
            return self._execute(
                strategy,
                mesh,
                call,
                lambda: trace_replica(strategy, fn, signature, avals, may_forward=keep),
            )
        except UnevenError:
            return run_uneven(self, strategy, fn, args, kwargs)
        except RunEagerly:
            return run_eagerly(strategy, fn, args, kwargs)

    def call_for_each(
        self, common: tuple[Any, ...], elements: Sequence[PyTree], keep_all: bool
    ) -> PyTree:
        """What `fn(common, element)` gives for `elements` in turn, all in one program.

        Args:
            common: What all calls are given.
            elements: What each call is given of its own.
            keep_all: Whether to give the results of all calls, stacked; else the last ones.

        Raises:
            UnlikeSteps, SlowInLoops, UnevenError, RunEagerly: If no one program can, or
                should, do it.
        """
        strategy = context.current().strategy
        args = (common, *elements)
        split_up(self._split)
        place = (strategy, keep_all)
        last = self._last.get(place)
        if last is not None:
            try:
                return last.call_again(args, {})
            except SignatureChanged:
                pass
        mesh = mesh_of_arguments(args, {}) or strategy.replica_mesh

        def trace() -> Trace:
            loop = trace_steps(self.fn, call.signature, call.arrays, mesh, keep_all)
            split = [v for v, layout in loop.writes.items() if layout.is_split]
            self._split.update(dict.fromkeys(split))
            return loop

        call = sort_arguments(args, {}, mesh, tell_mirrored=True)
        return self._execute(place, mesh, call, trace)

    def _call_on_host(self, args: Args, kwargs: Kwargs) -> PyTree:
        with context.changed(compile_runs=self):
            return self._thawing_fn()(*args, **kwargs)

    def _call_in_replica(
        self, here: context.Context, args: Args, kwargs: Kwargs
    ) -> PyTree:
        """A call in an eager replica: compiled for it alone, where that is possible."""
        call = sort_arguments(args, kwargs, None)
        where = (here.strategy, here.replica is None, context.local_index(here))
        key = (where, call.signature, tuple(map(abstract, call.arrays)))
        if key not in self._parts:
            self._parts[key] = self._stage_part(call)
        part = self._parts[key]
        return self._thawing_fn()(*args, **kwargs) if part is None else part(call)

    def _stage_part(self, call: Call) -> Part | None:
        fn, signature, arrays = self._thawing_fn(), call.signature, call.arrays

        def trace() -> Trace:
            return trace_call(fn, signature, arrays, None, Mode.PART)

        try:
            part = Part(until_no_new_variables(trace, fn))
        except RunEagerly:  # it meets other replicas
            return None
        self.note_trace((None, signature, tuple(map(abstract, arrays))))
        return part

    # Programs --------------------------------------------------------------------------

    def _execute(
        self,
        place: Any,
        mesh: ReplicaMesh | None,
        call: Call,
        trace: Callable[[], Trace],
    ) -> PyTree:
        """Finds or makes the program for `call`, and runs it."""
        avals = tuple(map(abstract, call.arrays))
        key = ((place, mesh, _settings()), call.signature, avals)
        candidates = self._programs.setdefault(key, [])
        for _ in range(_MOST_TRIES):
            program = next((p for p in candidates if p.layouts_match()), None)
            if program is None:
                traced = until_no_new_variables(trace, self.fn)
                program = Program(traced, call, mesh, self._donate)
                if traced.mesh is not None and traced.mesh.spans_workers:
                    label = describe_program(self, avals)
                    traced.mesh.cluster.compare(label)
                    program.watch(label)
                self.note_trace(key)
                candidates.append(program)
            try:
                result = program.compile_and_call(call)
            except SignatureChanged:
                continue  # another thread has laid out a variable otherwise since
            self._last[place] = program
            return result
        raise RuntimeError(
            f"{self!r} was not run: other threads change all the time whether the copies of its "
            "variables are the same on all replicas. Let one thread assign them."
        )

    # Static arguments ------------------------------------------------------------------

    def _freeze(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with those named in `static_argnames` made static."""
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        for name in self._static:
            if name in bound.arguments:
                bound.arguments[name] = freeze(name, bound.arguments[name])
        return bound.args, bound.kwargs

    def _thawing_fn(self) -> Fn:
        """`fn`, taking frozen arguments."""
        if not self._static:
            return self.fn

        @functools.wraps(self.fn)
        def thaw(*args: Any, **kwargs: Any) -> PyTree:
            def value_of(leaf: Any) -> Any:
                return leaf.value if isinstance(leaf, Frozen) else leaf

            args, kwargs = jax.tree.map(value_of, (args, kwargs), is_leaf=is_leaf)
            return self.fn(*args, **kwargs)

        return thaw

    def _owner(self, signature: Signature) -> Any:
        """The object whose method this is, if it is one."""
        first = signature.kinds[0] if signature.kinds else None
        if not isinstance(first, Static):
            return None
        members = vars(type(first.value)).values()
        return first if any(member is self for member in members) else None

    # Why it was traced again -----------------------------------------------------------

    def note_trace(self, key: Any) -> None:
        """Counts a trace; when there are many, warns with what has changed."""
        self.trace_count += 1
        # A method is traced once for each object, which is as it should be.
        owner = self._owner(key[1])
        self._traces[owner] += 1
        previous, self._last_key[owner] = self._last_key.get(owner), key
        if self._traces[owner] % _WARN_AFTER:
            return
        name = getattr(self.fn, "__name__", str(self.fn))
        warn_user(
            f"{name!r} has been traced {self._traces[owner]} times. The last time because "
            f"{explain_change(previous, key)}. Each trace compiles again, which is slow: "
            "pass changing numbers as arrays or plain numbers, keep shapes the same (pad, "
            "or drop the last batch), and avoid new objects as arguments."
        )


def _settings() -> tuple[Any, ...]:
    """JAX's settings that a program is built for."""
    names = (
        "enable_x64",
        "default_matmul_precision",
        "numpy_dtype_promotion",
        "debug_nans",
    )
    return tuple(getattr(jax.config, f"jax_{name}") for name in names)


def _is_data(leaf: Any) -> bool:
    """Whether an argument is a dataset or an iterator, which a program cannot loop over."""
    return hasattr(leaf, "__iter__") and not (
        is_leaf(leaf) or is_array(leaf) or isinstance(leaf, str | bytes | type)
    )
