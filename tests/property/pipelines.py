"""Random pipelines as plain data: what mirrax makes of one, and what Python's lists say.

A pipeline is a list of steps, the source first; a step is a tuple of a name and its
arguments. `build` makes the dataset, `expected` the list of its elements. The model knows
nothing of blocks, tables and cursors: every step is a function of a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st

import mirrax as mx

Dataset = mx.data.Dataset
Step = tuple[Any, ...]
Elements = list[Any]
MOST_ELEMENTS = 60


class Invalid(Exception):
    """The step cannot be applied to these elements."""


# Sources ----------------------------------------------------------------------------------

KINDS = "int float vector matrix pair dict text labelled named".split()


class Named(NamedTuple):
    """A structure of the user's."""

    image: Any
    label: Any


def arrays_of(kind: str, n: int) -> Any:
    """`n` rows of that kind, stacked: small whole numbers and halves."""
    numbers = np.arange(n)
    text = np.empty(n, object)
    text[:] = [b"row %d" % (i % 5) for i in range(n)]
    match kind:
        case "int":
            return numbers % 7
        case "float":
            return (numbers / 2).astype("float32")
        case "vector":
            return (np.arange(3 * n).reshape(n, 3) / 2 - 2).astype("float32")
        case "matrix":
            return np.arange(4 * n, dtype="int16").reshape(n, 2, 2) % 50
        case "pair":
            return numbers.astype("int32"), np.stack([numbers, -numbers], 1) / 2
        case "dict":
            return {"b": numbers * 0.25, "a": np.ones((n, 2), "uint8") * 3}
        case "text":
            return text
        case "labelled":
            return text, numbers.astype("int32")
        case "named":
            return Named(np.ones((n, 2), "float32"), {"id": numbers.astype("uint8")})
    raise AssertionError(kind)


def rows_of(arrays: Any, n: int) -> Elements:
    return [jax.tree.map(lambda a, i=i: a[i], arrays) for i in range(n)]


def ragged(sizes: tuple[int, ...]) -> Elements:
    return [np.arange(size, dtype="float32") for size in sizes]


def build_source(step: Step) -> Dataset:
    match step:
        case ("slices", kind, n):
            return Dataset.from_tensor_slices(arrays_of(kind, n))
        case ("tensors", kind, n):
            return Dataset.from_tensors(arrays_of(kind, n))
        case ("range", *numbers):
            return Dataset.range(*numbers)
        case ("generator", kind, n):
            rows = rows_of(arrays_of(kind, n), n)
            return Dataset.from_generator(lambda: iter(rows))
        case ("ragged", sizes):
            return Dataset.from_generator(
                lambda: iter(ragged(sizes)),
                output_signature=mx.TensorSpec((None,), "float32"),
            )
    raise AssertionError(step)


def expected_source(step: Step) -> Elements:
    match step:
        case ("slices" | "generator", kind, n):
            return rows_of(arrays_of(kind, n), n)
        case ("tensors", kind, n):
            return [arrays_of(kind, n)]
        case ("range", *numbers):
            return [np.int64(i) for i in range(*numbers)]
        case ("ragged", sizes):
            return ragged(sizes)
    raise AssertionError(step)


# Functions of elements --------------------------------------------------------------------


def element_of(parts: tuple[Any, ...]) -> Any:
    return parts[0] if len(parts) == 1 else parts


def over(fn, x):
    """`fn` of each leaf. In plain Python, so that mirrax can see that it is harmless."""
    if isinstance(x, dict):
        return {key: over(fn, x[key]) for key in x}
    if isinstance(x, tuple):
        return tuple([over(fn, part) for part in x])
    return fn(x)


def leaf_of(x):
    """The first leaf, in the order of JAX's pytrees."""
    if isinstance(x, dict):
        return leaf_of(x[min(x)])
    if isinstance(x, tuple):
        return leaf_of(x[0])
    return x


def double(*parts):
    return over(lambda x: x + x, element_of(parts))


def third(*parts):
    return over(lambda x: x / 3 - 1, element_of(parts))


def fold(*parts):
    return over(lambda x: np.where(x > 2, x - 2, x), element_of(parts))


def total(*parts):
    return over(lambda x: np.sum(x), element_of(parts))


def beside_itself(*parts):
    element = element_of(parts)
    return element, {"again": element}


def first(*parts):
    return leaf_of(parts)


def listed(*parts):
    x = leaf_of(parts)
    return [x, {"too": x}]  # a tuple, as in TensorFlow


def longer(*parts):
    return jax.tree.map(lambda x: np.concatenate([x, x]), element_of(parts))


