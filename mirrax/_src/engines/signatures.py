"""`mx.function(input_signature=...)`: checks arguments, and converts what is no JAX array yet."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.tree_util import keystr

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.specs import STRING, PerReplicaSpec, TensorSpec, dtype_name
from mirrax._src.base.values import (
    Args,
    Kwargs,
    Mirrored,
    PerReplica,
    ReplicaValues,
    is_array,
    is_leaf,
)
from mirrax._src.engines.arguments import are_equal

# A Python number becomes one of its own kind or of one to the right, as in TensorFlow.
_RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}  # V: bfloat16 and its like
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

# Makes an array of a dtype: `np.asarray`, or `jnp.asarray` for who computes with it directly.
Make = Callable[[Any, Any], Any]


class _Misfit(Exception):
    """Why an argument does not fit."""


class InputSignature:
    """The specs of a function's arguments.

    Attributes:
        specs: What the user gave, as a tuple.
    """

    def __init__(
        self, specs: Any, parameters: Signature, static: Sequence[str], who: str
    ) -> None:
        if not isinstance(specs, tuple | list):
            raise TypeError(
                f"`input_signature` must be either a tuple or a list, got {specs!r}; for one "
                "argument write `input_signature=[spec]`."
            )
        self.specs, self._who, self._static = tuple(specs), who, static
        self._parameters = parameters
        self._by_name = self._name_specs()
        flat, self._tree = jax.tree_util.tree_flatten_with_path(
            self._by_name, is_leaf=lambda x: x is None
        )
        self._leaves = [
            (spec, f"argument {path[0].key!r}{keystr(path[1:])}") for path, spec in flat
        ]
        for spec, _ in self._leaves:
            if not isinstance(spec, TensorSpec | PerReplicaSpec):
                raise TypeError(
                    "`input_signature` must be a possibly nested sequence of TensorSpec "
                    f"objects, but it has {spec!r} ({type(spec).__name__})."
                )

    def _name_specs(self) -> dict[str, Any]:
        """The spec of each argument, and those of `*args` as a tuple."""
        every = list(self._parameters.parameters.values())
        self._first = int(bool(every) and every[0].name == "self")
        described = [p for p in every[self._first :] if p.name not in self._static]
        by_position = [p.name for p in described if p.kind in _BY_POSITION]
        named = dict(zip(by_position, self.specs))
        rest = self.specs[len(by_position) :]
        var = [p.name for p in described if p.kind is Parameter.VAR_POSITIONAL]
        if var:
            named[var[0]] = rest
        elif rest:
            raise TypeError(
                f"`input_signature` has {len(self.specs)} specs, {len(rest)} more than {self._who} "
                f"has arguments for: {', '.join(by_position) or 'it takes none'}."
            )
        # Whether a call by position that is long enough has all that is described.
        self._is_plain = not var and len(described) == len(every) - self._first
        kinds = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        for p in described:
            if p.name not in named and p.default is p.empty and p.kind not in kinds:
                raise TypeError(
                    f"`input_signature` has no spec for argument {p.name!r} of {self._who}. "
                    "Add one, give the argument a default, or name it in `static_argnames`; "
                    "an argument by keyword only needs one of the latter two."
                )
        return named

    def is_settled(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a program that fits once tells by itself if these arguments do."""
        own = args[self._first :]
        return not kwargs and all(
            map(_is_settled, jax.tree.leaves(own, is_leaf=is_leaf))
        )

    def fit(
        self, args: Args, kwargs: Kwargs, make: Make = np.asarray
    ) -> tuple[Args, Kwargs]:
        """The arguments as the specs want them, by position where that is possible.

        Raises:
            TypeError: If one does not fit.
        """
        first, names = self._first, self._by_name
        if not kwargs and len(args) == first + len(names) and self._is_plain:
            own = self._fit_all(dict(zip(names, args[first:])), make)
            return (*args[:first], *(own[name] for name in names)), kwargs
        try:
            bound = self._parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise self._error(str(error)) from None
        given = bound.arguments
        parameters = self._parameters.parameters
        for name in [n for n in given if n not in self._by_name]:
            if name in self._static or (self._first and name == next(iter(parameters))):
                continue
            value, default = given.pop(name), parameters[name].default
            if parameters[name].kind is Parameter.VAR_KEYWORD:
                raise self._error(f"got unexpected arguments {', '.join(value)}")
            if value is not default and not are_equal(value, default):
                raise self._error(
                    f"argument {name!r}, which is not in the signature, keeps its default "
                    f"{default!r}; got {value!r}. Name it in `static_argnames` to change it"
                )
        for name in self._by_name:
            default = parameters[name].default
            given.setdefault(name, () if default is Parameter.empty else default)
        given.update(self._fit_all({name: given[name] for name in self._by_name}, make))
        return bound.args, bound.kwargs

    def _fit_all(self, values: dict[str, Any], make: Make) -> dict[str, Any]:
        try:
            leaves = self._tree.flatten_up_to(values)
        except ValueError:
            raise self._other_structure(values) from None
        for i, (spec, path) in enumerate(self._leaves):
            try:
                leaves[i] = _fit_leaf(spec, leaves[i], make)
            except _Misfit as misfit:
                shown = _show(leaves[i])
                raise self._error(
                    f"{path} is {shown}{misfit}, which does not fit {spec!r}"
                ) from None
        return jax.tree.unflatten(self._tree, leaves)

    def _other_structure(self, values: dict[str, Any]) -> TypeError:
        for name, spec in self._by_name.items():
            try:
                jax.tree.structure(spec).flatten_up_to(values[name])
            except ValueError:
                break
        shown = _show(values[name])
        return self._error(
            f"argument {name!r} is {shown}, which differs in structure from {spec!r}"
        )

    def _error(self, what: str) -> TypeError:
        shown = ", ".join(f"{name}: {spec!r}" for name, spec in self._by_name.items())
        return TypeError(
            f"{self._who} was called with arguments that its `input_signature` does not "
            f"allow: {what}. The signature is ({shown})."
        )


