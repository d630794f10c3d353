"""`mx.function(input_signature=...)`, and static arguments that are equal."""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored, parts, per_replica

import mirrax as mx

Spec = mx.TensorSpec
Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture(params=["compiled", "eager"], autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    mx.config.run_functions_eagerly(request.param == "eager")
    yield request.param
    mx.config.run_functions_eagerly(False)


def accepting(*specs: Any, fn: Any = lambda x: x, **options: Any) -> mx.Function:
    return mx.function(fn, input_signature=specs, **options)


# What a signature may be -------------------------------------------------------------------


def test_a_signature_is_kept_as_a_tuple():
    assert accepting(Spec([2])).input_signature == (Spec([2]),)
    assert mx.function(abs).input_signature is None
    assert mx.function(accepting(Spec([2]))).input_signature == (Spec([2]),)
    plain = mx.function(lambda x: x)
    assert mx.function(plain, input_signature=[Spec([])])(3).dtype == np.float32


@pytest.mark.parametrize("signature", [{"x": Spec([])}, Spec([]), "x"])
def test_a_signature_is_a_tuple_or_a_list(signature):
    with pytest.raises(TypeError, match="must be either a tuple or a list"):
        mx.function(lambda x: x, input_signature=signature)


@pytest.mark.parametrize("item", ["a", 3, None, {"a": None}, (Spec([]), 1), np.float32])
def test_a_signature_holds_specs_only(item):
    with pytest.raises(TypeError, match="possibly nested sequence of TensorSpec"):
        mx.function(lambda x: x, input_signature=[item])


def test_a_signature_fits_the_parameters():
    with pytest.raises(TypeError, match="has 2 specs, 1 more than .* arguments for: x"):
        accepting(Spec([]), Spec([]))
    with pytest.raises(TypeError, match="no spec for argument 'y'"):
        accepting(Spec([]), fn=lambda x, y: x)
    with pytest.raises(TypeError, match="no spec for argument 'y'"):
        accepting(Spec([]), fn=lambda x, *, y: x)


# Converting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [3, 3.0, True, np.int64(3), np.float64(3), np.array(3), jnp.array(3.0)]
)
def test_numbers_become_the_dtype_of_the_spec(value):
    f = accepting(Spec([], "float32"))
    result = f(value)
    assert isinstance(result, jax.Array) and result.dtype == np.float32
    assert not jax.typeof(result).weak_type
    assert float(result) == float(value)


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2]), [jnp.array(1.0), 2.0], [True, 2]]
)
def test_lists_and_numpy_arrays_are_converted(value):
    f = accepting(Spec([None], "float32"))
    assert f(value).dtype == np.float32
    assert f(value).tolist() == [1.0, 2.0]


def test_python_numbers_must_not_lose_anything_but_numpy_arrays_are_cast():
    f, b = accepting(Spec([], "int32")), accepting(Spec([], "bool"))
    assert (int(f(True)), int(f(np.float32(2.5))), bool(b(True))) == (1, 2, True)
    for function, value in ((f, 2.0), (f, 2**40), (b, 1), (f, 1j), (f, "a"), (f, None)):
        with pytest.raises(
            TypeError, match=r"argument 'x' is .*TensorSpec\(shape=\(\)"
        ):
            function(value)
    with pytest.raises(TypeError, match="does not fit"):
        f(np.complex64(1))
    with pytest.raises(TypeError, match="does not fit"):
        accepting(Spec(None))([[1, 2], [3]])


def test_a_variable_is_taken_for_its_value():
    v = mx.Variable(1.0)
    f = accepting(Spec([]), fn=lambda x: x + 1)
    assert float(f(v)) == 2.0
    v.assign(5.0)
    assert float(f(v)) == 6.0


def test_64_bits_in_a_spec_are_32_where_jax_has_no_others():
    f = accepting(Spec([None], "int64"))
    assert f(np.arange(2)).dtype == f(jnp.arange(3)).dtype == np.int32


def test_bfloat16_and_text():
    assert accepting(Spec([], jnp.bfloat16))(1.5).dtype == jnp.bfloat16
    assert accepting(Spec([], str), fn=lambda x: x + "!")("a") == "a!"
    with pytest.raises(TypeError, match=r"argument 'x' is float32\[\]"):
        accepting(Spec([], str))(jnp.ones(()))
    with pytest.raises(TypeError, match="argument 'x' is 3"):
        accepting(Spec([], str))(3)