def turned(*parts):
    return jax.tree.map(lambda x: x.T, element_of(parts))


def if_large(*parts):
    x = jax.tree.leaves(parts)[0]
    return x + x if np.sum(x) > 3 else x - x


def as_text(*parts):
    return "|".join(str(np.asarray(x).tolist()) for x in jax.tree.leaves(parts))


def of_any_length(*parts):
    x = jax.tree.leaves(parts)[0]
    return np.full(number_of(x) % 4, number_of(x))


def number_of(leaf: Any) -> int:
    is_text = isinstance(leaf, bytes) or leaf.dtype == object
    return np.size(leaf) if is_text else abs(int(np.sum(leaf)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        double,
        third,
        fold,
        total,
        beside_itself,
        first,
        listed,
        longer,
        turned,
        if_large,
        as_text,
        of_any_length,
    )
}


def is_even(*parts):
    return number_of(jax.tree.leaves(parts)[0]) % 2 == 0


def is_large(*parts):
    return np.sum(leaf_of(parts)) > 2


def never(*parts):
    return False


PREDICATES: dict[str, Callable[..., Any]] = {
    fn.__name__: fn for fn in (is_even, is_large, never)
}


def call(fn: Callable[..., Any], element: Any) -> Any:
    """As `map` calls it; what it returns as an element."""
    result = fn(*element) if type(element) is tuple else fn(element)
    result = tuple(result) if isinstance(result, list) else result
    return result.encode() if isinstance(result, str) else result


def inner_steps(kind: str, element: Any) -> list[Step]:
    """The dataset that the function of `flat_map` and `interleave` makes of an element."""
    k = number_of(jax.tree.leaves(element)[0])
    if kind == "numbers":
        return [("range", k, k + k % 4)]
    if kind == "mixed":
        return [("range", 10 * k, 10 * k + 5), ("shuffle", 5, None, True)]
    return [("range", k % 4), ("map", "double"), ("batch", 2, False)]


# Steps --------------------------------------------------------------------------------------


def apply_step(dataset: Dataset, step: Step) -> Dataset:
    match step:
        case ("map", name):
            return dataset.map(FUNCTIONS[name])
        case ("parallel map", name, calls):
            return dataset.map(FUNCTIONS[name], num_parallel_calls=calls)
        case ("filter", name):
            return dataset.filter(PREDICATES[name])
        case ("shuffle", size, seed, reshuffle):
            return dataset.shuffle(size, seed=seed, reshuffle_each_iteration=reshuffle)
        case ("repeat for ever", n):
            return dataset.repeat().take(n)
        case ("concatenate", n):
            return dataset.concatenate(dataset.take(n))
        case ("concatenate before", n):
            return dataset.take(n).concatenate(dataset)
        case ("zip", other):
            return Dataset.zip(dataset, build(other))
        case ("zip in a dict", other):
            return Dataset.zip({"mine": dataset, "yours": (build(other),)})
        case ("flat_map", kind):
            return dataset.flat_map(lambda *parts: build(inner_steps(kind, parts)))
        case ("interleave", kind, cycle, block, calls):
            return dataset.interleave(
                lambda *parts: build(inner_steps(kind, parts)),
                cycle_length=cycle,
                block_length=block,
                num_parallel_calls=calls,
            )
        case ("windows", size, shift, stride, drop):
            windows = dataset.map(first).window(size, shift, stride, drop)
            return windows.flat_map(lambda window: window.batch(size))
        case ("groups", n, size):
            return dataset.group_by_window(
                lambda *parts: group_of(parts, n),
                lambda key, window: window.map(lambda *parts: (key, element_of(parts))),
                window_size=size,
            )
        case ("take_while", name):
            return dataset.take_while(PREDICATES[name])
        case ("scan",):
            return dataset.scan(np.int64(0), counted)
        case ("choose", choices, stop):
            return Dataset.choose_from_datasets(
                [dataset, dataset.skip(1)],
                Dataset.from_tensor_slices(np.array(choices, np.int64)),
                stop,
            )
        case (name, *arguments):
            return getattr(dataset, name)(*arguments)
    raise AssertionError(step)


def group_of(element: Any, n: int) -> int:
    return number_of(jax.tree.leaves(element)[0]) % n


def counted(count, element):
    return count + group_of(element, 5), (count, element)


