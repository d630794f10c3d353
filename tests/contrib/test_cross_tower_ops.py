"""`CrossTowerOps`: the algorithms that come along, and a user's own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx

from .towers import (
    MEAN,
    NONE,
    ONLY_FIRST_TOWER,
    SUM,
    all_sizes,
    both_engines,
    compile_if,
    numbered,
    older_names,
    parts,
    tower,
    tower_id,
    towers,
)

pytestmark = older_names

contrib = mx.contrib.distribute
CPUS = jax.devices("cpu")


class Recorded(contrib.CrossTowerOps):
    """Sums on the host and remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _reduce(self, aggregation, per_device_value, destinations):
        self.calls.append(aggregation)
        values = per_device_value.values
        total = sum(values[1:], start=values[0])
        result = total / len(values) if aggregation is MEAN else total
        return self.broadcast(result, destinations)


OPS = {
    "default": lambda: None,
    "nccl": contrib.AllReduceCrossTowerOps,
    "hierarchical": lambda: contrib.AllReduceCrossTowerOps("hierarchical_copy"),
    "packs": lambda: contrib.AllReduceCrossTowerOps("nccl", num_packs=3),
    "no packs": lambda: contrib.AllReduceCrossTowerOps(num_packs=0),
    "negative packs": lambda: contrib.AllReduceCrossTowerOps(num_packs=-1),
    "small ones": lambda: contrib.AllReduceCrossTowerOps(
        num_packs=0, agg_small_grads_max_bytes=64, agg_small_grads_max_group=2
    ),
    "one device": contrib.ReductionToOneDeviceCrossTowerOps,
    "another device": lambda: contrib.ReductionToOneDeviceCrossTowerOps("CPU:1"),
    "own sum": lambda: contrib.ReductionToOneDeviceCrossTowerOps(
        accumulation_fn=lambda values: jnp.sum(jnp.stack(values), axis=0)
    ),
    "a user's": Recorded,
}
all_ops = pytest.mark.parametrize("name", OPS)


def values_of(distribution: Any) -> Any:
    """Several values of different shapes for each tower."""

    def fn():
        i = jnp.float32(tower_id() + 1)
        return [i, i * jnp.arange(3), i * jnp.ones((2, 5)), jnp.int32(tower_id())]

    return distribution.call_for_each_tower(mx.function(fn))


# Through a strategy ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "name"), [*((2, name) for name in OPS), (4, "hierarchical"), (4, "a user's")]
)
def test_a_strategy_reduces_by_its_ops(n: int, name: str) -> None:
    distribution = towers(n, cross_tower_ops=OPS[name]())
    with distribution.scope():
        v = mx.Variable(0.0)
        values = values_of(distribution)
        total = n * (n + 1) / 2
        sums = distribution.batch_reduce(SUM, [(x, x) for x in values])
        one = distribution.reduce(SUM, values[1], "CPU:2")
        mean = distribution.reduce(MEAN, values[0], v)
        first = distribution.reduce(ONLY_FIRST_TOWER, values[0], v)
    found = [parts(distribution, x) for x in sums]
    assert found[0] == [total] * n
    assert found[1] == [[0, total, 2 * total]] * n
    assert found[2] == [[[total] * 5] * 2] * n
    assert found[3] == [n * (n - 1) // 2] * n
    assert parts(distribution, one) == [[0, total, 2 * total]]
    assert parts(distribution, mean) == [total / n] * n
    assert parts(distribution, first) == [1.0] * n


@all_ops
def test_one_tower_has_little_to_reduce(name: str) -> None:
    distribution = towers(1, cross_tower_ops=OPS[name]())
    with distribution.scope():
        values = values_of(distribution)
        sums = distribution.batch_reduce(SUM, [(x, "CPU:0") for x in values])
    assert parts(distribution, sums[1]) == [[0.0, 1.0, 2.0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("compiled", name) for name in OPS),
        *(("eager", name) for name in ("default", "one device", "a user's")),
    ],
)
def test_training_by_any_ops_gives_the_same_weights(engine: str, name: str) -> None:
    distribution = towers(2, cross_tower_ops=OPS[name]())
    with distribution.scope():
        w, b = mx.Variable([1.0, 2.0]), mx.Variable(0.5)
        optimizer = mx.train.Optimizer(optax.sgd(0.1))

    def fn(x):
        gradients = mx.grad(lambda: jnp.sum((w * x - b) ** 2), [w, b])()
        optimizer.apply_gradients(zip(gradients, [w, b]))

    fn = compile_if(engine, fn)
    with distribution.scope():
        for _ in range(2):
            distribution.call_for_each_tower(fn, numbered(distribution))
    # By hand: the loss is the sum over x = 1, 2 and both weights of (w x - b)^2.
    weights, bias = np.asarray([1.0, 2.0]), 0.5
    for _ in range(2):
        errors = [weights * x - bias for x in (1.0, 2.0)]
        slope = 2 * sum(e * x for e, x in zip(errors, (1.0, 2.0)))
        bias += 0.1 * 2 * sum(np.sum(e) for e in errors)
        weights = weights - 0.1 * slope
    np.testing.assert_allclose(parts(distribution, w), [weights] * 2, rtol=1e-5)
    np.testing.assert_allclose(parts(distribution, b), [bias] * 2, rtol=1e-5)


