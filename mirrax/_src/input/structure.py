"""Elements as structures of NumPy arrays, and the specs that describe their leaves.

An element is a NumPy array or scalar, bytes, or a tuple, dict or other pytree of these. As
in TensorFlow a list is not structure: it is stacked into one array. A leaf may also be a
dataset (`Nested`), as `window` gives them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mirrax._src.base import specs
from mirrax._src.base.hiding import hides
from mirrax._src.base.specs import STRING, TensorSpec
from mirrax._src.base.structures import builder_of

PyTree = Any
DATASET = np.dtype("V0")  # of leaves that are datasets, which no array holds


class Nested:
    """A dataset where it is a leaf of an element."""

    @property
    def element_spec(self) -> PyTree:
        raise NotImplementedError


@hides("example")
class DatasetSpec:
    """What describes a dataset in an element of another one, as `window` gives them.

    >>> mx.data.Dataset.range(5).window(2).element_spec
    DatasetSpec(TensorSpec(shape=(), dtype=int64))

    Args:
        element_spec: The specs of the inner dataset's elements.
    """

    __slots__ = ("element_spec", "example")
    __module__ = "mirrax.data"
    shape, dtype, name = (), DATASET, None

    def __init__(
        self, element_spec: PyTree, example: Callable[[], Nested] | None = None
    ) -> None:
        self.element_spec = element_spec
        self.example = example  # makes such a dataset where there is none to look at

    def is_compatible_with(self, value: Any) -> bool:
        """Whether a value, or another spec, could be described by this one."""
        return isinstance(value, Nested | DatasetSpec)

    def __eq__(self, other: object) -> bool:
        is_spec = isinstance(other, DatasetSpec)
        return is_spec and self.element_spec == other.element_spec

    def __hash__(self) -> int:
        return hash((DatasetSpec, *leaves_of(self.element_spec)))

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec})"


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """A dtype's name, TensorFlow's for strings."""
    return "dataset" if dtype == DATASET else specs.dtype_name(dtype)


# Structures -----------------------------------------------------------------------------


def map_leaves(fn: Callable[..., Any], value: PyTree, *others: PyTree) -> PyTree:
    """`fn` of each leaf, with the leaves of `others` in its place; a list is a leaf.

    Unlike JAX's `tree.map` it keeps the order of dicts.

    Raises:
        StructureError: If the others are not alike.
    """
    kind = type(value)
    if kind is np.ndarray or kind is list or isinstance(value, np.generic | bytes):
        return fn(value, *others)
    if kind is dict:
        return _map_items(fn, value, others)
    if isinstance(value, tuple):
        for i, other in enumerate(others):
            if type(other) is not kind or len(other) != len(value):
                raise StructureError(i)
        mapped = [map_leaves(fn, *parts) for parts in zip(value, *others)]
        return kind(*mapped) if hasattr(value, "_fields") else kind(mapped)
    if value is None:
        for i, other in enumerate(others):
            if other is not None:
                raise StructureError(i)
        return None
    is_leaf = _is_leaf(value)
    if isinstance(value, Mapping) and (is_leaf or kind in (OrderedDict, defaultdict)):
        build = builder_of(value)
        if build is not None:
            return build(_map_items(fn, value, others))
    if is_leaf:
        return fn(value, *others)
    try:  # another pytree, a dataclass of the user's, say
        return jax.tree.map(fn, value, *others, is_leaf=_is_list)
    except ValueError:
        raise StructureError(0) from None


def _map_items(
    fn: Callable[..., Any], value: Mapping[Any, Any], others: Sequence[PyTree]
) -> dict[Any, Any]:
    for i, other in enumerate(others):
        is_alike = isinstance(other, type(value)) and other.keys() == value.keys()
        if not is_alike:
            raise StructureError(i)
    return {
        key: map_leaves(fn, part, *[other[key] for other in others])
        for key, part in value.items()
    }


class StructureError(Exception):
    """Argument `index` differs in structure; never reaches users."""

    def __init__(self, index: int) -> None:
        self.index = index


def check_leaves(leaves: Sequence[Any]) -> None:
    """Raises StructureError if one of several leaves of one place is structure."""
    for i, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, tuple | Mapping):
            raise StructureError(i - 1)


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_leaf(value: Any) -> bool:
    return jax.tree.structure(value, is_leaf=_is_list) == _LEAF


_LEAF = jax.tree.structure(0)


def leaves_of(value: PyTree) -> list[Any]:
    """The leaves, in the order of `map_leaves`."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def to_element(value: PyTree) -> PyTree:
    """What a user's function gave, as an element: every leaf a NumPy array or scalar."""
    if _is_array(value):
        return value
    if type(value) is tuple:
        for part in value:
            if not _is_array(part):
                return tuple([to_element(part) for part in value])
        return value
    return map_leaves(to_array, value)