def expected_step(elements: Elements, step: Step) -> Elements:
    match step:
        case ("map", name) | ("parallel map", name, _):
            return [call(FUNCTIONS[name], element) for element in elements]
        case ("filter", name):
            return [e for e in elements if call(PREDICATES[name], e)]
        case ("batch", size, drop):
            return [stack(part) for part in chunks(elements, size, drop)]
        case ("padded_batch", size, shapes, values, drop):
            assert shapes is None and values is None
            return [pad(part) for part in chunks(elements, size, drop)]
        case ("unbatch",):
            return [row for element in elements for row in unstack(element)]
        case ("shuffle", size, _, _):
            assert size == 1, "the model does not know the order"
            return elements
        case ("repeat", count):
            return elements * count
        case ("repeat for ever", n):
            return list(itertools.islice(itertools.cycle(elements), n))
        case ("take", n):
            return elements[:n] if n >= 0 else elements
        case ("skip", n):
            return elements[n:] if n >= 0 else []
        case ("shard", n, index):
            return elements[index::n]
        case ("concatenate", n):
            return elements + elements[:n]
        case ("concatenate before", n):
            return elements[:n] + elements
        case ("zip", other):
            return list(zip(elements, expected(other)))
        case ("zip in a dict", other):
            pairs = zip(elements, expected(other))
            return [{"mine": a, "yours": (b,)} for a, b in pairs]
        case ("enumerate", start):
            return [(np.int64(i), e) for i, e in enumerate(elements, start)]
        case ("flat_map", kind):
            return [e for part in inner(elements, kind) for e in part]
        case ("interleave", kind, cycle, block, _):
            return interleaved(inner(elements, kind), cycle, block)
        case ("windows", size, shift, stride, drop):
            rows = [call(first, element) for element in elements]
            starts = range(0, len(rows), shift)
            windows = [rows[i : i + size * stride : stride] for i in starts]
            return [stack(w) for w in windows if len(w) == size or not drop]
        case ("groups", n, size):
            return grouped(elements, n, size)
        case ("take_while", name):
            return list(
                itertools.takewhile(lambda e: call(PREDICATES[name], e), elements)
            )
        case ("scan",):
            counts = itertools.accumulate((group_of(e, 5) for e in elements), initial=0)
            return list(zip(map(np.int64, counts), elements))
        case ("choose", choices, stop):
            return chosen([elements, elements[1:]], choices, stop)
        case ("rebatch", sizes, drop):
            rows = [row for element in elements for row in unstack(element)]
            return rebatched(rows, sizes, drop)
        case ("cache",) | ("prefetch", _) | ("ignore_errors",):
            return elements
    raise AssertionError(step)


def grouped(elements: Elements, n: int, size: int) -> Elements:
    groups: dict[int, Elements] = {}
    out: Elements = []
    for element in elements:
        key = group_of(element, n)
        groups.setdefault(key, []).append((np.int64(key), element))
        if len(groups[key]) == size:
            out += groups.pop(key)
    return out + [pair for key in sorted(groups) for pair in groups[key]]


def chosen(parts: list[Elements], choices: tuple[int, ...], stop: bool) -> Elements:
    left, out = [list(part) for part in parts], []
    for choice in choices:
        if left[choice]:
            out.append(left[choice].pop(0))
        elif stop:
            break
    return out


def rebatched(rows: Elements, sizes: tuple[int, ...], drop: bool) -> Elements:
    out = []
    for size in itertools.cycle(sizes):
        part, rows = rows[:size], rows[size:]
        if not part or (drop and len(part) < size):
            return out
        out.append(stack(part))
    raise AssertionError


def inner(elements: Elements, kind: str) -> list[Elements]:
    return [unordered(inner_steps(kind, element)) for element in elements]


def interleaved(parts: list[Elements], cycle: int, block: int) -> Elements:
    """`block` elements of each of `cycle` lists in turn; one that has ended is replaced
    when its turn comes again."""
    waiting = [list(part) for part in parts]
    places: list[Elements | None] = [None] * cycle
    out: Elements = []
    for turn in itertools.cycle(range(cycle)):
        if not waiting and not any(place is not None for place in places):
            return out
        place = places[turn]
        if place is None:
            if not waiting:
                continue
            place = places[turn] = waiting.pop(0)
        out += place[:block]
        if len(place) < block:
            places[turn] = None
        else:
            del place[:block]
    raise AssertionError


def chunks(elements: Elements, size: int, drop: bool) -> list[Elements]:
    parts = [elements[i : i + size] for i in range(0, len(elements), size)]
    return [part for part in parts if len(part) == size or not drop]