# A user's own ---------------------------------------------------------------------------


@all_sizes
def test_a_users_ops_see_every_reduction(n: int) -> None:
    ops = Recorded()
    distribution = towers(n, cross_tower_ops=ops)
    with distribution.scope():
        value = numbered(distribution)
        distribution.reduce(SUM, value, "CPU:0")
        distribution.batch_reduce(MEAN, [(value, "CPU:0"), (value, value)])
    assert ops.calls == ([] if n == 1 else [SUM, MEAN, MEAN])


@both_engines
def test_a_users_ops_in_a_merge_function(engine: str) -> None:
    ops = Recorded()
    distribution = towers(2, cross_tower_ops=ops)

    def fn():
        value = jnp.float32(tower_id() + 1)
        return tower().merge_call(lambda d, x: d.reduce(SUM, x, x), value)

    with distribution.scope():
        result = distribution.call_for_each_tower(compile_if(engine, fn))
    assert parts(distribution, result)[0] == 3.0
    assert ops.calls == [SUM]


def test_a_users_ops_may_reduce_many_at_once_and_copy() -> None:
    class Batching(contrib.CrossTowerOps):
        batches: list[int] = []
        copies: list[Any] = []

        def _batch_reduce(self, aggregation, value_destination_pairs):
            self.batches.append(len(value_destination_pairs))
            return [sum(v.values) * 100 for v, _ in value_destination_pairs]

        def _broadcast(self, tensor, destinations):
            self.copies.append(destinations)
            return super()._broadcast(tensor, destinations)

    ops = Batching()
    distribution = towers(2, cross_tower_ops=ops)
    with distribution.scope():
        value = distribution.call_for_each_tower(lambda: np.float32(tower_id() + 1))
        values = [jax.device_put(x, CPUS[0]) for x in distribution.unwrap(value)]
        value = mx.distribute.PerReplica(values)
        found = distribution.batch_reduce(SUM, [(value, "CPU:0"), (value, "CPU:0")])
        distribution.broadcast(1.0, "CPU:1")
    assert [float(x) for x in found] == [300.0, 300.0]
    assert ops.batches == [2] and len(ops.copies) == 1


def test_a_subclass_without_an_algorithm() -> None:
    class Empty(contrib.CrossTowerOps):
        pass

    distribution = towers(2, cross_tower_ops=Empty())
    with pytest.raises(NotImplementedError, match="Empty does not override `_reduce`"):
        distribution.reduce(SUM, numbered(distribution), "CPU:0")
    value = Empty().broadcast(1.0, ["CPU:0", "CPU:1"])
    assert [float(x) for x in value.values] == [1.0, 1.0]


def test_an_exception_of_a_users_ops_comes_out_as_itself() -> None:
    class Broken(contrib.CrossTowerOps):
        def _reduce(self, aggregation, per_device_value, destinations):
            raise ZeroDivisionError

    distribution = towers(2, cross_tower_ops=Broken())
    with pytest.raises(ZeroDivisionError):
        distribution.reduce(SUM, numbered(distribution), "CPU:0")


