"""`mx.function`: compiles a function, with the variables it uses and the `run`s inside it."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import jax

from mirrax._src.base import context
from mirrax._src.base.errors import warn_user
from mirrax._src.base.jax_compat import in_trace
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import PyTree, UnevenError, is_array, is_leaf
from mirrax._src.collectives.launch import describe_program
from mirrax._src.engines.blocks import functions_run_eagerly, run_block
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.fingerprint import Lifted, lift
from mirrax._src.engines.program import Program, SignatureChanged, Staged
from mirrax._src.engines.signature import (
    Frozen,
    Signature,
    Split,
    Static,
    freeze,
    mesh_of_arguments,
    sort_arguments,
)
from mirrax._src.engines.staging import run_in_trace, stage_call, stage_run
from mirrax._src.engines.steps import split_up, stage_steps
from mirrax._src.engines.uneven import run_uneven
from mirrax._src.state.frame import RunEagerly
from mirrax._src.state.variable import Variable

_WARN_AFTER = 5
_WARN_AFTER_FORMS = 10


@overload
def function(
    fn: Callable[..., Any],
    /,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Function: ...
@overload
def function(
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
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
    objects are static. Variables that `fn` uses are found by themselves. A function that
    loops over a distributed dataset runs its loop on the host and compiles each `run`.

    Args:
        fn: The function; leave it out to use `mx.function(...)` as a decorator.
        donate_argnums: Positions of arguments whose memory the results may reuse.
        static_argnames: Names of arguments that `fn` needs as Python values.
    """
    if fn is None:
        return lambda fn: Function(fn, donate_argnums, static_argnames)
    return (
        fn
        if isinstance(fn, Function)
        else Function(fn, donate_argnums, static_argnames)
    )