# Checking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 2, 5])
def test_a_length_of_none_may_be_any(size):
    assert accepting(Spec([None, 2]))(jnp.ones((size, 2))).shape == (size, 2)
    assert accepting(Spec(None))(jnp.ones([1] * size)).ndim == size


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (jnp.ones(2, "int32"), r"int32\[2\]"),
        (jnp.ones(3), r"float32\[3\]"),
        (jnp.ones((2, 2)), r"float32\[2,2\]"),
        (np.ones(3), r"float64\[3\]"),
        ([1.0], r"\[1.0\]"),
        (2.0, "2.0"),
    ],
)
def test_another_dtype_rank_or_length_is_an_error(value, shown):
    f = accepting(Spec([2]))
    f(jnp.ones(2))
    wanted = r"TensorSpec\(shape=\(2,\), dtype=float32\)"
    with pytest.raises(TypeError, match=f"argument 'x' is {shown}, .*fit {wanted}"):
        f(value)
    assert f(jnp.ones(2)).tolist() == [1, 1]


def test_structures_are_checked_and_the_leaf_is_named():
    f = accepting({"a": Spec([None]), "b": (Spec([]), Spec([], "int32"))})
    result = f({"b": (1, 2), "a": [1, 2]})
    assert [result["a"].tolist(), *map(float, result["b"])] == [[1, 2], 1, 2]
    with pytest.raises(TypeError, match=r"argument 'x'\['b'\]\[1\] is float32\[\]"):
        f({"a": [1], "b": (1, jnp.ones(()))})
    with pytest.raises(TypeError, match=r"'x' is \{'a': TensorSpec\(shape=\(1,\)"):
        f({"a": jnp.ones(1)})
    for other in ({"a": [1]}, {"a": [1], "b": [1, 2]}, [1, 2], {"a": [1], "b": (1,)}):
        with pytest.raises(TypeError, match="differs in structure"):
            f(other)
    pair = accepting(Pair(Spec([]), Spec([])))
    assert isinstance(pair(Pair(1, 2)), Pair)