# By themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPS if name != "default"])
def test_ops_by_themselves(name: str) -> None:
    ops, distribution = OPS[name](), towers(2)
    assert ops is not None
    value = numbered(distribution)
    assert parts(distribution, ops.reduce(SUM, value, ["CPU:0", "CPU:1"])) == [3, 3]
    assert parts(distribution, ops.reduce(MEAN, value, value)) == [1.5, 1.5]
    assert float(ops.reduce(SUM, value, "CPU:1")) == 3.0
    both = ops.batch_reduce(SUM, [(value, "CPU:0"), (value, value)])
    assert [len(distribution.unwrap(x)) for x in both] == [1, 2]
    copies = ops.broadcast(jnp.ones(2), ["CPU:1", "CPU:3"])
    assert [x.devices() for x in distribution.unwrap(copies)] == [{CPUS[1]}, {CPUS[3]}]


@pytest.mark.parametrize("name", ["nccl", "one device", "a user's"])
@pytest.mark.parametrize(
    ("aggregation", "message"),
    [
        (NONE, "NONE is not a reduction"),
        (ONLY_FIRST_TOWER, "is not a reduction"),
        ("SUM", "`aggregation` must be a VariableAggregation"),
    ],
)
def test_ops_sum_and_average_only(name: str, aggregation: Any, message: str) -> None:
    ops, value = OPS[name](), numbered(towers(2))
    assert ops is not None
    with pytest.raises(ValueError, match=message):
        ops.reduce(aggregation, value, "CPU:0")
    with pytest.raises(ValueError, match=message):
        ops.batch_reduce(aggregation, [(value, "CPU:0")])


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="'nccl', 'hierarchical_copy', got 'ring'"):
        contrib.AllReduceCrossTowerOps("ring")


def test_the_device_that_reduces() -> None:
    calls = []

    def add(values):
        calls.append(len(values))
        return values[0] + values[1]

    ops = contrib.ReductionToOneDeviceCrossTowerOps("CPU:1", add)
    assert (ops.reduce_to_device, ops.accumulation_fn) == ("CPU:1", add)
    result = ops.reduce(MEAN, numbered(towers(2)), "CPU:0")
    assert float(result) == 1.5 and result.devices() == {CPUS[0]}
    assert calls and set(calls) == {2}


def test_the_device_that_reduces_has_to_run_a_tower() -> None:
    ops = contrib.ReductionToOneDeviceCrossTowerOps("CPU:3")
    with pytest.raises(ValueError, match="CPU:3, which runs no replica"):
        ops.reduce(SUM, numbered(towers(2)), "CPU:0")


# Random ones ----------------------------------------------------------------------------


@functools.cache
def strategy_of(n: int, name: str) -> Any:
    return towers(n, cross_tower_ops=OPS[name]())


@examples(20)
@given(
    n=st.integers(1, 4),
    name=st.sampled_from(sorted(OPS)),
    aggregation=st.sampled_from([SUM, MEAN, ONLY_FIRST_TOWER]),
    shapes=st.lists(
        st.lists(st.integers(0, 3), max_size=2).map(tuple), min_size=1, max_size=3
    ),
    where=st.sampled_from(["value", "variable", "all", "CPU:3", ["CPU:2", "CPU:0"]]),
    seed=st.integers(0, 99),
)
def test_random_values_beside_numpy(n, name, aggregation, shapes, where, seed) -> None:
    distribution = strategy_of(n, "default" if n == 1 else name)
    rng = np.random.default_rng(seed)
    columns = [rng.integers(-9, 9, (n, *shape)).astype("float32") for shape in shapes]
    with distribution.scope():
        values = [
            distribution.call_for_each_tower(
                lambda column=column: jnp.asarray(column[tower_id()])
            )
            for column in columns
        ]
        places = {
            "value": values[0],
            "variable": mx.Variable(0.0),
            "all": distribution.worker_devices,
        }
        place = places[where] if isinstance(where, str) and where in places else where
        found = distribution.batch_reduce(aggregation, [(v, place) for v in values])
    reduced = {SUM: np.sum, MEAN: np.mean, ONLY_FIRST_TOWER: lambda x, axis: x[0]}
    count = {"CPU:3": 1}.get(where, n) if isinstance(where, str) else len(where)
    for result, column in zip(found, columns):
        wanted = reduced[aggregation](column, axis=0)
        copies = distribution.unwrap(result)
        assert len(copies) == count
        for copy in copies:
            np.testing.assert_allclose(copy, wanted, rtol=1e-6)
