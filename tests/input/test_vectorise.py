"""One call for many rows gives bit for bit what a call for each row gives.

The rows of arrays in memory are passed to a function together where that is possible; the
same rows from a generator are always passed one by one.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import random
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.random as npr
import pytest

import mirrax as mx

Dataset = mx.data.Dataset
ROWS = 7
CONSTANT = np.linspace(-1, 1, 3).astype("float32")
SCALE = 0.3

# Functions that can be called with many rows, by what they need of a row -----------------

OF_ANY_SHAPE: dict[str, Any] = {
    "x": lambda x: x,
    "-x": lambda x: -x,
    "+x": lambda x: +x,
    "abs": lambda x: abs(x),
    "x + x": lambda x: x + x,
    "x * 3": lambda x: x * 3,
    "3 - x": lambda x: 3 - x,
    "x / 3": lambda x: x / 3,
    "1 / x": lambda x: 1 / x,
    "x // 3": lambda x: x // 3,
    "x % 3": lambda x: x % 3,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x ** 0.5": lambda x: x**0.5,
    "x ** -1": lambda x: x**-1,
    "2 ** x": lambda x: 2 ** (x / 50),
    "abs(x) ** 1.7": lambda x: abs(x) ** 1.7,
    "x * x": lambda x: x * x,
    "x / (x + 1)": lambda x: x / (x + 1),
    "x << 2": lambda x: x << 2,
    "how many": lambda x: (x > 0).sum(),
    "how many of all": lambda x: (x > 0).mean(),
    "a global": lambda x: x * SCALE,
    "astype": lambda x: x.astype("float32"),
    "astype and back": lambda x: x.astype(np.float64) / 255.0,
    "astype int8": lambda x: x.astype("int8"),
    "> 1": lambda x: x > 1,
    "== x": lambda x: x == x,
    "comparisons": lambda x: (x > 0) & (x < 5) | (x == 7),
    "~": lambda x: ~(x > 1),
    "divmod": lambda x: divmod(x, 3),
    "where": lambda x: np.where(x > 1, x, 0),
    "where both": lambda x: np.where(x > 1, x * 2, -x),
    "clip": lambda x: np.clip(x, 0, 3),
    "x.clip": lambda x: x.clip(1, 2),
    "sqrt": lambda x: np.sqrt(x),
    "exp": lambda x: np.exp(x / 7),
    "exp2": lambda x: np.exp2(x / 7),
    "log1p": lambda x: np.log1p(x * x),
    "log": lambda x: np.log(x + 0.5),
    "sin": lambda x: np.sin(x),
    "cos": lambda x: np.cos(x),
    "tan": lambda x: np.tan(x),
    "tanh": lambda x: np.tanh(x),
    "arctan": lambda x: np.arctan(x),
    "sinh": lambda x: np.sinh(x / 9),
    "cbrt": lambda x: np.cbrt(x),
    "floor": lambda x: np.floor(x),
    "rint": lambda x: np.rint(x / 3),
    "trunc": lambda x: np.trunc(x / 2),
    "sign": lambda x: np.sign(x),
    "square": lambda x: np.square(x),
    "reciprocal": lambda x: np.reciprocal(x + 0.5),
    "maximum": lambda x: np.maximum(x, 1),
    "minimum": lambda x: np.minimum(x, x - 1),
    "power": lambda x: np.power(abs(x) + 1, 1.7),
    "float power": lambda x: np.float_power(abs(x) + 1, 0.3),
    "hypot": lambda x: np.hypot(x, 2),
    "arctan2": lambda x: np.arctan2(x, x + 1),
    "logaddexp": lambda x: np.logaddexp(x, 1),
    "isnan": lambda x: np.isnan(x / 2),
    "isfinite": lambda x: np.isfinite(x * 1.0),
    "modf": lambda x: np.modf(x / 3),
    "frexp": lambda x: np.frexp(x * 1.0),
    "copysign": lambda x: np.copysign(x, -1.0),
    "nextafter": lambda x: np.nextafter(x * 1.0, 9),
    "add with dtype": lambda x: np.add(x, 1, dtype="float64"),
    "sum": lambda x: x.sum(),
    "np.sum": lambda x: np.sum(x),
    "sum dtype": lambda x: x.sum(dtype="float64"),
    "mean": lambda x: x.mean(),
    "np.mean": lambda x: np.mean(x),
    "max": lambda x: x.max(),
    "np.min": lambda x: np.min(x),
    "standardised": lambda x: (x - x.mean()) / (x.max() - x.min() + 1),
    "expand first": lambda x: np.expand_dims(x, 0),
    "expand last": lambda x: np.expand_dims(x, -1),
    "ravel": lambda x: x.ravel() * 2,
    "np.ravel": lambda x: np.ravel(x),
    "reshape": lambda x: x.reshape(-1, 1),
    "np.reshape": lambda x: np.reshape(x, (1, -1)),
    "flatten": lambda x: x.flatten(),
    "copy": lambda x: x.copy() + np.copy(x),
    "zeros_like": lambda x: np.zeros_like(x) + 1,
    "ones_like": lambda x: np.ones_like(x, dtype="float32"),
    "shape": lambda x: x * len(x.shape) + x.ndim + x.size + np.ndim(x),
    "np.shape": lambda x: x + len(np.shape(x)),
    "ellipsis": lambda x: x[...],
    "new axis": lambda x: x[None] * 2,
    "with a scalar array": lambda x: x + np.float32(0.1),
    "with a vector": lambda x: np.expand_dims(x, -1) * CONSTANT,
    "a constant": lambda x: 5,
    "a constant array": lambda x: np.ones(2),
    "a tuple": lambda x: (x, x * 2, 7),
    "a dict": lambda x: {"b": x, "a": {"c": -x}},
    "a list": lambda x: [x, x + 1],
    "is it an array": lambda x: x * 2 if isinstance(x, np.ndarray) else x * 3,
    "is it a scalar": lambda x: x * (2 if np.isscalar(x) else 3),
    "is it a float": lambda x: x / 2 if isinstance(x, np.floating) else x // 2,
    "its dtype": lambda x: x / 255 if x.dtype == np.uint8 else x + 1,
    "its dtype's kind": lambda x: x * 2 if x.dtype.kind == "f" else x,
    "in steps": lambda x: functools.reduce(lambda a, _: a * 2 + x, range(3), x),
}
OF_VECTORS = {
    "x[0]": lambda x: x[0],
    "x[-1]": lambda x: x[-1] * 2,
    "x[1:]": lambda x: x[1:],
    "x[::-1]": lambda x: x[::-1] + x,
    "len": lambda x: x * len(x),
    "sin(x[0])": lambda x: np.sin(x[0]),
    "tan(x[-1])": lambda x: np.tan(x[-1]),
    "tan(x[::-1])": lambda x: np.tan(x[::-1]),
    "exp(x[::2])": lambda x: np.exp(x[::2] / 9),
    "sum of every second": lambda x: x[::2].sum(),
    "sum from behind": lambda x: x[::-1].sum(),
    "softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
    "sum axis 0": lambda x: x.sum(axis=0),
    "sum axis -1": lambda x: x.sum(axis=-1),
    "sum keepdims": lambda x: x / (abs(x).sum(axis=0, keepdims=True) + 1),
    "mean axis": lambda x: np.mean(x, axis=0),
    "mean axis -1": lambda x: x.mean(-1, keepdims=True) * 2,
    "max axis": lambda x: x.max(axis=0),
    "np.min axis": lambda x: np.min(x, axis=-1),
}
OF_MATRICES = {
    "x[0, 1]": lambda x: x[0, 1],
    "x[:, 0]": lambda x: x[:, 0],
    "x[..., :1]": lambda x: x[..., :1],
    "crop and flip": lambda x: x[1:, ::-1],
    "cos of a column": lambda x: np.cos(x[:, 0]),
    "sum of a column": lambda x: x[:, 0].sum(),
    "sum from all ends": lambda x: x[::-1, ::-1].sum(),
    "sum of every second column": lambda x: x[:, ::2].sum(axis=0),
    "mean of a crop": lambda x: x[1:, :2].mean(),
    "row by column": lambda x: x[:, :1] * x[:1, :],
    "minus the mean": lambda x: x - x.mean(axis=1, keepdims=True),
    "sum of sums": lambda x: x.sum(axis=0).sum(),
    "sum axis 1": lambda x: x.sum(axis=1),
}
SHAPES = [(), (3,), (17,), (300,), (2, 3), (9, 40), (3, 1), (4, 5, 6), (0,)]
DTYPES = [
    "float32",
    "float64",
    "float16",
    "int32",
    "int64",
    "uint8",
    "bool",
]  # complex rows are never taken together


def functions_for(shape):
    found = dict(OF_ANY_SHAPE)
    found |= OF_VECTORS if len(shape) > 0 else {}
    found |= OF_MATRICES if len(shape) > 1 else {}
    return found.items()


def rows_in_memory(shape, dtype, layout):
    rng = np.random.default_rng(len(shape))
    data = rng.normal(size=(ROWS, *shape)) * 10.0 ** rng.integers(-3, 3, (ROWS, *shape))
    if dtype == "complex64":
        data = data + 1j * data[..., ::-1]
    if dtype.startswith(("int", "uint")):
        data = np.round(abs(data)) % 100
    array = (data > 0) if dtype == "bool" else data.astype(dtype)
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "reversed":
        return np.flip(np.flip(array).copy())
    return array


def outcome(make):
    """The elements, or the kind of error."""
    with np.errstate(all="ignore"):
        try:
            return make()
        except Exception as error:
            return type(error).__name__


def bits(value):
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: bits(part) for key, part in sorted(value.items())}
    if isinstance(value, tuple | list):
        return [bits(part) for part in value]
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tobytes()


def rows_of(batch):
    """A batch's rows."""
    if isinstance(batch, str):
        return batch
    if isinstance(batch, dict):
        columns = {key: rows_of(part) for key, part in batch.items()}
        return [{key: columns[key][i] for key in columns} for i in range(ROWS)]
    if isinstance(batch, tuple):
        return list(zip(*map(rows_of, batch)))
    return list(batch)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("plain", marks=pytest.mark.slow),  # with all shapes
        pytest.param("fortran", marks=pytest.mark.slow),
        "strided",
        pytest.param("reversed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
def test_many_rows_at_once_give_the_same_bits(dtype, layout):
    wrong = []
    for shape in SHAPES if layout == "plain" else SHAPES[:3] + SHAPES[5:6]:
        array = rows_in_memory(shape, dtype, layout)
        for name, fn in functions_for(shape):
            dataset = Dataset.from_tensor_slices(array).map(fn)
            single = outcome(lambda: list(dataset))  # noqa: B023
            at_once = outcome(lambda: list(dataset.batch(ROWS)))  # noqa: B023
            if not isinstance(at_once, str):
                at_once = rows_of(at_once[0])
            if bits(at_once) != bits(single):
                wrong.append((name, shape))
    assert not wrong


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_elements_are_what_the_function_returns(dtype):
    for shape in ((), (3,)):
        array = rows_in_memory(shape, dtype, "plain")
        for fn in (np.sin, np.sum, lambda x: x * x + 1, lambda x: np.expand_dims(x, 0)):
            dataset = Dataset.from_tensor_slices(array).map(fn)
            wanted = [fn(array[i]) for i in range(ROWS)]
            assert bits(list(dataset)) == bits(wanted)


# Which NumPy may compute in another way for one row than for many: powers, and what looks
# at every second row, or at a part, in another order of memory. `functools` is unknown.
ROW_BY_ROW = """2 ** x|power|float power|in steps|sin(x[0])|tan(x[-1])|tan(x[::-1])
|sum of every second|sum from behind|cos of a column|sum of a column|sum from all ends
|sum of every second column|mean of a crop""".replace("\n", "").split("|")


def test_the_functions_above_are_called_with_many_rows():
    slow = []
    for name, fn in functions_for((2, 3)):
        if name == "x << 2":  # for integers only
            continue
        dataset = Dataset.from_tensor_slices(np.ones((ROWS, 2, 3), "float32")).map(fn)
        list(dataset.batch(ROWS))
        step: Any = dataset.node
        if not step.fn.may_vectorise:
            slow.append(name)
    assert not set(slow) - set(ROW_BY_ROW)


@pytest.mark.parametrize("size", [1, 2, 5, ROWS])
def test_chains_of_functions_filters_and_shuffles_give_the_same_bits(size):
    array = rows_in_memory((3,), "float32", "plain")

    def chain(dataset):
        dataset = dataset.map(lambda x: (x * 2, x.sum()))
        dataset = dataset.filter(lambda x, total: total > -1)
        dataset = dataset.map(lambda x, total: {"x": x - total, "mean": x.mean()})
        return dataset.take(5).repeat(2).batch(size).map(lambda e: e["x"] / 3)

    at_once = chain(Dataset.from_tensor_slices(array))
    one_by_one = chain(Dataset.from_generator(lambda: iter(list(array))))
    assert bits(list(at_once)) == bits(list(one_by_one))
    assert len(list(at_once)) > 0


def test_errors_that_depend_on_a_row_are_the_users_own():
    powers = Dataset.from_tensor_slices(np.array([1, 2, 3, -1])).map(lambda x: 2**x)
    assert list(powers.take(3)) == [2, 4, 8]
    for dataset in (
        powers,
        powers.batch(4),
        powers.batch(2),
        powers.shuffle(4).batch(4),
    ):
        with pytest.raises(ValueError, match="negative integer powers") as caught:
            list(dataset)
        assert "`map`" in "".join(caught.value.__notes__)


def test_warnings_that_depend_on_a_row_are_the_users_own():
    dataset = Dataset.from_tensor_slices(np.array([1.0, 2.0, 0.0])).map(np.log)
    dataset = dataset.map(lambda x: x / 2)
    with pytest.raises(RuntimeWarning, match="divide by zero"):
        list(dataset.batch(3))


def test_a_predicate_with_an_error_that_depends_on_a_row():
    dataset = Dataset.from_tensor_slices(np.array([1, 2, 3, -1]))
    with pytest.raises(ValueError, match="negative integer powers"):
        list(dataset.filter(lambda x: 2**x > 3).batch(4))


def test_an_axis_that_does_not_exist_is_an_error_for_many_rows_too():
    dataset = Dataset.from_tensor_slices(np.ones((4, 2)))
    for axis in (-4, -3, 2, 3):
        with pytest.raises(ValueError, match="axis|bounds"):
            list(dataset.map(lambda x, axis=axis: np.expand_dims(x, axis)).batch(2))


# Elements of different shapes ---------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 3, 0, 2, 3), (1, 2, 3), (3, 3, 3, 1), (0, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_functions_and_predicates_of_elements_that_differ_in_shape(sizes, size):
    """They come one by one and are alike only after the function, or not even then."""
    rows = [np.ones(k, "float32") for k in sizes]
    ragged = Dataset.from_generator(lambda: iter(rows))

    def flat(dataset):
        return [x for batch in dataset.batch(size) for x in batch.tolist()]

    kept = [k for k in sizes if k > 2]
    assert flat(ragged.map(lambda x: np.sum(x))) == list(sizes)
    assert flat(ragged.map(lambda x: x + 1).map(lambda x: x.sum())) == [
        2 * k for k in sizes
    ]
    large = ragged.filter(lambda x: np.sum(x) > 2)
    assert flat(large) == [[1.0] * k for k in kept]
    assert flat(large.map(lambda x: x.sum())) == kept
    pairs = ragged.map(lambda x: (x, np.sum(x))).filter(lambda x, total: total > 2)
    assert flat(pairs.map(lambda x, total: total)) == kept
    counted = ragged.enumerate().filter(lambda i, x: np.sum(x) > 2)
    assert flat(counted.map(lambda i, x: i)) == [
        i for i, k in enumerate(sizes) if k > 2
    ]
    zipped = Dataset.zip(ragged, Dataset.range(9)).map(lambda x, i: x.sum() + i)
    assert flat(zipped) == [k + i for i, k in enumerate(sizes)]
    sharded = ragged.shard(2, 0).map(lambda x: x.sum())
    assert flat(sharded) == list(sizes[::2])
    assert len(list(large.padded_batch(size))) == -(-len(kept) // size)


# Functions that must be called row by row -------------------------------------------------


class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return x + self.count

    def method(self, x):
        self.count += 1
        return x + self.count


def counting_functions():
    """Functions that see how often they are called: the result is x plus that number."""
    in_list, in_array, in_dict = [0], np.zeros(1, int), {"n": 0}
    grows: list[int] = []
    counter = itertools.count(1)
    left = collections.deque(range(1, 100))
    cell = 0

    def list_item(x):
        in_list[0] += 1
        return x + in_list[0]

    def array_item(x):
        in_array[0] += 1
        return x + in_array[0]

    def dict_item(x):
        in_dict["n"] += 1
        return x + in_dict["n"]

    def growing(x):
        grows.append(1)
        return x + len(grows)

    def counted(x):
        return x + next(counter)

    def dunder(x):
        return x + counter.__next__()

    def queued(x):
        return x + left.popleft()

    def closure(x):
        nonlocal cell
        cell += 1
        return x + cell

    def ufunc_at(x):
        np.add.at(in_array, 0, 1)
        return x + in_array[0]

    def ufunc_out(x):
        return x + np.add(in_array, 1, out=in_array)[0]

    def alias(x):
        mine = in_array
        mine += 1
        return x + mine[0]

    def attribute(x):
        attribute.count = getattr(attribute, "count", 0) + 1
        return x + attribute.count

    def default(x, count=[0]):  # noqa: B006
        count[0] += 1
        return x + count[0]

    def helper(x):
        return list_item(x)

    functions = [
        list_item,
        array_item,
        dict_item,
        growing,
        counted,
        dunder,
        queued,
        closure,
        ufunc_at,
        ufunc_out,
        alias,
        attribute,
        default,
        helper,
        Counter(),
        Counter().method,
        functools.partial(Counter.method, Counter()),
    ]
    return {getattr(fn, "__name__", repr(fn).split(" at ")[0]): fn for fn in functions}


@pytest.mark.parametrize("name", counting_functions())
@pytest.mark.parametrize("size", [None, 3, 10])
def test_a_function_that_counts_is_called_once_for_each_element_in_order(name, size):
    fn = counting_functions()[name]
    dataset = Dataset.from_tensor_slices(np.arange(0, 100, 10)).map(fn)
    batches = list(dataset if size is None else dataset.batch(size))
    found = np.concatenate([np.ravel(batch) for batch in batches])
    assert found.tolist() == [10 * i + i + 1 for i in range(10)]


@pytest.mark.parametrize("size", [None, 3, 10])
def test_a_predicate_that_counts_is_called_once_for_each_element_in_order(size):
    seen = []

    def every_third(x):
        seen.append(int(x))
        return len(seen) % 3 == 0

    dataset = Dataset.range(10).filter(every_third)
    batches = list(dataset if size is None else dataset.batch(size))
    assert [int(x) for batch in batches for x in np.ravel(batch)] == [2, 5, 8]
    assert seen == list(range(10))


def generator_in_closure():
    rng = np.random.default_rng(0)
    return lambda x: x + rng.random()


RANDOM_FUNCTIONS = {
    "np.random": lambda x: x + np.random.rand(),
    "numpy.random as npr": lambda x: x + npr.uniform(),
    "random": lambda x: x + random.random(),
    "a generator": generator_in_closure(),
    "a clock": lambda x: x + time.perf_counter_ns() % 1_000_000_007 * 1e-3,
}


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_every_row_has_random_numbers_of_its_own(name):
    dataset = Dataset.from_tensor_slices(np.zeros(8)).map(RANDOM_FUNCTIONS[name])
    (batch,) = list(dataset.batch(8))
    assert len(set(batch.tolist())) == 8


def data_dependent_if(x):
    return x * 2 if x > 3 else -x


def with_try(x):
    try:
        return np.float32(int(x))
    except Exception:
        return np.float32(-1)


def with_suppress(x):
    result = np.float32(-1)
    try:
        result = np.float32(float(x) + 1)
    finally:
        return result  # noqa: B012


def in_a_loop(x):
    total = x * 0
    for i in range(int(x)):
        total = total + i
    return total


def with_jax(x):
    return jnp.sin(x)


def writes_to_a_copy(x):
    out = np.zeros(3)
    out[0] = x
    return out


def in_python(x):
    return float(x) ** 0.5


@pytest.mark.parametrize(
    "fn",
    [
        data_dependent_if,
        with_try,
        with_suppress,
        in_a_loop,
        with_jax,
        writes_to_a_copy,
        in_python,
        lambda x: max(x, np.int64(3)),
        lambda x: math.sqrt(x),
        lambda x: x.item() * 2,
        lambda x: np.arange(3)[x % 3],
        lambda x: np.array([x, x]),
        lambda x: np.stack([x, x * 2]),
        lambda x: np.full(2, x),
        lambda x: f"{x}",
        lambda x: x in (1, 2),
        lambda x: not x,
        lambda x: x and x + 1,
        lambda x: round(x / 3, 1),
        lambda x: np.float64(x) / 3,
        lambda x: type(x).__name__,
        lambda x: hash(x) % 7,
        lambda x: [x * i for i in range(3)],
    ],
)
def test_what_looks_at_a_row_gives_what_it_gives_row_by_row(fn):
    rows = np.arange(8)
    wanted = list(Dataset.from_generator(lambda: iter(rows)).map(fn).batch(8))
    found = list(Dataset.from_tensor_slices(rows).map(fn).batch(8))
    assert repr(found) == repr(wanted)
    by_element = list(Dataset.from_tensor_slices(rows).map(fn))
    by_python = [fn(x) for x in rows]
    if not isinstance(by_python[0], str | list | tuple):
        np.testing.assert_array_equal(
            np.asarray(by_element, "float32"), np.asarray(by_python, "float32")
        )


def test_every_row_of_numbers_in_range_has_the_dtype_that_was_asked_for():
    for dtype in ("int8", "uint8", "float32", "int64", "float16"):
        dataset = Dataset.range(120, 300, 20, output_type=np.dtype(dtype))
        (batch,) = list(dataset.batch(100))
        rows = list(dataset)
        assert batch.dtype == dtype
        assert {row.dtype.name for row in rows} == {dtype}
        assert bits(np.array(rows)) == bits(batch)


def test_a_function_of_rows_sees_changes_of_what_it_closes_over():
    scale = np.array(1.0)
    dataset = Dataset.from_tensor_slices(np.ones(4)).map(lambda x: x * scale).batch(2)
    iterator = iter(dataset)
    assert next(iterator).tolist() == [1, 1]
    scale[...] = 5
    assert next(iterator).tolist() == [5, 5]