def _is_settled(leaf: Any) -> bool:
    if is_leaf(leaf):
        return isinstance(leaf, ReplicaValues) and leaf.array is not None
    return getattr(leaf, "weak_type", None) is False  # an array of JAX's


def _fit_leaf(spec: Any, value: Any, make: Make) -> Any:
    if is_leaf(value):
        if isinstance(value, ReplicaValues):
            return _fit_parts(spec, value, make)
        value = jnp.asarray(value)  # a variable
    if isinstance(spec, PerReplicaSpec):
        here = context.current()
        if here.replica is None or here.strategy.num_replicas_in_sync == 1:
            raise _Misfit(", one value for all replicas")
        spec = spec.values[0]  # a replica's own part
    if spec.dtype == STRING:
        if not _is_text(value):
            raise _Misfit
        _check(spec, STRING, np.shape(value))
        return value
    dtype = canonicalize_dtype(spec.dtype)
    if not isinstance(value, jax.Array):
        value = _convert(value, dtype, make)
    elif jax.typeof(value).weak_type and _widens(value.dtype, dtype):
        value = jax.lax.convert_element_type(value, dtype)  # it was a Python number
    _check(spec, value.dtype, value.shape)
    return value


def _fit_parts(spec: Any, value: ReplicaValues, make: Make) -> ReplicaValues:
    is_each = isinstance(spec, PerReplicaSpec)
    if is_each and isinstance(value, Mirrored):
        raise _Misfit(", one value for all replicas")
    if value.array is not None:
        shape = value.array.shape
        if value.mesh is not None and value.layout is not None:
            shape = value.mesh.part_shape(value.layout, shape)
        for each in spec.values if is_each else (spec,):
            _check(each, value.array.dtype, shape)
        return value
    parts = value.values
    specs = spec.values if is_each else (spec,) * len(parts)
    if len(specs) != len(parts):
        raise _Misfit
    new = [_fit_leaf(*each, make) for each in zip(specs, parts)]
    is_same = all(map(operator.is_, new, parts))
    return value if is_same else type(value)(new, mesh=value.mesh)


def _convert(value: Any, dtype: np.dtype, make: Make) -> Any:
    """A NumPy array, or numbers of Python, as an array of `dtype`."""
    try:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
            return jnp.asarray(value, dtype)
        found = np.asarray(value).dtype
        # NumPy's numbers are cast, as in TensorFlow; Python's must not lose anything.
        is_cast = isinstance(value, np.ndarray | np.generic) and found.kind in "biufV"
        if not is_cast and not _widens(found, dtype):
            raise _Misfit
        return make(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _Misfit from error


def _widens(old: np.dtype, new: np.dtype) -> bool:
    return _RANKS.get(old.kind, 9) <= _RANKS.get(new.kind, -1)


def _is_text(value: Any) -> bool:
    known = isinstance(value, str | bytes | np.ndarray | np.generic)
    return known and np.asarray(value).dtype.kind in "OSU"


def _check(spec: TensorSpec, dtype: Any, shape: tuple[int, ...]) -> None:
    wanted = spec.dtype if spec.dtype == STRING else canonicalize_dtype(spec.dtype)
    lengths = spec.shape if spec.shape is not None else shape
    same = len(lengths) == len(shape) and all(
        a is None or a == b for a, b in zip(lengths, shape)
    )
    if dtype != wanted or not same:
        raise _Misfit


def _show(value: Any) -> str:
    if isinstance(value, PerReplica):
        return f"a per-replica value ({', '.join(map(_show, value.values))})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]"
    return repr(jax.tree.map(_describe, value, is_leaf=is_leaf))


def _describe(leaf: Any) -> Any:
    return TensorSpec(leaf.shape, leaf.dtype) if is_array(leaf) else leaf
