"""`reduce`, `batch_reduce`, `broadcast`, `map`, and taking values apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

from .towers import (
    MEAN,
    NONE,
    ON_READ,
    ONLY_FIRST_TOWER,
    SUM,
    all_sizes,
    both_engines,
    call,
    numbered,
    older_names,
    parts,
    tower_id,
    towers,
)

pytestmark = older_names

CPUS = jax.devices("cpu")
AGGREGATIONS = {
    SUM: lambda numbers: sum(numbers),
    MEAN: lambda numbers: sum(numbers) / len(numbers),
    ONLY_FIRST_TOWER: lambda numbers: numbers[0],
}
aggregations = pytest.mark.parametrize(
    "aggregation", AGGREGATIONS, ids=lambda a: a.name
)


def devices_of(distribution: Any, value: Any) -> list[Any]:
    return [part.devices() for part in distribution.unwrap(value)]


# reduce ---------------------------------------------------------------------------------


@aggregations
@both_engines
@all_sizes
def test_reduce_to_one_device(engine: str, n: int, aggregation: Any) -> None:
    distribution = towers(n)
    with distribution.scope():
        value = call(distribution, lambda: tower_id() + jnp.ones(2), engine=engine)
        result = distribution.reduce(aggregation, value, "/device:CPU:3")
    expected = AGGREGATIONS[aggregation](range(1, n + 1))
    assert parts(distribution, result) == [[expected, expected]]
    assert devices_of(distribution, result) == [{CPUS[3]}]


@aggregations
@all_sizes
def test_destinations_of_all_kinds(n: int, aggregation: Any) -> None:
    distribution = towers(n)
    expected = AGGREGATIONS[aggregation](range(1, n + 1))
    with distribution.scope():
        value, v = numbered(distribution), mx.Variable(0.0)
        for destinations, count in [
            (value, n),
            (v, n),
            (distribution.worker_devices, n),
            (["CPU:1", "/device:CPU:3"], 2),
            (["CPU:2"], 1),
            (distribution.parameter_devices[0], 1),
        ]:
            result = distribution.reduce(aggregation, value, destinations)
            assert parts(distribution, result) == [expected] * count, destinations
    devices = devices_of(
        distribution, distribution.reduce(aggregation, value, ["CPU:1", "CPU:3"])
    )
    assert devices == [{CPUS[1]}, {CPUS[3]}]


@aggregations
def test_tower_local_variables_are_values_of_towers(aggregation: Any) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        distribution.call_for_each_tower(lambda: v.assign_add(tower_id() + 2.0))
        result = distribution.reduce(aggregation, v, "CPU:0")
        batch = distribution.batch_reduce(aggregation, [(v, "CPU:0")])
    expected = AGGREGATIONS[aggregation]([3, 4])
    assert float(result) == expected
    assert [float(x) for x in batch] == [expected]


@all_sizes
def test_zero_needs_no_towers(n: int) -> None:
    distribution = towers(n)
    for aggregation in AGGREGATIONS:
        assert distribution.reduce(aggregation, 0, "CPU:0") == 0


@all_sizes
def test_a_plain_value_is_its_own_mean_and_first(n: int) -> None:
    distribution = towers(n)
    for aggregation in (MEAN, ONLY_FIRST_TOWER):
        assert float(distribution.reduce(aggregation, 3.0, "CPU:0")) == 3.0


@pytest.mark.parametrize("n", [2, 3])
def test_a_plain_value_cannot_be_summed_over_several_towers(n: int) -> None:
    with pytest.raises(ValueError, match=r"5\.0 is not distributed"):
        towers(n).reduce(SUM, 5.0, "CPU:0")


def test_one_tower_reduces_a_plain_value_onto_devices() -> None:
    distribution = towers(1)
    result = distribution.reduce(SUM, 1.0, ["CPU:0", "CPU:1"])
    assert parts(distribution, result) == [1.0, 1.0]
    assert devices_of(distribution, result) == [{CPUS[0]}, {CPUS[1]}]
    one = distribution.reduce(SUM, 1.0, "CPU:0")
    assert isinstance(one, jax.Array)


def test_a_mean_of_integers_is_a_float() -> None:
    distribution = towers(2)
    value = distribution.call_for_each_tower(lambda: jnp.int32(tower_id() + 3))
    assert float(distribution.reduce(MEAN, value, "CPU:0")) == 3.5


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("aggregation", "message"),
    [
        (NONE, "NONE is not a reduction"),
        ("sum", "must be a VariableAggregation, .* got 'sum'"),
        (mx.distribute.ReduceOp.SUM, "must be a VariableAggregation"),
        (None, "must be a VariableAggregation"),
    ],
)
def test_aggregations_that_do_not_reduce(
    n: int, aggregation: Any, message: str
) -> None:
    distribution = towers(n)
    value = numbered(distribution)
    with pytest.raises(ValueError, match=message):
        distribution.reduce(aggregation, value, "CPU:0")
    with pytest.raises(ValueError, match=message):
        distribution.batch_reduce(aggregation, [(value, "CPU:0")])


@aggregations
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("destinations", [None, []])
def test_a_result_has_to_go_somewhere(n: int, destinations: Any, aggregation) -> None:
    distribution = towers(n)
    value = numbered(distribution)
    with pytest.raises(ValueError, match="`destinations` must name where"):
        distribution.reduce(aggregation, value, destinations)


@aggregations
def test_destinations_that_do_not_exist(aggregation: Any) -> None:
    distribution = towers(2)
    with pytest.raises(ValueError, match="no device 'GPU:5' here"):
        distribution.reduce(aggregation, numbered(distribution), "GPU:5")


def test_reduce_needs_destinations() -> None:
    distribution = towers(2)
    reduce: Any = distribution.reduce
    with pytest.raises(TypeError, match="destinations"):
        reduce(SUM, numbered(distribution))


@pytest.mark.parametrize("aggregation", [SUM, MEAN], ids=lambda a: a.name)
def test_shapes_that_differ(aggregation: Any) -> None:
    distribution = towers(2)
    value = distribution.call_for_each_tower(lambda: jnp.ones(1 + tower_id()))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        distribution.reduce(aggregation, value, "CPU:0")


# batch_reduce ---------------------------------------------------------------------------


@aggregations
@all_sizes
def test_batch_reduce_is_reduce_of_each_in_order(n: int, aggregation: Any) -> None:
    distribution = towers(n)

    def fn():
        i = jnp.float32(tower_id())
        return i + 1, (i + 2) * jnp.ones((2, 3)), jnp.arange(4) + i

    with distribution.scope():
        v = mx.Variable(0.0)
        values = distribution.call_for_each_tower(mx.function(fn))
        pairs = list(zip(values, [v, "CPU:0", values[2]]))
        results = distribution.batch_reduce(aggregation, pairs)
        singles = [distribution.reduce(aggregation, *pair) for pair in pairs]
    assert isinstance(results, list) and len(results) == 3
    counts = [len(distribution.unwrap(result)) for result in results]
    assert counts == [n, 1, n]
    for result, single in zip(results, singles):
        assert parts(distribution, result) == parts(distribution, single)
    expected = AGGREGATIONS[aggregation]([np.arange(4) + i for i in range(n)])
    np.testing.assert_allclose(parts(distribution, results[2])[0], expected)


def test_batch_reduce_takes_a_tuple_of_pairs() -> None:
    distribution = towers(2)
    found = distribution.batch_reduce(SUM, ((numbered(distribution), "CPU:0"),))
    assert [float(x) for x in found] == [3.0]


@pytest.mark.parametrize("pairs", [5, [5], [(1.0,)], None])
def test_batch_reduce_of_what_is_no_pairs(pairs: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="value_destination_pairs"):
        towers(2).batch_reduce(SUM, pairs)


# broadcast ------------------------------------------------------------------------------


@pytest.mark.parametrize("destinations", [None, [], "all"])
@all_sizes
def test_broadcast_to_all_towers(n: int, destinations: Any) -> None:
    distribution = towers(n)
    with distribution.scope():
        if destinations == "all":
            destinations = distribution.worker_devices
        value = distribution.broadcast(jnp.arange(2.0), destinations)
        assert parts(distribution, value) == [[0.0, 1.0]] * n
        assert devices_of(distribution, value) == [{d} for d in CPUS[:n]]
        doubled = distribution.call_for_each_tower(lambda x: x * 2, value)
    assert parts(distribution, doubled) == [[0.0, 2.0]] * n


@all_sizes
def test_broadcast_to_some_devices(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        for v in (mx.Variable(0.0), mx.Variable([1.0, 2.0])):
            assert len(distribution.unwrap(distribution.broadcast(1.0, v))) == n
        one = distribution.broadcast(1.0, "CPU:3")
        two = distribution.broadcast(np.float32(1), ["CPU:3", "/cpu:1"])
    assert devices_of(distribution, one) == [{CPUS[3]}]
    assert devices_of(distribution, two) == [{CPUS[3]}, {CPUS[1]}]


def test_a_broadcast_value_counts_as_one() -> None:
    value = towers(3).broadcast(jnp.arange(3.0))
    np.testing.assert_array_equal(value + 1, [1, 2, 3])
    np.testing.assert_array_equal(value[1:], [1, 2])
    assert isinstance(value, mx.distribute.Mirrored)


def test_broadcast_to_an_unknown_device() -> None:
    with pytest.raises(ValueError, match="no device 'GPU:5' here"):
        towers(2).broadcast(1.0, "GPU:5")


# map ------------------------------------------------------------------------------------


@all_sizes
def test_map_and_reduce_is_90(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        map_in = [jnp.float32(i) for i in range(10)]
        map_out = distribution.map(map_in, lambda x, y: x * y, 2)
        assert float(distribution.reduce(SUM, map_out, "/device:CPU:0")) == 90.0
        assert float(distribution.reduce(MEAN, map_out, "/device:CPU:0")) == 9.0
        assert len(distribution.unwrap(distribution.reduce(SUM, map_out, "CPU:0"))) == 1


@all_sizes
def test_map_goes_over_the_devices_in_turn(n: int) -> None:
    distribution, placed = towers(n), []

    def fn(x, *, name):
        placed.append((name, jnp.asarray(x).devices()))
        assert mx.contrib.get_tower_context() is not None or name == "scope"
        return x * 10

    results = distribution.map(range(7), fn, name="no scope")
    outputs = [output.get() for output in distribution.unwrap(results)]
    assert outputs == [[10 * x for x in range(i, 7, n)] for i in range(n)]
    assert placed == [("no scope", {CPUS[x % n]}) for x in range(7)]
    with distribution.scope():
        distribution.map([1], fn, name="scope")


def test_the_mean_of_a_map_counts_elements_not_towers() -> None:
    distribution = towers(2)
    mapped = distribution.map([1.0, 2.0, 6.0], lambda x: x)
    assert float(distribution.reduce(MEAN, mapped, "CPU:0")) == 3.0
    assert repr(distribution.unwrap(mapped)[0]) == "MapOutput([1.0, 6.0])"


def test_a_map_over_fewer_elements_than_towers() -> None:
    distribution = towers(4)
    mapped = distribution.map([jnp.ones(2), jnp.ones(2)], lambda x: x * 3)
    result = distribution.reduce(SUM, mapped, distribution.worker_devices)
    assert parts(distribution, result) == [[6.0, 6.0]] * 4
    mean = distribution.reduce(MEAN, mapped, "CPU:0")
    assert parts(distribution, mean) == [[3.0, 3.0]]


def test_mirrored_arguments_of_a_map_arrive_as_the_devices_own() -> None:
    distribution = towers(2)
    factor, devices = distribution.broadcast(jnp.float32(3)), []

    def fn(x, factor):
        devices.append(factor.devices())
        return x * factor

    mapped = distribution.map([1.0, 2.0, 3.0], fn, factor)
    assert float(distribution.reduce(SUM, mapped, "CPU:0")) == 18.0
    assert devices == [{CPUS[0]}, {CPUS[1]}, {CPUS[0]}]


def test_a_map_takes_no_values_that_differ() -> None:
    distribution = towers(2)
    with pytest.raises(TypeError, match="`map` takes values that are the same"):
        distribution.map([1], lambda x, y: x, numbered(distribution))


@aggregations
def test_a_map_over_nothing_cannot_be_reduced(aggregation: Any) -> None:
    distribution = towers(2)
    mapped = distribution.map([], lambda x: x)
    assert [output.get() for output in distribution.unwrap(mapped)] == [[], []]
    with pytest.raises(ValueError, match="map"):
        distribution.reduce(aggregation, mapped, "CPU:0")


@pytest.mark.parametrize("n", [1, 2])
def test_maps_in_a_batch(n: int) -> None:
    distribution = towers(n)
    mapped = distribution.map([1.0, 2.0, 3.0], lambda x: x)
    value = numbered(distribution)
    found = distribution.batch_reduce(SUM, [(mapped, "CPU:0"), (value, "CPU:0")])
    assert [float(x) for x in found] == [6.0, n * (n + 1) / 2]


# unwrap and group -----------------------------------------------------------------------


@all_sizes
def test_unwrap_gives_a_list(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(2.0, name="v")
        local = mx.Variable(2.0, synchronization=ON_READ, aggregation=SUM)
    assert parts(distribution, numbered(distribution)) == list(range(1, n + 1))
    for variable in (v, local):
        found = distribution.unwrap(variable)
        assert isinstance(found, list) and len(found) == n
        assert all(isinstance(copy, mx.Variable) for copy in found)
        assert parts(distribution, variable) == [2.0] * n
    per_device = numbered(distribution)
    for other in (3, "text", None, [per_device], {"a": per_device}):
        found = distribution.unwrap(other)
        assert len(found) == 1 and found[0] is other


@all_sizes
def test_group_waits_for_nothing_and_gives_the_one_value(n: int) -> None:
    distribution = towers(n)
    value = numbered(distribution)
    found = distribution.group(value)
    assert found is None if n > 1 else float(found) == 1.0
    assert distribution.group(7) == 7
    assert distribution.group(value, name="train_op") is None
    assert distribution.group(None) is None