class Function:
    """A function that compiles itself; made by `mx.function`.

    Attributes:
        trace_count: How often the function has been traced.
    """

    __module__ = "mirrax"

    def __init__(
        self,
        fn: Callable[..., Any],
        donate_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> None:
        if not callable(fn):
            raise TypeError(f"`mx.function` needs a function, got {fn!r}.")
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.trace_count = 0
        self._donate = (
            (donate_argnums,)
            if isinstance(donate_argnums, int)
            else tuple(donate_argnums)
        )
        self._static = (
            (static_argnames,)
            if isinstance(static_argnames, str)
            else tuple(static_argnames)
        )
        self._check_names()
        self._programs: dict[Any, list[Program]] = {}
        self._last: dict[Any, Program] = {}
        self._last_key: dict[Any, Any] = {}
        self._traces: Counter[Any] = Counter()
        self.inner = FunctionCache()
        self._split: dict[Variable, None] = {}  # what loops want in parts
        self.cuts: dict[Any, list[Any]] = {}  # for uneven batches

    def _check_names(self) -> None:
        """Raises for an argument that is named but that the function does not have."""
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except (TypeError, ValueError):
            return  # a function without a signature
        kinds = {p.kind for p in parameters}
        for name in self._static:
            known = {p.name for p in parameters}
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
        if here.frame is not None or in_trace() or functions_run_eagerly():
            return self.fn(*args, **kwargs)
        if here.replica is not None and here.strategy.num_replicas_in_sync > 1:
            args, kwargs = (
                self._freeze(args, kwargs) if self._static else (args, kwargs)
            )
            return run_block(
                self._thawing, self.fn, ("function", id(self)), args, kwargs
            )
        if any(map(_is_data, jax.tree.leaves((args, kwargs), is_leaf=is_leaf))):
            return self._call_on_host(args, kwargs)
        mesh = mesh_of_arguments(args, kwargs) or here.strategy.replica_mesh
        try:
            return self._execute(
                mesh,
                *self._freeze(args, kwargs),
                lambda signature, arrays: stage_call(
                    self._thawing_fn(), signature, arrays, mesh
                ),
                (here.strategy, mesh),
            )
        except (RunEagerly, UnevenError):
            return self._call_on_host(args, kwargs)

    def run_on(
        self, strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PyTree:
        """`strategy.run(self, args, kwargs)`, compiled."""
        if functions_run_eagerly():
            return run_eagerly(strategy, self.fn, args, kwargs)
        fn = self._thawing_fn()
        args, kwargs = self._freeze(args, kwargs)
        try:
            return self._execute(
                strategy.replica_mesh,
                args,
                kwargs,
                lambda signature, arrays: stage_run(
                    strategy, fn, signature, arrays, may_forward=not self._donate
                ),
                strategy,
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
        here = context.current()
        args = (common, *elements)
        mesh = mesh_of_arguments(args, {}) or here.strategy.replica_mesh
        split_up(self._split)

        def stage(signature: Signature, arrays: list[Any]) -> Staged:
            staged = stage_steps(self.fn, signature, arrays, mesh, keep_all)
            split = [v for v, k in staged.writes.items() if isinstance(k, Split)]
            self._split.update(dict.fromkeys(split))
            return staged

        return self._execute(mesh, args, {}, stage, (here.strategy, mesh, keep_all))

    def _call_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        with context.changed(compile_runs=self):
            return self.fn(*args, **kwargs)

    # Programs --------------------------------------------------------------------------

    def _execute(
        self,
        mesh: ReplicaMesh | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stage: Callable[[Signature, list[Any]], Staged],
        place: Any,
    ) -> PyTree:
        is_run = not isinstance(place, tuple)
        signature, arrays, given = sort_arguments(args, kwargs, mesh, not is_run)
        last = self._last.get(place)
        if last is not None and last.signature == signature:
            # JAX itself finds out whether shapes have changed: it then traces again.
            try:
                return last(arrays, given)
            except SignatureChanged:
                pass
        key = (place, signature, tuple(map(_shape, arrays)))
        candidates = self._programs.setdefault(key, [])
        program = next((p for p in candidates if p.layouts_match()), None)
        if program is None:
            staged = stage(signature, arrays)
            label = describe_program(self, list(map(_shape, arrays)))
            if staged.mesh is not None and staged.mesh.is_shared:
                staged.mesh.cluster.compare(label)
            program = Program(staged, self._donated_leaves(signature), label)
            self.note_trace(key)
            candidates.append(program)
        self._last[place] = program
        return program.compile_and_call(arrays, given)

    def _donated_leaves(self, signature: Signature) -> list[bool]:
        if not self._donate:
            return [False] * sum(not isinstance(k, Static) for k in signature.kinds)
        positions = jax.tree.unflatten(signature.tree, range(len(signature.kinds)))
        donated = {
            leaf
            for i in self._donate
            if i < len(positions[0])
            for leaf in jax.tree.leaves(positions[0][i])
        }
        return [
            i in donated
            for i, kind in enumerate(signature.kinds)
            if not isinstance(kind, Static)
        ]

    # Static arguments ------------------------------------------------------------------

    def _freeze(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with those named in `static_argnames` made static."""
        if not self._static:
            return args, kwargs
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        for name in self._static:
            if name in bound.arguments:
                bound.arguments[name] = freeze(name, bound.arguments[name])
        return bound.args, bound.kwargs

    def _thawing_fn(self) -> Callable[..., Any]:
        """`fn`, taking frozen arguments."""
        return self._thawing(self.fn)

    def _thawing(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if not self._static:
            return fn

        @functools.wraps(fn)
        def thaw(*args: Any, **kwargs: Any) -> PyTree:
            args, kwargs = jax.tree.map(
                lambda x: x.value if isinstance(x, Frozen) else x,
                (args, kwargs),
                is_leaf=is_leaf,
            )
            return fn(*args, **kwargs)

        return thaw

    def _owner(self, signature: Signature) -> Any:
        """The object whose method this is, if it is one."""
        first = signature.kinds[0] if signature.kinds else None
        if isinstance(first, Static) and self in vars(type(first.value)).values():
            return first
        return None

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
            f"{_explain_change(previous, key)}. Each trace compiles again, which is slow: "
            "pass changing numbers as arrays or plain numbers, keep shapes the same (pad, "
            "or drop the last batch), and avoid new objects as arguments."
        )


class FunctionCache:
    """The compiled forms of functions that host code passes on, again and again.

    A function that is defined inside a loop is a new object every time; it is recognised by
    its code and what it closes over.
    """

    def __init__(self) -> None:
        self._functions: dict[Any, Function] = {}
        self._forms: Counter[Any] = Counter()

    def compiled(self, fn: Callable[..., Any]) -> tuple[Function, tuple[Any, ...]]:
        """The compiled form of `fn`, and the arrays to give it before the arguments."""
        lifted = lift(fn, exactly=False)
        key = fn if lifted is None else lifted.key
        if key not in self._functions:
            self._note_form(fn)
            self._functions[key] = Function(
                fn if lifted is None else _lifted(fn, lifted)
            )
        return self._functions[key], () if lifted is None else (lifted.arrays,)

    def _note_form(self, fn: Callable[..., Any]) -> None:
        """Counts the compiled forms of one piece of code; when there are many, warns."""
        code = getattr(fn, "__code__", None)
        self._forms[code] += 1
        if code is not None and self._forms[code] % _WARN_AFTER_FORMS == 0:
            warn_user(
                f"{code.co_name!r} ({Path(code.co_filename).name}:{code.co_firstlineno}) has "
                f"been compiled {self._forms[code]} times, because what it closes over was "
                "different each time. Each time is slow: pass what changes as an argument, "
                "or keep it in a variable."
            )


def _lifted(fn: Callable[..., Any], lifted: Lifted) -> Callable[..., Any]:
    """`fn`, with the arrays that it closes over as its first argument."""
    rebuild = lifted.rebuild

    def call(closed_over: tuple[Any, ...], *args: Any, **kwargs: Any) -> PyTree:
        return rebuild(closed_over)(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", "call")
    return call


def _shape(array: Any) -> Any:
    aval = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _is_data(leaf: Any) -> bool:
    """Whether an argument is a dataset or an iterator, which a program cannot loop over."""
    return hasattr(leaf, "__iter__") and not (
        is_leaf(leaf) or is_array(leaf) or isinstance(leaf, str | bytes | type)
    )


def _explain_change(old: Any, new: Any) -> str:
    if old is None or old[0] != new[0]:
        return "it runs under another strategy"
    signature, avals = new[1:]
    if old[1].tree != signature.tree:
        return f"the structure of the arguments changed from {old[1].tree} to {signature.tree}"
    paths = signature.paths()
    for path, before, now in zip(paths, old[1].kinds, signature.kinds):
        if before != now:
            return f"{path} changed from {_show_kind(before)} to {_show_kind(now)}"
    dynamic = [p for p, k in zip(paths, signature.kinds) if not isinstance(k, Static)]
    count = getattr(new[0], "num_replicas_in_sync", 1)
    for path, kind, before, now in zip(dynamic, signature.array_kinds(), old[2], avals):
        if before != now:
            shown = [_show_shape(aval, kind, count) for aval in (before, now)]
            return f"{path} changed from {shown[0]} to {shown[1]}"
    return "the copies of a variable are now different on each replica, or no longer so"


def _show_shape(aval: Any, kind: Any, count: int) -> str:
    """An argument's dtype and shape, as one replica sees it."""
    shape = list(aval.shape)
    if isinstance(kind, Split):
        shape = [] if kind.is_scalar else [shape[0] // count, *shape[1:]]
    weak = ", weakly typed" if aval.weak_type else ""
    return f"{aval.dtype.name}[{','.join(map(str, shape))}]{weak}"


def _show_kind(kind: Any) -> str:
    if isinstance(kind, Static):
        value = kind.value.value if isinstance(kind.value, Frozen) else kind.value
        return repr(value)
    return "a per-replica value" if isinstance(kind, Split) else "an array or number"


def as_function(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Function, tuple[Any, ...], dict[str, Any]] | None:
    """The `Function` in `fn`, with the arguments bound to it before the others.

    `fn` may be one itself, a method of one, or a `functools.partial` of these.
    """
    if isinstance(fn, Function):
        return fn, args, kwargs
    if isinstance(fn, types.MethodType):
        return as_function(fn.__func__, (fn.__self__, *args), kwargs)
    if isinstance(fn, functools.partial):
        return as_function(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    return None


def run_replicas(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """`strategy.run(fn, args, kwargs)`, by the engine that the place and `fn` call for."""
    here = context.current()
    if here.frame is not None or in_trace():
        return run_in_trace(strategy, fn, args, kwargs)
    found = as_function(fn, args, kwargs)
    if found is None and here.compile_runs:
        compiled, first = here.compile_runs.inner.compiled(fn)
        found = compiled, (*first, *args), kwargs
    if found is None:
        return run_eagerly(strategy, fn, args, kwargs)
    compiled, args, kwargs = found
    return compiled.run_on(strategy, args, kwargs)
