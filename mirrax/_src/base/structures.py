"""Structures that JAX does not know: mappings, and subclasses of dict, list and tuple.

TensorFlow looks into these, JAX takes them for leaves. `opened` puts a node of ours in the
place of each, which becomes an object of the user's class when the tree is built again. The
class itself is not registered with JAX: that is for its owner to do, at any time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey, keystr


class Atom:
    """What stays in one piece when arguments and results are unpacked."""

    __slots__ = ()
    has_values = False  # whether arrays are in it; a variable refers to them


# Distributed values and variables. Called for every node of a step's arguments: a method of
# a class is five times as fast here as a function.
is_leaf: Callable[[Any], bool] = Atom.__instancecheck__

# Types of leaves that need no second look.
PLAIN: set[type] = set()
_STRUCTURES = (Mapping, list, tuple, collections.deque)


def opened(tree: Any, what: str = "") -> Any:
    """`tree`, with nodes that JAX can flatten for structures that it does not know.

    Building such a tree gives objects of the user's classes. `what` the tree is called in
    messages: "argument" is a pair `(args, kwargs)`.

    Raises:
        TypeError: If there is `what`, and an object that cannot be opened holds arrays or
            distributed values.
    """
    kinds = set(map(type, jax.tree.leaves(tree, is_leaf=is_leaf)))
    if kinds <= PLAIN or all(map(_is_plain, kinds)):
        return tree
    if what == "argument":
        args, kwargs = tree
        every = tuple(_open_all(x, f"argument {i}") for i, x in enumerate(args))
        return every, {k: _open_all(x, f"argument {k!r}") for k, x in kwargs.items()}
    return _open_all(tree, what)


def _open_all(tree: Any, name: str) -> Any:
    def open_leaf(path: Any, leaf: Any) -> Any:
        return _open(leaf, name and name + keystr(path))

    return jax.tree.map_with_path(open_leaf, tree, is_leaf=is_leaf)


def _is_plain(kind: type) -> bool:
    is_record = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    may_hold = is_record or issubclass(kind, _STRUCTURES)
    if kind not in PLAIN and (not may_hold or issubclass(kind, Atom)):
        PLAIN.add(kind)
    return kind in PLAIN


def is_open(tree: Any) -> bool:
    """Whether there is a node of ours in a `PyTreeDef`."""
    data = tree.node_data()
    is_ours = data is not None and data[0] is _Node
    return is_ours or any(map(is_open, tree.children()))


def _open(leaf: Any, name: str) -> Any:
    if _is_plain(type(leaf)):
        return leaf
    if isinstance(leaf, _STRUCTURES):
        node = _node_of(leaf)
        if node is not None:
            keys, parts = node.form.keys, node.parts
            node.parts = [
                _open_all(part, name and f"{name}[{key!r}]")
                for key, part in zip(keys, parts)
            ]
            return node
    if name and _holds_values(leaf):
        raise TypeError(_explain(leaf, name))
    return leaf


# Nodes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """A structure without its parts. The order of keys makes no difference, as in a dict."""

    kind: type
    keys: tuple[Any, ...]
    order: tuple[Any, ...] = field(compare=False)
    build: Callable[[dict[Any, Any]], Any] = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.kind.__name__}{list(self.order)}"


class _Node:
    """A structure, opened; built again it is one of the user's class."""

    def __init__(self, form: _Form, parts: Iterable[Any]) -> None:
        self.form, self.parts = form, list(parts)


def _flatten_with_keys(node: _Node) -> tuple[list[tuple[Any, Any]], _Form]:
    is_mapping = issubclass(node.form.kind, Mapping)
    key_of = DictKey if is_mapping else SequenceKey
    return list(zip(map(key_of, node.form.keys), node.parts)), node.form


def _build(form: _Form, parts: Iterable[Any]) -> Any:
    found = dict(zip(form.keys, parts))
    return form.build({key: found[key] for key in form.order})


jax.tree_util.register_pytree_with_keys(
    _Node, _flatten_with_keys, _build, lambda node: (node.parts, node.form)
)


def _node_of(value: Any) -> _Node | None:
    build = builder_of(value)
    if build is None:
        return None
    items = _items_of(value)
    try:
        keys = tuple(sorted(items))
    except TypeError:
        keys = tuple(items)
    form = _Form(type(value), keys, tuple(items), build)
    return _Node(form, [items[key] for key in keys])


def builder_of(value: Any) -> Callable[[dict[Any, Any]], Any] | None:
    """What builds a structure like `value` from other parts; None if nothing does."""
    make: Any = type(value)
    if isinstance(value, collections.deque):
        make = functools.partial(make, maxlen=value.maxlen)
    elif isinstance(value, collections.defaultdict):
        make = functools.partial(make, value.default_factory)
    items = _items_of(value)
    ways = (_from_dict, _from_pairs) if isinstance(value, Mapping) else (_from_list,)
    for build in (functools.partial(way, make) for way in ways):
        try:
            new = build(items)
            if type(new) is type(value) and _items_of(new).keys() == items.keys():
                return build
        except Exception:  # whatever the user's constructor raises
            pass
    return None


def _items_of(value: Any) -> dict[Any, Any]:
    return dict(value if isinstance(value, Mapping) else enumerate(value))


def _from_dict(make: Callable[[Any], Any], items: dict[Any, Any]) -> Any:
    return make(items)


def _from_pairs(make: Callable[[Any], Any], items: dict[Any, Any]) -> Any:
    return make(list(items.items()))


def _from_list(make: Callable[[Any], Any], items: dict[Any, Any]) -> Any:
    return make(list(items.values()))


# What cannot be opened --------------------------------------------------------------------


def _holds_values(value: Any) -> bool:
    """Whether arrays or distributed values are in an object, or in objects in it."""
    rest, seen = [value], {}
    while rest:
        value = rest.pop()
        if isinstance(value, jax.Array | np.ndarray) or (
            is_leaf(value) and value.has_values
        ):
            return True
        if id(value) not in seen:  # objects may refer to each other
            seen[id(value)] = value
            rest += jax.tree.leaves(_parts_of(value), is_leaf=is_leaf)
    return False


def _parts_of(value: Any) -> list[Any]:
    kind = type(value)
    if isinstance(value, _STRUCTURES):
        return list(_items_of(value).values())
    fields = getattr(kind, "__attrs_attrs__", ())
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
    return [getattr(value, field.name, None) for field in fields]


def _explain(value: Any, name: str) -> str:
    kind = type(value).__qualname__
    if isinstance(value, _STRUCTURES):
        source = "dict" if isinstance(value, Mapping) else "list"
        why = f"which `{kind}({source})` does not build again"
        advice = f"Let the class be built from a {source}, or register it"
        how = f"jax.tree_util.register_pytree_node({kind}, ...)"
    else:
        is_dataclass = dataclasses.is_dataclass(value)
        why = f"{'a dataclass' if is_dataclass else 'an attrs class'} that JAX does not know"
        advice = "Register the class where it is defined"
        node = f"register_pytree_node({kind}, ...)"
        how = f"jax.tree_util.{f'register_dataclass({kind})' if is_dataclass else node}"
    return (
        f"{name[0].upper()}{name[1:]} is a {kind}, {why}, so that the arrays or distributed "
        f"values in it cannot be found. {advice}: `{how}`; or use a dict or a named tuple."
    )