def _is_array(value: Any) -> bool:
    is_numpy = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_numpy and value.dtype.kind not in "US"


def tuple_for_list(value: PyTree) -> PyTree:
    """What a function of a pipeline returned: a list there is a tuple, inside it an array."""
    return tuple(value) if type(value) is list else value


def to_array(value: Any) -> Any:
    """One leaf as NumPy; Python's numbers become 32-bit ones, as in TensorFlow."""
    if isinstance(value, Nested):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _encode(value) if value.dtype.kind in "US" else value
    if isinstance(value, str | bytes):
        return value.encode() if isinstance(value, str) else value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, list):
        return _stack_list(value)
    array = np.asarray(value)
    if array.dtype == STRING:
        raise TypeError(
            f"An element of a dataset holds {value!r} ({type(value).__name__}), which is not an "
            "array, number or string. Return NumPy arrays, and tuples or dicts of them."
        )
    return _encode(array) if array.dtype.kind in "US" else array


def _stack_list(value: list[Any]) -> np.ndarray:
    kinds = {isinstance(part, str | bytes) for part in value}
    if len(kinds) > 1:
        raise TypeError(f"A list mixes strings with other values: {value!r}.")
    first: Any = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    is_text = isinstance(first, str | bytes)
    try:
        # Not NumPy's fixed-width strings: they lose zeros at the end.
        array = np.asarray(value, object if is_text else None)
    except ValueError as error:
        raise ValueError(
            f"A list is stacked into one array, and the parts of this one differ in shape: "
            f"{[np.shape(part) for part in value]}. Use a tuple for several arrays."
        ) from error
    if is_text:
        return _encode(array)
    is_typed = hasattr(first, "dtype")
    if array.dtype == np.float64 and not is_typed:
        return array.astype(np.float32)
    if array.dtype == np.int64 and not is_typed:
        fits = not array.size or (array.min() >= -(2**31) and array.max() < 2**31)
        return array.astype(np.int32) if fits else array
    return array


def _encode(array: Any) -> Any:
    """Strings as bytes: NumPy's fixed-width strings would lose their own length."""
    if array.ndim == 0:
        if isinstance(array, np.bytes_):  # whose `item` loses zeros at the end
            return bytes(array)
        item = array.item()
        return item.encode() if isinstance(item, str) else item
    flat = [x.encode() if isinstance(x, str) else x for x in array.ravel().tolist()]
    encoded = np.empty(len(flat), object)
    encoded[:] = flat
    return encoded.reshape(array.shape)


# Specs ------------------------------------------------------------------------------------


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf of an element."""
    return getattr(leaf, "shape", ())


def dtype_of(leaf: Any) -> np.dtype:
    """The dtype of a leaf of an element."""
    if isinstance(leaf, Nested):
        return DATASET
    return STRING if isinstance(leaf, bytes) else leaf.dtype


def spec_of(element: PyTree) -> PyTree:
    """The element's leaves as specs."""
    return map_leaves(_spec_of_leaf, element)


