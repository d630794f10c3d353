"""`PerReplica` and `Mirrored`: pytrees, readable, never copied, usable as arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    all_styles,
    all_sum,
    both_engines,
    mirrored,
    parts,
    per_replica,
    replica_id,
    run,
)

import mirrax as mx

PerReplica, Mirrored = mx.distribute.PerReplica, mx.distribute.Mirrored


@pytest.fixture
def strategy():
    return mirrored(2)


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


# Pytrees -------------------------------------------------------------------------------


def test_a_per_replica_value_is_a_tree_of_its_parts():
    value = PerReplica([jnp.array([1.0]), jnp.array([2.0, 3.0])])
    leaves, tree = jax.tree.flatten(value)
    assert [leaf.tolist() for leaf in leaves] == [[1.0], [2.0, 3.0]]
    assert isinstance(jax.tree.unflatten(tree, leaves), PerReplica)
    doubled = jax.tree.map(lambda x: 2 * x, {"x": value})["x"]
    assert [part.tolist() for part in doubled.values] == [[2.0], [4.0, 6.0]]


def test_a_mirrored_value_maps_to_a_mirrored_value(strategy):
    value = strategy.replicate(jnp.array([1.0, 2.0]))
    doubled = jax.tree.map(lambda x: 2 * x, {"x": value})["x"]
    assert isinstance(doubled, Mirrored)
    assert parts(strategy, doubled) == [[2.0, 4.0]] * 2
    assert [x.devices() for x in doubled.values] == [{d} for d in jax.devices()[:2]]


def test_distributed_values_are_instances_of_distributed_values(strategy):
    with strategy.scope():
        v = mx.Variable(1.0)
    for value in (PerReplica([1, 2]), strategy.replicate(jnp.ones(2)), v):
        assert isinstance(value, mx.distribute.DistributedValues)
    assert not isinstance(jnp.ones(2), mx.distribute.DistributedValues)


def test_jax_functions_take_a_mirrored_value(strategy):
    value = strategy.replicate(jnp.array([1.0, 2.0]))
    assert float(jnp.sum(value)) == 3.0
    assert float(jax.jit(jnp.sum)(value)) == 3.0
    assert (value + 1).tolist() == (1 + value).tolist() == [2.0, 3.0]
    assert value[1] == 2.0
    assert (value.shape, value.dtype, len(value)) == ((2,), jnp.float32, 2)
    assert np.asarray(value).tolist() == [1.0, 2.0]


# Showing -------------------------------------------------------------------------------


def test_values_show_every_replicas_part(strategy):
    assert repr(PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"
    assert repr(strategy.replicate(jnp.float32(2.0))) == (
        "Mirrored:{\n  0: Array(2., dtype=float32),\n  1: Array(2., dtype=float32)\n}"
    )
    out = strategy.run(mx.function(lambda: replica_id()))
    assert repr(out) == (
        "PerReplica:{\n  0: Array(0, dtype=int32),\n  1: Array(1, dtype=int32)\n}"
    )


def test_a_variable_shows_its_copies(strategy):
    with strategy.scope():
        v = mx.Variable([1.0], name="w")
    assert repr(v) == (
        "MirroredVariable:{\n"
        "  0: <mx.Variable 'w' shape=(1,) dtype=float32, "
        "numpy=array([1.], dtype=float32)>,\n"
        "  1: <mx.Variable 'w/replica_1' shape=(1,) dtype=float32, "
        "numpy=array([1.], dtype=float32)>\n"
        "}"
    )


def test_values_can_be_shown_while_they_are_traced(strategy):
    with strategy.scope():
        v = mx.Variable(1.0)
    shown = []

    @mx.function
    def step(x):
        shown.append((repr(x), repr(v)))
        out = strategy.run(lambda x: x * v, (x,))
        shown.append((repr(out), str(v)))

    step(per_replica(strategy, [1.0], [2.0]))
    assert all("1: " in text for text, _ in shown)


# No copies -----------------------------------------------------------------------------


def test_the_parts_of_a_compiled_result_are_its_buffers(strategy):
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    step = mx.function(lambda x: (x + 1, all_sum(x)))
    own, shared = strategy.run(step, (x,))
    for value in (own, shared):
        first = pointers(strategy.experimental_local_results(value))
        assert first == pointers(strategy.experimental_local_results(value))
    whole = own.array
    assert pointers(s.data for s in whole.addressable_shards) == pointers(own.values)


def test_parts_and_whole_are_the_same_buffers(strategy):
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    before = pointers(strategy.experimental_local_results(x))
    strategy.run(mx.function(lambda x: x + 1), (x,))
    whole = x.array
    assert pointers(s.data for s in whole.addressable_shards) == before
    assert pointers(strategy.experimental_local_results(x)) == before


def test_parts_that_lie_on_their_devices_are_not_moved(strategy):
    given = [jax.device_put(jnp.ones(3), device) for device in jax.devices()[:2]]
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: given[ctx.replica_id_in_sync_group]
    )
    assert pointers(value.values) == pointers(given)
    seen = strategy.run(lambda x: x, (value,))
    assert pointers(strategy.experimental_local_results(seen)) == pointers(given)


def test_an_eager_replica_gets_the_copy_on_its_own_device(strategy):
    value = strategy.replicate(jnp.ones(3))
    inside = {}

    def replica_fn(x):
        x = jnp.asarray(x)
        inside[int(replica_id())] = (x.unsafe_buffer_pointer(), x.devices())

    strategy.run(replica_fn, (value,))
    expected = zip(pointers(value.values), ({d} for d in jax.devices()[:2]))
    assert [inside[i] for i in range(2)] == list(expected)


def test_the_copies_of_a_variable_are_not_copied_to_be_read(strategy):
    with strategy.scope():
        v = mx.Variable(jnp.ones(3))
    first = pointers(strategy.experimental_local_results(v))
    assert len(set(first)) == 2
    assert first == pointers(copy.read_value() for copy in v.values)
    assert first[0] == v.read_value().unsafe_buffer_pointer()
    out = strategy.run(lambda: v.read_value())
    assert pointers(strategy.experimental_local_results(out)) == first


# Arguments and results -----------------------------------------------------------------


@all_styles
def test_parts_made_by_hand_can_be_arguments(engine, strategy):
    for value in (
        PerReplica([jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])]),
        PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])]),
    ):
        out = run(strategy, lambda x: 2 * jnp.sum(x), value, engine=engine)
        assert parts(strategy, out) == [6.0, 14.0]


@all_styles
def test_python_numbers_in_parts_can_be_arguments(engine, strategy):
    out = run(strategy, lambda x: 2.0 * x, PerReplica([1, 5]), engine=engine)
    assert parts(strategy, out) == [2.0, 10.0]


@both_engines
def test_plain_arguments_are_the_same_for_all_replicas(engine, strategy):
    def replica_fn(a, b, *, scale, name):
        assert name == "sgd"
        return a * scale + b["c"]

    out = run(
        strategy,
        replica_fn,
        jnp.float32(2.0),
        {"c": np.float32(1.0)},
        engine=engine,
        scale=10,
        name="sgd",
    )
    assert parts(strategy, out) == [21.0, 21.0]


@all_styles
def test_an_array_of_any_device_can_be_an_argument(engine, strategy):
    far = jax.device_put(jnp.array([1.0, 2.0]), jax.devices()[5])
    out = run(strategy, lambda x: x * (replica_id() + 1), far, engine=engine)
    assert parts(strategy, out) == [[1.0, 2.0], [2.0, 4.0]]


@all_styles
def test_results_keep_their_structure(engine, strategy):
    def replica_fn():
        i = replica_id()
        return {"list": [i, i + 1], "tuple": (i,), "none": None, "text": "ok"}

    out = run(strategy, replica_fn, engine=engine)
    assert parts(strategy, out["list"][1]) == [1, 2]
    assert parts(strategy, out["tuple"][0]) == [0, 1]
    assert (out["none"], out["text"]) == (None, "ok")
    assert run(strategy, lambda: None, engine=engine) is None


@both_engines
def test_the_output_of_a_run_feeds_the_next_run(engine, strategy):
    x = per_replica(strategy, [1.0], [2.0])
    for _ in range(3):
        x = run(strategy, lambda x: 2 * x, x, engine=engine)
    assert parts(strategy, x) == [[8.0], [16.0]]
    total = run(strategy, all_sum, x, engine=engine)
    again = run(strategy, lambda t: t + replica_id(), total, engine=engine)
    assert parts(strategy, again) == [[24.0], [25.0]]


@all_styles
def test_one_replica_gives_plain_values(engine):
    strategy = mirrored(1)
    out = run(strategy, lambda x: {"y": x + 1}, jnp.array([1.0]), engine=engine)
    assert isinstance(out["y"], jax.Array)
    assert out["y"].tolist() == [2.0]


def test_local_results_are_on_their_own_devices():
    strategy = mirrored(4)
    for engine in ("eager", "compiled"):
        out = run(strategy, lambda: replica_id() + 1, engine=engine)
        found = [x.devices() for x in strategy.experimental_local_results(out)]
        assert found == [{device} for device in jax.devices()[:4]]


def test_parts_of_different_devices_can_be_added():
    strategy = mirrored(4)
    for engine in ("eager", "compiled"):
        out = run(strategy, lambda: replica_id() + 1, engine=engine)
        assert int(sum(strategy.experimental_local_results(out))) == 10
        assert int(jnp.stack(strategy.experimental_local_results(out)).sum()) == 10


def test_parts_of_a_value_made_from_a_function_can_be_added():
    strategy = mirrored(4)
    x = per_replica(strategy, [1.0], [2.0], [3.0], [4.0])
    total = sum(strategy.experimental_local_results(x))
    assert np.asarray(total).tolist() == [10.0]


def test_values_from_a_function_know_their_replica(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: {"id": ctx.replica_id_in_sync_group, "n": ctx.num_replicas_in_sync}
    )
    assert strategy.experimental_local_results(value["id"]) == (0, 1)
    assert strategy.experimental_local_results(value["n"]) == (2, 2)


# Gathering -----------------------------------------------------------------------------


@all_styles
@pytest.mark.parametrize("axis, expected", [(0, (4, 3)), (1, (2, 6)), (-1, (2, 6))])
def test_gather_joins_along_any_axis(engine, axis, expected, strategy):
    x = np.arange(12.0, dtype=np.float32).reshape(2, 2, 3)
    out = run(strategy, lambda x: x + 1, per_replica(strategy, *x), engine=engine)
    gathered = strategy.gather(out, axis=axis)
    assert gathered.shape == expected
    np.testing.assert_array_equal(gathered, np.concatenate(x + 1, axis=axis))


@both_engines
def test_gather_takes_nested_values_and_mirrored_ones(engine, strategy):
    x = per_replica(strategy, [1.0], [2.0])
    out = run(strategy, lambda x: {"own": x, "all": all_sum(x)}, x, engine=engine)
    gathered = strategy.gather(out, axis=0)
    assert gathered["own"].tolist() == [1.0, 2.0]
    assert gathered["all"].tolist() == [3.0, 3.0]


def test_gather_inside_a_function_around_the_caller(strategy):
    @mx.function
    def step(x):
        out = strategy.run(lambda x: x * 10, (x,))
        return strategy.gather(out, axis=0)

    assert step(per_replica(strategy, [1.0, 2.0], [3.0, 4.0])).tolist() == [
        10.0,
        20.0,
        30.0,
        40.0,
    ]


@both_engines
@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_gives_every_replica_everything(engine, axis):
    strategy = mirrored(4)
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2, 1)

    def replica_fn(x):
        return mx.get_replica_context().all_gather({"x": x}, axis=axis)["x"]

    out = run(strategy, replica_fn, per_replica(strategy, *x), engine=engine)
    expected = np.concatenate(x, axis=axis).tolist()
    assert parts(strategy, out) == [expected] * 4


@both_engines
def test_the_gradient_of_all_gather_sums_what_all_replicas_lose(engine, strategy):
    x = per_replica(strategy, [1.0], [2.0])
    weights = jnp.array([10.0, 100.0])

    def replica_fn(x):
        def loss(x):
            everything = mx.get_replica_context().all_gather(x, axis=0)
            return (replica_id() + 1) * jnp.sum(weights * everything)

        return jax.grad(loss)(x)

    # Replica i's loss counts i + 1 times, so three times in all.
    gradient = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, gradient) == [[30.0], [300.0]]


@pytest.mark.parametrize("axis", [0, np.int64(0), [0], (np.int32(0),)])
def test_an_axis_may_be_any_whole_number_or_several(axis):
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    value = mx.distribute.PerReplica([jnp.arange(3), jnp.arange(2)])
    assert int(strategy.reduce("SUM", value, axis=axis)) == 4


@pytest.mark.parametrize("axis", ["CPU:0", 0.0, [0, None]])
def test_what_is_no_axis_is_said_so(axis):
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    value = mx.distribute.PerReplica([jnp.arange(3), jnp.arange(2)])
    with pytest.raises(TypeError, match=r"`axis` must be None, .*`extended.reduce_to`"):
        strategy.reduce("SUM", value, axis=axis)