def test_arguments_are_counted():
    f = accepting(Spec([]), Spec([]), fn=lambda x, y: x + y)
    assert float(f(1, 2)) == float(f(1, y=2)) == float(f(y=1, x=2)) == 3.0
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        f(1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        f(1, 2, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        f(1, 2, z=3)
    with pytest.raises(TypeError, match="unexpected arguments z"):
        accepting(Spec([]), fn=lambda x, **rest: x)(1, z=3)


def test_specs_beyond_the_named_parameters_are_those_of_varargs():
    f = accepting(Spec([]), Spec([]), Spec([]), fn=lambda x, *rest: sum(rest, x))
    assert float(f(1, 2, 3)) == 6.0
    for wrong in ((1,), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="differs in structure"):
            f(*wrong)
    with pytest.raises(TypeError, match="differs in structure"):
        accepting(Spec([]), fn=lambda x, *rest: x)(1, 2)


def test_defaults_in_the_signature_are_converted_and_others_stay():
    f = accepting(Spec([]), Spec([]), fn=lambda x, y=2: y)
    assert f(1).dtype == np.float32 and float(f(1)) == 2.0
    g = accepting(Spec([]), fn=lambda x, y=1000, *, z="a": x + (y if z == "a" else 0))
    assert float(g(1)) == float(g(1, 1000)) == float(g(1, y=1000, z="a")) == 1001.0
    for other in (5, jnp.array(1000), 1000.0):
        with pytest.raises(TypeError, match="argument 'y', .* keeps its default 1000"):
            g(1, other)
    with pytest.raises(TypeError, match="argument 'z'"):
        g(1, z="b")


class Model:
    @mx.function(input_signature=[Spec([None])])
    def double(self, x: Any) -> Any:
        return x * 2


def test_a_method_does_not_have_self_in_its_signature(engine):
    model = Model()
    assert model.double([1, 2]).tolist() == model.double(x=[1, 2]).tolist() == [2, 4]
    assert model.double(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(TypeError, match="argument 'x'"):
        model.double(1)
    bound = mx.function(Model().double, input_signature=[Spec([2])])
    assert bound([1, 2]).tolist() == [2, 4]


def test_static_arguments_are_left_out_of_the_signature():
    def scale(x, mode, y):
        return x * y if mode == 2 else x

    f = accepting(Spec([]), Spec([]), fn=scale, static_argnames="mode")
    assert [float(f(3, 2, 5)), float(f(3, mode=1, y=5)), float(f(3, 2, y=4))] == [
        15,
        3,
        12,
    ]
    with pytest.raises(TypeError, match="argument 'y'"):
        f(3, 2, [1])


def test_a_donated_argument_may_be_converted():
    f = accepting(Spec([None]), donate_argnums=0, fn=lambda x: x + 1)
    x = jnp.zeros(2)
    assert f(x).tolist() == f(x=np.zeros(2)).tolist() == f([0, 0]).tolist() == [1, 1]


# How often it is traced ---------------------------------------------------------------------


def test_what_is_converted_is_not_traced_again(engine):
    f = accepting(Spec([], "float32"), fn=lambda x: x + 1)
    for value in (1, 2.0, np.float64(3), jnp.array(4.0), jnp.ones((), "float32"), True):
        assert float(f(value)) == float(value) + 1
        assert float(f(x=value)) == float(value) + 1
    assert f.trace_count == (1 if engine == "compiled" else 0)


def test_new_lengths_are_traced_without_a_warning(engine):
    f = accepting(Spec([None]), fn=lambda x: x.sum())
    for _ in range(2):
        for size in range(12):  # warnings are errors
            assert float(f(jnp.ones(size))) == size
    assert f.trace_count == (12 if engine == "compiled" else 0)


def test_other_reasons_for_traces_still_give_the_warning(engine):
    if engine == "eager":
        return
    f = accepting(Spec([None]), fn=lambda x, mode: x + mode, static_argnames="mode")
    with pytest.warns(UserWarning, match="traced 5 times"):
        for i in range(5):
            f([1], mode=i)


# With strategies ----------------------------------------------------------------------------


def test_each_replicas_part_is_checked_and_converted():
    strategy = mirrored(2)
    f = accepting(Spec([None]), fn=lambda x: x * 2)
    even = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    assert parts(strategy, strategy.run(f, (even,))) == [[2, 4], [6, 8]]
    assert parts(strategy, strategy.run(f, kwargs={"x": even})) == [[2, 4], [6, 8]]
    uneven = per_replica(strategy, [1.0, 2.0], [3.0])
    assert parts(strategy, strategy.run(f, (uneven,))) == [[2, 4], [6]]
    by_hand = mx.distribute.PerReplica([[1, 2], np.array([3, 4])])
    assert parts(strategy, strategy.run(f, (by_hand,))) == [[2, 4], [6, 8]]
    assert parts(strategy, strategy.run(f, ([1, 2],))) == [[2, 4], [2, 4]]
    for wrong in (
        1.0,
        per_replica(strategy, 1.0, 2.0),
        per_replica(strategy, [1], [2]),
    ):
        with pytest.raises(
            TypeError, match="argument 'x' is .*does not fit TensorSpec"
        ):
            strategy.run(f, (wrong,))


def test_a_part_of_fixed_length_is_checked_as_a_replica_sees_it():
    strategy = mirrored(2)
    f = accepting(Spec([2]), fn=lambda x: x + 1)
    caller = mx.function(lambda x: strategy.run(f, (x,)))
    good = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    bad = per_replica(strategy, [1.0], [3.0])
    for call in (caller, lambda x: strategy.run(f, (x,))):
        assert parts(strategy, call(good)) == [[2, 3], [4, 5]]
        with pytest.raises(TypeError, match="argument 'x'"):
            call(bad)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_element_spec_of_a_distributed_dataset_is_a_signature(num_replicas):
    strategy = mirrored(num_replicas)
    data = mx.data.Dataset.from_tensor_slices({"x": np.arange(7, dtype="float32")})
    distributed = strategy.experimental_distribute_dataset(data.batch(4))

    def replica_fn(batch):
        return batch["x"].sum()

    @mx.function(input_signature=[distributed.element_spec])
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_fn, (batch,)), axis=None)

    assert [float(step(batch)) for batch in distributed] == [6.0, 15.0]
    inner = accepting(distributed.element_spec, fn=replica_fn)
    sums = [strategy.run(inner, (batch,)) for batch in distributed]
    assert [float(strategy.reduce("SUM", s, axis=None)) for s in sums] == [6.0, 15.0]
    if num_replicas > 1:
        with pytest.raises(
            TypeError, match=r"\['x'\] is float32\[4\], one value for all"
        ):
            step({"x": jnp.ones(4)})
    with pytest.raises(TypeError, match="differs in structure"):
        step(jnp.ones(4))


def test_the_element_spec_of_a_dataset_is_a_signature():
    data = mx.data.Dataset.from_tensor_slices(
        (np.ones((5, 2), "float32"), np.arange(5))
    )
    data = data.batch(2)
    f = mx.function(lambda x, y: x.sum() + y.sum(), input_signature=data.element_spec)
    assert [float(f(*batch)) for batch in data] == [5.0, 9.0, 6.0]


def test_a_signature_holds_in_replicas_and_in_other_functions():
    strategy = mirrored(2)
    f = accepting(Spec([]), fn=lambda x: x.at[()].add(1))

    def replica_fn(x):
        return f(x) + f(2)

    x = per_replica(strategy, 1.0, 2.0)
    for fn in (replica_fn, mx.function(replica_fn)):
        assert parts(strategy, strategy.run(fn, (x,))) == [5.0, 6.0]
    caller = mx.function(lambda x: (f(x), strategy.run(f, (x,))))
    one, both = caller(3)  # a number, also where it is traced
    assert (float(one), parts(strategy, both)) == (4.0, [4.0, 4.0])
    wrong = mx.function(lambda x: f(jnp.stack([x, x])))
    with pytest.raises(TypeError, match=r"argument 'x' is float32\[2\]"):
        wrong(1.0)
    with pytest.raises(TypeError, match=r"argument 'x' is float32\[2\]"):
        strategy.run(lambda x: f(jnp.stack([x, x])), (x,))


# Equal static arguments ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    name: str = "a"


@dataclasses.dataclass
class Mutable:
    size: int


class Colour(enum.Enum):
    RED = 1


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def method(self) -> None:
        pass


class ArrayEqual(Named):
    def __eq__(self, other: object) -> Any:
        return np.array([True])

    __hash__ = Named.__hash__


class Unequal(Named):
    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = Named.__hash__


_one = Named("one")


@pytest.mark.parametrize(
    ("make", "num_traces"),
    [
        (lambda: Config(1), 1),
        (lambda: Pair("a", "b"), 1),
        (lambda: Colour.RED, 1),
        (lambda: frozenset({1, 2}), 1),
        (lambda: range(1000), 1),
        (lambda: slice(0, 2000) and b"ab", 1),
        (lambda: Named("one"), 1),
        (lambda: _one.method, 1),
        (lambda: np.dtype("float32"), 1),
        (lambda: {"a": Config(2), "b": [Named("x")]}, 1),
        (lambda: Mutable(1), 2),
        (lambda: Config([1]), 2),  # type: ignore[arg-type]
        (lambda: ArrayEqual("one"), 2),
        (lambda: Unequal("one"), 2),
        (lambda: object(), 2),
    ],
)
def test_equal_static_arguments_share_a_trace(make, num_traces, engine):
    f = mx.function(lambda x, static: x + 1)
    strategy = mirrored(2)
    made = [make() for _ in range(2)]  # alive at once, so that ids are different
    assert [float(f(1.0, value)) for value in made] == [2.0, 2.0]
    g = mx.function(lambda x, static: x + 1)
    for value in made:
        strategy.run(g, (1.0, value))
    count = num_traces if engine == "compiled" else 0
    assert (f.trace_count, g.trace_count) == (count, count)


def test_unequal_static_arguments_do_not(engine):
    f = mx.function(lambda x, static: x + static.size)
    sizes = [Config(1), Config(2), Config(1), Config(1, "b")]
    assert [float(f(0.0, config)) for config in sizes] == [1.0, 2.0, 1.0, 1.0]
    assert f.trace_count == (3 if engine == "compiled" else 0)


def test_a_range_is_looped_over_in_the_program(engine):
    f = mx.function(lambda x, numbers: sum((x * i for i in numbers), x))
    assert float(f(1.0, range(4))) == float(f(1.0, frozenset(range(4)))) == 7.0
    assert f.trace_count == (2 if engine == "compiled" else 0)
