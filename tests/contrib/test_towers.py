"""`call_for_each_tower` and `merge_call`: what goes in, what comes out, what fails."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

from .towers import (
    MEAN,
    SUM,
    all_sizes,
    both_engines,
    call,
    compile_if,
    numbered,
    older_names,
    parts,
    tower,
    tower_id,
    towers,
)

pytestmark = older_names


class Wrong(Exception):
    """A user's own exception."""


# The examples of the page ---------------------------------------------------------------


@both_engines
@all_sizes
def test_three_plus_tower_id(engine: str, n: int) -> None:
    distribution = towers(n)

    def merge_fn(given, three_plus_tower_id):
        assert given is distribution
        return sum(given.unwrap(three_plus_tower_id))

    def fn(three):
        v = three + tower_id()
        return tower().merge_call(merge_fn, v) + v

    with distribution.scope():
        merged_results = call(distribution, fn, 3, engine=engine)
    total = sum(3 + i for i in range(n))
    assert parts(distribution, merged_results) == [total + 3 + i for i in range(n)]


@both_engines
@all_sizes
def test_the_worker_device_index_numbers_the_towers(engine: str, n: int) -> None:
    distribution = towers(n)
    seen = []

    def fn(device_id):
        if engine == "eager":
            assert isinstance(device_id, int)
            seen.append((tower().device, device_id))
        return device_id * 10 + tower_id()

    with distribution.scope():
        index = distribution.worker_device_index
        ids = call(distribution, fn, index, engine=engine)
    assert parts(distribution, ids) == [11 * i for i in range(n)]
    assert distribution.unwrap(index) == list(range(n))
    for device, device_id in seen:
        assert distribution.worker_devices[device_id].endswith(device)


def test_the_index_of_one_tower_is_0() -> None:
    index = towers(1).worker_device_index
    assert index == 0 and isinstance(index, int)


# Arguments ------------------------------------------------------------------------------


@both_engines
@all_sizes
def test_arguments_by_position_and_by_name(engine: str, n: int) -> None:
    distribution = towers(n)
    own = numbered(distribution)
    result = call(
        distribution,
        lambda a, *rest, scale, **names: (a + rest[0] + names["b"]["c"]) * scale,
        own,
        10.0,
        scale=2.0,
        b={"c": own},
        engine=engine,
    )
    assert parts(distribution, result) == [2 * (2 * i + 12) for i in range(n)]


@both_engines
def test_mirrored_values_and_variables_arrive_as_the_towers_own(engine: str) -> None:
    distribution = towers(3)
    with distribution.scope():
        v = mx.Variable([1.0, 2.0])
    mirrored = distribution.broadcast(jnp.arange(2.0))

    def fn(v, pair):
        return v * pair[0] + pair[1]

    result = call(
        distribution, fn, v, (mirrored, numbered(distribution)), engine=engine
    )
    assert parts(distribution, result) == [[1, 3], [2, 4], [3, 5]]


@both_engines
def test_other_objects_arrive_as_they_are(engine: str) -> None:
    distribution, seen = towers(2), []
    given = object()

    def fn(options, name):
        seen.append((options is given, name))

    assert call(distribution, fn, given, "text", engine=engine) is None
    assert seen == [(True, "text")] * (2 if engine == "eager" else 1)


@pytest.mark.parametrize("concurrently", [True, False, None])
@both_engines
def test_run_concurrently_is_not_passed_on(engine: str, concurrently: Any) -> None:
    distribution = towers(2)

    def fn(x, **kwargs):
        assert not kwargs
        return x + tower_id()

    result = call(distribution, fn, 1, run_concurrently=concurrently, engine=engine)
    assert parts(distribution, result) == [1, 2]


def test_run_concurrently_has_to_be_a_boolean() -> None:
    with pytest.raises(TypeError, match="`run_concurrently` must be True or False"):
        towers(2).call_for_each_tower(lambda: 0, run_concurrently="yes")


def test_what_is_called_has_to_be_a_function() -> None:
    with pytest.raises(TypeError, match="needs a function, got 3"):
        towers(2).call_for_each_tower(3)  # pyright: ignore[reportArgumentType]


@both_engines
def test_missing_arguments_are_pythons_own_error(engine: str) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call(towers(2), lambda a, b: a, 1, engine=engine)


