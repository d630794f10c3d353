"""`assert_in_sync` and `check_numerics` find what is wrong, and say where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import both_engines, compile_if, mirrored, per_replica, replica_id
from helpers.hlo import count

import mirrax as mx
from mirrax._src.base.mesh import Layout
from mirrax._src.strategies import checking


def damage(variable, replica, change):
    """Changes one replica's copy, behind the variable's back."""
    copies = [shard.data for shard in variable.stored.addressable_shards]
    changed = change(np.array(copies[replica]))
    copies[replica] = jax.device_put(changed, copies[replica].device)
    variable.stored = jax.make_array_from_single_device_arrays(
        variable.shape, variable.stored.sharding, copies
    )


def flip_lowest_bit(array):
    array.reshape(-1).view(np.uint8)[0] ^= 1
    return array


def variables(strategy, *values):
    with strategy.scope():
        return [mx.Variable(v, name=f"v{i}") for i, v in enumerate(values)]


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype="f4").reshape(2, 3),
        np.float32(0.0),
        np.arange(3, dtype="i4"),
        np.array([True, False]),
        np.array([1.5, 2.5, 3.5], jnp.bfloat16),
        np.array([1 + 2j], "c8"),
        np.arange(5, dtype="u1"),
    ],
    ids=lambda v: f"{v.dtype}{list(v.shape)}",
)
def test_one_bit_of_one_copy(value):
    strategy = mirrored(3)
    first, second = variables(strategy, np.ones(2, "f4"), value)
    strategy.assert_in_sync({"a": first, "b": [second]})
    damage(second, 2, flip_lowest_bit)
    with pytest.raises(AssertionError) as error:
        strategy.assert_in_sync({"a": first, "b": [second]})
    lines = str(error.value).splitlines()
    kind = f"{second.dtype}{list(second.shape)}"
    assert lines[1] == (
        f"  variable 'v1' at ['b'][0] ({kind}): replica 2 (CPU:2) differs from the other 2"
    )
    assert len(lines) == 3 and lines[2].startswith("Restore a checkpoint.")


def test_equal_changes_at_two_places_are_seen():
    strategy = mirrored(2)
    [v] = variables(strategy, np.zeros(4, "f4"))
    damage(v, 1, lambda x: np.array([1, -1, 0, 0], "f4"))
    with pytest.raises(
        AssertionError, match="replica 1 .CPU:1. differs from replica 0"
    ):
        strategy.assert_in_sync(v)


def test_values_of_replicas():
    strategy = mirrored(2)
    state = strategy.replicate({"w": jnp.ones(2), "n": 3})
    strategy.assert_in_sync((state, "text", None, jnp.ones(2)))
    with pytest.raises(AssertionError, match=r"\['x'\] .float32.2.*replica 1 "):
        strategy.assert_in_sync({"x": per_replica(strategy, [1.0, 2.0], [1.0, 3.0])})
    with pytest.raises(AssertionError, match=r"\['x'\].*different shapes"):
        strategy.assert_in_sync({"x": per_replica(strategy, [1.0, 2.0], [1.0])})


@both_engines
def test_what_replicas_assigned_themselves(engine):
    strategy = mirrored(2)
    with strategy.scope():
        own = mx.Variable(0.0, name="own")
        total = mx.metrics.Sum()
    step = compile_if(
        engine, lambda: (own.assign(1.0 * replica_id()), total.update_state(1.0))
    )
    strategy.run(lambda: step() and None)
    strategy.assert_in_sync(total)  # it is summed when it is read
    with pytest.raises(AssertionError, match="variable 'own' .*differs"):
        strategy.assert_in_sync([total, own])


def test_optimizers_are_looked_into():
    strategy = mirrored(2)
    [w] = variables(strategy, np.ones(2, "f4"))
    optimizer = mx.train.Optimizer(optax.adam(0.1))
    strategy.run(mx.function(lambda: optimizer.apply_gradients([(jnp.ones(2), w)])))
    strategy.assert_in_sync([w, optimizer])
    damage(optimizer.variables[2], 0, lambda x: x + 1)
    with pytest.raises(AssertionError, match="variable 'optimizer/.*/mu/v0'"):
        strategy.assert_in_sync([w, optimizer])


def test_a_few_bytes_of_each_copy_and_no_communication():
    strategy = mirrored(2)
    arrays = [v.stored for v in variables(strategy, np.ones(1000, "f4"), np.ones(9))]
    mesh = strategy.replica_mesh
    for program in (checking._hashes, checking._bad):
        rows = checking._run(program, mesh, [(a, Layout.MIRRORED) for a in arrays])
        assert rows.nbytes == mesh.size * len(arrays) * 4
        mapped = jax.shard_map(
            program,
            mesh=mesh.mesh,
            in_specs=mesh.mirrored.spec,
            out_specs=mesh.split.spec,
            check_vma=False,
        )
        text = str(jax.jit(mapped).lower(arrays).compile().as_text())
        assert [count(text, op) for op in ("all-reduce", "all-gather")] == [0, 0]


def test_objects_that_cannot_be_looked_into_are_named():
    strategy = mirrored(2)
    with pytest.raises(TypeError, match=r"\['a'\] is of type object, and which arrays"):
        strategy.assert_in_sync({"a": object()})


# NaN and infinite values -------------------------------------------------------------------


@both_engines
def test_values_that_are_not_finite_are_named(engine):
    strategy = mirrored(2)
    [w] = variables(strategy, np.ones(3, "f4"))
    x = per_replica(strategy, [1.0, 2.0], [0.0, -1.0])
    step = compile_if(engine, lambda x: {"log": jnp.log(x), "w": w.read_value()})
    found = strategy.run(step, (x,))
    strategy.check_numerics([w, found["w"], jnp.ones(2), 3])
    with pytest.raises(FloatingPointError) as error:
        strategy.check_numerics(found, step=mx.Variable(12))
    assert str(error.value).splitlines() == [
        "Found NaN or infinite values at step 12:",
        "  ['log'] (float32[2]): 1 NaN and 1 infinite on replica 1 (CPU:1)",
    ]


def test_variables_plain_arrays_and_unequal_parts():
    strategy = mirrored(2)
    [v] = variables(strategy, np.array([jnp.inf, 1.0], "f4"))
    with pytest.raises(FloatingPointError) as error:
        strategy.check_numerics(
            {
                "v": v,
                "uneven": per_replica(strategy, [1.0, jnp.nan], [1.0]),
                "plain": np.array([np.nan, np.nan]),
                "whole": np.array([1, 2]),
            }
        )
    assert str(error.value).splitlines()[1:] == [
        "  ['plain'] (float32[2]): 2 NaN",
        "  ['uneven'] (float32[2]): 1 NaN on replica 0 (CPU:0)",
        "  variable 'v0' at ['v'] (float32[2]): 1 infinite on replica 0 (CPU:0)",
        "  variable 'v0' at ['v'] (float32[2]): 1 infinite on replica 1 (CPU:1)",
    ]


def test_without_a_strategy():
    strategy = mx.get_strategy()
    v = mx.Variable([1.0, jnp.nan], name="v")
    strategy.assert_in_sync(v)
    with pytest.raises(FloatingPointError, match="'v' .float32.2..: 1 NaN$"):
        strategy.check_numerics(v)


def test_bad_gradients_stay_out_of_variables():
    """The recipe in the docstring: the update is skipped, and the replica is named."""
    strategy = mirrored(2)
    [w] = variables(strategy, np.ones(2, "f4"))
    finite = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 5)
    optimizer = mx.train.Optimizer(finite)

    @mx.function
    def step(x):
        loss, gradient = mx.value_and_grad(lambda: jnp.sum(jnp.log(x) * w), w)()
        optimizer.apply_gradients([(gradient, w)])
        return loss

    strategy.run(step, (per_replica(strategy, 1.0, 2.0),))
    before = w.numpy()
    losses = strategy.run(step, (per_replica(strategy, 1.0, -1.0),))
    np.testing.assert_array_equal(w.numpy(), before)
    with pytest.raises(FloatingPointError, match="1 NaN on replica 1 .CPU:1"):
        strategy.check_numerics(losses)
    strategy.check_numerics([w, optimizer])


@pytest.mark.parametrize("name", ["assert_in_sync", "check_numerics"])
def test_where_it_cannot_be_called(name):
    strategy = mirrored(2)
    [v] = variables(strategy, 1.0)
    check = getattr(strategy, name)
    with pytest.raises(RuntimeError, match=f"`{name}` is called inside a replica"):
        strategy.run(lambda: check(v))
    with pytest.raises(RuntimeError, match=f"`strategy.{name}` looks at values"):
        mx.function(lambda: check(v))()


@pytest.mark.parametrize("name", ["assert_in_sync", "check_numerics"])
def test_a_name_is_not_what_it_names(name: str) -> None:
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(TypeError, match="nothing to check in the string 'w'"):
        getattr(strategy, name)("w")


@pytest.mark.newest
def test_empty_variables_are_in_sync_and_finite():
    strategy = mirrored(2)
    with strategy.scope():
        each = [mx.Variable(jnp.zeros(shape)) for shape in [(0, 2), (3,), (0,)]]
    strategy.assert_in_sync(each)
    strategy.check_numerics(each)
    strategy.assert_in_sync(each[0])
