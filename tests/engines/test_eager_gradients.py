"""Gradients in eager replicas are plain Python: a loss runs every time, on every replica."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored, parts, per_replica, replica_id

import mirrax as mx


class Counter:
    """Counts how often the Python of a loss runs; `tick` looks like a NumPy function."""

    def __init__(self):
        self.calls = 0
        self.tick = np.frompyfunc(self._count, 1, 1)

    def _count(self, x):
        self.calls += 1
        return x


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def w(strategy):
    with strategy.scope():
        return mx.Variable(1.0, name="w")


# Run every time -----------------------------------------------------------------------


def test_a_loss_made_anew_every_step_runs_on_every_replica(strategy, w):
    counter = Counter()
    tick = counter.tick

    def step(x, y):
        def loss():
            tick(0)
            return jnp.sum((w * x - y) ** 2)

        return mx.value_and_grad(loss, w)()

    for k in range(1, 5):
        x = per_replica(strategy, [1.0 * k, 2.0], [3.0, 4.0 * k])
        y = per_replica(strategy, [0.0, 0.0], [0.0, 0.0])
        value, gradient = strategy.run(step, (x, y))
        expected = [k * k + 4.0, 9.0 + 16.0 * k * k]
        assert parts(strategy, value) == expected
        assert parts(strategy, gradient) == [2 * e for e in expected]
    assert counter.calls == 8


def test_a_loss_sees_new_values_of_the_variable(strategy, w):
    counter = Counter()
    tick = counter.tick

    def loss(x):
        tick(0)
        return w * w * x

    for k in range(1, 5):
        w.assign(float(k))
        gradient = strategy.run(mx.grad(loss, w), (jnp.float32(3.0),))
        assert parts(strategy, gradient) == [6.0 * k] * 2
    assert counter.calls == 8


def test_a_loss_takes_new_shapes(strategy, w):
    counter = Counter()
    tick = counter.tick

    def loss(x):
        tick(0)
        return jnp.sum(w * x)

    for _ in range(3):
        for size in (1, 2):
            gradient = strategy.run(mx.grad(loss, w), (jnp.ones(size),))
            assert parts(strategy, gradient) == [float(size)] * 2
    assert counter.calls == 12


def test_a_gradient_outside_replicas_runs_every_time():
    counter = Counter()
    tick = counter.tick
    v = mx.Variable(3.0)
    for k in range(1, 4):
        x = jnp.float32(k)
        assert float(mx.grad(lambda: tick(0) * 0.0 + v * v * x, v)()) == 6.0 * k  # noqa: B023
    assert counter.calls == 3


def test_switched_off_the_loss_runs_every_time(strategy, w):
    counter = Counter()
    tick = counter.tick

    def loss(x):
        tick(0)
        return w * x

    mx.config.run_functions_eagerly(True)
    try:
        for _ in range(3):
            assert parts(strategy, strategy.run(mx.grad(loss, w), (2.0,))) == [2.0] * 2
    finally:
        mx.config.run_functions_eagerly(False)
    assert counter.calls == 6


def test_a_loss_that_branches_on_values_runs_every_time_and_is_right(strategy, w):
    def step(x):
        def loss():
            if float(x) > 2:
                return w * x
            return -(w * x)

        return mx.grad(loss, w)()

    for first, second in [(1.0, 3.0), (3.0, 1.0), (5.0, 7.0)]:
        out = strategy.run(step, (per_replica(strategy, first, second),))
        assert parts(strategy, out) == [a if a > 2 else -a for a in (first, second)]


# Exactly what Python would do ----------------------------------------------------------
#
# Each case gives a loss factor that depends on something; `change` changes that something
# from 2 to 5 between two calls of the same code, and the gradient has to follow.

SCALE = 2.0
NESTED = {"deep": [2.0]}
TABLE = np.array([2.0])
settings = types.ModuleType("settings")
settings.scale = 2.0  # type: ignore[attr-defined]


def set_globals(value):
    global SCALE
    SCALE = value
    NESTED["deep"][0] = value
    TABLE[0] = value
    settings.scale = value  # type: ignore[attr-defined]
    Config.scale = value


def scale_of_the_module():
    return SCALE


class Config:
    scale = 2.0


class Model:
    def __init__(self, scale):
        self.scale = scale
        self.inner = types.SimpleNamespace(scale=scale)
        self.layers = [{"scale": scale}]
        self.array = np.array([scale])

    def get(self):
        return self.scale

    def get_global(self):
        return SCALE

    @property
    def seen(self):
        return SCALE

    def __call__(self):
        return self.scale


class Child(Model):
    pass


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class SlottedChild(Slotted):
    """Has a slot and a `__dict__`."""


@dataclasses.dataclass
class Options:
    scale: float = 2.0


def cell_case():
    scale = 2.0

    def set_scale(value):
        nonlocal scale
        scale = value

    return set_scale, lambda: scale


def nested_cell_case():
    set_scale, inner = cell_case()
    return set_scale, lambda: inner()


def container_case(container, key, read):
    def change(value):
        container[key] = value

    return change, lambda: read(container)


def object_case(thing, read):
    def change(value):
        target = thing
        target.scale = value

    return change, lambda: read(thing)


def model_case(read, change):
    model = Model(2.0)
    return (lambda value: change(model, value)), lambda: read(model)


def bound_method_case(name="get"):
    model = Model(2.0)
    method = getattr(model, name)
    return (lambda value: setattr(model, "scale", value)), lambda: method()


def partial_case():
    model = Model(2.0)
    get = functools.partial(Model.get, model)
    return (lambda value: setattr(model, "scale", value)), lambda: get()


def default_case():
    def read(scale=2.0):
        return scale

    def change(value):
        read.__defaults__ = (value,)

    return change, read


def global_case(read):
    return set_globals, read


def set_index(array, value):
    array[0] = value


CASES = {
    "a closed-over number": cell_case,
    "a number that a closed-over function closes over": nested_cell_case,
    "a list": lambda: container_case([2.0], 0, lambda c: c[0]),
    "a dict": lambda: container_case({"a": 2.0}, "a", lambda c: c["a"]),
    "a dict with keys of several types": lambda: container_case(
        {"a": 2.0, 1: 0.0, None: 0.0}, "a", lambda c: c["a"]
    ),
    "a dict in a list": lambda: container_case([{}, 2.0], 1, lambda c: c[1]),
    "a numpy array changed in place": lambda: container_case(
        np.array([2.0]), 0, lambda c: c[0]
    ),
    "an attribute": lambda: object_case(Model(2.0), lambda m: m.scale),
    "an attribute of a child class": lambda: object_case(Child(2.0), lambda m: m.scale),
    "an attribute in a slot": lambda: object_case(Slotted(2.0), lambda m: m.scale),
    "an attribute in a slot beside a dict": lambda: object_case(
        SlottedChild(2.0), lambda m: m.scale
    ),
    "a field of a dataclass": lambda: object_case(Options(), lambda m: m.scale),
    "a namespace": lambda: object_case(
        types.SimpleNamespace(scale=2.0), lambda m: m.scale
    ),
    "an attribute of an attribute": lambda: model_case(
        lambda m: m.inner.scale, lambda m, value: setattr(m.inner, "scale", value)
    ),
    "a dict in a list in an attribute": lambda: model_case(
        lambda m: m.layers[0]["scale"], lambda m, value: m.layers[0].update(scale=value)
    ),
    "an array in an attribute": lambda: model_case(
        lambda m: m.array[0], lambda m, value: set_index(m.array, value)
    ),
    "an attribute that a method reads": lambda: model_case(
        lambda m: m.get(), lambda m, value: setattr(m, "scale", value)
    ),
    "an attribute that a call reads": lambda: model_case(
        lambda m: m(), lambda m, value: setattr(m, "scale", value)
    ),
    "an attribute that a kept method reads": bound_method_case,
    "an attribute that a kept call reads": lambda: bound_method_case("__call__"),
    "an attribute that a partial reads": partial_case,
    "a method replaced on the object": lambda: model_case(
        lambda m: m.get(), lambda m, value: setattr(m, "get", lambda: value)
    ),
    "a default argument": default_case,
    "a global": lambda: global_case(lambda: SCALE),
    "a global that a called function reads": lambda: global_case(
        lambda: scale_of_the_module()
    ),
    "a global that a function in a function reads": lambda: global_case(
        lambda: (lambda: (lambda: SCALE)())()
    ),
    "a global that a method reads": lambda: global_case(
        functools.partial(lambda m: m.get_global(), Model(2.0))
    ),
    "a global container": lambda: global_case(lambda: NESTED["deep"][0]),
    "a global array changed in place": lambda: global_case(lambda: TABLE[0]),
    "an attribute of a module": lambda: global_case(lambda: settings.scale),
    "an attribute of a class": lambda: global_case(lambda: Config.scale),
}


def model_global_case(read):
    model = Model(2.0)
    return set_globals, lambda: read(model)


CASES["a global that a method reads"] = lambda: model_global_case(
    lambda m: m.get_global()
)
CASES["a global that a property reads"] = lambda: model_global_case(lambda m: m.seen)


@pytest.fixture(autouse=True)
def globals_as_they_were():
    yield
    set_globals(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_follows(case):
    change, factor = CASES[case]()
    v = mx.Variable(1.0)

    def step():
        return float(mx.grad(lambda: v * factor(), v)())

    assert step() == 2.0
    change(5.0)
    assert step() == 5.0
    change(2.0)
    assert step() == 2.0


def test_a_gradient_in_replicas_follows(strategy, w):
    change, factor = CASES["an attribute"]()

    def step():
        return mx.grad(lambda: w * factor(), w)()

    for value in (2.0, 5.0, 2.0):
        change(value)
        assert parts(strategy, strategy.run(step)) == [value, value]


def test_a_gradient_follows_an_object_that_is_an_argument(strategy, w):
    model = Model(2.0)
    gradient = mx.grad(lambda model: w * model.scale, w)
    assert parts(strategy, strategy.run(gradient, (model,))) == [2.0, 2.0]
    model.scale = 5.0
    assert parts(strategy, strategy.run(gradient, (model,))) == [5.0, 5.0]


def test_a_gradient_follows_a_function_that_is_an_argument(strategy, w):
    change, factor = cell_case()
    gradient = mx.grad(lambda factor: w * factor(), w)
    assert parts(strategy, strategy.run(gradient, (factor,))) == [2.0, 2.0]
    change(5.0)
    assert parts(strategy, strategy.run(gradient, (factor,))) == [5.0, 5.0]


def test_a_gradient_follows_another_type_of_the_same_number(strategy, w):
    change, factor = cell_case()

    def step():
        loss = lambda: (w * 1.0, jnp.asarray(factor()))  # noqa: E731
        return mx.grad(loss, w, has_aux=True)()[1]

    dtypes = []
    for value in (1, 1.0, True):
        change(value)
        out = strategy.run(step)
        dtypes.append(str(strategy.experimental_local_results(out)[1].dtype))
    assert dtypes == ["int32", "float32", "bool"]


def test_a_gradient_follows_the_sign_of_zero(strategy, w):
    change, factor = cell_case()

    def step():
        return mx.grad(lambda: w * jnp.copysign(3.0, factor()), w)()

    change(0.0)
    assert parts(strategy, strategy.run(step)) == [3.0, 3.0]
    change(-0.0)
    assert parts(strategy, strategy.run(step)) == [-3.0, -3.0]


def test_a_gradient_follows_the_scope_and_the_replica(strategy, w):
    gradient = mx.grad(lambda: w * (1.0 + mx.get_strategy().num_replicas_in_sync), w)
    assert parts(strategy, strategy.run(gradient)) == [3.0, 3.0]
    assert float(gradient()) == 2.0
    with strategy.scope():
        assert float(gradient()) == 3.0


def test_a_gradient_knows_whether_it_runs_in_a_replica(strategy, w):
    def loss():
        return w * (5.0 if mx.distribute.in_cross_replica_context() else 2.0)

    gradient = mx.grad(loss, w)
    assert parts(strategy, strategy.run(gradient)) == [2.0, 2.0]
    with strategy.scope():
        assert float(gradient()) == 5.0
    assert parts(strategy, strategy.run(gradient)) == [2.0, 2.0]


def test_python_branches_on_the_replica_id_inside_a_loss(strategy, w):
    def loss():
        return w * (5.0 if replica_id() == 1 else 2.0)

    for _ in range(2):
        assert parts(strategy, strategy.run(mx.grad(loss, w))) == [2.0, 5.0]


# Effects -------------------------------------------------------------------------------


def test_print_in_a_loss_prints_every_time(strategy, w, capsys):
    def step():
        def loss():
            print("loss of replica", int(replica_id()))
            return w * 2.0

        return mx.grad(loss, w)()

    for _ in range(3):
        strategy.run(step)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["loss of replica 0", "loss of replica 1"] * 3


def test_a_list_grows_every_time(strategy, w):
    calls = []

    def loss():
        calls.append(1)
        return w * 2.0

    for k in range(1, 4):
        strategy.run(mx.grad(loss, w))
        assert len(calls) == 2 * k


class Base:
    def __init__(self):
        self.calls = 0

    def note(self):
        self.calls += 1


class Derived(Base):
    pass


@pytest.mark.parametrize("kind", [Base, Derived])
def test_an_object_counts_every_time(kind, strategy, w):
    log = kind()

    def loss():
        log.note()
        return w * 2.0

    for k in range(1, 4):
        strategy.run(mx.grad(loss, w))
        assert log.calls == 2 * k


def test_random_numbers_of_numpy_are_drawn_every_time(strategy, w):
    rng = np.random.default_rng(0)
    expected = np.random.default_rng(0)

    def loss():
        return w * rng.integers(1000)

    for _ in range(3):
        drawn = [float(expected.integers(1000)) for _ in range(2)]
        assert parts(strategy, strategy.run(mx.grad(loss, w))) == drawn


def test_an_iterator_advances_every_time(strategy, w):
    numbers = iter(range(1, 100))

    def loss():
        return w * next(numbers)

    for k in range(3):
        gradient = strategy.run(mx.grad(loss, w))
        assert parts(strategy, gradient) == [2.0 * k + 1, 2.0 * k + 2]


def test_variables_made_inside_a_loss_follow_pythons_if(strategy, w):
    made = {}

    def step():
        def loss():
            if "b" not in made:
                made["b"] = mx.Variable(10.0, name="b")
            return w * made["b"]

        return mx.grad(loss, w)()

    for _ in range(2):
        assert parts(strategy, strategy.run(step)) == [10.0, 10.0]
    assert isinstance(made["b"], mx.distribute.MirroredVariable)


def test_a_loss_follows_a_random_key(strategy, w):
    counter = Counter()
    tick = counter.tick

    def loss(key):
        tick(0)
        return w * jax.random.uniform(key)

    for seed in range(3):
        key = jax.random.key(seed)
        out = strategy.run(mx.grad(loss, w), (key,))
        assert parts(strategy, out) == [float(jax.random.uniform(key))] * 2
    assert counter.calls == 6