# Results --------------------------------------------------------------------------------


class Spec(NamedTuple):
    loss: Any
    train_op: Any = None


@both_engines
@all_sizes
def test_structures_come_back_with_a_value_for_each_tower(engine: str, n: int) -> None:
    distribution = towers(n)

    def fn():
        i = tower_id()
        return {"ids": [i, (i + 1.0, None)], "spec": Spec(i * 2), "name": "same"}

    result = call(distribution, fn, engine=engine)
    assert result["name"] == "same"
    assert result["ids"][1][1] is None
    assert isinstance(result["spec"], Spec) and result["spec"].train_op is None
    found = (result["ids"][0], result["ids"][1][0], result["spec"].loss)
    wanted = (range(n), range(1, n + 1), range(0, 2 * n, 2))
    assert [parts(distribution, x) for x in found] == [list(w) for w in wanted]
    is_per_device = isinstance(result["ids"][0], mx.distribute.PerReplica)
    assert is_per_device == (n > 1)


@both_engines
def test_nothing_comes_back_as_nothing(engine: str) -> None:
    assert call(towers(2), lambda: None, engine=engine) is None


@pytest.mark.parametrize("n", [1, 3])
@both_engines
def test_a_variable_comes_back_as_itself(engine: str, n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
    assert call(distribution, lambda: v, engine=engine) is v
    assert call(distribution, lambda v: [v], v, engine=engine)[0] is v


def test_towers_that_return_different_structures() -> None:
    with pytest.raises(ValueError, match="(?s)different structures.*replica 1"):
        towers(2).call_for_each_tower(lambda: [0] * (1 + tower_id()))


@both_engines
def test_results_lie_on_the_towers_devices(engine: str) -> None:
    distribution = towers(3)
    result = call(distribution, lambda: tower_id() + jnp.ones(2), engine=engine)
    devices = [part.devices() for part in distribution.unwrap(result)]
    assert devices == [{d} for d in jax.devices("cpu")[:3]]


# Variables of towers --------------------------------------------------------------------


@all_sizes
def test_a_variable_made_in_towers_is_one_for_all(n: int) -> None:
    distribution, made = towers(n), []

    def fn():
        made.append(mx.Variable(2.0, name="made"))
        made[-1].assign_add(1.0)
        return made[-1]

    v = distribution.call_for_each_tower(fn)
    assert all(found is v for found in made) and len(made) == n
    assert [c.name for c in distribution.unwrap(v)] == ["made"] + [
        f"made/replica_{i}" for i in range(1, n)
    ]
    assert parts(distribution, v) == [3.0] * n


@all_sizes
def test_compiled_towers_make_their_variables_once(n: int) -> None:
    distribution, made = towers(n), []

    @mx.function
    def fn(x):
        if not made:
            made.append(mx.Variable(2.0))
        return made[0].assign_add(x).read_value()

    for total in (5.0, 8.0):
        result = distribution.call_for_each_tower(fn, 3.0)
        assert parts(distribution, result)[0] == total
    assert len(made) == 1 and parts(distribution, made[0]) == [8.0] * n


def test_compiled_towers_are_traced_once() -> None:
    distribution = towers(4)
    fn = mx.function(lambda x: x + tower_id())
    for _ in range(3):
        result = distribution.call_for_each_tower(fn, jnp.float32(1))
    assert fn.trace_count == 1
    assert parts(distribution, result) == [1, 2, 3, 4]


# Merging --------------------------------------------------------------------------------


@both_engines
@all_sizes
def test_merge_call_gets_values_of_all_towers_and_gives_each_its_own(
    engine: str, n: int
) -> None:
    distribution, calls = towers(n), []

    def merge_fn(given, own, same, *, scale):
        calls.append(same)
        assert given is distribution
        assert mx.contrib.get_tower_context() is None
        assert mx.contrib.get_cross_tower_context() is distribution
        total = given.reduce(SUM, own, own)
        return {"own": own, "total": total, "none": None, "scale": scale}

    def fn():
        ctx = tower()
        got = ctx.merge_call(merge_fn, tower_id() + jnp.float32(1), "same", scale=10)
        assert mx.contrib.get_cross_tower_context() is None
        assert got["none"] is None and got["scale"] == 10
        return got["own"], got["total"]

    with distribution.scope():
        own, total = call(distribution, fn, engine=engine)
    assert calls == ["same"]
    assert parts(distribution, own) == [i + 1 for i in range(n)]
    assert parts(distribution, total)[0] == n * (n + 1) / 2


@both_engines
@all_sizes
def test_towers_merge_several_times(engine: str, n: int) -> None:
    distribution = towers(n)

    def add(given, x):
        return sum(given.unwrap(x))

    def fn(x):
        for _ in range(3):
            x = x + tower().merge_call(add, x)
        return x

    found = call(distribution, fn, numbered(distribution), engine=engine)
    start, total = np.arange(1, n + 1), n * (n + 1) / 2
    wanted = start + total * (1 + (n + 1) + (n + 1) ** 2)
    assert parts(distribution, found) == wanted.tolist()


@both_engines
def test_a_merge_function_runs_towers_again(engine: str) -> None:
    distribution = towers(2)

    def merge_fn(given, x):
        return given.call_for_each_tower(lambda x: x * 10 + tower_id(), x)

    def fn():
        return tower().merge_call(merge_fn, tower_id() + 1) + 100

    assert parts(distribution, call(distribution, fn, engine=engine)) == [110, 121]


@both_engines
def test_merge_call_updates_a_variable(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(10.0)

    def merge_fn(given, x):
        total = given.reduce(SUM, x, v)
        given.update(v, lambda v, t: v.assign_sub(t), total)

    call(
        distribution,
        lambda: tower().merge_call(merge_fn, tower_id() + jnp.float32(1)),
        engine=engine,
    )
    assert parts(distribution, v) == [7.0, 7.0]


@both_engines
def test_merge_fn_has_to_be_a_function(engine: str) -> None:
    def fn():
        tower().merge_call("sum")  # pyright: ignore[reportArgumentType]

    with pytest.raises(TypeError, match="`merge_fn` must be a function, got 'sum'"):
        call(towers(2), fn, engine=engine)


# Failures -------------------------------------------------------------------------------


def wrong(*args: Any) -> None:
    raise Wrong("on purpose")


PLACES = {
    "tower": wrong,
    "merge_fn": lambda: tower().merge_call(wrong),
    "tower in merge_fn": lambda: tower().merge_call(
        lambda d: d.call_for_each_tower(wrong)
    ),
    "merge_fn in merge_fn": lambda: tower().merge_call(
        lambda d: d.call_for_each_tower(lambda: tower().merge_call(wrong))
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n", [1, 3])
@both_engines
def test_a_users_exception_comes_out_as_itself(engine: str, n: int, place: str) -> None:
    distribution = towers(n)
    with distribution.scope():
        with pytest.raises(Wrong, match="on purpose"):
            call(distribution, PLACES[place], engine=engine)
        again = call(distribution, lambda: tower_id() + 1, engine=engine)
    assert parts(distribution, again) == list(range(1, n + 1))


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_tower_that_fails_while_others_wait(culprit: int) -> None:
    distribution = towers(3)

    def fn():
        if tower_id() == culprit:
            raise Wrong
        tower().merge_call(lambda d: None)

    with pytest.raises(Wrong) as caught:
        distribution.call_for_each_tower(fn)
    assert caught.value.__notes__ == [f"Raised in replica {culprit} (CPU:{culprit})."]
    assert not [t for t in threading.enumerate() if t.name.startswith("mirrax")]


@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (2, 1), (1, 3)])
def test_towers_that_merge_unequally_often(counts: tuple[int, int]) -> None:
    def fn():
        for _ in range(counts[tower_id()]):
            tower().merge_call(lambda d: None)

    distribution = towers(2)
    with pytest.raises(RuntimeError, match="`merge_call` equally often"):
        distribution.call_for_each_tower(fn)
    assert parts(distribution, distribution.call_for_each_tower(tower_id)) == [0, 1]


def test_a_context_of_a_tower_that_has_ended_merges_nothing() -> None:
    distribution, kept = towers(2), []
    distribution.call_for_each_tower(lambda: kept.append(tower()))
    with pytest.raises(RuntimeError, match="tower"):
        kept[0].merge_call(lambda d: None)


# Where things are called ----------------------------------------------------------------

ONLY_BETWEEN_TOWERS = {
    "reduce": lambda d: d.reduce(SUM, 1.0, "CPU:0"),
    "batch_reduce": lambda d: d.batch_reduce(SUM, [(1.0, "CPU:0")]),
    "broadcast": lambda d: d.broadcast(1.0),
    "call_for_each_tower": lambda d: d.call_for_each_tower(lambda: 0),
    "scope": lambda d: d.scope().__enter__(),
    "run_steps_on_dataset": lambda d: d.run_steps_on_dataset(
        lambda context, x: None, iter([1.0])
    ),
}


@pytest.mark.parametrize("name", ONLY_BETWEEN_TOWERS)
@both_engines
def test_what_belongs_between_towers_fails_in_one(engine: str, name: str) -> None:
    distribution = towers(2)

    def fn():
        ONLY_BETWEEN_TOWERS[name](distribution)

    with pytest.raises(RuntimeError, match="inside a replica function|outside"):
        call(distribution, fn, engine=engine)


@pytest.mark.parametrize("name", ONLY_BETWEEN_TOWERS)
def test_another_strategys_scope(name: str) -> None:
    distribution, other = towers(2), towers(2)
    with other.scope(), pytest.raises(RuntimeError, match="different strategies"):
        ONLY_BETWEEN_TOWERS[name](distribution)


@both_engines
def test_a_loop_of_steps_around_towers(engine: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        w = mx.Variable(1.0)

    def fn(x):
        loss, gradient = mx.value_and_grad(lambda: (w * x - 6.0) ** 2, w)()
        return loss, gradient

    compiled, losses = compile_if(engine, fn), []
    with distribution.scope():
        for _ in range(8):
            loss, gradient = distribution.call_for_each_tower(
                compiled, numbered(distribution)
            )
            gradient = distribution.reduce(SUM, gradient, destinations=w)
            distribution.update(w, lambda w, g: w.assign_sub(0.05 * g), gradient)
            losses.append(float(distribution.reduce(SUM, loss, "CPU:0")))
    # The minimum of (w - 6)^2 + (2 w - 6)^2 is at 3.6, and w halves its way to it.
    np.testing.assert_allclose(parts(distribution, w), [3.6 - 2.6 / 2**8] * 2, 1e-5)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_whole_step_between_towers_compiled(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)

    @mx.function
    def step(x):
        def fn(x):
            return tower().merge_call(lambda d, y: d.reduce(SUM, y, y), v * x)

        total = distribution.call_for_each_tower(fn, x)
        first = distribution.call_for_each_tower(lambda x: x + tower_id(), x)
        mean = distribution.reduce(MEAN, total, v)
        distribution.update(v, lambda v, t: v.assign_add(t), mean)
        return distribution.reduce(SUM, first, "CPU:0")

    with distribution.scope():
        value = numbered(distribution)
        results = [float(step(value)) for _ in range(3)]
    total = n * (n + 1) / 2
    assert results == [total + n * (n - 1) / 2] * 3
    assert parts(distribution, v) == [(1 + total) ** 3] * n
    assert step.trace_count == 1


@both_engines
@pytest.mark.parametrize("n", [1, 2])
def test_the_librarys_own_loop(engine: str, n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        kernel, bias, built = mx.Variable([[0.0]]), mx.Variable([0.0]), False
        iterator = distribution.distribute_dataset(
            lambda: mx.data.Dataset.from_tensor_slices([[1.0]]).repeat().batch(1)
        ).make_one_shot_iterator()

        def model_fn(x):
            def loss():
                return jnp.sum((x @ kernel + bias - 1.0) ** 2)

            gradients = mx.grad(loss, [kernel, bias])()
            for v, g in zip([kernel, bias], gradients):
                mean = tower().merge_call(lambda d, g, v=v: d.reduce(MEAN, g, v), g)
                v.assign_sub(0.1 * mean)

        model_fn = compile_if(engine, model_fn)
        errors = []
        for _ in range(10):
            distribution.group(
                distribution.call_for_each_tower(
                    model_fn, iterator.get_next(), run_concurrently=built
                )
            )
            built = True
            errors.append(1 - float(kernel.numpy()[0, 0] + bias.numpy()[0]))
    # Both weights move by 0.2 of the error.
    np.testing.assert_allclose(errors, 0.6 ** np.arange(1, 11), rtol=1e-4)
    assert len(set(map(str, parts(distribution, kernel)))) == 1
