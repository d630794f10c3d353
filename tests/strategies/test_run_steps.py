"""`strategy.run_steps`: many steps in one dispatch, with the values of single steps."""

from __future__ import annotations

import functools
import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import all_sum, mirrored, parts, replica_id
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx
from mirrax._src.engines.program import Program

ON_READ = mx.VariableSynchronization.ON_READ
SUM = mx.VariableAggregation.SUM

all_sizes = pytest.mark.parametrize("n", [1, 2, 3])
Dataset = mx.data.Dataset


def batches(strategy: Any, rows: Any, batch: int) -> Iterator[Any]:
    """An iterator over global batches of the rows of arrays."""
    dataset = Dataset.from_tensor_slices(rows).batch(batch)
    return iter(strategy.experimental_distribute_dataset(dataset))


def step_by_step(strategy: Any, fn: Any, iterator: Iterator[Any], steps: int) -> Any:
    """What `run_steps` gives, by single compiled steps and NumPy, for every replica."""
    compiled, results = mx.function(fn), []
    for _, element in zip(range(steps), iterator):
        results.append(of_all(strategy, strategy.run(compiled, (element,))))
    return [
        jax.tree.map(lambda *leaves: np.stack(leaves), *own) for own in zip(*results)
    ]


def of_all(strategy: Any, result: Any) -> list[Any]:
    """Every replica's part of a result, as NumPy sees it."""
    found = strategy.experimental_local_results(result)
    return [
        jax.tree.map(np.asarray, found[i % len(found)])
        for i in range(strategy.num_replicas_in_sync)
    ]