def stack(elements: Elements) -> Any:
    flat = [jax.tree.flatten(element) for element in elements]
    if any(tree != flat[0][1] for _, tree in flat):
        raise Invalid
    columns = zip(*(leaves for leaves, _ in flat))
    return jax.tree.unflatten(flat[0][1], [stack_leaves(column) for column in columns])


def stack_leaves(leaves: Any) -> np.ndarray:
    if any(describe(leaf) != describe(leaves[0]) for leaf in leaves):
        raise Invalid
    if describe(leaves[0])[0] == "string":
        out = np.empty((len(leaves), *np.shape(leaves[0])), object)
        for i, leaf in enumerate(leaves):
            out[i] = leaf
        return out
    return np.stack([np.asarray(leaf) for leaf in leaves])


def pad(elements: Elements) -> Any:
    flat = [jax.tree.flatten(element) for element in elements]
    if any(tree != flat[0][1] for _, tree in flat):
        raise Invalid
    columns = zip(*(leaves for leaves, _ in flat))
    return jax.tree.unflatten(flat[0][1], [pad_leaves(column) for column in columns])


def pad_leaves(leaves: Any) -> np.ndarray:
    dtype, rank = describe(leaves[0])[0], np.ndim(leaves[0])
    if any(describe(x)[0] != dtype or np.ndim(x) != rank for x in leaves):
        raise Invalid
    longest = [max(np.shape(x)[axis] for x in leaves) for axis in range(rank)]
    if dtype == "string":
        out = np.full((len(leaves), *longest), b"", object)
    else:
        out = np.zeros((len(leaves), *longest), dtype)
    for i, leaf in enumerate(leaves):
        out[(i, *(slice(n) for n in np.shape(leaf)))] = leaf
    return out


def unstack(element: Any) -> Elements:
    leaves = jax.tree.leaves(element)
    if any(isinstance(x, bytes) or not np.ndim(x) for x in leaves):
        raise Invalid
    if len({len(leaf) for leaf in leaves}) != 1:
        raise Invalid
    return rows_of(element, len(leaves[0]))