def _spec_of_leaf(leaf: Any) -> TensorSpec | DatasetSpec:
    if isinstance(leaf, Nested):
        return DatasetSpec(leaf.element_spec, lambda: leaf)
    return TensorSpec(shape_of(leaf), dtype_of(leaf))


def holds_datasets(spec: PyTree) -> bool:
    """Whether a leaf of the elements is a dataset."""
    return any(isinstance(leaf, DatasetSpec) for leaf in leaves_of(spec))


def with_axis(spec: PyTree, length: int | None) -> PyTree:
    """The spec of `length` such elements in one array."""
    return map_leaves(
        lambda s: TensorSpec(
            None if s.shape is None else (length, *s.shape), s.dtype, s.name
        ),
        spec,
    )


def without_axis(spec: PyTree) -> PyTree:
    """The spec of one of the elements that are stacked in one array."""
    return map_leaves(
        lambda s: TensorSpec(s.shape and s.shape[1:], s.dtype, s.name), spec
    )


def show(value: PyTree) -> str:
    """An element's structure for messages: `(float32[3], string[])`."""
    shown = map_leaves(lambda leaf: _Shown(leaf), value)
    return repr(shown)


class _Shown:
    def __init__(self, leaf: Any) -> None:
        shape = "?" if leaf is None else ",".join(map(str, shape_of(leaf)))
        self.text = f"{dtype_name(dtype_of(leaf))}[{shape}]"

    def __repr__(self) -> str:
        return self.text


# Memory -----------------------------------------------------------------------------------

# JAX takes over NumPy's memory on CPUs, without a copy, if it is aligned.
_ALIGNMENT = 64
# Smaller arrays are copied twice in less time than aligned memory takes to get.
_WORTH_ALIGNING = 16 * 1024


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array that devices can take over."""
    if dtype == DATASET:
        raise TypeError(
            f"The elements are datasets, which cannot be stacked into one array of shape {shape}. "
            "Make arrays of them first: `flat_map(lambda window: window.batch(n))`."
        )
    if dtype == STRING:
        return np.empty(shape, dtype)
    size = dtype.itemsize
    for length in shape:
        size *= length
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def own(leaf: Any) -> Any:
    """A leaf in memory of its own, which a device may take over."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.nbytes < _WORTH_ALIGNING and not leaf.dtype.hasobject:
        return np.array(leaf, order="C")
    out = empty(leaf.shape, leaf.dtype)
    out[...] = leaf
    return out


def stack_leaves(leaves: Sequence[Any]) -> np.ndarray:
    """Equal leaves of several elements in one array.

    Raises:
        ValueError: If they differ in shape or dtype.
    """
    first = leaves[0]
    shape, dtype = shape_of(first), dtype_of(first)
    if not shape and isinstance(first, np.generic) and dtype.kind in "iufb":
        if all(type(leaf) is type(first) for leaf in leaves):
            return np.array(leaves, dtype)
    out = empty((len(leaves), *shape), dtype)
    for i, leaf in enumerate(leaves):
        if type(leaf) is not np.ndarray:
            check_leaves(leaves)
        if shape_of(leaf) != shape or dtype_of(leaf) != dtype:
            raise ValueError(
                f"element 0 is {show(first)} and element {i} is {show(leaf)}"
            )
        out[i] = leaf
    return out


def stack_elements(elements: Sequence[PyTree]) -> PyTree:
    """Elements of one structure as one element with an axis more.

    Raises:
        ValueError: If the elements differ.
    """
    try:
        return map_leaves(lambda *leaves: stack_leaves(leaves), *elements)
    except StructureError as error:
        other = show(elements[error.index + 1])
        text = (
            f"element 0 is {show(elements[0])} and element {error.index + 1} is {other}"
        )
        advice = "Make their structure alike with `map`"
    except ValueError as error:
        text = str(error)
        advice = (
            "Use `padded_batch` for lengths that vary, or make them alike with `map`"
        )
    raise ValueError(
        f"The elements of a batch must be alike, but of {len(elements)} elements {text}. "
        f"{advice}."
    )