class Counter:
    """How often a function has been traced."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1


def assert_equal(found: Any, wanted: Any) -> None:
    """The same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def rows_of(count: int, width: int = 3) -> np.ndarray:
    rng = np.random.default_rng(count)
    return rng.normal(size=(count, width)).astype("float32")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were started, one after another."""
    started: list[Program] = []
    launch = Program._run

    def note(self: Program, *args: Any) -> Any:
        started.append(self)
        return launch(self, *args)

    monkeypatch.setattr(Program, "_run", note)
    return started


# Values ---------------------------------------------------------------------------------


@all_sizes
def test_results_are_those_of_single_steps_stacked(n: int) -> None:
    strategy = mirrored(n)
    rows = rows_of(12 * n)

    def fn(x):
        total = jnp.sum(x, axis=1)
        return {"total": total, "id": replica_id(), "all": (all_sum(x), None)}

    found = strategy.run_steps(fn, batches(strategy, rows, 2 * n), 6)
    wanted = step_by_step(strategy, fn, batches(strategy, rows, 2 * n), 6)
    assert_equal(of_all(strategy, found), wanted)
    own = of_all(strategy, found)[n - 1]
    assert own["total"].shape == (6, 2) and own["all"][0].shape == (6, 2, 3)
    assert own["id"].tolist() == [n - 1] * 6


def test_the_example_of_the_docstring() -> None:
    strategy = mirrored(2)
    iterator = batches(strategy, np.arange(12), 4)
    found = strategy.run_steps(jnp.sum, iterator, steps=3)
    assert parts(strategy, found) == [[1, 9, 17], [5, 13, 21]]


@all_sizes
def test_the_next_call_goes_on_with_the_next_elements(n: int) -> None:
    strategy = mirrored(n)
    iterator = batches(strategy, np.arange(10 * n), n)
    first = strategy.run_steps(lambda x: x[0], iterator, 3)
    second = strategy.run_steps(lambda x: x[0], iterator, 4)
    assert parts(strategy, first)[0] == [0, n, 2 * n]
    assert parts(strategy, second)[0] == [n * k for k in range(3, 7)]
    assert parts(strategy, strategy.run(lambda x: x[0], (next(iterator),)))[0] == 7 * n


def test_one_step_has_the_axis_too() -> None:
    strategy = mirrored(2)
    found = strategy.run_steps(lambda x: x, batches(strategy, np.arange(4), 4), 1)
    assert parts(strategy, found) == [[[0, 1]], [[2, 3]]]


class Row(NamedTuple):
    x: Any
    y: Any


def test_elements_and_results_of_any_structure() -> None:
    strategy = mirrored(2)
    rows = {"a": np.arange(8), "b": Row(np.arange(8) * 10, np.arange(8.0))}

    def fn(element):
        assert isinstance(element["b"], Row)
        return Row([element["a"]], {"s": element["b"].x + 1, "none": None})

    found = strategy.run_steps(fn, batches(strategy, rows, 4), 2)
    assert isinstance(found, Row) and found.y["none"] is None
    assert parts(strategy, found.x[0]) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert parts(strategy, found.y["s"])[1] == [[21, 31], [61, 71]]


def test_results_that_are_no_arrays() -> None:
    strategy = mirrored(2)

    def fn(x):
        return None, "text", 3, True, 2.5

    found = strategy.run_steps(fn, batches(strategy, np.arange(8), 4), 2)
    assert found[0] is None and found[1] == "text"
    numbers = [np.asarray(parts(strategy, x)[0]).tolist() for x in found[2:]]
    assert numbers == [[3, 3], [True, True], [2.5, 2.5]]


def test_nothing_comes_back_as_nothing() -> None:
    strategy = mirrored(2)
    iterator = batches(strategy, np.arange(8), 4)
    assert strategy.run_steps(lambda x: None, iterator, 2) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: mx.distribute.OneDeviceStrategy("CPU:1"),
        lambda: mx.MirroredStrategy(["CPU:2"]),
        mx.get_strategy,
    ],
    ids=["one device", "one replica", "default"],
)
def test_strategies_of_one_replica(make: Callable[[], Any]) -> None:
    strategy = make()
    with strategy.scope():
        v = mx.Variable(0.0)
    found = strategy.run_steps(
        lambda x: v.assign_add(jnp.sum(x)).read_value(),
        batches(strategy, np.arange(8.0, dtype="float32"), 2),
        3,
    )
    assert parts(strategy, found) == [[1.0, 6.0, 15.0]]
    assert float(v) == 15.0


def test_elements_of_any_iterator() -> None:
    strategy = mirrored(2)
    numbers = iter([1.0, 2.0, 3.0])
    found = strategy.run_steps(lambda x: x * 2 + replica_id(), numbers, 2)
    assert parts(strategy, found) == [[2.0, 4.0], [3.0, 5.0]]
    assert next(numbers) == 3.0

    values = (
        strategy.experimental_distribute_values_from_function(
            lambda ctx, k=k: jnp.float32(10 * k + ctx.replica_id_in_sync_group)
        )
        for k in range(3)
    )
    found = strategy.run_steps(lambda x: x, values, 3)
    assert parts(strategy, found) == [[0, 10, 20], [1, 11, 21]]


# Variables ------------------------------------------------------------------------------


@pytest.mark.slow
@all_sizes
def test_variables_of_all_kinds_are_carried_from_step_to_step(n: int) -> None:
    strategy = mirrored(n)

    def make():
        with strategy.scope():
            kinds = {
                "mirrored": mx.Variable(jnp.zeros(3), aggregation=SUM),
                "mean": mx.Variable(0.0, aggregation=mx.VariableAggregation.MEAN),
                "own": mx.Variable(1.0),
                "local": mx.Variable(0.0, synchronization=ON_READ, aggregation=SUM),
                "read": mx.Variable([1.0, 2.0, 3.0]),
            }
        return {**kinds, "ordinary": mx.Variable(2.0)}

    def step_of(v):
        def fn(x):
            v["mirrored"].assign_add(jnp.sum(x * v["read"], axis=0))
            v["mean"].assign(jnp.float32(replica_id()) + v["mean"])
            v["own"].assign(v["own"] * 2 + replica_id())
            v["local"].assign_add(jnp.sum(x))
            return v["mirrored"].read_value(), v["own"] + v["ordinary"], v["local"] * 1

        return fn

    rows = np.round(rows_of(10 * n) * 8)  # sums are exact
    many, single = make(), make()
    found = strategy.run_steps(step_of(many), batches(strategy, rows, 2 * n), 5)
    wanted = step_by_step(strategy, step_of(single), batches(strategy, rows, 2 * n), 5)
    assert_equal(of_all(strategy, found), wanted)
    for name in many:
        assert parts(strategy, many[name]) == parts(strategy, single[name]), name
    own = [1.0] * n
    for _ in range(5):
        own = [2 * x + i for i, x in enumerate(own)]
    assert parts(strategy, many["own"]) == own
    assert float(many["local"]) == rows.sum()


@pytest.mark.parametrize("steps", [2, 5], ids=["one program", "one by one"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_variable_that_is_returned_counts_by_its_value(n: int, steps: int) -> None:
    strategy = mirrored(n)
    with strategy.scope():
        v = mx.Variable(1.0)
    iterator = batches(strategy, np.ones(2 * n), n)  # two elements
    found = strategy.run_steps(lambda x: [v.assign_add(1.0)], iterator, steps)
    assert parts(strategy, found[0])[0] == [2.0, 3.0]


def test_arrays_that_were_read_before_stay_as_they_are() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.zeros(2))
        local = mx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def fn(x):
        local.assign_add(jnp.sum(x))
        return v.assign_add(jnp.ones(2)).read_value(), x

    iterator = batches(strategy, np.ones(24, "float32"), 4)
    kept, seen = [], []
    for k in range(3):
        kept += [v.read_value(), v.values[1].read_value(), local.values[1].read_value()]
        seen += [k * 2.0, k * 2.0, k * 4.0]
        kept += [strategy.run_steps(fn, iterator, 2)]
        seen += [None]
    for array, value in zip(kept, seen):
        if value is not None:
            np.testing.assert_array_equal(array, np.full(array.shape, value))
    rounds = [of_all(strategy, k)[1] for k, s in zip(kept, seen) if s is None]
    assert [r[0][:, 0].tolist() for r in rounds] == [[1, 2], [3, 4], [5, 6]]


def test_threads_run_their_own_loops() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        totals = [mx.Variable(0.0, aggregation=SUM) for _ in range(3)]

    def work(total: mx.Variable) -> None:
        iterator = batches(strategy, np.ones(48, "float32"), 4)
        for _ in range(4):
            strategy.run_steps(lambda x: total.assign_add(jnp.sum(x)), iterator, 3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, totals))
    assert [float(total) for total in totals] == [48.0] * 3


def test_single_steps_and_loops_take_turns() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0)
        local = mx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def fn(x):
        local.assign_add(jnp.sum(x))
        return v.assign_add(all_sum(jnp.sum(x))).read_value()

    iterator = batches(strategy, np.ones(40, "float32"), 4)
    compiled = mx.function(fn)
    for k in range(2):
        strategy.run_steps(fn, iterator, 2)
        strategy.run(compiled, (next(iterator),))
        strategy.run(fn, (next(iterator),))
        assert float(v) == float(local) == 16.0 * (k + 1)
    v.assign(100.0)
    found = strategy.run_steps(fn, iterator, 2)
    assert parts(strategy, found)[0] == [104.0, 108.0]


def test_variables_are_made_in_the_first_step_only() -> None:
    strategy = mirrored(2)
    made: list[mx.Variable] = []

    def fn(x):
        if not made:
            made.append(mx.Variable(10.0))
            made.append(mx.Variable(0.0, synchronization=ON_READ, aggregation=SUM))
        made[1].assign_add(jnp.sum(x))
        return made[0].assign_add(1.0).read_value()

    iterator = batches(strategy, np.ones(32, "float32"), 4)
    for start in (10.0, 13.0):
        found = strategy.run_steps(fn, iterator, 3)
        assert parts(strategy, found)[0] == [start + 1, start + 2, start + 3]
    assert len(made) == 2 and float(made[1]) == 24.0
    assert parts(strategy, made[0]) == [16.0, 16.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "transformation"),
    [
        (1, optax.sgd(0.1)),
        (2, optax.adam(0.01)),
        (4, optax.sgd(0.05, momentum=0.9)),
    ],
    ids=["1 sgd", "2 adam", "4 momentum"],
)
def test_training_gives_the_weights_of_single_steps(n: int, transformation) -> None:
    strategy = mirrored(n)
    rows = (rows_of(48, 4), rows_of(48, 1))

    def train(in_one: bool) -> tuple[Any, Any]:
        with strategy.scope():
            w, b = mx.Variable(jnp.ones((4, 1))), mx.Variable(jnp.zeros(1))
            optimizer = mx.train.Optimizer(transformation)

        def fn(element):
            x, y = element
            loss, gradients = mx.value_and_grad(
                lambda: mx.nn.compute_average_loss(
                    jnp.sum((x @ w + b - y) ** 2, axis=1)
                ),
                [w, b],
            )()
            optimizer.apply_gradients(zip(gradients, [w, b]))
            return loss

        iterator = batches(strategy, rows, 8)
        losses = (
            of_all(strategy, strategy.run_steps(fn, iterator, 6))
            if in_one
            else step_by_step(strategy, fn, iterator, 6)
        )
        assert int(optimizer.iterations) == 6
        return losses, [w.numpy(), b.numpy(), *[s.numpy() for s in optimizer.variables]]

    many, single = train(True), train(False)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(single)):
        np.testing.assert_array_equal(a, b)


def test_gradients_are_accumulated_over_steps() -> None:
    strategy = mirrored(2)

    def train(in_one: bool) -> Any:
        with strategy.scope():
            w = mx.Variable(jnp.ones(3))
            optimizer = mx.train.Optimizer(
                optax.sgd(0.5, momentum=0.5), gradient_accumulation_steps=3
            )

        def fn(x):
            gradient = mx.grad(lambda: jnp.sum((x @ w) ** 2), w)()
            optimizer.apply_gradients([(gradient, w)])
            return w.read_value()

        iterator = batches(strategy, np.round(rows_of(28)) / 8, 4)
        found = (
            of_all(strategy, strategy.run_steps(fn, iterator, 7))
            if in_one
            else step_by_step(strategy, fn, iterator, 7)
        )
        assert int(optimizer.iterations) == 2
        return found

    found = train(True)
    changes = [not np.array_equal(a, b) for a, b in zip(found[0], found[0][1:])]
    assert changes == [False, True, False, False, True, False]
    np.testing.assert_allclose(found, train(False), rtol=1e-6)


def test_a_variable_becomes_equal_between_rounds() -> None:
    strategy, traces = mirrored(2), Counter()
    with strategy.scope():
        v = mx.Variable(1.0)

    def fn(x):
        traces.note()
        return v.assign(v + replica_id() + x).read_value()

    for k in range(3):
        found = strategy.run_steps(fn, iter([0.0, 1.0]), 2)
        assert parts(strategy, found) == [[1.0, 2.0], [2.0, 4.0]]
        assert parts(strategy, v) == [2.0, 4.0]
        v.assign(1.0)  # a part for each replica before, now the same on all
        if k == 0:
            first = traces.count
    assert traces.count == first


def test_metrics_are_kept_and_reset_between_rounds() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        mean = mx.metrics.Mean()
    iterator = batches(strategy, np.arange(24.0, dtype="float32"), 4)
    for k in range(2):
        strategy.run_steps(lambda x: mean.update_state(x), iterator, 3)
        assert float(mean.result()) == 12 * k + 5.5
        mean.reset_state()


def test_random_numbers_of_a_key_that_is_carried() -> None:
    strategy = mirrored(2)

    def draws(in_one: bool) -> Any:
        with strategy.scope():
            key = mx.Variable(jax.random.key(0))

        def fn(x):
            now, later = jax.random.split(key.read_value())
            key.assign(later)
            return x + jax.random.uniform(now)

        iterator = batches(strategy, np.zeros(8, "float32"), 2)
        return (
            of_all(strategy, strategy.run_steps(fn, iterator, 4))
            if in_one
            else step_by_step(strategy, fn, iterator, 4)
        )

    found = draws(True)
    assert_equal(found, draws(False))
    assert len(set(found[0].ravel().tolist())) == 4


# One dispatch, one compile --------------------------------------------------------------


def test_many_steps_are_one_dispatch_and_one_compile(launches: list[Program]) -> None:
    strategy, traces = mirrored(2), Counter()
    with strategy.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def fn(x):
        traces.note()
        return v.assign_add(jnp.sum(x)).read_value()

    iterator = batches(strategy, np.ones(400, "float32"), 4)
    strategy.run_steps(fn, iterator, 20)
    first = traces.count
    launches.clear()
    for _ in range(3):
        strategy.run_steps(fn, iterator, 20)
    assert traces.count == first <= 2
    assert len(launches) == 3 and len(set(map(id, launches))) == 1
    assert float(v) == 4.0 * 80
    [step] = strategy.stepper._steps["run"]._functions.values()
    assert step.function.trace_count == 1


def test_the_program_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, texts = mirrored(2), []
    launch = Program._run

    def note(self: Program, inputs: Any) -> Any:
        groups = self._reused, self._kept
        arrays = (g.arrays(self._array_of)[0] for g in groups)
        lowered = self._jitted.lower(*arrays, *inputs)
        texts.append(lowered.compile().as_text())
        return launch(self, inputs)

    monkeypatch.setattr(Program, "_run", note)
    with strategy.scope():
        v = mx.Variable(jnp.zeros(3))
    strategy.run_steps(
        lambda x: v.assign_add(all_sum(jnp.sum(x, axis=0))).read_value(),
        batches(strategy, rows_of(40), 4),
        10,
    )
    [text] = texts
    assert len(re.findall(r" while\(", text)) == 1
    assert '"known_trip_count":{"n":"10"}' in text.replace(" ", "")
    reductions = [line for line in text.splitlines() if " all-reduce(" in line]
    assert len(reductions) == 1  # inside the loop, not once for each step


def test_convolutions_on_cpus_are_faster_one_by_one(launches: list[Program]) -> None:
    strategy = mirrored(2)

    def train(in_one: bool) -> Any:
        with strategy.scope():
            kernel = mx.Variable(jnp.ones((3, 3, 1, 2)))

        def fn(x):
            def loss():
                y = jax.lax.conv_general_dilated(
                    x,
                    kernel.read_value(),
                    (1, 1),
                    "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
                return jnp.mean(y**2)

            value, gradient = mx.value_and_grad(loss, kernel)()
            kernel.assign_sub(0.01 * all_sum(gradient))
            return value

        iterator = batches(strategy, rows_of(16, 25).reshape(16, 5, 5, 1), 2)
        if not in_one:
            return step_by_step(strategy, fn, iterator, 8), kernel.numpy()
        found = [strategy.run_steps(fn, iterator, 4) for _ in range(2)]
        apart = [of_all(strategy, result) for result in found]
        return [np.concatenate(own) for own in zip(*apart)], kernel.numpy()

    many = train(True)
    assert len(launches) >= 8
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(train(False))):
        np.testing.assert_array_equal(a, b)


def test_another_number_of_steps_compiles_once_more() -> None:
    strategy, traces = mirrored(2), Counter()

    def fn(x):
        traces.note()
        return jnp.sum(x)

    iterator = batches(strategy, np.arange(80), 4)
    for steps in (3, 5, 3, 5):
        found = strategy.run_steps(fn, iterator, steps)
        assert parts(strategy, found)[0] == sorted(parts(strategy, found)[0])
    assert traces.count == 2


def test_a_step_defined_anew_in_each_round_is_compiled_once() -> None:
    strategy, traces = mirrored(2), Counter()
    with strategy.scope():
        v = mx.Variable(0.0)
    iterator = batches(strategy, np.ones(80, "float32"), 4)

    def train(rate: jax.Array) -> None:
        def fn(x):
            traces.note()
            return v.assign_add(rate * jnp.sum(x)).read_value()

        strategy.run_steps(fn, iterator, 2)

    for k in range(4):
        train(jnp.float32(k))
        if k == 0:
            first = traces.count
    assert traces.count == first <= 2
    assert float(v) == 2 * 2 * (0 + 1 + 2 + 3)


def test_compiled_functions_partials_and_methods() -> None:
    strategy = mirrored(2)

    class Model:
        def __init__(self) -> None:
            self.total = mx.Variable(0.0)
            self.compiled = mx.function(self.step)

        def step(self, x):
            return self.total.assign_add(jnp.sum(x)).read_value()

    with strategy.scope():
        model = Model()
    iterator = batches(strategy, np.ones(64, "float32"), 4)
    for fn in (model.step, model.compiled, functools.partial(Model.step, model)):
        model.total.assign(0.0)
        for start in (0.0, 4.0):
            found = strategy.run_steps(fn, iterator, 2)
            assert parts(strategy, found)[0] == [start + 2, start + 4]


def test_what_is_dropped_is_freed() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.ones(3))
    iterator = batches(strategy, rows_of(24), 4)
    found = strategy.run_steps(lambda x: jnp.sum(x * v), iterator, 2)
    gone = [weakref.ref(part) for part in strategy.experimental_local_results(found)]
    gone.append(weakref.ref(iterator))
    del found, iterator
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


# Data that ends, or differs -------------------------------------------------------------


@all_sizes
def test_uneven_last_batches(n: int) -> None:
    strategy = mirrored(n)
    rows = np.arange(7.0 * n + 1, dtype="float32")

    def run(in_one: bool) -> Any:
        with strategy.scope():
            v = mx.Variable(0.0, aggregation=SUM)

        def fn(x):
            v.assign_add(jnp.sum(x))
            return jnp.sum(x), jnp.int32(x.shape[0])

        iterator = batches(strategy, rows, 2 * n)
        steps = len(rows) // (2 * n) + 1
        if not in_one:
            return step_by_step(strategy, fn, iterator, steps), float(v)
        return of_all(strategy, strategy.run_steps(fn, iterator, steps)), float(v)

    found, total = run(True)
    wanted, other = run(False)
    assert_equal(found, wanted)
    assert total == other == rows.sum()


def test_results_that_depend_on_the_size_of_an_uneven_batch() -> None:
    strategy = mirrored(2)
    iterator = batches(strategy, np.arange(11), 4)
    with pytest.raises(ValueError, match="cannot be stacked, their shapes are"):
        strategy.run_steps(lambda x: x, iterator, 3)


def test_data_that_ends_early_gives_fewer_steps() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def fn(x):
        v.assign_add(jnp.sum(x).astype("float32"))
        return jnp.sum(x)

    iterator = batches(strategy, np.arange(12), 4)
    found = strategy.run_steps(fn, iterator, 10)
    assert parts(strategy, found) == [[1, 9, 17], [5, 13, 21]]
    assert float(v) == 66.0
    for _ in range(2):
        with pytest.raises(mx.errors.OutOfRangeError, match="data has ended"):
            strategy.run_steps(fn, iterator, 10)
    assert float(v) == 66.0


def test_tails_of_many_lengths_do_not_warn() -> None:
    strategy = mirrored(2)
    for count in range(1, 8):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = strategy.run_steps(jnp.sum, iter([jnp.ones(2)] * count), 10)
        assert parts(strategy, found)[0] == [2.0] * count


def test_no_data_at_all() -> None:
    strategy = mirrored(2)
    with pytest.raises(mx.errors.OutOfRangeError, match="data has ended"):
        strategy.run_steps(lambda x: x, iter([]), 1)


def test_elements_of_different_shapes_and_static_values() -> None:
    strategy = mirrored(2)
    elements = iter([jnp.ones(2), jnp.ones(3), jnp.ones(2)])
    found = strategy.run_steps(jnp.sum, elements, 3)
    assert parts(strategy, found)[0] == [2.0, 3.0, 2.0]

    def fn(element):
        return element["x"] * (10 if element["name"] == "ten" else 1)

    names = iter([{"x": 1.0, "name": "ten"}, {"x": 2.0, "name": "one"}])
    found = strategy.run_steps(fn, names, 2)
    assert parts(strategy, found)[0] == [10.0, 2.0]


def test_mixed_kinds_of_elements() -> None:
    strategy = mirrored(2)
    own = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.float32(ctx.replica_id_in_sync_group)
    )
    elements = iter([jnp.float32(5), own, jnp.float32(7)])
    found = strategy.run_steps(lambda x: x + 1, elements, 3)
    assert parts(strategy, found) == [[6.0, 1.0, 8.0], [6.0, 2.0, 8.0]]


def test_the_position_after_a_loop_is_saved_and_restored(tmp_path: Path) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def fn(x):
        return v.assign_add(jnp.sum(x)).read_value()

    iterator = batches(strategy, np.arange(40.0, dtype="float32"), 4)
    strategy.run_steps(fn, iterator, 3)
    checkpoint = mx.train.Checkpoint(v=v, iterator=iterator)
    saved = checkpoint.save(tmp_path / "checkpoint")
    first = of_all(strategy, strategy.run_steps(fn, iterator, 4))
    checkpoint.restore(saved)
    assert_equal(of_all(strategy, strategy.run_steps(fn, iterator, 4)), first)
    assert float(v) == sum(range(28))


# Errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None, True])
def test_steps_have_to_be_a_number(steps: Any) -> None:
    strategy = mirrored(2)
    with pytest.raises(ValueError, match="`steps` must be a positive integer, got"):
        strategy.run_steps(lambda x: x, iter([1.0]), steps)


def test_wrong_arguments() -> None:
    strategy = mirrored(2)
    run_steps: Any = strategy.run_steps
    with pytest.raises(TypeError, match="`run_steps` needs a function, got 3"):
        run_steps(3, iter([1.0]), 1)
    with pytest.raises(TypeError, match=r"got list; pass `iter\(dataset\)`"):
        run_steps(lambda x: x, [1.0], 1)
    dataset = strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))
    with pytest.raises(TypeError, match=r"got DistributedDataset; pass `iter\(datas"):
        run_steps(lambda x: x, dataset, 1)
    with pytest.raises(TypeError, match="positional argument"):
        run_steps(lambda x, y: x, iter([1.0]), 1)


def test_a_step_that_raises() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(1.0)

    def broken(x):
        v.assign_add(1.0)
        raise ZeroDivisionError("in the step")

    iterator = batches(strategy, np.ones(40, "float32"), 4)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the step"):
            strategy.run_steps(broken, iterator, 2)
    assert parts(strategy, v) == [1.0, 1.0]
    found = strategy.run_steps(lambda x: v + jnp.sum(x), iterator, 2)
    assert parts(strategy, found)[0] == [3.0, 3.0]


def test_a_number_that_is_none_leaves_the_variables() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(1.0)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError, match="nan"):
            strategy.run_steps(lambda x: v.assign(jnp.log(x)), iter([1.0, -1.0]), 2)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert parts(strategy, v) == [1.0, 1.0]


def test_data_that_raises() -> None:
    strategy = mirrored(2)

    def generate():
        yield 1.0
        raise ZeroDivisionError("in the data")

    with pytest.raises(ZeroDivisionError, match="in the data"):
        strategy.run_steps(lambda x: x, generate(), 3)


def test_where_it_can_be_called() -> None:
    strategy, other = mirrored(2), mirrored(2)
    with pytest.raises(RuntimeError, match="inside a replica function"):
        strategy.run(lambda: strategy.run_steps(lambda x: x, iter([1.0]), 1))
    with other.scope(), pytest.raises(RuntimeError, match="different strategies"):
        strategy.run_steps(lambda x: x, iter([1.0]), 1)
    for compiled in (mx.function, jax.jit):
        fn = compiled(lambda y: strategy.run_steps(lambda x: x + y, iter([1.0]), 1))
        with pytest.raises(RuntimeError, match="a compiled loop of its own"):
            fn(1.0)
    with strategy.scope():
        found = strategy.run_steps(lambda x: x, iter([1.0]), 1)
    assert parts(strategy, found)[0] == [1.0]


def test_functions_that_run_eagerly() -> None:
    strategy, seen = mirrored(2), []
    with strategy.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def fn(x):
        seen.append(float(jnp.sum(x)))  # possible in plain Python only
        return v.assign_add(jnp.sum(x)).read_value()

    mx.config.run_functions_eagerly(True)
    try:
        found = strategy.run_steps(
            fn, batches(strategy, np.arange(8.0, dtype="float32"), 4), 2
        )
    finally:
        mx.config.run_functions_eagerly(False)
    assert parts(strategy, found)[0] == [6.0, 28.0]
    assert seen == [1.0, 5.0, 9.0, 13.0]


# Random ones ----------------------------------------------------------------------------

STRATEGIES = {n: mirrored(n) for n in range(1, 5)}


@pytest.mark.slow
@examples(25)
@given(
    n=st.integers(1, 4),
    rows=st.integers(1, 20),
    batch=st.integers(1, 6),
    rounds=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    synchronization=st.sampled_from(["AUTO", "ON_READ"]),
    aggregation=st.sampled_from(["SUM", "MEAN", "ONLY_FIRST_REPLICA"]),
)
def test_random_sizes_beside_a_python_loop(
    n, rows, batch, rounds, synchronization, aggregation
) -> None:
    strategy = STRATEGIES[n]
    data = np.arange(rows, dtype="float32")

    def run(in_one: bool) -> Any:
        with strategy.scope():
            v = mx.Variable(
                1.0,
                synchronization=mx.VariableSynchronization[synchronization],
                aggregation=mx.VariableAggregation[aggregation],
            )

        def fn(x):
            v.assign_add(jnp.sum(x) + 1)
            return {"v": v * 2, "rows": all_sum(jnp.float32(x.shape[0]))}

        compiled, found = mx.function(fn), []
        iterator = batches(strategy, data, batch)
        for steps in rounds:
            if in_one:
                try:
                    found += [of_all(strategy, strategy.run_steps(fn, iterator, steps))]
                except mx.errors.OutOfRangeError:
                    found += ["end"]
            else:
                done = step_by_step(strategy, compiled, iterator, steps)
                found += [done or "end"]
        return found, parts(strategy, v)

    many, single = run(True), run(False)
    assert [x == "end" for x in many[0]] == [x == "end" for x in single[0]]
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(single)):
        if not isinstance(a, str):
            np.testing.assert_array_equal(a, b)


def test_many_forms_of_one_step_warn() -> None:
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def round_of(name: str) -> None:
        strategy.run_steps(lambda x: x * len(name), iter([1.0, 2.0]), 2)

    for k in range(9):
        round_of("x" * k)
    with pytest.warns(UserWarning, match="'<lambda>' .* has been compiled 10 times"):
        round_of("another")