def describe(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """dtype and shape."""
    if isinstance(leaf, bytes):
        return "string", ()
    array = np.asarray(leaf)
    return ("string" if array.dtype == object else array.dtype.name), array.shape


# Pipelines ----------------------------------------------------------------------------------


def build(steps: list[Step]) -> Dataset:
    """The dataset; a new one every time."""
    dataset = build_source(steps[0])
    for step in steps[1:]:
        dataset = apply_step(dataset, step)
    return dataset


def expected(steps: list[Step]) -> Elements:
    """What the dataset should give."""
    elements = expected_source(steps[0])
    for step in steps[1:]:
        elements = expected_step(elements, step)
    return elements


def small(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


sources = st.one_of(
    st.tuples(st.just("slices"), st.sampled_from(KINDS), small(0, 12)),
    st.tuples(st.just("generator"), st.sampled_from(KINDS), small(0, 12)),
    st.tuples(st.just("tensors"), st.sampled_from(KINDS), small(1, 3)),
    st.tuples(st.just("range"), small(0, 12)),
    st.tuples(
        st.just("range"), small(-3, 3), small(-4, 9), st.sampled_from([1, 2, -1])
    ),
    st.tuples(
        st.just("ragged"), st.lists(small(0, 3), min_size=1, max_size=5).map(tuple)
    ),
)
functions = st.sampled_from(list(FUNCTIONS))
inner_kinds = st.sampled_from(["numbers", "batches"])
others = st.lists(sources, min_size=1, max_size=1)

steps_of_one_element = st.one_of(
    st.tuples(st.just("map"), functions),
    st.tuples(st.just("parallel map"), functions, small(1, 3)),
)
steps_of_any_kind = st.one_of(
    steps_of_one_element,
    steps_of_one_element,
    st.tuples(st.just("filter"), st.sampled_from(list(PREDICATES))),
    st.tuples(st.just("batch"), small(1, 5), st.booleans()),
    st.tuples(
        st.just("padded_batch"), small(1, 4), st.none(), st.none(), st.booleans()
    ),
    st.just(("unbatch",)),
    st.tuples(st.just("repeat"), small(0, 3)),
    st.tuples(st.just("repeat for ever"), small(0, 20)),
    st.tuples(st.just("take"), small(-1, 12)),
    st.tuples(st.just("skip"), small(-1, 5)),
    small(1, 4).flatmap(
        lambda n: st.tuples(st.just("shard"), st.just(n), small(0, n - 1))
    ),
    st.tuples(st.sampled_from(["concatenate", "concatenate before"]), small(0, 5)),
    st.tuples(st.sampled_from(["zip", "zip in a dict"]), others),
    st.tuples(st.just("enumerate"), small(0, 5)),
    st.tuples(st.just("flat_map"), inner_kinds),
    small(1, 3).flatmap(
        lambda cycle: st.tuples(
            st.just("interleave"),
            inner_kinds,
            st.just(cycle),
            small(1, 3),
            st.sampled_from([None, None, cycle]),
        )
    ),
    st.just(("cache",)),
    st.tuples(st.just("prefetch"), small(0, 3)),
    st.just(("shuffle", 1, 0, True)),
    st.tuples(st.just("windows"), small(1, 4), small(1, 5), small(1, 2), st.booleans()),
    st.tuples(st.just("groups"), small(1, 3), small(1, 4)),
    st.tuples(st.just("take_while"), st.sampled_from(list(PREDICATES))),
    st.just(("scan",)),
    st.just(("ignore_errors",)),
    st.tuples(
        st.just("choose"),
        st.lists(small(0, 1), max_size=12).map(tuple),
        st.booleans(),
    ),
    st.tuples(
        st.just("rebatch"),
        st.lists(small(1, 4), min_size=1, max_size=3).map(tuple),
        st.booleans(),
    ),
)


@st.composite
def pipelines(draw: Any, most_steps: int = 5) -> list[Step]:
    """A source and some steps that fit; those that do not are left out."""
    steps: list[Step] = [draw(sources)]
    elements = expected(steps)
    for step in draw(st.lists(steps_of_any_kind, min_size=1, max_size=most_steps)):
        try:
            after = expected_step(elements, step)
        except Exception:  # the function, or the step, does not fit these elements
            continue
        if len(after) <= MOST_ELEMENTS and sum(map(size_of, after)) < 3000:
            steps.append(step)
            elements = after
    return steps


def size_of(element: Any) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(element))


@st.composite
def random_orders(draw: Any, keep_elements: bool = False) -> list[Step]:
    """As `pipelines`, with shuffles among the steps, and in inner datasets.

    With `keep_elements` the elements do not depend on the order they come in.
    """
    steps = draw(pipelines(most_steps=3))
    if draw(st.booleans()) and not keep_elements and len(expected(steps)) < 8:
        steps.append(draw(st.sampled_from(INNER_SHUFFLES)))
    for _ in range(draw(small(1, 2))):
        size, seed = draw(st.sampled_from([2, 3, 100, None])), draw(seeds)
        where = len(steps) if keep_elements else draw(small(1, len(steps)))
        steps.insert(where, ("shuffle", size, seed, draw(st.booleans())))
    after = draw(st.lists(st.sampled_from(AFTER_SHUFFLES), max_size=2))
    return [*steps, *after]


seeds = st.sampled_from([None, 7])
INNER_SHUFFLES = [
    ("flat_map", "mixed"),
    ("interleave", "mixed", 2, 2, None),
    ("interleave", "mixed", 2, 1, 2),
]
AFTER_SHUFFLES = [
    ("repeat", 2),
    ("prefetch", 2),
    ("cache",),
    ("map", "as_text"),
    ("parallel map", "as_text", 2),
]


def unordered(steps: list[Step]) -> Elements:
    """What the dataset should give, in some order."""
    plain = ("shuffle", 1, 0, True)
    return expected([plain if step[0] == "shuffle" else step for step in steps])


# Comparing ----------------------------------------------------------------------------------


def assert_same(found: Any, wanted: Any) -> None:
    """The same structure, dtypes, shapes and bits."""
    leaves, tree = jax.tree.flatten(wanted)
    others, other = jax.tree.flatten(found)
    assert other == tree, f"{found!r} is not built like {wanted!r}"
    for a, b in zip(others, leaves):
        assert describe(a) == describe(b), f"{found!r} is not {wanted!r}"
        assert key_of(a) == key_of(b), f"{found!r} is not {wanted!r}"


def assert_all_same(found: Elements, wanted: Elements) -> None:
    assert len(found) == len(wanted), f"{found!r} is not {wanted!r}"
    for a, b in zip(found, wanted):
        assert_same(a, b)


def key_of(element: Any) -> Any:
    """Something that is equal for equal elements only, and can be sorted and counted."""
    leaves, tree = jax.tree.flatten(element)
    return str(tree), tuple((*describe(leaf), bits_of(leaf)) for leaf in leaves)


def bits_of(leaf: Any) -> Any:
    if isinstance(leaf, bytes):
        return leaf
    array = np.asarray(leaf)
    return repr(array.tolist()) if array.dtype == object else array.tobytes()
