"""Corners where a result could be silently wrong, or an array lost."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mirrax as mx

pytestmark = pytest.mark.slow

PerReplica = mx.distribute.PerReplica


def uneven() -> PerReplica:
    return PerReplica([jnp.ones(2), jnp.ones(1)])


def context():
    return mx.get_replica_context()


def test_what_depends_on_a_shape_is_each_replicas_own(two_cpus) -> None:
    count = mx.function(lambda x: jnp.ones(x.shape[0]).sum())
    assert (
        float(two_cpus.reduce("SUM", two_cpus.run(count, (uneven(),)), axis=None)) == 3
    )
    with two_cpus.scope():
        v = mx.Variable(1.0)
    scaled = mx.function(lambda x: v * x.shape[0])
    assert (
        float(two_cpus.reduce("SUM", two_cpus.run(scaled, (uneven(),)), axis=None)) == 3
    )
    ranges = two_cpus.run(
        mx.function(lambda x: jnp.arange(x.shape[0]) * 1), (uneven(),)
    )
    assert [part.tolist() for part in ranges.values] == [[0, 1], [0]]
    two_cpus.run(
        mx.function(lambda x: v.assign(jnp.ones(x.shape[0]).sum()) * 1), (uneven(),)
    )
    assert [float(copy) for copy in v.values] == [2, 1]


def test_an_uneven_training_step_keeps_variables_mirrored(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(jnp.ones(3))

    @mx.function
    def step(x):
        v.assign(v - 0.1 * context().all_reduce("sum", jnp.ones(3) * x.sum()))

    two_cpus.run(step, (uneven(),))
    assert isinstance(v.stored, jax.Array)
    np.testing.assert_allclose(v, np.full(3, 0.7), rtol=1e-6)


def test_one_function_under_two_strategies(two_cpus) -> None:
    @mx.function
    def total(x):
        return mx.get_strategy().run(lambda y: context().all_reduce("sum", y), (x,))

    for count in (2, 3, 2):
        with mx.MirroredStrategy([f"CPU:{i}" for i in range(count)]).scope():
            assert float(total(jnp.float32(1))) == count


def test_a_variable_of_another_strategy_is_not_baked_in(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(1.0)
    other = mx.MirroredStrategy(["CPU:2", "CPU:3"])
    with pytest.raises(RuntimeError, match="Mixing different strategies"):
        other.run(mx.function(lambda: v.read_value() * 1))


def test_loop_bodies_see_variables_as_they_are_now(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(2.0)

    def body(c, _):
        return c * v.read_value(), None

    @mx.function
    def f(x):
        first = lax.scan(body, x, None, length=2)[0]
        v.assign(v + 10.0)
        return first, lax.scan(body, x, None, length=2)[0]

    first, second = two_cpus.run(f, (1.0,))
    assert (float(first), float(second)) == (4, 144)
    first, second = two_cpus.run(f, (1.0,))
    assert (float(first), float(second)) == (144, 484)

    @mx.function
    def g(x):
        return lax.scan(body, x, None, length=2)[0]

    assert float(two_cpus.run(g, (jnp.ones(()),))) == 484


def test_jit_of_a_variable_in_eager_code_is_an_error() -> None:
    v = mx.Variable(2.0, name="v")
    helper = jax.jit(lambda x: x * v)
    with pytest.raises(RuntimeError, match="Variable 'v' is read inside .*jax.jit"):
        helper(1.0)
    with pytest.raises(RuntimeError, match="Variable 'v' is read inside"):
        lax.scan(lambda c, _: (c * v, None), 1.0, None, length=2)
    assert float(jax.grad(lambda x: x * v.read_value())(1.0)) == 2


def test_static_arguments_are_told_apart_by_type() -> None:
    @mx.function(static_argnames="n")
    def f(x, n):
        return x + 1 if isinstance(n, bool) else x + 2 if isinstance(n, float) else x

    assert [float(f(0.0, n=n)) for n in (1, 1.0, True)] == [0, 2, 1]
    with pytest.raises(TypeError, match="must be hashable"):
        f(0.0, n=[1])


def test_numpy_results_are_new_each_time() -> None:
    f = mx.function(lambda x: (x, np.zeros(2)))
    f(1.0)[1][:] += 5
    assert f(1.0)[1].tolist() == [0, 0]


def test_replicas_that_reduce_differently_are_told(two_cpus) -> None:
    def replica_fn():
        op = "sum" if context().replica_id_in_sync_group == 0 else "mean"
        return context().all_reduce(op, jnp.float32(1))

    with pytest.raises(ValueError, match=r"(?s)replica 0.*SUM.*replica 1.*MEAN"):
        two_cpus.run(replica_fn)


def test_variables_that_got_one_value_in_an_uneven_step_are_apart(two_cpus) -> None:
    with two_cpus.scope():
        v, w = mx.Variable(jnp.zeros(2)), mx.Variable(jnp.zeros(2))

    @mx.function
    def assign_both(x):
        total = context().all_reduce("sum", jnp.ones(2) * x.sum())
        v.assign(total)
        w.assign(total)
        return v.read_value()

    @mx.function
    def add():
        v.assign_add(jnp.ones(2))
        w.assign_add(jnp.ones(2))

    result = two_cpus.run(assign_both, (uneven(),))
    two_cpus.run(add)
    two_cpus.run(add)
    assert v.numpy().tolist() == w.numpy().tolist() == [5, 5]
    assert result.values[0].tolist() == [3, 3]


def test_variables_that_got_one_value_in_a_compiled_step_are_apart(two_cpus) -> None:
    with two_cpus.scope():
        v, w = mx.Variable(jnp.zeros(2)), mx.Variable(jnp.zeros(2))
    given = jnp.full(2, 7.0)

    @mx.function
    def assign_both(x):
        v.assign(x)
        w.assign(x)

    @mx.function
    def add():
        v.assign_add(jnp.ones(2))
        w.assign_add(v)

    two_cpus.run(assign_both, (given,))
    two_cpus.run(add)
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([8, 8], [15, 15])
    assert given.tolist() == [7, 7]


def test_one_step_from_several_threads(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(0.0)
    step = mx.function(lambda: v.assign_add(1.0) * 1)
    two_cpus.run(step)
    threads = [
        threading.Thread(target=lambda: [two_cpus.run(step) for _ in range(50)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert float(v) == 151


def test_a_finally_that_communicates_does_not_hang(two_cpus) -> None:
    def replica_fn():
        if context().replica_id_in_sync_group == 1:
            raise KeyError("mine")
        try:
            context().all_reduce("sum", jnp.float32(1))
        finally:
            context().all_reduce("sum", jnp.float32(1))

    with pytest.raises(KeyError, match="mine"):
        two_cpus.run(replica_fn)
    assert float(two_cpus.run(lambda: context().all_reduce("sum", jnp.float32(1)))) == 2


def test_debug_nans_leaves_the_variables(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(1.0)
    step = mx.function(lambda x: v.assign(v / x) * 1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        two_cpus.run(step, (jnp.float32(jnp.nan),))
    assert float(v) == 1


def test_replicating_on_one_replica_copies() -> None:
    one = mx.MirroredStrategy(["CPU:0"])
    mine = jnp.ones(3)
    step = mx.function(lambda s: s + 1, donate_argnums=0)
    one.run(step, (one.replicate(mine),))
    assert mine.tolist() == [1, 1, 1]


def test_donating_an_array_twice_is_told(two_cpus) -> None:
    state = two_cpus.replicate(jnp.ones(3))
    step = mx.function(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))
    with pytest.raises(ValueError, match="donated twice"):
        two_cpus.run(step, (state, state))


def test_ordinary_variables_follow_from_strategy_to_strategy() -> None:
    v = mx.Variable(jax.device_put(jnp.float32(2), jax.devices("cpu")[3]))
    read = mx.function(lambda: v * 1)
    for devices in (["CPU:0", "CPU:1"], ["CPU:4", "CPU:5"], ["CPU:1"]):
        result = mx.MirroredStrategy(devices).run(read)
        assert float(result) == 2
    add = mx.function(lambda: v.assign_add(1.0) * 1)
    assert (float(add()), float(add())) == (3, 4)


def test_python_numbers_in_eager_gradients() -> None:
    w = mx.Variable(2.0)

    def loss(n):
        return sum(w for _ in range(n)) * len(np.zeros(n))

    value, gradient = mx.value_and_grad(loss, w)(3)
    assert (float(value), float(gradient)) == (18, 9)


def test_static_names_count_in_an_eager_replica(two_cpus) -> None:
    inner = mx.function(lambda x, n: x * len(range(n)), static_argnames="n")
    result = two_cpus.run(lambda x: inner(x, n=3), (jnp.float32(2),))
    assert [float(part) for part in result.values] == [6, 6]


def test_a_mean_variable_may_be_assigned_while_differentiating(two_cpus) -> None:
    with two_cpus.scope():
        w = mx.Variable(1.0)
        mean = mx.Variable(
            0.0, aggregation=mx.VariableAggregation.MEAN, trainable=False
        )

    def replica_fn(x):
        def loss():
            mean.assign(w * x)
            return w * x

        return mx.value_and_grad(loss, w)()[1]

    x = PerReplica([jnp.float32(1), jnp.float32(3)])
    for fn in (replica_fn, mx.function(replica_fn)):
        mean.assign(0.0)
        result = two_cpus.run(fn, (x,))
        assert [float(part) for part in result.values] == [1, 3]
        assert float(mean) == 2


def test_jax_settings_reach_the_replicas(two_cpus) -> None:
    with jax.enable_x64(True):
        result = two_cpus.run(lambda: jnp.asarray(1.5).dtype)
    assert result == jnp.float64


def test_grouped_sums_and_callbacks_are_each_replicas_own() -> None:
    four = mx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    groups = [[0], [1, 2, 3]]
    grouped = mx.function(
        lambda: lax.psum(jnp.ones(()), "replica", axis_index_groups=groups)
    )
    try:
        result = four.run(grouped)
    except NotImplementedError:
        return  # groups of unequal size are JAX's to refuse
    assert [float(part) for part in result.values] == [1, 3, 3, 3]
    assert isinstance(result, PerReplica)


def test_numpy_arrays_on_the_left(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(jnp.full(3, 2.0))
    result = two_cpus.run(mx.function(lambda: np.ones(3, "float32") * v))
    np.testing.assert_array_equal(result, np.full(3, 2.0))
    assert isinstance(np.ones(3) * v, jax.Array)


def test_gathering_nothing(two_cpus) -> None:
    empty = PerReplica([jnp.zeros((0, 3)), jnp.zeros((0, 3))])
    assert two_cpus.gather(empty, axis=0).shape == (0, 3)
    for wrap in (lambda f: f, mx.function):
        result = two_cpus.run(wrap(lambda x: context().all_gather(x, axis=0)), (empty,))
        assert result.shape == (0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_means_keep_the_dtype_also_when_uneven(two_cpus, dtype) -> None:
    for lengths in ((2, 2), (2, 1)):
        value = PerReplica([jnp.ones(n, dtype) for n in lengths])
        assert two_cpus.reduce("MEAN", value, axis=0).dtype == dtype


def test_a_plain_argument_comes_back_plain_in_both_engines(two_cpus) -> None:
    for fn in (lambda x: x, mx.function(lambda x: x)):
        assert two_cpus.run(fn, (3,)) == 3
        with pytest.raises(ValueError, match="not distributed"):
            two_cpus.reduce("SUM", two_cpus.run(fn, (3,)), axis=None)


def test_new_variables_do_not_trace_uneven_steps_again(two_cpus) -> None:
    step = mx.function(lambda x: context().all_reduce("sum", x.sum()))
    kept = []
    for _ in range(3):
        assert float(two_cpus.run(step, (uneven(),))) == 3
        with two_cpus.scope():
            kept.append(mx.Variable(1.0))
    assert step.trace_count == 2


def test_parts_of_different_dtypes(two_cpus) -> None:
    value = PerReplica([jnp.ones(2, "float32"), jnp.ones(2, "int32")])
    result = two_cpus.run(mx.function(lambda x: x.sum()), (value,))
    assert [float(part) for part in result.values] == [2, 2]
    words = PerReplica(["a", "bc"])
    assert two_cpus.run(mx.function(len), (words,)).values == (1, 2)
