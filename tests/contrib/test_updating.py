"""Variables of towers: making them, assigning, `update`, `read_var` and their containers."""

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
    compile_if,
    numbered,
    older_names,
    parts,
    tower_id,
    towers,
)

pytestmark = older_names

CPUS = jax.devices("cpu")


def test_only_first_tower_is_only_first_replica() -> None:
    assert ONLY_FIRST_TOWER is mx.VariableAggregation.ONLY_FIRST_REPLICA


# update ---------------------------------------------------------------------------------


@all_sizes
def test_the_pages_example_of_colocated_variables(n: int) -> None:
    distribution, calls = towers(n), []
    with distribution.scope():
        var1 = mx.Variable(1.0, name="var1")
        with distribution.colocate_vars_with(var1):
            var2 = mx.Variable(10.0)
            var3 = mx.Variable(100.0)

        def fn(v1, v2, v3):
            calls.append((v1.name, v1.read_value().devices()))
            v1.assign_add(v2 + v3)

        assert distribution.update(var1, fn, var2, var3) is None
    for var in (var1, var2, var3):
        copies = [copy.read_value() for copy in distribution.unwrap(var)]
        assert [c.devices() for c in copies] == [{d} for d in CPUS[:n]]
    assert parts(distribution, var1) == [111.0] * n
    names = ["var1"] + [f"var1/replica_{i}" for i in range(1, n)]
    assert calls == [(name, {d}) for name, d in zip(names, CPUS)]


@all_sizes
def test_arguments_of_update(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable([1.0, 2.0])
        mirrored = distribution.broadcast(jnp.asarray([10.0, 20.0]))

        def fn(v, a, pair, *, scale, name):
            assert name == "text"
            assert not isinstance(pair["b"], mx.distribute.DistributedValues)
            return v.assign_add((a + pair["b"]) * scale).read_value()

        result = distribution.update(
            v, fn, 1.0, {"b": mirrored}, scale=2.0, name="text"
        )
    assert parts(distribution, v) == [[23.0, 44.0]] * n
    assert parts(distribution, result) == [[23.0, 44.0]] * n


@pytest.mark.parametrize("n", [2, 4])
def test_the_result_of_update_can_be_given_to_update(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v, w = mx.Variable(1.0), mx.Variable(0.0)
        result = distribution.update(v, lambda v, x: v.assign_add(x).read_value(), 2.0)
        distribution.update(w, lambda w, x: w.assign(10 * x), result)
        plain = distribution.update_non_slot(
            distribution.non_slot_devices([v]), lambda x: x + 1.0, 4.0
        )
        distribution.update(v, lambda v, x: v.assign(x), plain)
    assert parts(distribution, w) == [30.0] * n
    assert parts(distribution, v) == [5.0] * n


@all_sizes
def test_update_is_no_tower(n: int) -> None:
    distribution, seen = towers(n), []

    def fn(v):
        seen.append(
            (
                mx.contrib.get_tower_context(),
                mx.contrib.get_cross_tower_context() is distribution,
                mx.contrib.has_distribution_strategy(),
            )
        )

    with distribution.scope():
        v = mx.Variable(1.0)
        distribution.update(v, fn)
        distribution.update_non_slot(
            distribution.non_slot_devices([v]), lambda: fn(None)
        )
    assert seen == [(None, True, True)] * 2 * n


def test_another_variable_inside_update_is_its_copy_on_the_device() -> None:
    distribution = towers(2)
    with distribution.scope():
        v, count = mx.Variable(1.0), mx.Variable(0.0)
        distribution.update(v, lambda v: count.assign_add(v) and None)
        assert parts(distribution, count) == [1.0, 1.0]


@all_sizes
def test_update_of_a_tower_local_variable(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        distribution.update(v, lambda v, x: v.assign(x), 5.0)
        assert parts(distribution, v) == [5.0] * n
        assert float(distribution.read_var(v)) == 5.0 * n


@both_engines
def test_update_by_a_compiled_function(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0)

        def step(x):
            total = distribution.reduce(SUM, x, v)
            distribution.update(v, lambda v, t: v.assign_add(t), total)

        step = compile_if(engine, step)
        for _ in range(2):
            step(numbered(distribution))
    assert parts(distribution, v) == [7.0, 7.0]


@pytest.mark.parametrize("n", [2, 3])
def test_update_takes_no_values_that_differ(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v, value = mx.Variable(1.0), numbered(distribution)
        for args, kwargs in [((value,), {}), ((), {"x": {"deep": [value]}})]:
            with pytest.raises(
                TypeError, match="`update` takes values that are the sa"
            ):
                distribution.update(v, lambda v, x: None, *args, **kwargs)
            with pytest.raises(TypeError, match="`update_non_slot` takes values"):
                distribution.update_non_slot(
                    distribution.non_slot_devices([v]), lambda x: None, *args, **kwargs
                )
    assert parts(distribution, v) == [1.0] * n


@pytest.mark.parametrize("what", [3.0, None, "v"])
def test_update_needs_a_variable(what: Any) -> None:
    with pytest.raises(TypeError, match="`update` takes a variable"):
        towers(2).update(what, lambda v: None)


def test_update_of_a_variable_made_elsewhere() -> None:
    v = mx.Variable(1.0)
    with pytest.raises(ValueError, match="made outside the scope"):
        towers(2).update(v, lambda v: None)


def test_an_exception_in_update_comes_out_as_itself() -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0)
        with pytest.raises(ZeroDivisionError):
            distribution.update(v, lambda v: 1 / 0)
        distribution.update(v, lambda v: v.assign(2.0))
    assert parts(distribution, v) == [2.0, 2.0]


# update_non_slot ------------------------------------------------------------------------


@all_sizes
def test_update_non_slot_runs_on_each_device(n: int) -> None:
    distribution, seen = towers(n), []
    with distribution.scope():
        v, count = mx.Variable(1.0), mx.Variable(0)
        devices = distribution.non_slot_devices([v])
        assert devices == distribution.worker_devices
        assert distribution.non_slot_devices([]) == devices

        def fn(x, mirrored, *, y):
            seen.append(jnp.zeros(()).devices())
            count.assign_add(1)
            return mirrored * (x + y)

        mirrored = distribution.broadcast(jnp.float32(2))
        result = distribution.update_non_slot(devices, fn, 3.0, mirrored, y=4.0)
        assert distribution.update_non_slot(devices, lambda: None) is None
    assert seen == [{d} for d in CPUS[:n]]
    assert parts(distribution, result) == [14.0] * n
    assert parts(distribution, count) == [1] * n


@pytest.mark.parametrize("where", ["CPU:1", ["/device:CPU:1"]])
def test_update_non_slot_on_one_of_the_devices(where: Any) -> None:
    distribution, seen = towers(2), []
    with distribution.scope():
        count = mx.Variable(0)

        def fn():
            seen.append(jnp.zeros(()).devices())
            count.assign_add(1)
            return 3.0

        assert distribution.update_non_slot(where, fn) == 3.0
    assert seen == [{CPUS[1]}]
    assert parts(distribution, count) == [0, 1]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (None, "must name where"),
        ([], "must name where"),
        (["GPU:9"], "no device 'GPU:9'"),
    ],
)
def test_update_non_slot_has_to_know_where(where: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        towers(2).update_non_slot(where, lambda: None)


@all_sizes
def test_an_update_that_returns_the_copies_returns_the_variable(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
        found = distribution.update(v, lambda v, x: {"v": v.assign(x)}, 5.0)
    assert parts(distribution, found["v"]) == [5.0] * n
    assert distribution.value_container(distribution.unwrap(found["v"])[0]) is v


# Assigning in towers --------------------------------------------------------------------


@both_engines
def test_the_mean_of_what_towers_assign(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0, aggregation=MEAN)
        call(distribution, lambda: v.assign(1.0 * tower_id()), engine=engine)
        assert parts(distribution, v) == [0.5, 0.5]
        call(distribution, lambda: v.assign(5.0), engine=engine)
        assert parts(distribution, v) == [5.0, 5.0]
        call(distribution, lambda: v.assign_sub(1.0), engine=engine)
        assert parts(distribution, v) == [4.0, 4.0]
        call(distribution, lambda: v.assign_add(tower_id() + 1.0), engine=engine)
        assert parts(distribution, v) == [5.5, 5.5]


@both_engines
@all_sizes
def test_the_sum_of_what_towers_assign(engine: str, n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0, aggregation=SUM)
        call(distribution, lambda: v.assign(tower_id() + 1.0), engine=engine)
        total = n * (n + 1) / 2
        assert parts(distribution, v) == [total] * n
        call(
            distribution,
            lambda: v.assign_add(jnp.float32(tower_id() + 1)),
            engine=engine,
        )
    assert parts(distribution, v) == [2 * total] * n


@both_engines
def test_a_number_cannot_be_summed_over_towers(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0, aggregation=SUM, name="v")
    with pytest.raises(ValueError, match=r"'v' has aggregation SUM.* number 5\.0"):
        call(distribution, lambda: v.assign(5.0), engine=engine)


@both_engines
def test_one_tower_assigns_a_number_to_a_sum(engine: str) -> None:
    distribution = towers(1)
    with distribution.scope():
        v = mx.Variable(1.0, aggregation=SUM)
        call(distribution, lambda: v.assign(5.0), engine=engine)
    assert float(v) == 5.0


@both_engines
def test_only_the_first_towers_value_is_assigned(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(3.0, aggregation=ONLY_FIRST_TOWER)
        local = mx.Variable(2.0, synchronization=ON_READ, aggregation=ONLY_FIRST_TOWER)

        def fn():
            v.assign_add(7.0 * (tower_id() + 1))
            local.assign_add(5.0 * (tower_id() + 1))

        call(distribution, fn, engine=engine)
        assert parts(distribution, v) == [10.0, 10.0]
        assert parts(distribution, local) == [7.0, 12.0]
        assert float(distribution.read_var(local)) == 7.0


@both_engines
@all_sizes
def test_without_an_aggregation_each_tower_sets_its_copy(engine: str, n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
        call(distribution, lambda: v.assign(tower_id() + 1.0), engine=engine)
    assert parts(distribution, v) == [i + 1.0 for i in range(n)]


@all_sizes
def test_assigning_between_towers(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
        v.assign(6.0)
        assert parts(distribution, v) == [6.0] * n
        v.assign_add(6.0)
        v.assign_sub(2.0)
    assert parts(distribution, v) == [10.0] * n


# Tower-local variables ------------------------------------------------------------------

READS = {SUM: sum, MEAN: np.mean, ONLY_FIRST_TOWER: lambda x: x[0]}


@pytest.mark.parametrize("aggregation", READS, ids=lambda a: a.name)
@both_engines
@all_sizes
def test_tower_local_variables_are_read_together(
    engine: str, n: int, aggregation: Any
) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0, synchronization=ON_READ, aggregation=aggregation)
        assert not v.trainable
        inside = call(
            distribution,
            lambda: v.assign_add(tower_id() + 2.0).read_value(),
            engine=engine,
        )
        own = [3.0 + i for i in range(n)]  # 3, 4 and their sum 7, with two towers
        assert parts(distribution, inside) == own
        assert parts(distribution, v) == own
        np.testing.assert_allclose(distribution.read_var(v), READS[aggregation](own))
        np.testing.assert_allclose(v.read_value(), READS[aggregation](own))


@all_sizes
def test_assigning_tower_local_variables_between_towers(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        total = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        mean = mx.Variable(1.0, synchronization=ON_READ, aggregation=MEAN)
        total.assign(6.0)
        mean.assign(6.0)
        assert parts(distribution, total) == [6.0 / n] * n
        assert parts(distribution, mean) == [6.0] * n
        assert float(distribution.read_var(total)) == 6.0
        assert float(distribution.read_var(mean)) == 6.0


@both_engines
def test_read_var_in_a_tower_is_the_towers_own(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
    call(distribution, lambda: v.assign_add(tower_id() + 2.0), engine=engine)
    inside = call(distribution, lambda: distribution.read_var(v), engine=engine)
    assert parts(distribution, inside) == [3.0, 4.0]


@all_sizes
def test_read_var_of_other_variables(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(2.0)
        assert float(distribution.read_var(v)) == 2.0


def test_read_var_of_what_is_no_variable() -> None:
    with pytest.raises(TypeError, match="variable"):
        towers(2).read_var(3.0)  # pyright: ignore[reportArgumentType]


def test_a_tower_local_variable_without_aggregation_has_no_value_for_all() -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(2.0, synchronization=ON_READ, aggregation=NONE, name="v")
    with pytest.raises(ValueError, match="'v' has synchronization ON_READ and aggrega"):
        distribution.read_var(v)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"synchronization": mx.VariableSynchronization.NONE}, "NONE"),
        ({"synchronization": "sometimes"}, "sometimes"),
        ({"aggregation": "product"}, "product"),
    ],
)
def test_variables_that_cannot_be(arguments: Any, message: str) -> None:
    with towers(2).scope(), pytest.raises(ValueError, match=message):
        mx.Variable(1.0, name="v", **arguments)


# Containers and places ------------------------------------------------------------------


@all_sizes
def test_value_container_of_a_copy(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
        local = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        found = []
        distribution.update(v, lambda c: found.append(distribution.value_container(c)))
    for variable in (v, local):
        for copy in distribution.unwrap(variable):
            assert distribution.value_container(copy) is variable
        assert distribution.value_container(variable) is variable
    assert all(container is v for container in found) and len(found) == n
    for other in (jnp.ones(2), 3, "text", None):
        assert distribution.value_container(other) is other


@pytest.mark.parametrize("n", [1, 2])
def test_colocate_vars_with_needs_the_scope(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
    with pytest.raises(RuntimeError, match="scope"):
        with distribution.colocate_vars_with(v):
            mx.Variable(1.0)
    with towers(2).scope(), pytest.raises(RuntimeError, match="scope"):
        with distribution.colocate_vars_with(v):
            mx.Variable(1.0)


def test_colocate_vars_with_what_is_no_variable() -> None:
    distribution = towers(2)
    with distribution.scope():
        with pytest.raises((TypeError, ValueError, AttributeError), match="colocate"):
            with distribution.colocate_vars_with(3.0):  # pyright: ignore[reportArgumentType]
                mx.Variable(1.0)


# The library's own manual loop ----------------------------------------------------------


@both_engines
@all_sizes
def test_minimizing_a_loss_by_hand(engine: str, n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        kernel = mx.Variable([[1.0]])
        one = distribution.broadcast(jnp.asarray([[1.0]]))

        def grad_fn(x):
            def loss():
                return jnp.sum(jnp.square((x @ kernel) - 2.0))

            return [(mx.grad(loss, kernel)(), kernel)]

        grad_fn = compile_if(engine, grad_fn)

        def step():
            befores, afters = [], []
            for g, v in distribution.call_for_each_tower(grad_fn, one):
                assert v is kernel
                befores.append(distribution.read_var(v))
                g = distribution.reduce(SUM, g, destinations=v)
                distribution.unwrap(
                    distribution.update(v, lambda v, g: v.assign_sub(0.1 / n * g), g)
                )
                afters.append(distribution.read_var(v))
            return float(befores[0][0, 0]), float(afters[0][0, 0])

        for _ in range(10):
            before, after = step()
            assert abs(after - 2) < abs(before - 2)
    np.testing.assert_allclose(after, 2 - 0.8**10, rtol=1e-5)
